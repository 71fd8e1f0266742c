"""Figures of a load test: percentiles, goodput, a table and JSON with vLLM's names."""

import statistics
from collections.abc import Sequence
from typing import Any

from headrace.bench.http import Sample

NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, linear between neighbours; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def series(samples: Sequence[Sample], metric: str) -> list[float]:
    """All values of a metric, in milliseconds."""
    if metric == "ttft":
        return [sample.ttft * 1000 for sample in samples]
    if metric == "tpot":
        return [sample.tpot * 1000 for sample in samples if sample.output_tokens > 1]
    if metric == "itl":
        return [gap * 1000 for sample in samples for gap in sample.itl]
    return [sample.e2e * 1000 for sample in samples]


def meets(sample: Sample, limits: dict[str, float]) -> bool:
    """Whether a request met every limit (milliseconds)."""
    values = {"ttft": sample.ttft, "tpot": sample.tpot, "e2el": sample.e2e}
    return all(values[name] * 1000 <= limit for name, limit in limits.items())


def figures(
    samples: Sequence[Sample],
    seconds: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: dict[str, float],
) -> dict[str, Any]:
    """The result of a run, under vLLM's names."""
    good = [sample for sample in samples if sample.error is None]
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": sum(sample.cached_tokens for sample in good),
        "request_throughput": len(good) / seconds,
        "request_goodput": None,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }
    if goodput:
        met = sum(meets(sample, goodput) for sample in good)
        result["request_goodput"] = met / seconds
        result["goodput_share"] = met / max(1, len(samples))
    for metric in metrics:
        values = series(good, metric)
        result[f"mean_{metric}_ms"] = statistics.fmean(values) if values else 0.0
        result[f"median_{metric}_ms"] = percentile(values, 50)
        result[f"std_{metric}_ms"] = statistics.pstdev(values) if values else 0.0
        result[f"max_{metric}_ms"] = max(values, default=0.0)
        for share in percentiles:
            result[f"p{share:g}_{metric}_ms"] = percentile(values, share)
    return result


def table(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The result for the terminal."""
    rows: list[tuple[str, str]] = [
        ("Successful requests", str(result["completed"])),
        ("Failed requests", str(result["failed"])),
        ("Benchmark duration (s)", f"{result['duration']:.2f}"),
        ("Total input tokens", str(result["total_input_tokens"])),
        ("Total cached tokens", str(result["total_cached_tokens"])),
        ("Total generated tokens", str(result["total_output_tokens"])),
        ("Request throughput (req/s)", f"{result['request_throughput']:.2f}"),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", f"{result['request_goodput']:.2f}"))
        rows.append(("Requests within the limits", f"{result['goodput_share']:.1%}"))
    rows += [
        ("Output token throughput (tok/s)", f"{result['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{result['total_token_throughput']:.2f}"),
    ]
    lines = [f"{' Serving Benchmark Result ':=^52}"]
    lines += [f"{name:<40}{value:>12}" for name, value in rows]
    for metric in metrics:
        lines.append(f"{NAMES[metric]:-^52}")
        shown = [("Mean", "mean"), ("Median", "median"), ("Max", "max")]
        shown += [(f"P{share:g}", f"p{share:g}") for share in percentiles]
        for title, key in shown:
            value = result[f"{key}_{metric}_ms"]
            lines.append(f"{f'{title} {metric.upper()} (ms):':<40}{value:>12.2f}")
    lines.append("=" * 52)
    return "\n".join(lines)
