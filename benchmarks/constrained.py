"""Throughput of constrained requests beside unconstrained ones, through the real server.

    PYTHONPATH=. python benchmarks/constrained.py [--json] [--rounds 5] [--kinds json_schema regex]

Starts `headrace serve`, then per kind of constraint, at a fixed concurrency: a round of constrained
requests (seeded, temperature 1), and a round of the same prompts without constraint and with the
very same numbers of tokens (max_tokens and ignore_eos). Rounds are interleaved, medians compared.
`json_schema, stepwise` asks for log-probabilities in both, so that no token is appended without
sampling; `regex, prose` is the worst case: words are counted, so hardly a token is forced and every
mask is new. mask_ms is the time of a mask, hidden the share of it behind the forward pass, both
from /metrics: hidden masks still take CPU time from a forward pass that keeps all cores busy.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import Server, serving

WORDS = ("water", "wheel", "river", "engine", "light", "glass", "stone", "north", "signal",
         "copper", "garden", "number")  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 10, "maxLength": 60},
        "items": {
            "type": "array", "minItems": 4, "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 5, "maxLength": 20},
                    "kind": {"enum": ["stone", "copper", "glass"]},
                    "count": {"type": "integer", "minimum": 0, "maximum": 9999},
                },
                "required": ["name", "kind", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "items"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "items", "schema": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": FORMAT},
    "json_schema, stepwise": {"response_format": FORMAT, "logprobs": 0},
    "regex": {
        "structured_outputs": {
            "regex": r"(Name: [A-Z][a-z]{2,9} [A-Z][a-z]{2,9}, mail: [a-z]{3,9}@[a-z]{3,9}"
            r"\.(com|org), since: (19|20)\d\d-[01]\d-[0-3]\d\n){4}"
        }
    },
    "regex, prose": {
        "structured_outputs": {"regex": r"([A-Z][a-z]{2,9}( [a-z]{2,9}){4,8}\. ){4,6}"}
    },
    "choice": {
        "structured_outputs": {
            "choice": [f"{a} and {b} by the {c}" for a in WORDS for b in WORDS for c in WORDS]
        }
    },
}


class Load:
    """Requests of one kind against one server."""

    def __init__(self, server: Server, concurrency: int, requests: int) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=300)
        self._pool = ThreadPoolExecutor(concurrency)
        self._prompts = [
            "Tell of " + " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 30))
            for i in range(requests)
        ]

    def run(self, bodies: list[dict[str, Any]]) -> tuple[float, list[int]]:
        """(tokens a second, completion tokens of each request)."""
        jobs = [
            {"prompt": prompt, "temperature": 1.0, "seed": 5, **body}
            for prompt, body in zip(self._prompts, bodies, strict=True)
        ]
        started = time.perf_counter()
        counts = list(self._pool.map(self._count, jobs))
        return sum(counts) / (time.perf_counter() - started), counts

    def _count(self, body: dict[str, Any]) -> int:
        answer = self._client.post("/v1/completions", json=body)
        answer.raise_for_status()
        count: int = answer.json()["usage"]["completion_tokens"]
        return count


def compare(server: Server, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of interleaved rounds of one kind."""
    load = Load(server, options.concurrency, options.requests)
    constrained = [{**KINDS[kind], "max_tokens": 400}] * options.requests
    _, counts = load.run(constrained)  # compiles the grammar, fills the prefix cache
    same = {name: KINDS[kind][name] for name in ("logprobs",) if name in KINDS[kind]}
    free = [{**same, "max_tokens": count, "ignore_eos": True} for count in counts]
    load.run(free)
    names = ("mask_seconds", "mask_hidden_seconds", "masks", "forced_tokens")
    before = {name: server.metric(f"headrace:{name}_total") for name in names}
    rates: dict[str, list[float]] = {"constrained": [], "unconstrained": []}
    for number in range(options.rounds):
        pair = [("constrained", constrained), ("unconstrained", free)]
        for name, bodies in pair if number % 2 == 0 else reversed(pair):
            rate, found = load.run(bodies)
            assert found == counts, "token counts differ"
            rates[name].append(rate)
    spent = {name: server.metric(f"headrace:{name}_total") - before[name] for name in names}
    medians = {name: statistics.median(each) for name, each in rates.items()}
    pairs = zip(rates["constrained"], rates["unconstrained"], strict=True)
    return {
        "kind": kind,
        "tokens_per_request": statistics.mean(counts),
        **{name: round(each, 1) for name, each in medians.items()},
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "forced_share": round(spent["forced_tokens"] / (sum(counts) * options.rounds), 3),
        "mask_ms": round(1e3 * spent["mask_seconds"] / max(spent["masks"], 1), 3),
        "hidden": round(spent["mask_hidden_seconds"] / max(spent["mask_seconds"], 1e-9), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "log", options.model) as server,
    ):
        for kind in options.kinds:
            rows.append(compare(server, kind, options))
            if not options.json:
                print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
