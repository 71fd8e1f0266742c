"""CPU time of the API process per streamed chunk, everything but the model included.

    PYTHONPATH=. python benchmarks/api_chunks.py

The application runs on a real socket behind the real client of the engine process, fed with the
frames that an engine would send (one token a stream and step); `headrace bench serve` reads in a
process of its own. Time spent making the frames is the engine's and is taken off.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time

from headrace.engine.client import Stream
from headrace.engine.messages import FromEngine, Output, Outputs, Submit
from headrace.engine.wire import Encoder, Frames
from headrace.serve.listen import address, bind
from headrace.serve.resolve import Served
from headrace.serve.server import HttpServer, http_config
from tests.serve.conftest import Site
from tests.serve.vocabulary import small_tokenizer

ROUNDS = 3


class Engine:
    """Frames in, streams out, as `EngineClient` does it."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.stats: dict[str, float] = {}
        self._frames: Frames[Outputs] = Frames(FromEngine)

    async def submit(self, submit: Submit) -> Stream:
        self.streams[submit.id] = stream = Stream(submit)
        return stream

    def abort(self, request_id: str) -> None:
        self.streams.pop(request_id, None)

    def finish(self, request_id: str, index: int) -> None:
        raise AssertionError("no stop strings here")

    def take(self, frame: bytes) -> None:
        for message in self._frames.feed(frame):
            self.stats = message.stats or self.stats
            for output in message.outputs:
                if self.streams[output.id].take(output):
                    del self.streams[output.id]


async def measure(site: Site, streams: int, tokens: int) -> float:
    """CPU microseconds per chunk."""
    engine = Engine()
    site.engine = engine  # type: ignore[assignment]
    listener = bind("127.0.0.1", 0)
    server = HttpServer(http_config(site.app(), 1000))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    load = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace", "bench", "serve", "--base-url", address(listener),
        "--num-prompts", str(streams), "--output-len", str(tokens), "--model", "tiny",
        "--input-len", "5", "--json", stdout=subprocess.PIPE,
    )  # fmt: skip
    while len(engine.streams) < streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    word = site.tokenizer.encode("the", add_special=False)[0]
    encoder, spent = Encoder(), 0.0
    for step in range(tokens):
        finish = "length" if step == tokens - 1 else None
        outputs = [Output(name, 0, (word,), 0, finish) for name in engine.streams]
        frame = encoder.frame(Outputs(tuple(outputs), (), {"running": float(streams)}))
        middle = time.process_time()
        engine.take(frame)
        for _ in range(3):
            await asyncio.sleep(0)
        spent += time.process_time() - middle
    out, _ = await load.communicate()
    assert json.loads(out)["total_output_tokens"] == streams * tokens
    server.should_exit = True
    await serving
    return spent / (streams * tokens) * 1e6


def main() -> None:
    tokenizer = small_tokenizer()
    site = Site(tokenizer, Served("tiny", tokenizer, 100_000))
    print("streams  CPU per chunk (us, median)")
    for streams, tokens in ((1, 400), (8, 200), (32, 100)):
        rounds = [asyncio.run(measure(site, streams, tokens)) for _ in range(ROUNDS)]
        print(f"{streams:7}  {statistics.median(rounds):.0f}")


if __name__ == "__main__":
    main()
