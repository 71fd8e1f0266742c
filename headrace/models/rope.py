"""Rotary frequencies, fixed at load.

Some scaling rules depend on the length of the sequence; here they take the longest one that may
come (`max_model_len`), once, so that a token's K never depends on what follows it. Computed in
float64 and rounded to float32. Sources: Su et al. 2021 (RoPE), Chen et al. 2023 (linear),
"NTK-aware scaled RoPE" 2023 (dynamic), Peng et al. 2023 (YaRN), Llama 3.1 (llama3), Ding et al.
2024 (LongRoPE).
"""

from dataclasses import dataclass
from math import log, pi, sqrt

import numpy as np
import numpy.typing as npt

from headrace.models.spec import Rope, Scaling


@dataclass(frozen=True)
class Frequencies:
    """inverse: float32 [dims / 2], radians a position. scale: multiplies cos and sin. note: what
    was fixed at load, or None."""

    inverse: npt.NDArray[np.float32]
    scale: float = 1.0
    note: str | None = None


def frequencies(rope: Rope, max_model_len: int) -> Frequencies:
    """The inverse frequencies for sequences of up to `max_model_len` positions."""
    base = _inverse(rope.theta, rope.dims)
    scaling = rope.scaling
    if scaling is None:
        return Frequencies(base.astype(np.float32))
    inverse, scale, note = base, 1.0, None
    match scaling.kind:
        case "linear":
            inverse = base / scaling.factor
        case "factors":
            inverse = base / np.asarray(scaling.long, np.float64)
        case "dynamic":
            inverse, note = _dynamic(rope, scaling, max_model_len)
        case "llama3":
            inverse = _llama3(base, scaling)
        case "yarn":
            inverse, scale = _yarn(rope, scaling, base)
        case "longrope":
            inverse, scale, note = _longrope(base, scaling, max_model_len)
    return Frequencies(inverse.astype(np.float32), scale, note)


def _inverse(theta: float, dims: int) -> npt.NDArray[np.float64]:
    return np.asarray(theta ** -(np.arange(0, dims, 2, dtype=np.float64) / dims), np.float64)


def _dynamic(
    rope: Rope, scaling: Scaling, max_model_len: int
) -> tuple[npt.NDArray[np.float64], str]:
    length = max(max_model_len, scaling.original)
    stretch = scaling.factor * length / scaling.original - (scaling.factor - 1)
    theta = rope.theta * stretch ** (rope.dims / (rope.dims - 2))
    note = f"dynamic rope scaling fixed for {length} positions: theta {rope.theta:g} -> {theta:g}"
    return _inverse(theta, rope.dims), note


def _llama3(base: npt.NDArray[np.float64], scaling: Scaling) -> npt.NDArray[np.float64]:
    wavelength = 2 * pi / base
    smooth = (scaling.original / wavelength - scaling.low_freq) / (
        scaling.high_freq - scaling.low_freq
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray((1 - smooth) * base / scaling.factor + smooth * base)


def _yarn(
    rope: Rope, scaling: Scaling, base: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], float]:
    def dim_of(rotations: float) -> float:
        """The (fractional) dim that turns so often over the original context."""
        return rope.dims * log(scaling.original / (rotations * 2 * pi)) / (2 * log(rope.theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(np.floor(low)), float(np.ceil(high))
    low, high = max(low, 0.0), min(high, rope.dims - 1.0)
    ramp = (np.arange(rope.dims // 2) - low) / max(high - low, 0.001)
    ramp = np.clip(ramp, 0.0, 1.0)
    inverse = base / scaling.factor * ramp + base * (1 - ramp)
    scale = scaling.attention_factor
    if scale is None and scaling.mscale and scaling.mscale_all_dim:
        scale = _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return inverse, _mscale(scaling.factor, 1.0) if scale is None else scale


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(
    base: npt.NDArray[np.float64], scaling: Scaling, max_model_len: int
) -> tuple[npt.NDArray[np.float64], float, str]:
    long = max_model_len > scaling.original
    factors = scaling.long if long else scaling.short
    scale = scaling.attention_factor
    if scale is None:
        stretch = 1 + log(scaling.factor) / log(scaling.original)
        scale = 1.0 if scaling.factor <= 1 else sqrt(stretch)
    note = (
        f"longrope fixed to its {'long' if long else 'short'} factors for {max_model_len} "
        f"positions (trained on {scaling.original})"
    )
    return base / np.asarray(factors, np.float64), scale, note
