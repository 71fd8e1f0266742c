"""`headrace bench serve`: load a running server and measure it, with vLLM's flag names."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.bench.http import Client, Sample
from headrace.bench.report import NAMES, figures, table
from headrace.bench.workload import Ask, Source, file_asks, gaps, prefix_asks, random_asks
from headrace.errors import ConfigError, HeadraceError

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags, as far as they mean something here."""
    add = parser.add_argument
    add("--backend", default="openai", choices=list(ENDPOINTS), help="which API to speak")
    add("--base-url", metavar="URL", help="the server (default: http://HOST:PORT)")
    add("--host", default="127.0.0.1", metavar="HOST")
    add("--port", type=int, default=8000, metavar="N")
    add("--endpoint", metavar="PATH", help="path to post to (default: by --backend)")
    add("--model", metavar="NAME", help="model to ask for (default: the first one served)")
    add("--api-key", metavar="KEY", help="bearer token (default: $OPENAI_API_KEY)")
    add("--dataset-name", default="random", help="what to send",
        choices=["random", "prefix_repetition", "sharegpt", "custom"])  # fmt: skip
    add("--dataset-path", metavar="FILE", help="file of sharegpt or custom (JSON lines)")
    add("--num-prompts", type=int, default=100, metavar="N", help="requests to send")
    add("--request-rate", type=float, default=float("inf"), metavar="R",
        help="requests a second (default: all at once)")  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="B",
        help="gamma shape of the gaps: 1 is Poisson, below 1 burstier")  # fmt: skip
    add("--max-concurrency", type=int, metavar="N", help="requests in flight at once")
    add("--input-len", "--random-input-len", type=int, default=128, metavar="N", dest="input_len")
    add("--output-len", "--random-output-len", type=int, metavar="N", dest="output_len",
        help="tokens to ask for (default 128, or what the data set says)")  # fmt: skip
    add("--random-range-ratio", type=float, default=0.0, metavar="R",
        help="lengths vary by this share")  # fmt: skip
    add("--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all share")
    add("--prefix-repetition-prefix-len", type=int, default=1000, metavar="N")
    add("--prefix-repetition-suffix-len", type=int, default=30, metavar="N")
    add("--prefix-repetition-num-prefixes", type=int, default=1, metavar="N")
    add("--prefix-repetition-output-len", type=int, metavar="N")
    add("--prompt-form", choices=["text", "ids"], default="text",
        help="send words, or token ids (exact lengths; completions only)")  # fmt: skip
    add("--vocabulary", type=int, default=32000, metavar="N", help="ids are drawn below this")
    add("--ignore-eos", action="store_true", help="every answer has its full length")
    add("--temperature", type=float, default=0.0, metavar="T")
    add("--extra-body", metavar="JSON", help="more request fields")
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="more headers")
    add("--seed", type=int, default=0, metavar="N")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before the clock")
    add("--ramp-up-strategy", choices=["linear", "exponential"], help="how the rate rises")
    add("--ramp-up-start-rps", type=float, metavar="R")
    add("--ramp-up-end-rps", type=float, metavar="R")
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="M,M")
    add("--metric-percentiles", default="99", metavar="P,P")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="limits, as in ttft:500 tpot:50 e2el:5000")  # fmt: skip
    add("--timeout", type=float, metavar="S", help="seconds for one answer")
    add("--save-result", action="store_true", help="write the figures as JSON")
    add("--save-detailed", action="store_true", help="with every request's times")
    add("--result-dir", default=".", metavar="DIR")
    add("--result-filename", metavar="FILE")
    add("--json", action="store_true", help="print the figures as JSON, no table")
    add("--disable-tqdm", action="store_true", help="no progress line")


def run(arguments: argparse.Namespace) -> int:
    """Run the load; returns 1 when no request succeeded."""
    metrics = _names(arguments.percentile_metrics)
    percentiles = _numbers(arguments.metric_percentiles)
    limits = _limits(arguments.goodput)
    asks = _asks(arguments)
    samples, seconds, model = asyncio.run(_load(arguments, asks))
    result: dict[str, Any] = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": arguments.backend,
        "model_id": model,
        "num_prompts": len(asks),
        "request_rate": _shown_rate(arguments.request_rate),
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **figures(samples, seconds, metrics, percentiles, limits),
    }
    if arguments.save_detailed:
        result |= {
            "input_lens": [sample.prompt_tokens for sample in samples],
            "output_lens": [sample.output_tokens for sample in samples],
            "ttfts": [sample.ttft for sample in samples],
            "itls": [sample.itl for sample in samples],
            "errors": [sample.error or "" for sample in samples],
        }
    failures = [sample.error for sample in samples if sample.error is not None]
    if failures:
        sys.stderr.write(f"headrace: {len(failures)} requests failed; the first: {failures[0]}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        sys.stdout.write(table(result, metrics, percentiles) + "\n")
    if arguments.save_result or arguments.save_detailed:
        path = _result_path(arguments, model)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        sys.stderr.write(f"written to {path}\n")
    return 0 if result["completed"] else 1


def _shown_rate(rate: float) -> float | str:
    return "inf" if rate == float("inf") else rate


def _result_path(arguments: argparse.Namespace, model: str) -> Path:
    name: str | None = arguments.result_filename
    if name is None:
        rate = _shown_rate(arguments.request_rate)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{arguments.backend}-{rate}qps-{Path(model).name}-{stamp}.json"
    return Path(str(arguments.result_dir)) / name


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise ConfigError("--percentile-metrics", f"{name!r} is none of {', '.join(NAMES)}")
    return names


def _numbers(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("--metric-percentiles", f"{text!r} are not numbers") from None
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError("--metric-percentiles", "percentiles lie between 0 and 100")
    return values


def _limits(words: list[str]) -> dict[str, float]:
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            if name not in ("ttft", "tpot", "e2el"):
                raise ValueError
            limits[name] = float(value)
        except ValueError:
            raise ConfigError("--goodput", f"{word!r} is not ttft:MS, tpot:MS or e2el:MS") from None
    return limits


def _asks(arguments: argparse.Namespace) -> list[Ask]:
    count, kind = arguments.num_prompts, arguments.dataset_name
    if count < 1:
        raise ConfigError("--num-prompts", "at least 1")
    if arguments.prompt_form == "ids" and arguments.backend == "openai-chat":
        raise ConfigError("--prompt-form", "chat takes no token ids")
    source = Source(arguments.seed, arguments.prompt_form, arguments.vocabulary)
    if kind == "random":
        return random_asks(
            source, count, arguments.input_len, arguments.output_len or 128,
            arguments.random_prefix_len, arguments.random_range_ratio,
        )  # fmt: skip
    if kind == "prefix_repetition":
        output = arguments.prefix_repetition_output_len or arguments.output_len or 128
        return prefix_asks(
            source, count, arguments.prefix_repetition_num_prefixes,
            arguments.prefix_repetition_prefix_len, arguments.prefix_repetition_suffix_len, output,
        )  # fmt: skip
    if arguments.dataset_path is None:
        raise ConfigError("--dataset-path", f"needed by --dataset-name {kind}")
    try:
        return file_asks(arguments.dataset_path, kind, count, arguments.output_len)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("--dataset-path", f"{arguments.dataset_path}: {error}") from None


def _bodies(arguments: argparse.Namespace, asks: list[Ask], model: str) -> list[bytes]:
    """The request bodies, made before the clock starts."""
    try:
        extra = json.loads(arguments.extra_body) if arguments.extra_body else {}
    except ValueError as error:
        raise ConfigError("--extra-body", str(error)) from None
    fixed: dict[str, Any] = {
        "model": model, "temperature": arguments.temperature, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if arguments.ignore_eos:
        fixed["ignore_eos"] = True
    fixed |= extra
    bodies = []
    for ask in asks:
        if arguments.backend == "openai-chat":
            own: dict[str, Any] = {"messages": [{"role": "user", "content": ask.prompt}]}
        else:
            own = {"prompt": ask.prompt}
        bodies.append(json.dumps({**fixed, **own, "max_tokens": ask.output_len}).encode())
    return bodies


async def _load(arguments: argparse.Namespace, asks: list[Ask]) -> tuple[list[Sample], float, str]:
    """Send everything; returns the samples, the seconds and the model's name."""
    url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
    headers = dict(_header(word) for word in arguments.header)
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        client = Client(url, headers)
        model = arguments.model or await _first_model(client)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise HeadraceError(f"{url}: cannot ask for a model name: {error}") from None
    path = arguments.endpoint or ENDPOINTS[arguments.backend]
    bodies = _bodies(arguments, asks, model)
    for index in range(arguments.num_warmups):
        await client.post(path, bodies[index % len(bodies)], arguments.timeout)
    places = asyncio.Semaphore(arguments.max_concurrency or len(bodies))
    done = 0

    async def one(body: bytes) -> Sample:
        nonlocal done
        async with places:
            sample = await client.post(path, body, arguments.timeout)
        done += 1
        return sample

    shown = sys.stderr.isatty() and not arguments.disable_tqdm
    watch = asyncio.create_task(_progress(lambda: done, len(bodies))) if shown else None
    started = time.perf_counter()
    tasks = []
    waits = gaps(
        len(bodies), arguments.request_rate, arguments.burstiness, arguments.seed,
        _ramp(arguments),
    )  # fmt: skip
    due = started
    for body, gap in zip(bodies, waits, strict=True):
        tasks.append(asyncio.create_task(one(body)))
        due += gap
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
    samples = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - started
    if watch is not None:
        watch.cancel()
        sys.stderr.write("\r\x1b[K")
    client.close()
    return samples, seconds, model


def _ramp(arguments: argparse.Namespace) -> tuple[float, float, str] | None:
    if arguments.ramp_up_strategy is None:
        return None
    first, last = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
    if not first or not last or first < 0 or last < 0:
        raise ConfigError(
            "--ramp-up-strategy", "needs --ramp-up-start-rps and --ramp-up-end-rps above 0"
        )
    return first, last, arguments.ramp_up_strategy


def _header(word: str) -> tuple[str, str]:
    name, found, value = word.partition("=")
    if not found:
        raise ConfigError("--header", f"{word!r} is not NAME=VALUE")
    return name, value


async def _first_model(client: Client) -> str:
    status, body = await client.get("/v1/models")
    if status != 200:
        raise ValueError(f"/v1/models answers {status}")
    return str(json.loads(body)["data"][0]["id"])


async def _progress(done: Any, total: int) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            sys.stderr.write(f"\r{done()} of {total} requests")
            sys.stderr.flush()
            await asyncio.sleep(0.5)
