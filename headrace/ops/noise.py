"""The sampler's noise: a counter-based hash, the same on every back-end.

A sample point is (seed, choice, position); each token id of it gets its own 64 random bits, in
unsigned 64-bit arithmetic that wraps (`>>` is a logical shift, `^` exclusive or):

    GAMMA    = 0x9E3779B97F4A7C15
    mix(z)   : z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
               z = (z ^ (z >> 27)) * 0x94D049BB133111EB
               return z ^ (z >> 31)
    key      = mix(mix(seed + GAMMA) ^ ((choice << 32) | position))
    bits(id) = mix(key + GAMMA * (id + 1))
    u(id)    = ((bits >> 12) + 0.5) * 2**-52          exact in float64, 0 < u < 1
    g(id)    = -ln(-ln(u))                            finite: -3.61 < g < 36.8

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood 2014), and bits(id) its stream from `key`;
choice and position are the batch's int32 values, never negative. `bits` must agree exactly; the
logarithms may be computed in any precision with a relative error of -ln(u) below about 1e-6. In
float32 that asks for -log1p(-w) with w = ((~bits >> 12) + 0.5) * 2**-52 where u is near 1: rounding
u itself would give an infinite g and many ties. An equal form that needs one logarithm:
argmax(logit + g) = argmax(exp(logit - max) / -ln(u)).
"""

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64, elementwise."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def bits(
    seed: int, choice: int, position: int, ids: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    """64 random bits for each token id. seed: any int, taken modulo 2**64."""
    start = np.array([(seed + int(_GAMMA)) & _MASK], np.uint64)
    key = mix(mix(start) ^ np.uint64((choice << 32) | position))
    return mix(key + _GAMMA * (ids.astype(np.uint64) + np.uint64(1)))


def gumbel(
    seed: int, choice: int, position: int, ids: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each token id, float64, always finite."""
    uniform = ((bits(seed, choice, position, ids) >> np.uint64(12)) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
