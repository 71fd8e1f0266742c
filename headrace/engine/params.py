"""`SamplingParams`, the user's wishes for one request, checked and resolved into a `Submit`.

Both doors use this: the offline API and the HTTP server. Names and defaults are vLLM's.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from headrace.engine.messages import BeamSpec, GrammarSpec, SamplingSpec, Submit
from headrace.errors import RequestError
from headrace.ops.batch import MAX_TOP_LOGPROBS

MAX_N = 128
MAX_BEAMS = 16
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 4096


class Vocabulary(Protocol):
    """What resolving needs of a tokenizer."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, specials: bool = ..., add_special: bool = ...) -> list[int]: ...


def _shown(value: Any) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse a value that is not a finite number in [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(name, f"{name} must be a finite number, got {_shown(value)}")
    if value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(name, f"{name} must be in {bracket}{low}, {high}], got {_shown(value)}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, f"{name} must be an integer, got {_shown(value)}")
    if not low <= value <= high:
        raise RequestError(name, f"{name} must be in [{low}, {high}], got {_shown(value)}")


def _token_ids(name: str, ids: Iterable[Any], vocabulary: int) -> tuple[int, ...]:
    result = tuple(ids)
    for value in result:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
            raise RequestError(
                name,
                f"{name}: token id {_shown(value)} is outside the vocabulary [0, {vocabulary})",
            )
    return result


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are drawn and when it ends. See docs/api.md for every field.

    Raises RequestError naming the field and its limit when a value is out of range.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: GrammarSpec | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_TOP_LOGPROBS)
        _number("length_penalty", self.length_penalty, -10, 10)
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError("stop", f"stop has more than {MAX_STOP_STRINGS} strings")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise RequestError("stop", "stop must be a string, or a list of strings, none empty")
        if self.logit_bias is not None and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError("logit_bias", f"logit_bias has more than {MAX_LOGIT_BIAS} entries")
        if self.use_beam_search:
            self._check_beams()

    def _check_beams(self) -> None:
        """Refuse what has no meaning for a search that draws nothing."""
        _integer("n", self.num_sequences, 1, MAX_BEAMS)
        if self.max_tokens == 0:
            raise RequestError("max_tokens", "max_tokens must be at least 1 with use_beam_search")
        for name in ("presence_penalty", "frequency_penalty", "min_p"):
            if getattr(self, name) != 0:
                raise RequestError(name, f"{name} cannot be combined with use_beam_search")
        if self.repetition_penalty != 1:
            raise RequestError(
                "repetition_penalty", "repetition_penalty cannot be combined with use_beam_search"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_sequences(self) -> int:
        """Sequences to run: best_of where given, else n."""
        return self.n if self.best_of is None else self.best_of


def _bad_word_ids(words: Sequence[str], tokenizer: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each word as it starts a text and as it follows a space, like vLLM."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError("bad_words", f"bad_words holds {word!r}: words must have letters")
        bare = word.lstrip()
        for text in (bare, " " + bare):
            ids = tuple(tokenizer.encode(text, specials=False, add_special=False))
            found[ids] = None
    return tuple(found)


def make_submit(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    tokenizer: Vocabulary,
    max_model_len: int,
    *,
    arrival: float = 0.0,
    default_seed: int | None = None,
) -> Submit:
    """Resolve `params` for one prompt.

    max_tokens None means all that the context allows; a larger one is cut to it. Raises
    RequestError for an empty prompt, a token id outside the vocabulary, or a prompt that leaves no
    room for one token.
    """
    ids = _token_ids("prompt", prompt, tokenizer.vocabulary)
    if not ids:
        raise RequestError("prompt", "prompt is empty: at least one token is needed")
    room = max_model_len - len(ids)
    scoring = params.max_tokens == 0
    if room < (0 if scoring else 1):
        raise RequestError(
            "prompt",
            f"prompt has {len(ids)} tokens, but the model's context is {max_model_len}"
            " tokens and at least one must be left for the output",
        )
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    stop_tokens = () if params.ignore_eos else tuple(sorted(tokenizer.stop_ids))
    if params.stop_token_ids:
        extra = _token_ids("stop_token_ids", params.stop_token_ids, tokenizer.vocabulary)
        stop_tokens = tuple(sorted({*stop_tokens, *extra}))
    bias: dict[int, float] = {}
    for key, value in (params.logit_bias or {}).items():
        _token_ids("logit_bias", (key,), tokenizer.vocabulary)
        _number("logit_bias", value, -100, 100)
        bias[key] = float(value)
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = _token_ids("allowed_token_ids", params.allowed_token_ids, tokenizer.vocabulary)
        if not allowed:
            raise RequestError("allowed_token_ids", "allowed_token_ids is empty: nothing is left")
    bad_words = _bad_word_ids(params.bad_words, tokenizer) if params.bad_words else ()
    if allowed is not None:
        banned = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            banned.update(stop_tokens)
        if banned.issuperset(allowed):
            text = "allowed_token_ids: bad_words and min_tokens ban all of them"
            raise RequestError("allowed_token_ids", text)
    seed = params.seed if params.seed is not None else default_seed
    ranked = params.best_of is not None and params.best_of > params.n
    sampling = SamplingSpec(
        temperature=float(params.temperature),
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        seed=(random.getrandbits(64) if seed is None else seed) % 2**64,
        logit_bias=bias,
        banned_until=(stop_tokens, params.min_tokens),
        allowed=allowed,
        bad_words=bad_words,
        logprobs=0 if ranked and params.logprobs is None else params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
    beam = None
    if params.use_beam_search:
        beam = BeamSpec(width=params.num_sequences, length_penalty=params.length_penalty)
    return Submit(
        id=request_id,
        prompt=ids,
        max_tokens=max_tokens,
        sampling=sampling,
        n=params.num_sequences,
        stop_tokens=stop_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        priority=params.priority,
        namespace=() if params.cache_salt is None else ("salt", params.cache_salt),
        grammar=params.structured_outputs,
        beam=beam,
        arrival=arrival,
    )


PARAM_NAMES = frozenset(field.name for field in fields(SamplingParams))
"""The names that `SamplingParams` takes."""
