"""Output over HTTP beside the bound that the linear layers alone set.

    PYTHONPATH=. python benchmarks/linear_bound.py SmolLM2-135M-Instruct.Q4_1.gguf

In turn, `--rounds` times for each number of streams (128 tokens in, 128 out, all at once): through
a server, in this process, and in this process with each instruction timed. The bound is the tokens
over the seconds of all linears and logits of the timed run: what there would be if attention,
norms, sampling, Python, the server and the client took no time.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from peer_setup import Room, Server, engines
from peers import Load, together

from headrace import LLM, SamplingParams

IN, OUT = 128, 128


class InProcess:
    """The engine in this process."""

    def __init__(self, model: str, streams: int, threads: int) -> None:
        self._llm = LLM(model, max_model_len=288, max_num_seqs=streams, threads=threads)
        self._executable = self._llm.loaded.executable
        self._streams = streams
        self._linear = 0.0

    def rate(self, load: Load) -> float:
        """Output tokens a second of one wave."""
        prompts = [load.ids(IN) for _ in range(self._streams)]
        sampling = SamplingParams(max_tokens=OUT, temperature=0, ignore_eos=True)
        started = time.perf_counter()
        self._llm.generate(prompts, sampling)
        return self._streams * OUT / (time.perf_counter() - started)

    def bound(self, load: Load) -> float:
        """The same over the seconds of linears and logits alone."""
        self._linear = 0.0
        run = self._executable.run
        self._executable.run = self._timed  # type: ignore[method-assign]
        try:
            self.rate(load)
        finally:
            self._executable.run = run  # type: ignore[method-assign]
        return self._streams * OUT / self._linear

    def _timed(self, part: str = "all") -> None:
        assert part == "all"
        for op, _, seconds, _, _ in self._executable.profile():  # type: ignore[attr-defined]
            if op in ("linear", "logits"):
                self._linear += seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    (engine,), _ = engines(["headrace"], options.model, options.threads, folder)
    print("streams  over HTTP  in process  linears alone (tok/s)  HTTP of linears")
    for streams in options.streams:
        here = InProcess(options.model, streams, options.threads)
        server = Server(engine, Room(streams, 288), folder / "server.log")
        rows: list[tuple[float, float, float]] = []
        try:
            for round_ in range(-1, options.rounds):
                load = Load(server.url, round_)
                served = asyncio.run(together(streams)(load))[f"output{streams}"]
                row = served, here.rate(load), here.bound(load)
                if round_ >= 0:  # the first pays for caches
                    rows.append(row)
        finally:
            server.stop()
        a, b, c = (statistics.median(column) for column in zip(*rows, strict=True))
        share = statistics.median(row[0] / row[2] for row in rows)
        print(f"{streams:7}  {a:9.0f}  {b:10.0f}  {c:21.0f}  {share:15.0%}", flush=True)


if __name__ == "__main__":
    main()
