"""The reference's sampler: one sample point at a time, in the order that `spec.Sample` gives.

Decisions are made in float64 from float32 logits, so that another back-end's rounding only shows
where two candidates are nearly equal. A logit that is not a number counts as -inf. Where nothing is
allowed, or all that is allowed has -inf, every id ties and the lowest wins.
"""

import numpy as np
import numpy.typing as npt

from headrace.ops import noise
from headrace.ops.batch import F32, MAX_TOP_LOGPROBS, RaggedBatch

F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def sample(logits: F32, batch: RaggedBatch) -> None:
    """Fill the outputs of `batch` for every sample point. logits: [R, >= vocabulary]."""
    vocabulary = batch.limits.vocabulary
    for i in range(batch.num_samples):
        raw = logits[batch.sample_row[i], :vocabulary]
        raw = np.where(np.isnan(raw), np.float32(-np.inf), raw)
        token = int(batch.forced[i])
        if token < 0:
            token = choose(processed(raw, batch, i), batch, i)
        batch.out_token[i] = token
        if batch.top_logprobs[i] >= 0:
            report(raw, token, batch, i)


def report(raw: F32, token: int, batch: RaggedBatch, i: int) -> None:
    """Log-probability and rank of `token` by the raw logits, and the list of the most likely."""
    wide = shifted(raw)
    logprobs = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    batch.out_logprob[i] = logprobs[token]
    ahead = np.count_nonzero(raw > raw[token]) + np.count_nonzero(raw[:token] == raw[token])
    batch.out_rank[i] = 1 + ahead
    wanted = min(int(batch.top_logprobs[i]), MAX_TOP_LOGPROBS)
    if wanted > 0:
        listed = descending(raw)[:wanted]
        batch.out_top_token[i, : len(listed)] = listed
        batch.out_top_logprob[i, : len(listed)] = logprobs[listed]


def processed(raw: F32, batch: RaggedBatch, i: int) -> F32:
    """The logits after mask, bias and penalties, float32."""
    logits = raw.copy()
    if batch.mask_index[i] >= 0:
        words = batch.masks[batch.mask_index[i]]
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)]
        logits[allowed == 0] = -np.inf
    biases = slice(int(batch.bias_start[i]), int(batch.bias_start[i + 1]))
    np.add.at(logits, batch.bias_token[biases], batch.bias_value[biases])
    penalties = slice(int(batch.penalty_start[i]), int(batch.penalty_start[i + 1]))
    ids, count = batch.penalty_token[penalties], batch.penalty_count[penalties]
    x, repetition = logits[ids], batch.repetition[i]
    x = np.where(x > 0, x / repetition, x * repetition)
    x -= np.where(count > 0, batch.presence[i], np.float32(0))
    x -= batch.frequency[i] * count.astype(np.float32)
    logits[ids] = x
    return logits


def choose(logits: F32, batch: RaggedBatch, i: int) -> int:
    """The token of sample point i, from its processed logits."""
    temperature = float(batch.temperature[i])
    if temperature == 0 or np.isneginf(logits.max()):
        return int(np.argmax(logits))
    scaled = shifted(logits) / temperature
    kept = survivors(scaled, float(batch.min_p[i]), int(batch.top_k[i]), float(batch.top_p[i]))
    g = noise.gumbel(int(batch.seed[i]), int(batch.choice[i]), int(batch.sample_position[i]), kept)
    return int(kept[np.argmax(scaled[kept] + g)])


def survivors(scaled: F64, min_p: float, top_k: int, top_p: float) -> Ids:
    """Ids that pass min-p, top-k and top-p, ascending. scaled: logits less their maximum, over the
    temperature. Weights are exp(scaled), so the most likely id has exactly 1."""
    weights = np.exp(scaled)
    order = descending(scaled)
    order = order[(weights[order] >= min_p) & (weights[order] > 0)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        running = np.cumsum(weights[order])
        order = order[: 1 + int(np.searchsorted(running, top_p * running[-1]))]
    return np.sort(order)


def shifted(logits: F32) -> F64:
    """logits less their maximum, in float64; all zeros where the maximum is infinite and met."""
    wide = logits.astype(np.float64)
    top = wide.max()
    less: F64 = np.where(wide == top, 0.0, -np.inf) if np.isinf(top) else wide - top
    return less


def descending(values: npt.NDArray[np.floating]) -> Ids:
    """Ids by value, highest first, ties by id."""
    return np.argsort(-values, kind="stable")
