"""Streaming attention: the first N and the last W tokens, asked for by flags."""

import numpy as np
import pytest

from headrace.checkpoint import open_checkpoint, open_configured
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.models.spec import Layer
from headrace.ops.backends import open_backend
from headrace.ops.spec import KVGroup
from tests.models.forward import cpu_levels, logits
from tests.models.test_parity import FAMILIES

LLAMA = str(FAMILIES / "llama")


def test_layers_and_groups() -> None:
    config = EngineConfig(model=LLAMA, attention_sinks=4, attention_window=20)
    model = open_configured(config).model()
    assert model.spec.layers == (Layer(20, "global", 4),) * 2
    assert model.groups == (KVGroup("window-4+20", (0, 1), 20, 1, 4),)
    assert model.notes == ("attention sees the first 4 and the last 20 tokens, as asked",)
    gemma = EngineConfig(model=str(FAMILIES / "gemma3"), attention_window=20)
    assert [group.window for group in open_configured(gemma).model().groups] == [11, 20]


@pytest.mark.parametrize("backend", ["reference", *(["cpu"] if cpu_levels() else [])])
def test_what_is_seen(backend: str) -> None:
    """With a window as long as the text nothing changes. With a shorter one the rows change from
    the first position that no longer sees all, and a change to a token shows at a row exactly
    where that row can see it (the model has one layer of reach each)."""
    runs = open_backend(backend)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 96, 64).tolist()
    plain = logits(runs, open_checkpoint(LLAMA).model(64), ids, 64)

    def streamed(sinks: int, window: int, tokens: list[int] = ids) -> np.ndarray:
        config = EngineConfig(model=LLAMA, attention_sinks=sinks, attention_window=window)
        return logits(runs, open_configured(config).model(64), tokens, 64)

    np.testing.assert_array_equal(streamed(0, 64), plain)
    short = streamed(4, 10)
    changed = (short != plain).any(axis=1)
    assert not changed[:14].any()  # positions below 4 + 10 see all before them
    assert changed[14:].all()
    other = [*ids[:20], (ids[20] + 1) % 96, *ids[21:]]
    differs = (streamed(4, 10, other) != short).any(axis=1)
    reach = 20 + 2 * 9  # two layers, each looks back nine tokens
    assert not differs[:20].any()
    assert differs[20 : 20 + 10].all()
    assert not differs[reach + 1 :].any()
    first = [ids[0] + 1, *ids[1:]]
    assert (streamed(4, 10, first) != short).any(axis=1).all()  # a sink is seen from everywhere
    assert not (streamed(0, 10, first) != streamed(0, 10)).any(axis=1)[19:].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_sinks": 4}, "attention_sinks: needs --attention-window"),
        ({"attention_sinks": -1}, "attention_sinks: must not be negative"),
        ({"attention_window": 0}, "attention_window: must be at least 1"),
    ],
)
def test_refusals(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_configured(EngineConfig(model=LLAMA, **options))
