"""The table behind `headrace plan --break-even`.

For a checkpoint on this machine the prefill rate and the links are measured now; for anything else
they come from the cost model and the tables.
"""

import time
from dataclasses import replace
from random import Random

from rich.console import Console
from rich.table import Table

from headrace.config import EngineConfig
from headrace.cost import calibrate
from headrace.cost.breakeven import BreakEven, break_even
from headrace.cost.catalog import configured, find_model
from headrace.cost.hardware import LOCAL, Device
from headrace.cost.options import Question
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.messages import SamplingSpec, Submit

_PROMPT = 1024


def show(console: Console, question: Question) -> None:
    """Print W* and what each link would do. One rank, or the ranks that were asked for."""
    model = find_model(question.model, question.precision, question.ranks)
    device, prefill = question.device, None
    here = device.name == LOCAL and not configured(question.model)
    if here:
        prefill, device = measure_prefill(question.model), measure_links(device)
    found = break_even(model, device, model.on(device), prefill)
    source = "measured" if here else "priced"
    console.print(
        f"prefill {found.prefill:,.0f} tokens/s ({source}), KV {found.kv_bytes / 1024:.1f} KiB a "
        f"token: W* = {found.bandwidth / 1e9:.3g} GB/s"
    )
    console.print(_table(found))
    split = [verdict for verdict in found.verdicts if verdict.share < 0.1]
    console.print(
        f"a prefill/decode split costs under 10 % of the prefill over: "
        f"{', '.join(verdict.link for verdict in split) or 'none of these'}"
    )


def measure_prefill(model: str) -> float:
    """Prompt tokens/s of this engine for one prompt of 1,024 tokens (fewer where the model is
    shorter), the better of two."""
    engine = Engine(load(EngineConfig(model=model, max_num_seqs=1)))
    try:
        length = min(_PROMPT, engine.loaded.plan.max_model_len - 1)
        draw, best = Random(0), 0.0
        for name in ("first", "second"):
            ids = engine.loaded.plan.limits.vocabulary
            prompt = tuple(draw.randrange(ids) for _ in range(length))
            began = time.perf_counter()
            engine.submit(Submit(name, prompt, 1, SamplingSpec(temperature=0.0)))
            while engine.has_work:
                engine.step()
            best = max(best, length / (time.perf_counter() - began))
        return best
    finally:
        engine.close()


def measure_links(device: Device) -> Device:
    """The device with what a copy and the loopback reach now."""
    now = {"copy": calibrate.copy_rate(0.3), "loopback": calibrate.loopback_rate()}
    return replace(device, measured={**device.measured, **now})


def _table(found: BreakEven) -> Table:
    table = Table(
        "link", "GB/s", "of prefill", "4k cached prefix", "active KV",
        box=None, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for verdict in found.verdicts:
        better = "fetch" if verdict.pays else "recompute"
        table.add_row(
            verdict.link, f"{verdict.bandwidth / 1e9:.2f}", f"{verdict.share:.1%}",
            f"{better}, saves {abs(verdict.saved):.3g} s", f"{verdict.slowdown:.0f}x slower",
        )  # fmt: skip
    return table
