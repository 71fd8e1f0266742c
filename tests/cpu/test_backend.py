"""What the back-end promises around its kernels: levels, memory, parts, timings."""

import gc
import mmap
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError, KernelError
from headrace.ops.batch import Limits
from headrace.ops.cpu import CpuBackend
from headrace.ops.program import ProgramBuilder
from headrace.ops.spec import Buffer, Embed, KVGroup, Lora, Program
from headrace.ops.weights import Weight
from tests.cpu.linears import LEVELS, OneLinear
from tests.ops.quantize import exact, weight
from tests.ops.rig import layout

RNG = np.random.default_rng(9)
WEIGHTS = {
    "table": weight(RNG, "table", "Q8_0", (100, 64)),
    "w": weight(RNG, "w", "Q4_1", (96, 64)),
    "norm": exact("norm", np.ones(96)),
    "rope": exact("rope", 0.1 ** np.arange(4)),
}
LAYOUT = layout(kv_heads=2, head_dim=16, groups=(KVGroup("full", (0,)),))


def small_program() -> Program:
    build = ProgramBuilder()
    x = build.embed("table", 100, 64)
    qkv = build.linear(x, "w", 96)
    q = build.rope_store(qkv, 0, 2, 2, 16, "rope", 8)
    out = build.attention(q, 0, 2, 2, 16, 0.25)
    build.tap("attended", out)
    return build.finish(x, build.logits(x, "table", 100))


def resident() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def test_an_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="neon"):
        CpuBackend("neon")


def test_auto_is_the_best_level() -> None:
    assert CpuBackend().level == LEVELS[0]


def test_what_has_no_kernel_is_declined_by_name() -> None:
    buffer = Buffer(0, 8)
    backend = CpuBackend()
    assert "CPU" in (backend.accepts(Lora(buffer, buffer, "w"), {}) or "")
    reason = backend.accepts(Embed(buffer, "table"), {"table": ("Q9_9",)})
    assert reason is not None
    assert "table" in reason
    assert "Q9_9" in reason


def test_missing_weights_are_named_before_anything_is_allocated() -> None:
    limits = Limits(8, 1, 1, 1, 1, 1, 1, 16, 100, 1)
    with pytest.raises(KernelError, match="rope"):
        CpuBackend().load(
            small_program(), {**WEIGHTS, "rope": exact("rope", np.ones(3))}, LAYOUT, limits
        )


def test_memory_is_what_is_held() -> None:
    limits = Limits(512, 4, 512, 4, 4, 600, 30_000, 9600, 100, 2)
    backend, program = CpuBackend(), small_program()
    planned = backend.memory(program, WEIGHTS, LAYOUT, limits)
    backend.load(program, WEIGHTS, LAYOUT, Limits(8, 1, 1, 1, 1, 1, 1, 16, 100, 2)).close()
    gc.collect()
    before = resident()
    executable = backend.load(program, WEIGHTS, LAYOUT, limits)
    executable.populate()
    deadline = time.monotonic() + 60
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    held = resident() - before
    assert planned["kv"] >= 30_000 * LAYOUT.page_bytes
    total = sum(planned.values()) - planned["batch"]
    assert abs(held - total) < (1 << 20), (held, planned)
    executable.close()
    gc.collect()
    assert resident() - before < (1 << 20)


def test_parts_of_a_step() -> None:
    limits = Limits(8, 1, 8, 8, 1, 1, 1, 16, 100, 1)
    executable = CpuBackend().load(small_program(), WEIGHTS, LAYOUT, limits)
    batch = executable.batch
    batch.num_tokens = batch.num_logits = batch.num_samples = 3
    batch.num_slices = 1
    batch.token[:3] = [7, 8, 9]
    batch.position[:3] = [0, 1, 2]
    batch.slice_row[:2] = [0, 3]
    batch.logits_row[:3] = batch.sample_row[:3] = [0, 1, 2]
    batch.out_token[:3] = -1
    executable.run("forward")
    assert batch.out_token[:3].tolist() == [-1, -1, -1]
    logits = executable.read(small_program().logits)
    executable.run("sample")
    assert batch.out_token[:3].tolist() == logits.argmax(axis=1).tolist()
    batch.out_token[:3] = -1
    executable.run()
    assert batch.out_token[:3].tolist() == logits.argmax(axis=1).tolist()
    timed = executable.profile()
    assert {"embed", "linear", "rope_store", "attention", "logits", "sample"} <= {
        t[0] for t in timed
    }
    assert all(seconds >= 0 and flops >= 0 for _, _, seconds, _, flops in timed)
    linears = {path for op, path in executable.paths if op in ("linear", "logits")}
    assert linears
    assert all(path.startswith(executable.level) for path in linears)


def test_only_kept_buffers_are_read_and_nothing_after_close() -> None:
    program = small_program()
    limits = Limits(8, 1, 1, 1, 1, 1, 1, 16, 100, 1)
    executable = CpuBackend().load(program, WEIGHTS, LAYOUT, limits)
    with pytest.raises(KeyError, match="not kept"):
        executable.read(Buffer(1, 96))
    executable.close()
    executable.close()
    with pytest.raises(ValueError, match="closed"):
        executable.read(program.hidden)


def test_weights_are_dropped_from_a_mapped_file_only(tmp_path: Path) -> None:
    data = WEIGHTS["w"].parts[0].data
    file = tmp_path / "weights"
    file.write_bytes(data.tobytes())
    with file.open("rb") as opened:
        mapped = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    x = RNG.standard_normal((4, 64)).astype(np.float32)
    part = WEIGHTS["w"].parts[0]
    got = OneLinear(LEVELS[0], Weight("w", (replace(part, data=mapped),)), x).run(np.arange(4))
    want = OneLinear(LEVELS[0], WEIGHTS["w"], x).run(np.arange(4))
    assert got.tobytes() == want.tobytes()
    assert bytes(mapped) == data.tobytes() == WEIGHTS["w"].parts[0].data.tobytes()
