"""What loading says of the kernels it chose, and what --strict-kernels refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.config import EngineConfig
from headrace.engine.load import load
from headrace.errors import KernelError
from tests.cpu.linears import LEVELS
from tests.engine.conftest import TINY
from tests.models.convert import hf_tensors


def write_odd_heads(folder: Path, head_dim: int) -> str:
    """The tiny Llama with heads of another size; returns the folder."""
    config = json.loads((TINY / "config.json").read_text()) | {"head_dim": head_dim}
    (folder / "config.json").write_text(json.dumps(config))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": 1, "v_proj": 1}
    rng = np.random.default_rng(1)
    tensors = hf_tensors(TINY / "model.safetensors")
    for name, values in tensors.items():
        part = name.split(".")[-2]
        rows, columns = (*values.shape, 0)[:2]
        if part in heads:
            rows = heads[part] * head_dim
        elif part == "o_proj":
            columns = heads["q_proj"] * head_dim
        else:
            continue
        tensors[name] = (0.1 * rng.standard_normal((rows, columns))).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("level", LEVELS)
def test_strict_kernels_refuses_odd_heads(level: str, tmp_path: Path) -> None:
    model = write_odd_heads(tmp_path, 20)
    config = EngineConfig(model, backend="cpu", level=level, kv_cache_memory_bytes=1 << 20)
    loaded = load(config)
    assert loaded.kernels["attention"] == f"{level}.generic"
    loaded.executable.close()
    with pytest.raises(KernelError, match=rf"head_dim 20: attention \({level}\.generic\)"):
        load(EngineConfig(**{**vars(config), "strict_kernels": True}))


def test_strict_kernels_takes_fast_models_and_refuses_the_reference() -> None:
    config = EngineConfig(str(TINY), kv_cache_memory_bytes=1 << 20, strict_kernels=True)
    with pytest.raises(KernelError, match="linear"):
        load(EngineConfig(**{**vars(config), "backend": "reference"}))
    for level in LEVELS:
        loaded = load(EngineConfig(**{**vars(config), "backend": "cpu", "level": level}))
        assert loaded.kernels["attention"] == level
        assert set(loaded.kernels) >= {"embed", "linear", "rope_store", "logits", "sample"}
        loaded.executable.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: all are bound to it")
@pytest.mark.parametrize(("pinned", "bound"), [(True, 2), (False, 0)])
def test_pinned_threads_have_a_core_each(pinned: bool, bound: int) -> None:
    """In a process of its own: the thread that loads is one of them."""
    text = (
        "import os, sys; from headrace.config import EngineConfig\n"
        "from headrace.engine.load import load\n"
        "config = EngineConfig(sys.argv[1], kv_cache_memory_bytes=1 << 20, threads=2,"
        f" pin_threads={pinned})\n"
        "loaded = load(config)\n"
        "tasks = [int(task) for task in os.listdir('/proc/self/task')]\n"
        "masks = [os.sched_getaffinity(task) for task in tasks]\n"
        "print(len({tuple(mask) for mask in masks if len(mask) == 1}))\n"
        "loaded.executable.close()\n"
    )
    run = subprocess.run([sys.executable, "-c", text, str(TINY)], capture_output=True, text=True)
    assert run.stdout.strip() == str(bound), run.stderr
