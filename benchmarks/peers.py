"""The same work on headrace and on its peers, interleaved, in one table.

    python benchmarks/peers.py ~/.cache/headrace/models/SmolLM2-135M-Instruct.Q4_1.gguf

Sets up llama.cpp (package xllamacpp; the same file, and a copy rounded to Q4_0, its fastest
format), OpenVINO GenAI and vLLM's CPU back-end (bfloat16) in environments of their own, then for
each work item starts all servers and asks them in turn, round after round. Every prompt is random
token ids, new in each round and equal for all. Prints medians, and the ratio of headrace to the
best peer. Needs an idle machine; `--items`, `--engines` and `--rounds` cut it short, `--save`
gathers several runs.
"""

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_setup import KV_BYTES, Engine, Room, Server, engines

from headrace.bench.http import Client, Sample
from headrace.bench.workload import Source

ENGINES = ["headrace", "llama-q4_1", "llama-q4_0", "openvino", "vllm"]
VOCABULARY = 40000
Figures = dict[str, float]


@dataclass(frozen=True)
class Item:
    """Some work: what it needs and how it is measured. figure: (title, whether more is better)."""

    room: Room
    measure: Callable[["Load"], Coroutine[Any, Any, Figures]]
    figures: dict[str, tuple[str, bool]]


class Load:
    """Sends one round's requests to one server; equal seeds give equal prompts."""

    def __init__(self, url: str, seed: int) -> None:
        self._client = Client(url, {})
        self._source = Source(seed, "ids", VOCABULARY)

    def ids(self, count: int) -> list[int]:
        """Random token ids."""
        return self._source.tokens(count)

    async def ask(self, ids: list[int], count: int) -> Sample:
        """One streamed answer of `count` tokens. Raises RuntimeError when it fails."""
        request = {
            "prompt": ids, "max_tokens": count, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        sample = await self._client.post("/v1/completions", json.dumps(request).encode(), 300.0)
        if sample.error is not None or sample.output_tokens != count:
            raise RuntimeError(sample.error or f"{sample.output_tokens} of {count} tokens came")
        return sample

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


async def decode(load: Load) -> Figures:
    sample = await load.ask(load.ids(32), 128)
    return {"decode": 1 / sample.tpot}


async def prefill(load: Load) -> Figures:
    sample = await load.ask(load.ids(512), 2)
    return {"prefill": 512 / sample.ttft}


def together(count: int) -> Callable[[Load], Coroutine[Any, Any, Figures]]:
    async def measure(load: Load) -> Figures:
        prompts = [load.ids(128) for _ in range(count)]
        started = time.perf_counter()
        await asyncio.gather(*(load.ask(prompt, 128) for prompt in prompts))
        return {f"output{count}": count * 128 / (time.perf_counter() - started)}

    return measure


async def shared(load: Load) -> Figures:
    prefix = load.ids(1000)
    prompts = [[*prefix, *load.ids(30)] for _ in range(32)]
    places = asyncio.Semaphore(8)

    async def one(prompt: list[int]) -> None:
        async with places:
            await load.ask(prompt, 32)

    started = time.perf_counter()
    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return {"shared": time.perf_counter() - started}


async def beside(load: Load) -> Figures:
    """The streams' worst gap is taken from the sending of the long prompt to its first token."""
    streams = [asyncio.create_task(load.ask(load.ids(32), 256)) for _ in range(8)]
    await asyncio.sleep(2.0)
    long = await load.ask(load.ids(4000), 2)
    first, worst = long.started + long.ttft, 0.0
    for sample in await asyncio.gather(*streams):
        at = sample.started + sample.ttft
        for gap in sample.itl:
            if at + gap > long.started and at < first:
                worst = max(worst, gap)
            at += gap
    return {"stall": worst, "ttft": long.ttft}


async def far(load: Load) -> Figures:
    sample = await load.ask(load.ids(7900), 64)
    return {"far": 1 / sample.tpot, "long": 7900 / sample.ttft}


ITEMS = {
    "decode": Item(Room(1, 512), decode, {"decode": ("decode at 1 (tok/s)", True)}),
    "prefill": Item(Room(1, 1024), prefill, {"prefill": ("prefill of 512 (tok/s)", True)}),
    **{
        f"output{count}": Item(
            Room(count, 288), together(count),
            {f"output{count}": (f"output at {count}, 128 in + 128 out (tok/s)", True)},
        )
        for count in (8, 16, 32)
    },
    "shared": Item(
        Room(8, 1088), shared,
        {"shared": ("32 x (1,000 shared + 30), 32 out, at 8 (s, less is better)", False)},
    ),
    "beside": Item(
        Room(9, 4096), beside,
        {"stall": ("4,000 tokens beside 8 streams: worst ITL (s, less is better)", False),
         "ttft": ("... the prompt's TTFT (s, less is better)", False)},
    ),
    "far": Item(
        Room(1, 8192), far,
        {"far": ("decode at 8,000 of context (tok/s)", True),
         "long": ("prefill of 7,900 (tok/s)", True)},
    ),
}  # fmt: skip
START = {
    "ready": ("ready (s, less is better)", False),
    "pss": ("summed PSS, 8,192 tokens of KV (MB, less is better)", False),
}


def start(engine: Engine, seed: int, log: Path) -> Figures:
    """Seconds to the first answer, and memory after all KV was used once."""
    server = Server(engine, Room(8, 1024), log)
    try:
        asyncio.run(_fill(server.url, seed))
        return {"ready": server.ready, "pss": server.memory()}
    finally:
        server.stop()


async def _fill(url: str, seed: int) -> None:
    load = Load(url, seed)
    await asyncio.gather(*(load.ask(load.ids(900), 16) for _ in range(8)))
    load.close()


def measure(
    name: str, chosen: list[Engine], rounds: int, log: Path, keep: Callable[..., None]
) -> None:
    """All rounds of an item; a server that fails is named and left out."""
    if name == "start":
        for round_ in range(rounds):
            for engine in chosen:
                keep(name, engine.name, start(engine, round_, log))
        return
    item, servers = ITEMS[name], {}
    try:
        for engine in chosen:
            try:
                servers[engine.name] = Server(engine, item.room, log)
            except RuntimeError as error:
                sys.stderr.write(f"{error}\n")
        for round_ in range(-1, rounds):
            for label, server in servers.items():
                load = Load(server.url, round_)
                if round_ < 0:  # first requests pay for caches and lazy set-up
                    asyncio.run(_warm(load))
                    continue
                try:
                    keep(name, label, asyncio.run(item.measure(load)))
                except RuntimeError as error:
                    sys.stderr.write(f"{label}, {name}: {error}\n")
    finally:
        for server in servers.values():
            server.stop()


async def _warm(load: Load) -> None:
    await load.ask(load.ids(32), 8)
    load.close()


def limits(threads: int) -> dict[str, float]:
    """What this machine can do, by `headrace bench limits`."""
    command = [sys.executable, "-m", "headrace", "bench", "limits",
               "--threads", str(threads), "--json"]  # fmt: skip
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["rows"]
    return {f"{row['limit']} ({row['unit']})": row["value"] for row in rows}


def table(records: list[dict[str, Any]], bytes_of_weights: int) -> str:
    """Markdown: medians (and runs), headrace against the best peer, limits below."""
    titles = {key: value for item in ITEMS.values() for key, value in item.figures.items()} | START
    seen = [name for name in ENGINES if any(r["engine"] == name for r in records)]
    lines = ["| work | " + " | ".join(seen) + " | headrace / best peer |"]
    lines.append("|---" * (len(seen) + 2) + "|")
    for key, (title, more) in titles.items():
        medians, cells = {}, []
        for name in seen:
            values = [r["figures"][key] for r in records
                      if r["engine"] == name and key in r["figures"]]  # fmt: skip
            if values:
                medians[name] = statistics.median(values)
            count = "" if len(values) == 3 else f" (n={len(values)})"
            cells.append(f"{medians[name]:.3g}{count}" if values else "-")
        if not medians:
            continue
        ours, peers = medians.pop("headrace", None), list(medians.values())
        ratio = "-"
        if ours and peers:
            best = max(peers) if more else min(peers)
            ratio = f"{ours / best:.2f}"
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {ratio} |")
    found: dict[str, list[float]] = {}
    for record in records:
        if record["engine"] == "limits":
            for key, value in record["figures"].items():
                found.setdefault(key, []).append(value)
    lines += ["", "| limit | median | range |", "|---|---|---|"]
    for key, values in found.items():
        lines.append(f"| {key} | {statistics.median(values):.4g} | "
                     f"{min(values):.4g} to {max(values):.4g} |")  # fmt: skip
    for name, context, size in (("decode", 96, "read 100 MB (GB/s)"),
                                ("far", 7932, "read 268 MB (GB/s)")):  # fmt: skip
        rates = [r["figures"][name] for r in records
                 if r["engine"] == "headrace" and name in r["figures"]]  # fmt: skip
        if rates and size in found:
            read = (bytes_of_weights + context * KV_BYTES) / 1e9
            bound = statistics.median(found[size]) / read
            rate = statistics.median(rates)
            lines.append(
                f"\nheadrace, {name}: {rate:.1f} of {bound:.1f} tok/s ({rate / bound:.0%}),"
                f" {read * 1e3:.0f} MB a step."
            )
    return "\n".join(lines)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the .gguf file, with Q4_1 weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", nargs="+", default=[*ITEMS, "start"],
                        choices=[*ITEMS, "start"], metavar="ITEM")  # fmt: skip
    parser.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES, metavar="NAME")
    parser.add_argument("--environments", type=Path, metavar="FOLDER",
                        default=Path.home() / ".cache" / "headrace" / "peers")  # fmt: skip
    parser.add_argument("--save", type=Path, metavar="FILE", help="add to, and print, this file")
    options = parser.parse_args()
    folder: Path = options.environments
    folder.mkdir(parents=True, exist_ok=True)
    chosen, missing = engines(options.engines, options.model, options.threads, folder)
    records: list[dict[str, Any]] = []
    if options.save is not None and options.save.exists():
        records = [json.loads(line) for line in options.save.read_text().splitlines()]

    def keep(item: str, engine: str, figures: Figures) -> None:
        records.append({"item": item, "engine": engine, "figures": figures})
        sys.stderr.write(f"{item} {engine} {figures}\n")
        if options.save is not None:
            with options.save.open("a") as out:
                out.write(json.dumps(records[-1]) + "\n")

    for name in options.items if chosen else []:
        keep(name, "limits", limits(options.threads))
        measure(name, chosen, options.rounds, folder / "servers.log", keep)
    print(table(records, Path(options.model).stat().st_size))
    for name, why in missing.items():
        print(f"\n{name}: not measured: {why}")


if __name__ == "__main__":
    main()
