"""The memory plan: every byte of an engine is decided, checked and printed before anything is
loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.plan import Group, Knobs, PoolConfig
from headrace.errors import ConfigError, MemoryPlanError
from headrace.models.spec import Model
from headrace.ops.batch import Limits
from headrace.ops.spec import Backend, KVLayout

DEFAULT_KV_BYTES = 512 << 20
"""KV bytes when the user names none: what a small model needs for tens of thousands of tokens. More
is one flag away; taking half of a machine unasked is not kind."""

MAX_ENDLESS = 1 << 24
"""Longest sequence of streaming attention: the tables of its pages are no longer small beyond."""

DEFAULT_MAX_SEQUENCES = 128
DEFAULT_STEP_TOKENS = 512
PROCESS_BYTES = 112 << 20
"""Interpreter, libraries and tokenizer of the two processes together, measured
(docs/performance)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes resolved for one engine.

    bytes: what each part will hold ('weights', 'kv', 'workspace', 'batch', 'process').
    notes: decisions that a person should see, one line each.
    """

    layout: KVLayout
    limits: Limits
    pool: PoolConfig
    knobs: Knobs
    max_model_len: int
    bytes: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """All bytes of the plan."""
        return sum(self.bytes.values())


def human(count: int) -> str:
    """Bytes for people: 1.5 GiB, 98.4 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
        value /= 1024
    return f"{value:.1f} TiB"


def available_bytes() -> int:
    """Memory this process may still take: the kernel's estimate, less where a cgroup is tighter."""
    available = 8 << 30
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            room = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):
            continue
        available = min(available, max(room, 0))
    return available


def blocks_of_sequence(group: Group, positions: int, block_size: int, step: int) -> int:
    """Most blocks one sequence holds at once: a window keeps the last W - 1 positions beside the
    rows of the step being computed."""
    everything = -(-positions // block_size)
    if group.window is None:
        return everything
    kept = -(-(group.window + step + group.first) // block_size) + 2
    return min(everything, kept)


def make_plan(
    config: EngineConfig,
    model: Model,
    backend: Backend,
    threads: int,
    available: int | None = None,
) -> MemoryPlan:
    """Resolve all sizes. available: bytes that may be taken (default: what the machine has free).

    Raises ConfigError for a value that cannot be honoured and MemoryPlanError, with the numbers,
    when it does not fit.
    """
    if config.block_size % 16 or config.block_size <= 0:
        raise ConfigError(
            "block_size", f"must be a positive multiple of 16, not {config.block_size}"
        )
    if config.mixed_prefill_tokens < 0:
        raise ConfigError(
            "mixed_prefill_tokens", f"must be 0 or more, not {config.mixed_prefill_tokens}"
        )
    notes: list[str] = []
    spec = model.spec
    layout = KVLayout(
        groups=model.groups,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_size=config.block_size,
        dtype="f16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
    )
    groups = tuple(Group(each.window, each.pages_per_block, each.first) for each in model.groups)
    wanted = config.max_model_len
    most = MAX_ENDLESS if spec.endless else spec.max_positions
    if wanted is not None and not 1 <= wanted <= most:
        hint = "" if spec.endless or spec.positions else "; --attention-window goes beyond"
        raise ConfigError(
            "max_model_len", f"must be in [1, {most}] for this model, not {wanted}{hint}"
        )
    length = wanted or spec.max_positions
    sequences = _positive("max_num_seqs", config.max_num_seqs, DEFAULT_MAX_SEQUENCES)
    step_tokens = _positive(
        "max_num_batched_tokens", config.max_num_batched_tokens, DEFAULT_STEP_TOKENS
    )
    kv_bytes = config.kv_cache_memory_bytes
    available = available_bytes() if available is None else available
    block_size = config.block_size

    def pages_for(positions: int) -> int:
        return sum(
            blocks_of_sequence(group, positions, block_size, step_tokens) * group.pages_per_block
            for group in groups
        )

    explicit = kv_bytes is not None
    if kv_bytes is None:
        kv_bytes = max(DEFAULT_KV_BYTES, pages_for(min(length, 8192)) * layout.page_bytes)
        kv_bytes = min(kv_bytes, pages_for(length) * sequences * layout.page_bytes)
    pages = kv_bytes // layout.page_bytes
    if pages_for(length) > pages:
        if wanted is not None:
            raise MemoryPlanError(
                f"max_model_len {wanted} needs {human(pages_for(wanted) * layout.page_bytes)} of KV"
                f" cache for one sequence, but kv_cache_memory_bytes is {human(kv_bytes)}:"
                " raise it or lower --max-model-len"
            )
        length = _longest(pages_for, pages, length, block_size)
        if length < block_size:
            raise MemoryPlanError(
                f"kv_cache_memory_bytes {human(kv_bytes)} holds less than one block of"
                f" {block_size} tokens ({human(pages_for(block_size) * layout.page_bytes)})"
            )
        notes.append(
            f"max_model_len capped to {length} (the model allows {spec.max_positions}):"
            f" one sequence must fit the KV cache of {human(kv_bytes)}"
        )
    limits = Limits(
        max_tokens=step_tokens,
        max_slices=min(sequences, step_tokens),
        max_logits=max(sequences, 64),
        max_samples=max(sequences, 64),
        slots=sequences,
        max_blocks=-(-length // block_size),
        num_pages=pages,
        max_positions=length,
        vocabulary=model.tokens,
        threads=threads,
        pinned=config.pin_threads,
    )
    sizes = backend.memory(model.program, model.weights, layout, limits)
    sizes = {**sizes, "process": PROCESS_BYTES}
    total = sum(sizes.values())
    if total > available:
        parts = ", ".join(f"{name} {human(size)}" for name, size in sizes.items())
        source = "--kv-cache-memory-bytes" if explicit else "the default KV cache"
        raise MemoryPlanError(
            f"the plan needs {human(total)} ({parts}) but {human(available)} is available:"
            f" lower {source} with --kv-cache-memory-bytes, --max-num-seqs or --max-model-len"
        )
    pool = PoolConfig(
        num_pages=pages,
        block_size=block_size,
        groups=groups,
        max_positions=length,
        slots=sequences,
        prefix_caching=config.enable_prefix_caching,
    )
    knobs = Knobs(
        max_sequences=limits.max_slices,
        max_tokens=step_tokens,
        chunk=step_tokens,
        max_logits=limits.max_logits,
        watermark=config.watermark,
        max_waiting=config.max_num_queued_reqs or 0,
        policy=config.scheduling_policy,
        mixed_prefill=config.mixed_prefill_tokens,
    )
    return MemoryPlan(layout, limits, pool, knobs, length, sizes, tuple(notes))


def _positive(field: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise ConfigError(field, f"must be at least 1, not {value}")
    return default if value is None else value


def _longest(pages_for: Callable[[int], int], pages: int, length: int, block_size: int) -> int:
    """The longest sequence, in whole blocks, whose KV fits `pages`."""
    low, high = 0, length // block_size
    while low < high:
        middle = (low + high + 1) // 2
        if pages_for(middle * block_size) <= pages:
            low = middle
        else:
            high = middle - 1
    return low * block_size
