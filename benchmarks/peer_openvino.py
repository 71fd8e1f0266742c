"""OpenVINO GenAI's continuous batching behind a thin HTTP adapter, in an environment of its own.

    python peer_openvino.py MODEL.gguf --port 9000 --threads 2 --capacity 16384

`benchmarks/peers.py` starts this. The adapter takes token ids and streams each token's number as
text: it neither tokenizes nor detokenizes, so its figures flatter OpenVINO a little.
"""

import argparse
import asyncio
import json
import threading
from typing import Any

import numpy as np
import openvino
import openvino_genai

BLOCK = 32  # tokens in a KV block of OpenVINO on a CPU
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    """Runs the pipeline's steps on a thread and hands each token to the event loop."""

    def __init__(self, pipeline: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._pipeline = pipeline
        self._loop = loop
        self._asked: list[tuple[list[int], int, asyncio.Queue[int | None]]] = []
        self._wake = threading.Condition()

    def ask(self, ids: list[int], count: int) -> "asyncio.Queue[int | None]":
        """Queue a request; its tokens come in the queue, None at the end."""
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        with self._wake:
            self._asked.append((ids, count, tokens))
            self._wake.notify()
        return tokens

    def run(self) -> None:
        """Step for ever."""
        running: list[tuple[Any, asyncio.Queue[int | None]]] = []
        serial = 0
        while True:
            with self._wake:
                while not self._asked and not running:
                    self._wake.wait()
                asked, self._asked = self._asked, []
            for ids, count, tokens in asked:
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
                prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
                running.append((self._pipeline.add_request(serial, prompt, config), tokens))
                serial += 1
            self._pipeline.step()
            news, left = [], []
            for handle, tokens in running:
                if handle.can_read():
                    for output in handle.read().values():
                        news += [(tokens, token) for token in output.generated_ids]
                if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
                    left.append((handle, tokens))
                else:
                    news.append((tokens, None))
            running = left
            self._loop.call_soon_threadsafe(deliver, news)


def deliver(news: list[tuple["asyncio.Queue[int | None]", int | None]]) -> None:
    """Put the tokens of a step where their requests wait."""
    for tokens, token in news:
        tokens.put_nowait(token)


def chunk(event: dict[str, Any]) -> bytes:
    """A server-sent event as a chunk."""
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: GET answers 200, POST generates."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get"):
                body = b'{"data": [{"id": "openvino"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                continue
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            request = json.loads(await reader.readexactly(length))
            tokens, count = engine.ask(request["prompt"], request["max_tokens"]), 0
            writer.write(HEAD)
            while (token := await tokens.get()) is not None:
                count += 1
                writer.write(chunk({"choices": [{"text": f"{token} "}]}))
            usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": count}
            writer.write(chunk({"choices": [], "usage": usage}) + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--capacity", type=int, required=True, help="tokens of KV")
    options = parser.parse_args()
    config = openvino_genai.SchedulerConfig()
    config.num_kv_blocks = -(-options.capacity // BLOCK)
    config.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": options.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, config, "CPU", properties)
    engine = Engine(pipeline, asyncio.get_running_loop())
    threading.Thread(target=engine.run, daemon=True).start()
    server = await asyncio.start_server(
        lambda reader, writer: serve(engine, reader, writer), "127.0.0.1", options.port
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
