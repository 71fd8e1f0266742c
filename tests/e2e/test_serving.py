"""What the issue of the main job promises, seen on the real server."""

import asyncio
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.e2e.conftest import Server, ServerMaker
from tests.e2e.cutting import cut_many


def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_it_knows_a_capital(server: Server) -> None:
    answer = server.complete("The capital of France is", max_tokens=4)
    assert "Paris" in answer["choices"][0]["text"]  # type: ignore[index]


def test_64_streams_all_finish_right_and_in_order(server: Server) -> None:
    prompts = [f"Count from {i} upwards: {i}, {i + 1}," for i in range(64)]

    async def stream(api: openai.AsyncOpenAI, prompt: str) -> tuple[str, int, int]:
        text, finishes, usage = "", 0, 0
        chunks = await api.completions.create(
            model="smollm2-135m",
            prompt=prompt, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        async for chunk in chunks:
            if chunk.usage is not None:
                usage = chunk.usage.completion_tokens
            for choice in chunk.choices:
                text += choice.text
                finishes += choice.finish_reason is not None
        return text, finishes, usage

    async def all_streams() -> list[tuple[str, int, int]]:
        async with client(server) as api:
            return await asyncio.gather(*[stream(api, prompt) for prompt in prompts])

    together = asyncio.run(all_streams())
    assert all(finishes == 1 for _, finishes, _ in together)
    for index in range(0, 64, 9):
        alone = server.complete(prompts[index], max_tokens=24)
        assert together[index][0] == alone["choices"][0]["text"]  # type: ignore[index]
        assert together[index][2] == alone["usage"]["completion_tokens"]  # type: ignore[index]


def test_a_shared_prefix_is_computed_once(start: ServerMaker) -> None:
    rng = random.Random(3)
    prefix = [rng.randrange(1000, 20000) for _ in range(1000)]
    suffixes = [[rng.randrange(1000, 20000) for _ in range(20)] for _ in range(32)]
    with start("--max-model-len", "2048") as server, ThreadPoolExecutor(32) as pool:
        answers = list(
            pool.map(lambda s: server.complete(prefix + s, max_tokens=2, ignore_eos=True), suffixes)
        )
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]  # type: ignore[index]
        total = 32 * 1020
        computed = total - sum(cached)
        assert computed <= 1000 + 32 * 20 + 16 * 32
        assert server.metric("vllm:prompt_tokens_cached_total") == sum(cached)


def test_lengths_around_block_and_context_borders(start: ServerMaker) -> None:
    ids = [1000 + i for i in range(140)]
    with start("--max-model-len", "128") as server:
        for length in (1, 15, 16, 17, 31, 32, 33, 48):
            first = server.complete(ids[:length], max_tokens=4, ignore_eos=True)
            again = server.complete(ids[:length], max_tokens=4, ignore_eos=True)
            assert first["choices"][0]["text"] == again["choices"][0]["text"]  # type: ignore[index]
            cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]
            assert length - 16 <= cached < length
        for length, tokens in ((126, 2), (127, 1)):
            answer = server.complete(ids[:length], max_tokens=8, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == tokens  # type: ignore[index]
            assert answer["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        for length in (128, 129):
            answer = server.post("/v1/completions", prompt=ids[:length], max_tokens=8)
            assert answer.status_code == 400
            assert "128" in answer.json()["error"]["message"]
        server.complete("fine", max_tokens=2)


def test_a_plain_request_whose_client_leaves_is_freed(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + "/v1/completions",
            json={"prompt": "Tell", "max_tokens": 1900, "ignore_eos": True},
            timeout=httpx.Timeout(10, read=0.4),
        )
    assert server.settled("vllm:num_requests_running", 0, 2.0) == 0


def test_requests_cut_at_random_moments_leave_nothing(server: Server) -> None:
    assert server.settled("vllm:num_requests_running", 0) == 0
    gauges = cut_many(server, 120)
    assert not any(gauges.values()), gauges
    server.complete("still here", max_tokens=2)


def test_sigterm_lets_running_requests_finish(start: ServerMaker) -> None:
    with start("--max-model-len", "1024") as server:
        answers: list[httpx.Response] = []
        body = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        thread = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", **body))
        )
        thread.start()
        while server.metric("vllm:num_requests_running") == 0:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert server.process.wait(timeout=20) == 0
