"""A small cut of the determinism table (scripts/determinism.py) on every level that runs here."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace.config import EngineConfig
from headrace.ops.cpu import _native

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "determinism.py"


@pytest.fixture(scope="module")
def determinism() -> ModuleType:
    spec = importlib.util.spec_from_file_location("determinism", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["determinism"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("level", _native.levels())
def test_tokens_and_bits_are_the_same_under_all_conditions(
    level: str, determinism: ModuleType
) -> None:
    base = EngineConfig(backend="cpu", max_model_len=1024)
    rows = list(determinism.table(base, [level], [1, 2], count=2, tokens=4, others=3))
    assert len(rows) > 10
    for _, condition, equal, of, _ in rows:
        assert equal == of == 4, condition
