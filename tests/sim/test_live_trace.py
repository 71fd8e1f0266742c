"""A live engine recorded with `trace` replays in the core to the same plans, all of them."""

from pathlib import Path
from random import Random

from headrace import trace
from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.messages import SamplingSpec, Submit
from headrace.errors import OverloadError

TINY = Path(__file__).parents[1] / "golden" / "families" / "llama"


def test_500_mixed_requests(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    loaded = load(
        EngineConfig(
            str(TINY), backend="reference", kv_cache_dtype="f32", threads=1, max_model_len=128,
            max_num_seqs=6, max_num_batched_tokens=48, max_num_queued_reqs=30,
            kv_cache_memory_bytes=20 * _page_bytes(), trace=str(path),
        )
    )  # fmt: skip
    engine = Engine(loaded)
    draw = Random(7)
    heads = [tuple(draw.randrange(96) for _ in range(40)) for _ in range(4)]
    submitted, refused = 0, 0
    alive: list[str] = []
    while submitted < 500 or engine.has_work:
        while submitted < 500 and draw.random() < 0.6:
            name = str(submitted)
            submitted += 1
            head = draw.choice(heads)[: draw.choice((0, 16, 40))]
            tail = tuple(draw.randrange(96) for _ in range(draw.randrange(1, 48)))
            sampling = SamplingSpec(temperature=0.8, seed=submitted)
            submit = Submit(
                name, head + tail, draw.randrange(1, 40), sampling, n=draw.choice((1, 1, 1, 2))
            )
            try:
                engine.submit(submit)
                alive.append(name)
            except OverloadError:
                refused += 1
        if alive and draw.random() < 0.08:
            engine.abort(alive.pop(draw.randrange(len(alive))))
        if alive and draw.random() < 0.04:
            engine.finish(draw.choice(alive), 0)
        engine.step()
    stats = engine.stats()
    engine.scheduler.check()
    engine.close()
    assert stats["preemptions"] > 0
    assert stats["prefix_hits"] > 0
    assert stats["cost_observations"] > 100
    report = trace.replay(path)
    assert report.difference is None
    assert report.requests == 500
    assert report.refused == refused
    assert report.plans == stats["steps"]
    kinds = {line.split(",", 1)[0] for line in path.read_text().splitlines()[1:]}
    assert {'["add"', '["abort"', '["finish"', '["coefficients"'} <= kinds


def _page_bytes() -> int:
    """Bytes of a page of the tiny model: 2 layers of K and V, in f32, 16 tokens."""
    from headrace.checkpoint import open_checkpoint
    from headrace.ops.spec import KVLayout

    model = open_checkpoint(str(TINY)).model(128)
    spec = model.spec
    return KVLayout(model.groups, spec.kv_heads, spec.head_dim, dtype="f32").page_bytes
