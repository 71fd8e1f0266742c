"""Roofline, step time, batch curve, prefill floor: how fast a device can go, and what bounds it."""

from collections.abc import Sequence
from dataclasses import dataclass


def ridge_point(flops: float, bandwidth: float) -> float:
    """FLOP per byte above which a kernel is bound by compute: F / B (Williams et al. 2009).

    flops: peak FLOP/s. bandwidth: peak bytes/s.
    """
    return flops / bandwidth


def attainable_flops(intensity: float, flops: float, bandwidth: float) -> float:
    """FLOP/s of a kernel of that intensity (FLOP/byte): min(F, I * B) (Williams et al. 2009)."""
    return min(flops, intensity * bandwidth)


def linear_intensity(
    tokens: int,
    inputs: int,
    outputs: int,
    weight_bytes: float = 2.0,
    activation_bytes: float = 2.0,
) -> float:
    """FLOP per byte of Y = X W for `tokens` rows; about `tokens` for 16-bit weights, few rows.

    weight_bytes, activation_bytes: bytes a value.
    """
    flops = 2.0 * tokens * inputs * outputs
    moved = inputs * outputs * weight_bytes + tokens * (inputs + outputs) * activation_bytes
    return flops / moved


def decode_attention_intensity(heads: int, kv_heads: int, kv_bytes: float = 2.0) -> float:
    """FLOP per byte of attention for one query per sequence, at any batch or context.

    Each cached K and V value of kv_bytes bytes serves heads / kv_heads queries with 2 FLOP each: 1
    for 16-bit MHA, the group factor for GQA, `heads` for MQA.
    """
    return 2.0 * heads / (kv_heads * kv_bytes)


def latent_attention_intensity(heads: int, latent: int, rope: int, kv_bytes: float = 2.0) -> float:
    """FLOP per byte of absorbed latent attention (DeepSeek-V2): all heads share one row of
    latent + rope values; scores read all of it, the output its latent part."""
    return heads * (2.0 * (latent + rope) + 2.0 * latent) / ((latent + rope) * kv_bytes)


def decode_ceiling(bandwidth: float, weight_bytes: float, kv_bytes: float = 0.0) -> float:
    """Most steps/s (tokens/s at batch 1): every weight, and the KV, is read once a step."""
    return bandwidth / (weight_bytes + kv_bytes)


def step_seconds(
    weight_bytes: float, kv_bytes: float, flops: float, bandwidth: float, rate: float
) -> float:
    """Seconds of a step: max of moving weights and KV, and computing.

    kv_bytes: bytes of KV that the step reads, over the whole batch. flops: FLOP of the step.
    rate: FLOP/s.
    """
    return max((weight_bytes + kv_bytes) / bandwidth, flops / rate)


def decode_flops(params: float, batch: int) -> float:
    """FLOP of the linear layers for one token of each of `batch` sequences: 2 P b."""
    return 2.0 * params * batch


@dataclass(frozen=True)
class CurvePoint:
    """One batch size of a decode curve. seconds: of a step, which is TPOT. throughput: tokens/s."""

    batch: int
    seconds: float
    throughput: float


def batch_curve(
    batches: Sequence[int],
    weight_bytes: float,
    kv_bytes_per_sequence: float,
    params: float,
    bandwidth: float,
    rate: float,
) -> list[CurvePoint]:
    """The latency-throughput curve t(b) = max((W + b KV) / B, 2 P b / F)."""
    points = []
    for batch in batches:
        seconds = step_seconds(
            weight_bytes,
            batch * kv_bytes_per_sequence,
            decode_flops(params, batch),
            bandwidth,
            rate,
        )
        points.append(CurvePoint(batch, seconds, batch / seconds))
    return points


def knee(curve: Sequence[tuple[float, float]]) -> int:
    """Index of the knee of a curve: the point farthest from the chord between its ends, both axes
    scaled to [0, 1] (Satopaa et al. 2011, "Finding a 'kneedle' in a haystack").

    curve: (x, y) with x increasing. Raises ValueError when there is no point.
    """
    if not curve:
        raise ValueError("a curve without points has no knee")
    (x0, y0), (x1, y1) = curve[0], curve[-1]
    width, height = x1 - x0, y1 - y0
    if width == 0 or height == 0:
        return 0
    gaps = [abs((y - y0) / height - (x - x0) / width) for x, y in curve]
    return max(range(len(curve)), key=lambda i: (gaps[i], -i))


def largest_batch(
    curve: Sequence[CurvePoint], tpot: float, max_batch: int | None = None
) -> CurvePoint | None:
    """The largest batch of a curve whose step meets a TPOT promise (seconds), or None."""
    met = [p for p in curve if p.seconds <= tpot and (max_batch is None or p.batch <= max_batch)]
    return max(met, key=lambda point: point.batch, default=None)


def prefill_rate(params: float, rate: float) -> float:
    """Prompt tokens/s from the linear layers alone: F / 2P. rate: achieved FLOP/s."""
    return rate / (2.0 * params)


def prefill_seconds(
    tokens: int, params: float, rate: float, layers: int = 0, width: int = 0, causal: bool = True
) -> float:
    """Floor of the time to the first token: 2 P n for the linear layers, and where layers and width
    are given 4 n^2 d a layer for attention, half of it under a causal mask."""
    attention = 4.0 * layers * width * float(tokens) ** 2 * (0.5 if causal else 1.0)
    return (2.0 * params * tokens + attention) / rate


def attention_crossover(params: float, layers: int, width: int, causal: bool = False) -> float:
    """Prompt length at which attention costs as many FLOP as the linear layers: 2P / 4dL, twice
    that under a causal mask. Below it prefill is linear in the prompt, not quadratic.

    width: heads * head_dim.
    """
    return 2.0 * params / (4.0 * width * layers) * (2.0 if causal else 1.0)
