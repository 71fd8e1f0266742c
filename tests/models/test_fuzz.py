"""500 damaged GGUF files and 500 damaged safetensors files: a clear error in under a second, or a
model that is consistent; never a crash, never much memory. scripts/fuzz.py goes on for longer."""

import json
import shutil
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from headrace.checkpoint import open_checkpoint
from headrace.errors import ModelError
from tests.models.convert import convert
from tests.models.mutate import mutate
from tests.models.test_parity import FAMILIES

SEEDS = 500
LIMIT_SECONDS = 1.0
LIMIT_BYTES = 30_000_000


def attempt(path: Path, tokenizer: bool = False) -> str:
    """Open a damaged checkpoint as the program would: 'refused' or 'opened'."""
    began = time.process_time()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        checkpoint = open_checkpoint(str(path))
        model = checkpoint.model()
        if tokenizer:
            checkpoint.tokenizer()
        assert all(model.weights[n].shape == shape for n, shape in model.program.shapes.items())
        message = ""
    except ModelError as error:
        message = str(error)
    assert time.process_time() - began < LIMIT_SECONDS
    assert tracemalloc.get_traced_memory()[1] - before < LIMIT_BYTES
    assert "\n" not in message
    assert len(message) < 1000
    return "refused" if message else "opened"


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_damaged_gguf_files(tmp_path: Path, traced: None) -> None:
    source, target = tmp_path / "source.gguf", tmp_path / "damaged.gguf"
    convert(FAMILIES / "llama", FAMILIES / "llama" / "model.safetensors", source, vocabulary=96)
    raw = source.read_bytes()
    header = raw.rindex(b"weight") + 60
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(SEEDS):
        kind, data = mutate(raw, seed, header)
        target.write_bytes(data)
        outcomes[kind, attempt(target, tokenizer=True)] += 1
    assert not outcomes["truncate", "opened"]
    assert sum(n for (_, outcome), n in outcomes.items() if outcome == "refused") > SEEDS / 2


def test_damaged_safetensors_files(tmp_path: Path, traced: None) -> None:
    raw = (FAMILIES / "llama" / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    shutil.copy(FAMILIES / "llama" / "config.json", tmp_path)
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(SEEDS):
        kind, data = mutate(raw, seed, header)
        (tmp_path / "model.safetensors").write_bytes(data)
        outcomes[kind, attempt(tmp_path)] += 1
    assert not outcomes["truncate", "opened"]
    assert sum(n for (_, outcome), n in outcomes.items() if outcome == "refused") > SEEDS / 2


def test_damaged_configurations(tmp_path: Path, traced: None) -> None:
    for name in ("model.safetensors", "config.json"):
        shutil.copy(FAMILIES / "llama" / name, tmp_path)
    raw = (FAMILIES / "llama" / "config.json").read_bytes()
    outcomes: Counter[str] = Counter()
    for seed in range(200):
        _, data = mutate(raw, seed, len(raw))
        (tmp_path / "config.json").write_bytes(data)
        outcomes[attempt(tmp_path)] += 1
    assert outcomes["refused"] > 100
    for deep in ("[" * 100_000, '{"a":' * 100_000, json.dumps({"hidden_size": 10**400})):
        (tmp_path / "config.json").write_text(deep)
        assert attempt(tmp_path) == "refused"
