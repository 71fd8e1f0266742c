"""Bytes of KV and of weights."""

import math
from collections.abc import Iterable


def kv_bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, value_bytes: float = 2.0
) -> float:
    """Bytes of K and V of one token: 2 * layers * kv_heads * head_dim * bytes.

    kv_heads is the model's number of K/V heads: all heads for MHA, fewer for GQA, 1 for MQA.
    Sizing a GQA model by its query heads overstates KV by the group factor (8 for Llama 70B).
    """
    return 2.0 * layers * kv_heads * head_dim * value_bytes


def latent_bytes_per_token(layers: int, latent: int, rope: int, value_bytes: float = 2.0) -> float:
    """Bytes of one token of multi-head latent attention: one row of latent + rope values a layer
    (DeepSeek-V2)."""
    return float(layers * (latent + rope)) * value_bytes


def kv_bytes(context: int, groups: Iterable[tuple[float, int | None]]) -> float:
    """Bytes of KV of one sequence at that context, over groups of (bytes a token, window or
    None)."""
    return sum(
        token_bytes * (context if window is None else min(context, window))
        for token_bytes, window in groups
    )


def bits_per_weight(
    element_bits: float, block: int, scale_bits: float, tensor_bits: float = 0.0, size: int = 1
) -> float:
    """Bits a weight of a block format: elements plus the block's scales (and minimums).

    block: weights that share scale_bits. tensor_bits: further bits once per tensor of `size`
    weights. MXFP4: 4 + 8/32 = 4.25 (OCP Microscaling v1.0). NVFP4: 4 + 8/16 = 4.5.
    """
    return element_bits + scale_bits / block + tensor_bits / size


def weight_bytes(params: float, bits: float) -> float:
    """Bytes of `params` weights at that many bits each."""
    return params * bits / 8.0


def ocp_scale_exponent(largest: float, element_exponent: int = 2) -> int:
    """Exponent e of the shared scale 2^e of a microscaling block whose largest magnitude is
    `largest` > 0: floor(log2(largest)) minus the exponent of the element's largest power of two (2
    for E2M1, whose largest value is 6 = 1.5 * 2^2) (OCP Microscaling v1.0, section 6.3).

    The maximum lands in [4, 8), so only those past 6 saturate. Taking floor(log2(largest / 6)) puts
    it in [6, 12) and clips nearly every block.
    """
    if largest <= 0:
        raise ValueError(f"largest: {largest} is not positive; a block of zeros needs no scale")
    mantissa, exponent = math.frexp(largest)
    del mantissa
    return exponent - 1 - element_exponent


def max_sequences(free_bytes: float, context: int, token_bytes: float, block: int = 16) -> int:
    """Sequences of that many tokens whose KV fits, in whole blocks of `block` tokens."""
    blocks = -(-context // block)
    return int(free_bytes // (blocks * block * token_bytes))
