"""`headrace plan MODEL`: what a service takes, before anything runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from headrace.cli.plan_page import page_of
from headrace.cost import parse
from headrace.cost.capacity import Choice, Gain, cost_rate
from headrace.cost.catalog import BITS, KV_BYTES, Precision, names
from headrace.cost.formulas.rates import knee
from headrace.cost.hardware import find_device
from headrace.cost.options import Answer, Question, answer, describe, gains
from headrace.cost.parse import at_least
from headrace.models.sketch import Ranks
from headrace.sim.verify import Verified, load_curve, verify

CURVE = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the machine, the promise, the traffic, and how to print."""
    parser.add_argument(
        "model", metavar="MODEL",
        help=f"{', '.join(names())}, a config.json, a .gguf file or a short name",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", default="local", metavar="NAME",
        help="a device of data/devices.toml (h100, a100, ...), or local (the calibrated profile)",
    )  # fmt: skip
    parser.add_argument("--devices", type=Path, metavar="FILE", help="further devices, as TOML")
    parser.add_argument(
        "--slo", default="ttft=1s,tpot=50ms", metavar="PROMISE", help="ttft=500ms,tpot=50ms"
    )
    parser.add_argument(
        "--traffic", default="rate=1,prompt=1000,output=200", metavar="TRAFFIC",
        help="rate=20,prompt=1000,output=200,cached=0.3,longest=8192 (requests/s, mean tokens)",
    )  # fmt: skip
    parser.add_argument("--weights", choices=list(BITS), help="format of the weights")
    parser.add_argument("--experts", choices=list(BITS), help="format of routed experts")
    parser.add_argument("--kv", choices=list(KV_BYTES), default="f16", help="format of K and V")
    parser.add_argument(
        "--tensor", type=at_least(1), metavar="N", help="tensor parallel ranks, fixed"
    )
    parser.add_argument(
        "--expert", type=at_least(1), metavar="N", help="expert parallel ranks, fixed"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="skip the simulation of the chosen replica"
    )
    parser.add_argument(
        "--break-even", action="store_true",
        help="whether moving KV (offload, prefill/decode split) would pay, from the link speeds",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def run(arguments: argparse.Namespace) -> int:
    """Plan, check by simulation, print."""
    ranks = None
    if arguments.tensor or arguments.expert:
        ranks = Ranks(arguments.tensor or 1, arguments.expert or 1)
    question = Question(
        arguments.model,
        find_device(arguments.hardware, arguments.devices),
        parse.traffic(arguments.traffic),
        parse.promise(arguments.slo),
        Precision(arguments.weights, arguments.experts, arguments.kv),
        ranks,
    )
    found = answer(question)
    helps = gains(found)
    checked = None
    if found.best is not None and not arguments.no_verify:
        checked = verify(found.best, question.traffic, question.promise)
    if arguments.html and found.best is not None:
        loads = (
            []
            if arguments.no_verify
            else load_curve(found.best, question.traffic, question.promise, CURVE)
        )
        arguments.html.write_text(page_of(found, helps, checked, loads), "utf-8")
    if arguments.json:
        sys.stdout.write(json.dumps(as_data(found, helps, checked), indent=1) + "\n")
    else:
        show(Console(), found, helps, checked)
        if arguments.html:
            Console().print(f"plots in {arguments.html}")
    if arguments.break_even:
        from headrace.cli import break_even

        break_even.show(Console(stderr=arguments.json), question)
    return 0 if found.best is not None else 1


def knee_of(choice: Choice) -> int:
    """Index of the knee of a choice's curve: where more batch stops paying in throughput."""
    return knee([(float(p.batch), p.throughput) for p in choice.curve])


def as_data(found: Answer, helps: list[Gain], checked: Verified | None) -> dict[str, Any]:
    """The plan as plain data: seconds, bytes, dollars."""
    question = found.question
    return {
        "model": question.model,
        "hardware": question.device.name,
        "traffic": vars(question.traffic) | {"context": question.traffic.context},
        "promise": {"ttft": question.promise.ttft, "tpot": question.promise.tpot},
        "choices": [choice_data(choice) for choice in found.choices],
        "misses": dict(found.misses),
        "gains": [{"change": gain.change, "cost_ratio": gain.ratio} for gain in helps],
        "verified": None
        if checked is None
        else {
            "replicas": checked.replicas,
            "kept": checked.kept,
            "report": {k: v for k, v in checked.report.to_dict().items() if k != "timeline"},
        },
    }


def choice_data(choice: Choice) -> dict[str, Any]:
    """One choice as plain data."""
    model = choice.replica.model
    return {
        "spread": describe(model.ranks),
        "devices_per_replica": choice.replica.devices,
        "weight_bytes_per_device": model.rank_bytes,
        "kv_bytes_per_device": choice.replica.kv_bytes,
        "kv_bytes_per_token": model.kv_token_bytes(),
        "sequences_that_fit": choice.replica.sequences,
        "batch": choice.at.batch,
        "chunk": choice.at.chunk,
        "tpot": choice.at.tpot,
        "itl_with_chunk": choice.at.itl,
        "ttft_unqueued": choice.at.ttft,
        "requests_per_second": choice.at.requests,
        "output_tokens_per_second": choice.at.throughput,
        "knee_batch": choice.curve[knee_of(choice)].batch,
        "replicas": choice.replicas,
        "utilisation": choice.utilisation,
        "dollars_per_hour": choice.per_hour,
        "dollars_per_million": {
            "input": choice.input_price,
            "cached": choice.cached_price,
            "output": choice.output_price,
        },
        "time": choice.at.terms,
        "curve": [
            {"batch": p.batch, "tpot": p.tpot, "throughput": p.throughput, "ttft": p.ttft}
            for p in choice.curve
        ],
    }


def binds(choice: Choice, found: Answer) -> str:
    """What keeps a replica from doing more, in words."""
    promise = found.question.promise
    beyond = [point for point in choice.curve if point.batch > choice.at.batch]
    if not beyond:
        if choice.at.batch >= choice.replica.sequences:
            return f"KV memory: it holds {choice.at.batch} such requests"
        return f"prompts: past batch {choice.at.batch} they take longer than the answers"
    after = beyond[0]
    if promise.tpot is not None and after.tpot > promise.tpot:
        return f"the TPOT promise: {after.tpot * 1e3:.0f} ms at batch {after.batch}"
    if promise.ttft is not None and after.ttft > promise.ttft:
        return f"the TTFT promise: {after.ttft * 1e3:.0f} ms at batch {after.batch}"
    return f"compute: batch {after.batch} answers no more requests a second"


def show(console: Console, found: Answer, helps: list[Gain], checked: Verified | None) -> None:
    """The plan as tables."""
    question, best = found.question, found.best
    traffic = question.traffic
    console.print(
        f"[bold]{question.model}[/bold] on {question.device.title}: {traffic.rate:g} requests/s of "
        f"{traffic.prompt:g} + {traffic.output:g} tokens, {traffic.cached:.0%} of prompts cached"
    )
    if best is None:
        console.print("no way of running it keeps the promise:")
        for spread, reason in found.misses:
            console.print(f"  {spread}: {reason}")
    else:
        console.print(_choices_table(found))
        for reason, some in _grouped(found.misses).items():
            console.print(f"  {reason}: {', '.join(some)}", style="dim")
        _show_best(console, found, best, checked)
    table = RichTable("what would help", "cost", box=None, padding=(0, 3, 0, 0))
    for gain in helps[:6]:
        if gain.ratio is None:
            table.add_row(gain.change, "keeps the promise")
        elif gain.ratio < 0.995:
            table.add_row(gain.change, f"{gain.ratio - 1:+.0%}")
    if table.row_count:
        console.print(table)


def _grouped(misses: tuple[tuple[str, str], ...]) -> dict[str, list[str]]:
    """Spreads that are no choice, by what is wrong with them in a few words."""
    groups: dict[str, list[str]] = {}
    for spread, reason in misses:
        short = reason.split(":")[0] if "promise" in reason else "does not fit"
        groups.setdefault(short, []).append(spread)
    return groups


def _choices_table(found: Answer) -> RichTable:
    table = RichTable(
        "spread", "replicas", "batch/chunk", "TPOT/TTFT ms", "req/s", "$/h", "$/M in/cached/out",
        box=None, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for choice in found.choices[:6]:
        at = choice.at
        prices = (choice.input_price, choice.cached_price, choice.output_price)
        table.add_row(
            describe(choice.replica.model.ranks), str(choice.replicas), f"{at.batch}/{at.chunk}",
            f"{at.tpot * 1e3:.1f}/{at.ttft * 1e3:.0f}", f"{at.requests:.3g}",
            f"{choice.per_hour:.2f}" if choice.per_hour else "-",
            "/".join(f"{price:.2g}" for price in prices) if choice.per_hour else "-",
        )  # fmt: skip
    return table


def _show_best(console: Console, found: Answer, best: Choice, checked: Verified | None) -> None:
    model, at = best.replica.model, best.at
    knee_point = best.curve[knee_of(best)]
    spent = sorted(at.terms.items(), key=lambda item: -item[1])
    lines = [
        ("each device holds", f"{model.rank_bytes / 1e9:.1f} GB of weights, "
         f"{best.replica.kv_bytes / 1e9:.1f} GB of KV: {best.replica.sequences} requests"),
        ("what binds", binds(best, found)),
        ("time goes to", ", ".join(f"{name} {share:.0%}" for name, share in spent if share > 0.02)),
        ("knee", f"batch {knee_point.batch}: {knee_point.throughput:.0f} tok/s at "
         f"{knee_point.tpot * 1e3:.1f} ms"),
        ("utilisation", f"{best.utilisation:.0%} of {best.replicas} replicas"),
    ]  # fmt: skip
    if found.question.device.measured:
        lines.append(
            (
                "serve it with",
                f"--max-num-seqs {at.batch} --max-num-batched-tokens {at.batch + at.chunk} "
                f"--mixed-prefill-tokens {at.chunk}",
            )
        )
    if model.ranks.expert > 1:
        lines.append(("batch and chunk", f"are those of each of {model.ranks.expert} expert ranks"))
    if best.per_hour:
        divided = cost_rate(best, found.question.traffic)
        lines.append(("if replicas divided", f"${divided:.2f}/h"))
    if checked is not None:
        r = checked.report
        verdict = "kept" if checked.kept else "NOT kept"
        more = f", with {checked.added} more than the closed form" if checked.added else ""
        lines.append(
            (
                "simulated",
                f"{checked.replicas} replicas{more}: promise {verdict} for {r.attainment:.0%}; "
                f"TTFT p90 {r.ttft['p90'] * 1e3:.0f} ms, TPOT p50 {r.tpot['p50'] * 1e3:.1f} ms",
            )
        )
    table = RichTable.grid(padding=(0, 2))
    for name, text in lines:
        table.add_row(f"  {name}", text)
    console.print(table)
