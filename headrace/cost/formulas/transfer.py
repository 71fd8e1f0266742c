"""Moving KV: link speeds, break-even, fetch against recompute, offload."""

from typing import Literal


def transfer_seconds(num_bytes: float, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds to move that many bytes over a link of bandwidth bytes/s."""
    return latency + num_bytes / bandwidth


def break_even_bandwidth(kv_bytes_per_token: float, params: float, rate: float) -> float:
    """Link speed W* (bytes/s) at which moving a prompt's KV takes as long as computing it: c F /
    2P.

    The prompt's length cancels: W* depends on the model and the device. rate: achieved prefill
    FLOP/s. params: active parameters a token. The same W* decides prefill/decode splits and offload
    of cached prefixes (seed 2, sections 2 and 3).
    """
    return kv_bytes_per_token * rate / (2.0 * params)


def transfer_share(
    kv_bytes_per_token: float, params: float, rate: float, bandwidth: float
) -> float:
    """Seconds to move a prompt's KV over seconds to compute it: W* / W."""
    return break_even_bandwidth(kv_bytes_per_token, params, rate) / bandwidth


def fetch_or_recompute(
    tokens: int,
    kv_bytes_per_token: float,
    prefill_tokens_per_second: float,
    bandwidth: float,
    latency: float = 0.0,
) -> tuple[Literal["fetch", "recompute"], float]:
    """The cheaper way to have `tokens` of KV, and the seconds it saves over the other."""
    fetch = transfer_seconds(tokens * kv_bytes_per_token, bandwidth, latency)
    recompute = tokens / prefill_tokens_per_second
    return ("fetch" if fetch < recompute else "recompute"), abs(recompute - fetch)


def offload_slowdown(near_bandwidth: float, far_bandwidth: float) -> float:
    """How much longer a step takes to read *active* KV across the far link: B_near / B_far. KV that
    nobody reads yet is another matter (`break_even_bandwidth`)."""
    return near_bandwidth / far_bandwidth


def all_to_all_bytes(tokens: int, top_k: int, hidden: int, value_bytes: float) -> float:
    """Bytes that one expert dispatch (or combine) moves: every token's row to each of its experts.

    DeepEP's setting: 8,192 tokens, top 8, hidden 7,168; dispatch in FP8 (1), combine in BF16 (2).
    """
    return float(tokens) * top_k * hidden * value_bytes


def all_reduce_seconds(
    num_bytes: float, ranks: int, bandwidth: float, latency: float = 0.0
) -> float:
    """Ring all-reduce: each rank sends 2 (r - 1) / r of the bytes in 2 (r - 1) hops
    (Patarasuk & Yuan 2009). bandwidth: bytes/s of one direction of one rank's link."""
    if ranks <= 1:
        return 0.0
    hops = 2 * (ranks - 1)
    return hops / ranks * num_bytes / bandwidth + hops * latency


def overlap_ratio(exposed: float, total: float) -> float:
    """Share of a transfer's seconds hidden behind compute: 1 - exposed / total."""
    return 1.0 - exposed / total if total > 0 else 1.0
