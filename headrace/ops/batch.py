"""The packed arrays of one step: what the engine writes and a back-end reads, at fixed addresses.

One `RaggedBatch` is allocated at load for the largest step (`Limits`) and reused; a step sets the
counts and the leading entries of each array. Arrays per sample point, copies and per-request lists
(penalties, biases, masks) may be replaced by larger ones; then `generation` goes up and a back-end
binds again before it runs.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

MAX_TOP_LOGPROBS = 64
"""Columns of the top-log-probability outputs; the API's own limit is lower or equal."""


@dataclass(frozen=True)
class Limits:
    """The largest step a loaded program must take, and the size of its KV.

    max_tokens: rows T. max_slices: slices. max_logits: logits rows R. max_samples: sample points.
    slots: sequences that hold a page table. max_blocks: blocks a sequence (table width).
    num_pages: pages of KV. max_positions: positions a sequence may have (rope tables).
    vocabulary: columns of the logits that may be sampled (the padded rest never is).
    threads: worker threads a CPU back-end may use. pinned: each on a core of its own, in turn where
    they are more.
    """

    max_tokens: int
    max_slices: int
    max_logits: int
    max_samples: int
    slots: int
    max_blocks: int
    num_pages: int
    max_positions: int
    vocabulary: int
    threads: int = 1
    pinned: bool = False


class RaggedBatch:
    """See the module docstring. Unless said otherwise an entry at or past its count is stale.

    Rows.      token, position: int32 [T].
    Slices.    slice_row: int32 [S + 1], slice i owns rows [slice_row[i], slice_row[i + 1]);
               slice_slot: int32 [S], its row in `table`; its first position is
               position[slice_row[i]].
    Tables.    table: int32 [slots, table_rows, max_blocks], page ids; persistent between steps.
    Logits.    logits_row: int32 [R], the row of each logits row; strictly increasing.
    Copies.    copy: int32 [C, 4], (source page, target page, first token, tokens), done before the
               program runs, in order: tokens [first, first + tokens) of every layer in the page.
    Samples.   sample_row: int32 [N], index among the logits rows. forced: int32, -1 to sample, else
               the id whose log-probability is wanted (prompt scoring). temperature, top_p, min_p,
               repetition, presence, frequency: float32. top_k: int32. seed: uint64.
               choice: int32, the index among `n`. sample_position: int32, the position that the new
               token will have. top_logprobs: int32, -1 no log-probabilities, else how many.
               penalty_start: int32 [N + 1] into penalty_token: int32 (distinct ids of the prompt
               and the output), penalty_count: int32 (times in the output, 0 = in the prompt only).
               bias_start: int32 [N + 1] into bias_token: int32, bias_value: float32.
               mask_index: int32 [N], -1 or a row of masks: uint32 [M, ceil(V / 32)], bit i % 32 of
               word i / 32 set when id i is allowed.
    Outputs.   out_token: int32 [N]. out_logprob: float32 [N] of the raw logits, and out_rank: int32
               (1 = most likely), where top_logprobs >= 0. out_top_token, out_top_logprob:
               [N, MAX_TOP_LOGPROBS], best first, ties to the lowest id.
    """

    def __init__(self, limits: Limits, table_rows: int) -> None:
        self.limits = limits
        self.generation = 0
        self.num_tokens = 0
        self.num_slices = 0
        self.num_logits = 0
        self.num_samples = 0
        self.num_copies = 0
        samples = limits.max_samples
        self.token: I32 = np.zeros(limits.max_tokens, np.int32)
        self.position: I32 = np.zeros(limits.max_tokens, np.int32)
        self.slice_row: I32 = np.zeros(limits.max_slices + 1, np.int32)
        self.slice_slot: I32 = np.zeros(limits.max_slices, np.int32)
        self.table: I32 = np.zeros((limits.slots, table_rows, limits.max_blocks), np.int32)
        self.logits_row: I32 = np.zeros(limits.max_logits, np.int32)
        self.copy: I32 = np.zeros((limits.slots * table_rows + 1, 4), np.int32)
        self.sample_row: I32 = np.zeros(samples, np.int32)
        self.forced: I32 = np.full(samples, -1, np.int32)
        self.temperature: F32 = np.zeros(samples, np.float32)
        self.top_k: I32 = np.zeros(samples, np.int32)
        self.top_p: F32 = np.ones(samples, np.float32)
        self.min_p: F32 = np.zeros(samples, np.float32)
        self.repetition: F32 = np.ones(samples, np.float32)
        self.presence: F32 = np.zeros(samples, np.float32)
        self.frequency: F32 = np.zeros(samples, np.float32)
        self.seed: U64 = np.zeros(samples, np.uint64)
        self.choice: I32 = np.zeros(samples, np.int32)
        self.sample_position: I32 = np.zeros(samples, np.int32)
        self.top_logprobs: I32 = np.full(samples, -1, np.int32)
        self.penalty_start: I32 = np.zeros(samples + 1, np.int32)
        self.penalty_token: I32 = np.zeros(1024, np.int32)
        self.penalty_count: I32 = np.zeros(1024, np.int32)
        self.bias_start: I32 = np.zeros(samples + 1, np.int32)
        self.bias_token: I32 = np.zeros(1024, np.int32)
        self.bias_value: F32 = np.zeros(1024, np.float32)
        self.mask_index: I32 = np.full(samples, -1, np.int32)
        self.masks: U32 = np.zeros((1, (limits.vocabulary + 31) // 32), np.uint32)
        self.out_token: I32 = np.zeros(samples, np.int32)
        self.out_logprob: F32 = np.zeros(samples, np.float32)
        self.out_rank: I32 = np.zeros(samples, np.int32)
        self.out_top_token: I32 = np.zeros((samples, MAX_TOP_LOGPROBS), np.int32)
        self.out_top_logprob: F32 = np.zeros((samples, MAX_TOP_LOGPROBS), np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are now."""
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))

    def reserve(
        self, samples: int = 0, copies: int = 0, penalties: int = 0, biases: int = 0, masks: int = 0
    ) -> None:
        """Make room for that many sample points, copies, list entries and mask rows.

        Contents of grown arrays are kept; `generation` goes up when an array was replaced.
        """
        for names, need in (
            (SAMPLE_ARRAYS, samples),
            (("penalty_start", "bias_start"), samples + 1 if samples else 0),
            (("copy",), copies),
            (("penalty_token", "penalty_count"), penalties),
            (("bias_token", "bias_value"), biases),
            (("masks",), masks),
        ):
            for name in names:
                array = getattr(self, name)
                if len(array) < need:
                    grown = np.zeros((max(need, 2 * len(array)), *array.shape[1:]), array.dtype)
                    grown[: len(array)] = array
                    setattr(self, name, grown)
                    self.generation += 1


SAMPLE_ARRAYS = (
    "sample_row", "forced", "temperature", "top_k", "top_p", "min_p", "repetition", "presence",
    "frequency", "seed", "choice", "sample_position", "top_logprobs", "mask_index", "out_token",
    "out_logprob", "out_rank", "out_top_token", "out_top_logprob",
)  # fmt: skip
"""Arrays of a `RaggedBatch` with one entry per sample point."""
