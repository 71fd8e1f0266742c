"""/metrics: the names that routers read, true values, counters that never fall."""

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.plan import Stats
from headrace.engine.messages import Observation, Ready
from headrace.serve.metrics import FINE, ITL, LATENCY, TTFT, Histogram, Metrics, lengths
from tests.serve.conftest import Site, run_async


def values(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def total(metrics: Metrics, name: str, **labels: str) -> float:
    return sum(
        value
        for (found, own), value in values(metrics).items()
        if found == name and labels.items() <= dict(own).items()
    )


ROUTERS_READ = [
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info", "vllm:lora_requests_info", "vllm:num_requests_waiting_by_reason",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:prompt_tokens_cached_total", "vllm:request_success_total", "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:admission_rejections_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket",
    "vllm:request_time_per_output_token_seconds_bucket", "vllm:request_num_preemptions_bucket",
    "headrace:inter_token_latency_seconds_bucket", "headrace:time_to_first_token_seconds_bucket",
]  # fmt: skip

ENGINE_STATS = [
    *Stats.__slots__, "step_seconds", "kernel_seconds", "predicted_seconds", "forced_tokens",
    "cost_mape", "cost_bias", "mfu", "mbu",
]  # fmt: skip

READY = Ready(
    max_model_len=128, vocabulary=300, block_size=16, num_pages=10, backend="cpu", level="avx2",
    threads=2, memory={}, timeline=(), kernels={"linear": "avx2", "attention": "avx2"},
)  # fmt: skip


def test_every_promised_name_is_there_with_its_labels() -> None:
    metrics = Metrics("m", dict)
    metrics.ready(READY)
    found = values(metrics)
    families = text_string_to_metric_families(metrics.text().decode())
    written = {
        (s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples
    }
    assert written == found
    names = {name for name, _ in found}
    assert set(ROUTERS_READ) <= names
    for name, labels in found:
        own = dict(labels)
        if name.startswith(("vllm:", "headrace:")):
            assert (own["model_name"], own["engine"]) == ("m", "0")
    assert total(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="10") == 1


def test_the_page_names_what_is_there_and_all_of_it() -> None:
    counters = {"masks": 3.0, "mask_seconds": 0.5, "mask_hidden_seconds": 0.25}
    stats = {**dict.fromkeys(ENGINE_STATS, 1.0), **counters}
    metrics = Metrics("m", lambda: stats)
    metrics.ready(READY)
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in values(metrics)}
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    told = set(re.findall(r"`((?:vllm|headrace):\w+)", page))
    told |= {f"headrace:{name}" for name in re.findall(r"`vllm:(\w+)`, `headrace:…`", page)}
    assert told == shown
    for name, value in counters.items():
        assert total(metrics, f"headrace:{name}_total") == value


def test_buckets_are_those_of_the_conventions() -> None:
    metrics = Metrics("m", dict)
    for name, bounds in (
        ("vllm:time_to_first_token_seconds", TTFT),
        ("vllm:inter_token_latency_seconds", ITL),
        ("vllm:e2e_request_latency_seconds", LATENCY),
        ("headrace:inter_token_latency_seconds", FINE),
        ("vllm:request_prompt_tokens", lengths(8192)),
    ):
        shown = [dict(own)["le"] for found, own in values(metrics) if found == f"{name}_bucket"]
        assert [float(le) for le in shown] == [*map(float, bounds), float("inf")]
    assert min(FINE) == 0.001


@given(st.lists(st.floats(-1, 3000), max_size=40))
def test_a_histogram_counts_what_was_observed(observed):
    histogram = Histogram("h", "text", (0.5, 1, 100))
    for value in observed:
        histogram.observe(value)
    samples = {
        (s.name, s.labels.get("le")): s.value for s in histogram.family({"model_name": "m"}).samples
    }
    for bound in (0.5, 1, 100):
        right = sum(max(value, 0) <= bound for value in observed)
        assert samples["h_bucket", str(float(bound))] == right
    assert samples["h_count", None] == len(observed)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=4))
def test_counters_never_fall_whatever_the_engine_says(reports):
    stats: dict[str, float] = {}
    metrics = Metrics("m", lambda: stats)
    shown = []
    for value in reports:
        stats["preemptions"] = value
        shown.append(total(metrics, "vllm:num_preemptions_total"))
    assert shown == sorted(shown)
    assert shown[-1] == max(reports)


def test_gauges_follow_the_engine_down_to_zero() -> None:
    stats = {"running": 3.0, "waiting": 2.0, "pages_used": 5.0, "pages_total": 10.0}
    metrics = Metrics("m", lambda: stats)
    assert total(metrics, "vllm:kv_cache_usage_perc") == 0.5
    assert total(metrics, "vllm:num_requests_running") == 3
    stats.update(running=0, waiting=0, pages_used=0)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert total(metrics, f"vllm:{name}") == 0


def test_observations_add_up() -> None:
    metrics = Metrics("m", dict)
    for finish in ("stop", "length", "abort", "strange"):
        metrics.finished(Observation(0.1, 0.2, 0.9, 40, 10, 16, 1, finish))
    assert total(metrics, "vllm:request_prompt_tokens_sum") == 160
    assert total(metrics, "vllm:request_generation_tokens_sum") == 40
    assert total(metrics, "vllm:request_prefill_kv_computed_tokens_sum") == 96
    assert total(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert total(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert total(metrics, "vllm:request_queue_time_seconds_count") == 4
    assert abs(total(metrics, "vllm:request_time_per_output_token_seconds_sum") - 0.4) < 1e-9


@run_async
async def test_requests_at_the_door_are_measured(site: Site) -> None:
    from headrace.errors import OverloadError

    count = len(site.tokenizer.encode("Hello world.")) + 1
    site.engine.cached_tokens = 2
    await site.complete(n=2, stream=True)
    await site.chat()
    assert total(site.metrics, "vllm:generation_tokens_total") == 3 * count
    assert total(site.metrics, "vllm:prompt_tokens_cached_total") == 4
    prompts = sum(len(submit.prompt) for submit in site.engine.submits)
    assert total(site.metrics, "vllm:prompt_tokens_total") == prompts
    assert total(site.metrics, "vllm:time_to_first_token_seconds_count") == 2
    assert total(site.metrics, "vllm:inter_token_latency_seconds_count") == 3 * (count - 1)
    assert total(site.metrics, "vllm:e2e_request_latency_seconds_count") == 2
    assert total(site.metrics, "headrace:open_requests") == 0
    names = set(re.findall(r'model_name="([^"]*)"', site.metrics.text().decode()))
    await site.complete(model="another-name")
    assert set(re.findall(r'model_name="([^"]*)"', site.metrics.text().decode())) == names
    site.engine.refuse = OverloadError("full", 1)
    await site.complete()
    assert total(site.metrics, "vllm:admission_rejections_total") == 1
