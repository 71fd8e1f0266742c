"""What /metrics shows: the engine's counters and gauges, and histograms measured at the door.

Histograms are plain lists here (an observation is one bisection); `prometheus_client` only writes
them out. The `vllm:` names are those that routers read; the `headrace:` ones have finer buckets.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from headrace.engine.messages import Observation, Ready

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
        40, 80, 160, 640, 2560)  # fmt: skip
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
       80)  # fmt: skip
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
           7680)  # fmt: skip
FINE = (0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025,
        0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)  # fmt: skip
COUNTS = (1, 2, 5, 10, 20)


def lengths(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `limit`."""
    decades = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]
    return tuple(value for value in decades if value <= limit) or (1,)


class Histogram:
    """Counts of observations below each bound, and their sum. Negative values count as zero."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text = name, text
        self._bounds = tuple(bounds)
        self._labels = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add one observation."""
        value = max(value, 0.0)
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, labels: Mapping[str, str]) -> Metric:
        """The histogram for the exposition format."""
        family = HistogramMetricFamily(self.name, self.text, labels=list(labels))
        buckets = list(zip(self._labels, accumulate(self._counts), strict=True))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class Metrics(Collector):
    """All metrics of one server. stats: reads the engine's latest counters and gauges.

    open: requests that are being answered now.
    """

    def __init__(self, model_name: str, stats: Callable[[], Mapping[str, float]]) -> None:
        self.open = 0
        self._stats = stats
        self._labels = {"model_name": model_name, "engine": "0"}
        self._highest: dict[str, float] = {}
        self._ready: Ready | None = None
        self._finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._refused = dict.fromkeys(("max_num_queued_reqs",), 0)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._cached_tokens = 0
        self._make_histograms(8192)

    def _make_histograms(self, max_model_len: int) -> None:
        sizes = lengths(max_model_len)
        self._first = [
            Histogram("vllm:time_to_first_token_seconds", "time to first token", TTFT),
            Histogram("headrace:time_to_first_token_seconds", "time to first token", FINE),
        ]
        self._inter = [
            Histogram("vllm:inter_token_latency_seconds", "time between outputs", ITL),
            Histogram("headrace:inter_token_latency_seconds", "time between outputs", FINE),
        ]
        self._whole = Histogram("vllm:e2e_request_latency_seconds", "time of a request", LATENCY)
        self._queue = Histogram("vllm:request_queue_time_seconds", "time waiting", LATENCY)
        self._fine_queue = Histogram("headrace:request_queue_time_seconds", "time waiting", FINE)
        self._prefill = Histogram("vllm:request_prefill_time_seconds", "time in prefill", LATENCY)
        self._decode = Histogram("vllm:request_decode_time_seconds", "time in decode", LATENCY)
        self._inference = Histogram("vllm:request_inference_time_seconds", "time running", LATENCY)
        self._per_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "mean decode time of a token", ITL
        )
        self._prompt = Histogram("vllm:request_prompt_tokens", "prompt tokens", sizes)
        self._generation = Histogram("vllm:request_generation_tokens", "tokens generated", sizes)
        self._computed = Histogram(
            "vllm:request_prefill_kv_computed_tokens", "prompt tokens not from the cache", sizes
        )
        self._preemptions = Histogram("vllm:request_num_preemptions", "preemptions", COUNTS)
        self._n = Histogram("vllm:request_params_n", "the parameter n", COUNTS)
        self._max_tokens = Histogram("vllm:request_params_max_tokens", "max_tokens", sizes)

    def ready(self, ready: Ready) -> None:
        """The engine's facts are known."""
        self._ready = ready
        self._make_histograms(ready.max_model_len)

    # --- observations -----------------------------------------------------------------------

    def submitted(self, n: int, max_tokens: int) -> None:
        """A request was handed to the engine."""
        self._n.observe(n)
        self._max_tokens.observe(max_tokens)

    def prompted(self, tokens: int, cached: int) -> None:
        """A prompt was computed, `cached` of its tokens from the cache."""
        self._prompt_tokens += tokens
        self._cached_tokens += cached

    def generated(self, tokens: int) -> None:
        """Tokens came out."""
        self._generation_tokens += tokens

    def first_token(self, seconds: float) -> None:
        """The first output of a request, after `seconds` at the door."""
        for histogram in self._first:
            histogram.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """A later output of a choice, `seconds` after its last."""
        for histogram in self._inter:
            histogram.observe(seconds)

    def refused(self) -> None:
        """The engine's queue was full."""
        self._refused["max_num_queued_reqs"] += 1

    def answered(self, seconds: float) -> None:
        """A request was answered to its end, after `seconds`."""
        self._whole.observe(seconds)

    def finished(self, seen: Observation) -> None:
        """The engine finished or dropped a request."""
        self._queue.observe(seen.queue)
        self._fine_queue.observe(seen.queue)
        self._prefill.observe(seen.prefill)
        self._decode.observe(seen.decode)
        self._inference.observe(seen.prefill + seen.decode)
        if seen.generation_tokens > 1:
            self._per_token.observe(seen.decode / (seen.generation_tokens - 1))
        self._prompt.observe(seen.prompt_tokens)
        self._generation.observe(seen.generation_tokens)
        self._computed.observe(seen.prompt_tokens - seen.cached_tokens)
        self._preemptions.observe(seen.preemptions)
        reason = seen.finish if seen.finish in self._finished else "error"
        self._finished[reason] += 1

    # --- exposition -------------------------------------------------------------------------

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def _counted(self, name: str, stats: Mapping[str, float]) -> float:
        """An engine counter; it never falls, whatever the engine reports."""
        value = max(stats.get(name, 0.0), self._highest.get(name, 0.0))
        self._highest[name] = value
        return value

    def collect(self) -> Iterator[Metric]:
        """Every metric family, for prometheus_client."""
        stats = dict(self._stats())
        yield from self._gauges(stats)
        yield from self._counters(stats)
        histograms = [
            *self._first, *self._inter, self._whole, self._queue, self._fine_queue, self._prefill,
            self._decode, self._inference, self._per_token, self._prompt, self._generation,
            self._computed, self._preemptions, self._n, self._max_tokens,
        ]  # fmt: skip
        for histogram in histograms:
            yield histogram.family(self._labels)

    def _gauges(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        total = stats.get("pages_total", 0.0)
        used = stats.get("pages_used", 0.0) / total if total else 0.0
        yield self._gauge("vllm:num_requests_running", "running", stats.get("running", 0.0))
        yield self._gauge("vllm:num_requests_waiting", "waiting", stats.get("waiting", 0.0))
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "waiting, and why",
            labels=[*self._labels, "reason"],
        )  # fmt: skip
        waiting.add_metric([*self._labels.values(), "capacity"], stats.get("waiting", 0.0))
        waiting.add_metric([*self._labels.values(), "deferred"], 0.0)
        yield waiting
        yield self._gauge("vllm:kv_cache_usage_perc", "share of KV pages in use", used)
        yield self._gauge("headrace:open_requests", "requests being answered", self.open)
        for name, text in (
            ("pages_used", "KV pages in use"),
            ("pages_cached", "KV pages of cached prefixes that nobody uses"),
            ("pages_total", "KV pages in all"),
            ("step_seconds", "seconds of the last step"),
            ("kernel_seconds", "seconds of the last step inside the kernels"),
            ("predicted_seconds", "seconds that the cost model predicted for the last step"),
            ("cost_mape", "mean absolute error of predicted step times, last 512 steps, 1 = 100 %"),
            ("cost_bias", "mean error of predicted step times, positive = predicted too long"),
            ("mfu", "share of the machine's arithmetic used by the last step"),
            ("mbu", "share of the machine's memory bandwidth used by the last step"),
        ):
            if name in stats:
                yield self._gauge(f"headrace:{name}", text, stats[name])
        if (ready := self._ready) is not None:
            info = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_pages),
                    "num_cpu_blocks": "0"}  # fmt: skip
            yield self._info("vllm:cache_config_info", "sizes of the KV cache", [info])
            adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
            yield self._info("vllm:lora_requests_info", "adapters: there are none", [adapters])
            place = {"backend": ready.backend, "level": ready.level, "threads": str(ready.threads)}
            yield self._info("headrace:backend_info", "how the model is executed", [place])
            paths = [{"op": op, "path": path} for op, path in ready.kernels.items()]
            yield self._info("headrace:kernel_info", "kernel path of an op", paths)

    def _counters(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        for name, text, value in (
            ("vllm:prompt_tokens", "prompt tokens", self._prompt_tokens),
            ("vllm:generation_tokens", "generated tokens", self._generation_tokens),
            ("vllm:prompt_tokens_cached", "prompt tokens read from the cache",
             self._cached_tokens),
        ):  # fmt: skip
            yield self._counter(name, text, value)
        for name, text, key in (
            ("vllm:num_preemptions", "preemptions", "preemptions"),
            ("vllm:prefix_cache_queries", "prompt tokens looked up in the cache",
             "prefix_queries"),
            ("vllm:prefix_cache_hits", "prompt tokens found in the cache", "prefix_hits"),
            ("headrace:computed_tokens", "tokens computed", "computed_tokens"),
            ("headrace:recomputed_tokens", "tokens computed again", "recomputed_tokens"),
            ("headrace:evicted_pages", "cached pages given up", "evictions"),
            ("headrace:copied_tokens", "KV rows copied", "copied_tokens"),
            ("headrace:steps", "forward passes", "steps"),
            ("headrace:masks", "grammar masks made", "masks"),
            ("headrace:mask_seconds", "seconds of making grammar masks", "mask_seconds"),
            ("headrace:mask_hidden_seconds", "of these, those behind the forward pass",
             "mask_hidden_seconds"),
            ("headrace:forced_tokens", "grammar tokens appended without sampling", "forced_tokens"),
        ):  # fmt: skip
            yield self._counter(name, text, self._counted(key, stats))
        reasons = CounterMetricFamily(
            "vllm:request_success", "requests by the way they ended",
            labels=[*self._labels, "finished_reason"],
        )  # fmt: skip
        for reason, count in self._finished.items():
            reasons.add_metric([*self._labels.values(), reason], count)
        yield reasons
        refused = CounterMetricFamily(
            "vllm:admission_rejections", "requests refused at the door",
            labels=[*self._labels, "reason"],
        )  # fmt: skip
        for reason, count in self._refused.items():
            refused.add_metric([*self._labels.values(), reason], count)
        yield refused

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _info(self, name: str, text: str, facts: Sequence[Mapping[str, str]]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, *facts[0]])
        for fact in facts:
            family.add_metric([*self._labels.values(), *fact.values()], 1)
        return family
