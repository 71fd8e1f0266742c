"""A tiny Llama with random weights on the reference back-end: every step is exact and quick."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.messages import Output, SamplingSpec, Submit

TINY = Path(__file__).parent.parent / "golden" / "families" / "llama"
EngineMaker = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[EngineMaker]:
    """Engines of the tiny model; closed at the end, their books checked."""
    made: list[Engine] = []

    def build(**options: object) -> Engine:
        config = {"backend": "reference", "kv_cache_dtype": "f32", "max_model_len": 128}
        engine = Engine(load(EngineConfig(str(TINY), **{**config, **options})))  # type: ignore[arg-type]
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.scheduler.check()
        assert not engine.has_work
        assert engine.scheduler.stats().pages_used == 0
        engine.close()


def submit(name: str, prompt: list[int], max_tokens: int = 8, **more: object) -> Submit:
    """A greedy request unless `sampling` says otherwise."""
    fields = {"sampling": SamplingSpec(temperature=0.0), **more}
    return Submit(id=name, prompt=tuple(prompt), max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[tuple[str, int], list[Output]]:
    """Run until nothing is left; the outputs of each (request, choice)."""
    found: dict[tuple[str, int], list[Output]] = {}
    for _ in range(10_000):
        if not engine.has_work:
            return found
        outputs = engine.step()
        for output in outputs.outputs if outputs else ():
            found.setdefault((output.id, output.index), []).append(output)
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]
