"""Structured output: which tokens may come next, by llguidance.

`validate` refuses at the door what can't be honoured; `GrammarCompiler.compile` gives a `Grammar`,
and `Grammar.start` a `Cursor` for one sequence. A cursor is a function of the tokens it accepted,
so preemption and replay need only the tokens.

Kinds (`engine.messages.GrammarSpec`): json, json_object, regex, choice, grammar, structural_tag.
Where the text that must follow is certain, only its own tokenization is allowed: then the mask
holds one token, and `Cursor.forced` gives these tokens at once. JSON is written as `json.dumps`
does, with ", " and ": " and no other white space, unless a whitespace pattern is given.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from headrace.errors import RequestError
from headrace.text.lark import lark_source
from headrace.text.patterns import bound_pattern
from headrace.text.schema import COMPACT, bound_source, checked_schema, read_json
from headrace.text.tokenizer import Tokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
FIELD = "structured_outputs"
CACHED_GRAMMARS = 256
MAX_CHOICES = 5_000
DEEP_STACK = 128 << 20
STACK_SIZE_LOCK = threading.Lock()  # the stack size of new threads is one setting per process
WHITESPACE = "x-whitespace-pattern"


def _limits() -> LLParserLimits:
    """Bounds on the work of one compilation and one mask: about 20 ms each, 100 MB of states."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def validate(kind: str, source: str, field: str = FIELD) -> None:
    """Refuse a constraint that can't be honoured. Raises RequestError for `field` that names the
    keyword or the fault. Needs no tokenizer; takes milliseconds."""
    _matcher(LLTokenizer("byte"), grammar_text(kind, source, field), field)


def grammar_text(kind: str, source: str, field: str = FIELD) -> str:
    """The constraint in llguidance's own form. Raises RequestError."""
    bound_source(source, field)
    match kind:
        case "json":
            return _json_grammar(source, field)
        case "json_object":
            return _json_grammar('{"type": "object"}', field)
        case "regex":
            bound_pattern(source, field, "the pattern")
            return str(LLMatcher.grammar_from_regex(source))
        case "choice":
            return _choice_grammar(source, field)
        case "grammar":
            return str(LLMatcher.grammar_from_lark(lark_source(source, field)))
        case "structural_tag":
            from headrace.text.tags import tag_grammar

            return tag_grammar(source, field)
    raise RequestError(field, f"{field}: {kind!r} is not one of {', '.join(KINDS)}")


def json_source(schema: Any, whitespace_pattern: str | None = None) -> str:
    """The source of kind json. whitespace_pattern: an expression for the white space that may stand
    between the parts of the JSON text, in place of the fixed ", " and ": "."""
    if whitespace_pattern is not None:
        schema = {**(schema if isinstance(schema, dict) else {"allOf": [schema]})}
        schema[WHITESPACE] = whitespace_pattern
    return json.dumps(schema, ensure_ascii=False)


def _json_grammar(source: str, field: str) -> str:
    schema = checked_schema(source, field)
    options: Any = COMPACT
    whitespace = schema.pop(WHITESPACE, None)
    if isinstance(whitespace, str):
        bound_pattern(whitespace, field, "whitespace_pattern")
        options = {"whitespace_pattern": whitespace, "whitespace_flexible": True}
    text = json.dumps(schema, ensure_ascii=False)
    return str(LLMatcher.grammar_from_json_schema(text, overrides=options))


def _choice_grammar(source: str, field: str) -> str:
    choices = read_json(source, field)
    if not isinstance(choices, list) or not choices:
        raise RequestError(field, f"{field}: choice must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise RequestError(field, f"{field}: choice has more than {MAX_CHOICES} strings")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError(field, f"{field}: choice must hold non-empty strings")
    # One terminal: thousands of alternatives are one item of the parser.
    pattern = "|".join(_literal(choice) for choice in dict.fromkeys(choices))
    return str(LLMatcher.grammar_from_regex(pattern))


def _literal(text: str) -> str:
    """A pattern that matches this text alone."""
    return "".join(
        char if char.isalnum() or char == " " or ord(char) > 0x9F else f"\\x{{{ord(char):x}}}"
        for char in text
    )


def _matcher(words: LLTokenizer, text: str, field: str) -> LLMatcher:
    """The matcher of a constraint. Raises RequestError when it can't be built, or nothing at all
    matches.

    The compiler recurses along chains of `$ref`, some 10 kB of stack each, so it runs on a thread
    whose stack holds the longest chain that `schema.MAX_NODES` lets through.
    """
    built: list[LLMatcher] = []

    def build() -> None:
        built.append(LLMatcher(words, text, limits=_limits(), log_level=0))

    with STACK_SIZE_LOCK:
        usual = threading.stack_size(DEEP_STACK)
        try:
            worker = threading.Thread(target=build, name="grammar")
            worker.start()
        finally:
            threading.stack_size(usual)
    worker.join()
    (matcher,) = built
    if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
        raise RequestError(field, f"{field}: nothing can match")
    if matcher.is_error():
        message = " ".join(str(matcher.get_error()).split())
        raise RequestError(field, f"{field}: can't be honoured: {message}")
    return matcher


class _Words:
    """The vocabulary as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode_inside
        self.eos_token_id = next(iter(_stops(tokenizer)))
        self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocabulary)]
        self.special_token_ids = sorted(
            token for token in tokenizer.special_ids if token < tokenizer.vocabulary
        )

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def _stops(tokenizer: Tokenizer) -> list[int]:
    """Stop ids, the end of sequence first."""
    stops = sorted(tokenizer.stop_ids, key=lambda token: (token != tokenizer.eos, token))
    if not stops:
        raise RequestError(FIELD, f"{FIELD}: this model has no token that ends a generation")
    return stops


class GrammarCompiler:
    """Compiles constraints for one tokenizer and keeps the latest. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: LLTokenizer | None = None
        self._grammars: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: str, source: str, field: str = FIELD) -> "Grammar":
        """The grammar of a constraint. Raises RequestError (see `validate`)."""
        with self._lock:
            grammar = self._grammars.pop((kind, source), None)
            if grammar is None:
                grammar = self._build(kind, source, field)
            self._grammars[kind, source] = grammar
            if len(self._grammars) > CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
            return grammar

    def _build(self, kind: str, source: str, field: str) -> "Grammar":
        text = grammar_text(kind, source, field)
        if self._words is None:
            self._words = LLTokenizer(
                TokenizerWrapper(_Words(self._tokenizer)),
                n_vocab=self._tokenizer.vocabulary,
                eos_token=_stops(self._tokenizer),
            )
        return Grammar(_matcher(self._words, text, field), self._tokenizer)


class Grammar:
    """A compiled constraint."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer) -> None:
        self._matcher = matcher
        self.stops = tokenizer.stop_ids
        self.words = (tokenizer.vocabulary + 31) // 32
        bits = np.arange(self.words * 32) < tokenizer.vocabulary
        self.everything = np.packbits(bits, bitorder="little").view(np.uint32)

    def start(self, after: int | None = None) -> "Cursor":
        """A cursor at the beginning of the text; with `after`, the grammar begins after that token
        (the end of the model's thinking), and all may come before it."""
        return Cursor(self._matcher.deep_copy(), self, after)


class Cursor:
    """Where one sequence stands in its grammar.

    can_stop: the text so far is complete, a stop id may come. finished: nothing but a stop id may
    come, or one came. All methods raise RequestError when the grammar needs more work than its
    limits allow.
    """

    def __init__(
        self, matcher: LLMatcher, grammar: Grammar, after: int | None, ended: bool = False
    ) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._after = after
        self._ended = ended

    @property
    def can_stop(self) -> bool:
        """Whether a stop id may come: the text so far is complete, or the grammar has not begun."""
        return self._ended or self._after is not None or bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether no more text can come."""
        return self._ended or (self._after is None and bool(self._matcher.is_stopped()))

    def mask(self, out: NDArray[np.uint32]) -> None:
        """Write a bit per token (bit id % 32 of word id // 32): 1 where the token may come next.
        out: uint32, contiguous, at least (vocabulary + 31) // 32 words; the rest is set to 0."""
        words = self._grammar.words
        out[words:] = 0
        own = out[:words]
        if self._after is not None and not self._ended:
            own[:] = self._grammar.everything
            return
        self._raise_error()
        if self.finished:
            own[:] = 0
            for token in self._grammar.stops:
                own[token // 32] |= np.uint32(1 << token % 32)
            return
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        self._raise_error()

    def forced(self) -> list[int]:
        """The tokens that must come next, one after the other; empty where there is a choice."""
        if self.finished or self._after is not None:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._raise_error()
        return tokens

    def accept(self, ids: Sequence[int]) -> bool:
        """Move past ids. False, with the cursor past those before it, at the first id that the
        grammar does not allow."""
        return all(map(self._accept, ids))

    def _accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._grammar.stops:
            self._ended = self.can_stop
            return self._ended
        if self._after is not None:
            self._after = None if token == self._after else self._after
            return True
        if self._matcher.try_consume_tokens([token]) == 1:
            return True
        self._raise_error()
        return False

    def copy(self) -> "Cursor":
        """A cursor of its own at the same place."""
        return Cursor(self._matcher.deep_copy(), self._grammar, self._after, self._ended)

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            message = " ".join(str(self._matcher.get_error()).split())
            raise RequestError(FIELD, f"{FIELD}: the grammar gave up: {message}", code=422)
