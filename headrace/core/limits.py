"""What the scheduler refuses at the door."""

from headrace.core.plan import Knobs, PoolConfig, Refused, Request


def check_request(request: Request, pool: PoolConfig) -> None:
    """Raises Refused for a request that can never be served."""
    length = len(request.prompt)
    if not length:
        raise Refused("prompt", "the prompt has no tokens")
    if request.max_tokens < 0:
        raise Refused("max_tokens", f"max_tokens is {request.max_tokens}; it may not be negative")
    if length + request.max_tokens > pool.max_positions:
        raise Refused(
            "prompt",
            f"{length} prompt tokens and max_tokens {request.max_tokens} exceed the "
            f"{pool.max_positions} positions of the context",
        )
    if not 1 <= request.n <= pool.slots:
        raise Refused("n", f"n is {request.n}; it must be from 1 to {pool.slots}")
    if request.n > 1 and not request.max_tokens:
        raise Refused("n", f"n is {request.n} but max_tokens is 0: there is nothing to sample")
    if request.score_from is not None and request.score_from < 1:
        raise Refused("score_from", f"score_from is {request.score_from}; position 0 has no score")


def check_overload(waiting: int, free: int, knobs: Knobs) -> None:
    """Raises Refused where so many wait that not even the `free` seats would bring them under the
    limit."""
    limit = knobs.max_waiting
    if limit and waiting >= limit + max(0, free):
        raise Refused(None, f"{waiting} requests wait, the limit is {limit}", overload=True)


def checked_pool(pool: PoolConfig, need: int) -> PoolConfig:
    """The pool, or ValueError where it has fewer than the pages a longest sequence needs."""
    if need > pool.num_pages:
        raise ValueError(
            f"num_pages: a sequence of {pool.max_positions} tokens needs {need} pages of KV, "
            f"the pool has {pool.num_pages}; lower max_positions or give more memory"
        )
    return pool


def checked_knobs(knobs: Knobs) -> Knobs:
    """The knobs, or ValueError naming the one that is out of range."""
    for name in ("max_sequences", "max_tokens", "chunk", "max_logits"):
        if getattr(knobs, name) < 1:
            raise ValueError(f"{name}: {getattr(knobs, name)} is below 1")
    if not 0 <= knobs.watermark < 1:
        raise ValueError(f"watermark: {knobs.watermark} is not in [0, 1)")
    for name in ("max_waiting", "mixed_prefill"):
        if getattr(knobs, name) < 0:
            raise ValueError(f"{name}: {getattr(knobs, name)} is negative")
    return knobs
