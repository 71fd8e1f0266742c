"""Requests whose clients leave at random moments: nothing of them may stay in the server.

python -m tests.e2e.cutting --requests 1000      starts a server, cuts, compares, prints
"""

import argparse
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.conftest import Server, serving

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def cut(url: str, seed: int) -> None:
    """One request of a random shape, left after up to 0.4 s."""
    rng = random.Random(seed)
    length, seconds = rng.randint(1, 200), rng.uniform(0, 0.4)
    body = {
        "prompt": [1000 + (i * length) % 5000 for i in range(length)],
        "max_tokens": 200,
        "stream": rng.random() < 0.5,
        "ignore_eos": True,
        "n": rng.randint(1, 3),
        "temperature": 1.0,
    }
    end = time.monotonic() + seconds
    try:
        with httpx.stream(
            "POST", url + "/v1/completions", json=body, timeout=max(seconds, 0.01)
        ) as answer:
            for _ in answer.iter_raw():
                if time.monotonic() > end:
                    return
    except httpx.TransportError:
        pass


def cut_many(server: Server, count: int) -> dict[str, float]:
    """Cut `count` requests, 16 at a time; the gauges once they have settled."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda seed: cut(server.url, seed), range(count)))
    return {gauge: server.settled(gauge, 0) for gauge in GAUGES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "log", "--max-model-len", "2048") as server,
    ):
        gauges = cut_many(server, options.requests)
        served = server.metric("vllm:request_success_total")
        print(f"{options.requests} requests cut, {served:.0f} known to the engine: {gauges}")
    return 0 if not any(gauges.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
