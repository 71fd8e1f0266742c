"""`headrace inspect`: the numbers add up, and the command prints them."""

import json
from pathlib import Path

import pytest

from headrace.checkpoint import open_checkpoint
from headrace.cli import main
from headrace.models.inspect import inspect_checkpoint
from headrace.ops.backends import open_backend
from tests.models.convert import convert
from tests.models.test_parity import FAMILIES


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    convert(FAMILIES / "gemma3", FAMILIES / "gemma3" / "model.safetensors", path, vocabulary=96)
    return path


def test_bytes_add_up(gemma: Path) -> None:
    checkpoint = open_checkpoint(str(gemma))
    report = inspect_checkpoint(checkpoint, open_backend("null"), max_model_len=100)
    assert report.nbytes == sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
    assert sum(row.tensors for row in report.formats) == len(checkpoint.tensors)
    once = {row.kind: row for row in report.weights}
    ropes = once["rope.global"].nbytes + once["rope.local"].nbytes
    assert sum(row.nbytes for row in report.weights) == report.nbytes + ropes
    assert once["embed"].ops == ("embed", "logits")  # tied: one weight, held once
    local, full = report.groups
    assert (local.window, local.layers, full.window, full.layers) == (11, 2, None, 1)
    assert local.token_bytes == 2 * full.token_bytes == 2 * 2 * 24 * 2
    assert (local.held_bytes, full.held_bytes) == (11 * local.token_bytes, 100 * full.token_bytes)


def test_the_command(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [str(gemma), "--backend", "reference", "--kv-cache-memory-bytes", "1M"]
    assert main(["inspect", *flags]) == 0
    shown = capsys.readouterr().out
    for expected in ("gemma3", "window-11", "F32", "Memory", "tied embeddings", "<|b|>"):
        assert expected in shown
    assert main(["inspect", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "tiny"


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK" * 40)
    assert main(["inspect", str(tmp_path / "x.gguf")]) == 1
    assert "not a GGUF file" in capsys.readouterr().err
