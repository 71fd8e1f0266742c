"""A small cut of the determinism table (scripts/determinism.py) on every level that runs here."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from headrace.checkpoint import open_checkpoint
from headrace.config import EngineConfig
from headrace.engine.params import PARAM_NAMES, SamplingParams
from headrace.ops.cpu import _native
from tests.e2e.tiny import write_tiny


def test_tokens_and_bits_are_the_same_under_all_conditions(determinism: ModuleType) -> None:
    """On the default model, at the best level; preemption needs longer runs: see below."""
    base = EngineConfig(backend="cpu", max_model_len=1024)
    rows = determinism.table(
        base, [_native.levels()[0]], [1, 2], count=2, tokens=4, others=3,
        wanted=lambda row: not row.features and not row.preempt,
    )  # fmt: skip
    assert_equal(rows, {4: 12})


@pytest.mark.parametrize("level", _native.levels())
def test_all_features_in_one_batch_leave_each_request_as_it_is_alone(
    level: str, determinism: ModuleType, tmp_path: Path
) -> None:
    """All rows on a tiny checkpoint, also those of all features: penalties, filters,
    log-probabilities, n, best_of, beams, grammars with forced tokens, stop strings, bad words,
    salts; chunked, cached, preempted, 1 and 2 threads."""
    base = EngineConfig(write_tiny(tmp_path), backend="cpu", max_model_len=512)
    rows = determinism.table(base, [level], [1, 2], count=4, tokens=16, others=6)
    assert_equal(rows, {8: 13, 8 + 19: 7})


def assert_equal(rows: Iterable[tuple[str, str, int, int, str]], expected: dict[int, int]) -> None:
    """expected: how many rows of how many requests."""
    sizes = Counter()
    for _, condition, equal, of, note in rows:
        assert equal == of, f"{condition}: {note}"
        assert "not small enough" not in note
        sizes[of] += 1
    assert sizes == expected


def test_the_mixture_uses_every_field_that_steers_sampling(determinism: ModuleType) -> None:
    shown_only = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens",
                  "include_stop_str_in_output", "priority"}  # fmt: skip
    requests = determinism.mixture(open_checkpoint().tokenizer(), 24).values()
    plain = SamplingParams()
    for name in PARAM_NAMES - shown_only:
        assert any(getattr(each, name) != getattr(plain, name) for each in requests), name
