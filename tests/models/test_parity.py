"""Every family against `transformers` in float32: tiny checkpoints of scripts/golden.py."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.ops.backends import open_backend
from tests.models.forward import cpu_levels, cut, logits, stream

FAMILIES = Path(__file__).parent.parent / "golden" / "families"
CASES = sorted(path.name for path in FAMILIES.iterdir())
BACKENDS = ["reference auto", *(f"cpu {level}" for level in cpu_levels())]


def checkpoint(case: str, folder: Path) -> Checkpoint:
    """The checkpoint of a case; variants of one base share its weights."""
    shutil.copy(FAMILIES / case / "config.json", folder / "config.json")
    own = FAMILIES / case / "model.safetensors"
    base = FAMILIES / case.partition("+")[0] / "model.safetensors"
    (folder / "model.safetensors").symlink_to(own if own.exists() else base)
    return open_checkpoint(str(folder))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, backend: str, tmp_path: Path) -> None:
    golden = np.load(FAMILIES / case / "golden.npz")
    ids = golden["ids"].tolist()
    model = checkpoint(case, tmp_path).model(len(ids))
    ours = logits(open_backend(*backend.split()), model, ids, len(ids))
    wanted = golden["logits"]
    error = np.abs(ours[golden["positions"]] - wanted).max() / np.abs(wanted).max()
    assert error < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(case: str, backend: str, tmp_path: Path) -> None:
    golden = np.load(FAMILIES / case / "golden.npz")
    ids = golden["ids"][:40].tolist()
    model = checkpoint(case, tmp_path).model(len(golden["ids"]))
    runs = open_backend(*backend.split())
    whole = logits(runs, model, ids, len(ids))
    for cuts in (cut(40, 1), [7, 1, 16, 16]):
        pieces = np.concatenate(list(stream(runs, model, ids, cuts)))
        np.testing.assert_array_equal(pieces, whole)
