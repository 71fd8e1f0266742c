"""Random operations with every check after every one. The full size: python -m tests.core.soak."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.soak import Soak, soak


@pytest.mark.parametrize("seed", range(60))
def test_soak(seed: int) -> None:
    soak(seed, 150)


class Scripted:
    """Draws from hypothesis in place of a random generator, so that failures shrink."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def random(self) -> float:
        return self.data.draw(st.integers(0, 99)) / 100

    def randint(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, max(low, high)))

    def randrange(self, stop: int) -> int:
        return self.data.draw(st.integers(0, stop - 1))

    def choice(self, options: object) -> object:
        return self.data.draw(st.sampled_from(options))  # type: ignore[arg-type]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_any_operations(data: st.DataObject) -> None:
    state = Soak(Scripted(data))  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 25))):
        state.operate()
    state.drain()


@pytest.mark.parametrize("seed", range(8))
def test_same_inputs_same_outputs(seed: int) -> None:
    first, second = (soak(seed, 200).machine for _ in range(2))
    assert first.scheduler.stats() == second.scheduler.stats()
    assert first.outputs == second.outputs
    assert first.tables == second.tables
