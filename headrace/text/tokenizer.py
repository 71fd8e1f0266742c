"""Text to token ids and back, whatever file the tokenizer came from.

`Tokenizer` wraps a `tokenizers` object for encoding and a table of token bytes for decoding.
Decoding is by bytes: a text is the UTF-8 reading of its tokens' bytes joined, each maximal invalid
part read as U+FFFD, so that any split of the ids gives the same text (see `detokenize`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headrace.errors import RequestError
from headrace.text.template import ChatTemplate

NEVER = "\U0010ffff"
WHITE_SPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006"
    "\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
SENTINEL = "\x02"  # merges with nothing: no vocabulary joins this control character to others


@dataclass(frozen=True)
class Facts:
    """What a file says about its tokenizer, beside the encoder itself.

    vocabulary: ids below this are real. token_bytes: bytes of every id. special: control tokens.
    ends: ids that end a generation. prefix, suffix: ids put around a text. strips_leading_space:
    decoding drops one leading space. swallowing: tokens that take in the white space after them.
    folding: how many times longer than its tokens' bytes a text can be, because of normalization.
    chat_template: its source.
    """

    vocabulary: int
    token_bytes: Sequence[bytes]
    special: frozenset[int]
    bos: int | None
    eos: int | None
    ends: frozenset[int]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    strips_leading_space: bool = False
    swallowing: frozenset[int] = frozenset()
    folding: int = 1
    chat_template: str | None = None


class Tokenizer:
    """Encodes and decodes text. Immutable and thread-safe after construction.

    vocabulary: ids below this are real tokens (the model's embedding may be padded beyond).
    stop_ids: every id that ends a generation: the end of sequence, the marks with which the chat
    template ends a turn, and those of the checkpoint's generation config.
    add_bos: whether `encode` puts a begin token before a text. swallowing: tokens that take in the
    white space next to them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, facts: Facts) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._facts = facts
        self._bytes = facts.token_bytes
        self.vocabulary = facts.vocabulary
        self.bos = facts.bos
        self.eos = facts.eos
        self.special_ids = facts.special
        self.swallowing = facts.swallowing
        self.add_bos = facts.bos is not None and facts.bos in facts.prefix
        self.chat_template = facts.chat_template
        self.strips_leading_space = facts.strips_leading_space
        self.max_token_bytes = max(map(len, facts.token_bytes), default=1)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """All ids that end a generation."""
        ends = set(self._facts.ends)
        if self.eos is not None:
            ends.add(self.eos)
        if self.chat_template is not None and self.special_pattern is not None:
            after = ChatTemplate(self.chat_template).after_answer()
            mark = self.special_pattern.match(after.lstrip())
            if mark is not None:
                ends.add(self.special_literals[mark[0]])
        return frozenset(ends)

    @cached_property
    def special_literals(self) -> dict[str, int]:
        """Text of each control token that has any, longest first."""
        literals = {self.token_text(token): token for token in sorted(self.special_ids)}
        literals.pop("", None)
        return dict(sorted(literals.items(), key=lambda item: (-len(item[0]), item[1])))

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the text of any control token; None where there is none."""
        if not self.special_literals:
            return None
        return re.compile(any_of(self.special_literals))

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same encoder, which reads the text of control tokens as ordinary text."""
        plain = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(self._backend, part) is not None:
                setattr(plain, part, getattr(self._backend, part))
        added = self._backend.get_added_tokens_decoder()
        for token in sorted(added):
            if not added[token].special:
                plain.add_tokens([added[token]])
            elif plain.token_to_id(added[token].content) is None:
                # Ids are given in order: hold the place of a control token with a text of no one.
                plain.add_tokens([f"{NEVER}{token}{NEVER}"])
        return plain

    def encode(
        self,
        text: str,
        *,
        specials: bool = True,
        add_special: bool = True,
        limit: int | None = None,
        field: str = "prompt",
    ) -> list[int]:
        """Token ids of a text.

        specials: whether the text of a control token becomes that token. add_special: whether the
        tokenizer's begin and end tokens are put around. limit: most tokens the result may have; a
        text that surely has more is refused before the work. Raises RequestError for `field`, when
        there are more than `limit` tokens or the text is not valid Unicode (a lone surrogate).
        """
        size = self._size(text, field)
        if limit is not None and size > limit * self.max_token_bytes:
            self._refuse_surely_longer(text, size, limit, field)
        backend = self._backend if specials else self._plain
        # The batch call is the one that lets other threads run meanwhile.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if add_special:
            ids = [*self._facts.prefix, *ids, *self._facts.suffix]
        if limit is not None and len(ids) > limit:
            raise RequestError(
                field, f"{field} has {len(ids)} tokens, more than the limit of {limit}"
            )
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a text that goes on from other text: nothing is put before it, not even the
        space with which some tokenizers begin, and it becomes no control tokens."""
        if not self.strips_leading_space:
            return self.encode(text, specials=False, add_special=False)
        head = self.encode(SENTINEL, specials=False, add_special=False)
        ids = self.encode(SENTINEL + text, specials=False, add_special=False)
        return ids[len(head) :]

    @staticmethod
    def _size(text: str, field: str) -> int:
        """Bytes of the text in UTF-8."""
        if text.isascii():
            return len(text)
        try:
            return len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                field, f"{field} holds a lone surrogate at character {error.start}"
            ) from error

    def _refuse_surely_longer(self, text: str, size: int, limit: int, field: str) -> None:
        """Raise when the text has more than `limit` tokens however it is cut.

        No token covers more bytes than the longest one, save by normalization (`folding`) and by
        control tokens that swallow the white space around them.
        """
        if self.swallowing:
            size -= sum(text.count(char) * len(char.encode()) for char in WHITE_SPACE)
        fewest = -(-size // (self.max_token_bytes * self._facts.folding))
        if fewest > limit:
            raise RequestError(
                field, f"{field} has at least {fewest} tokens, more than the limit of {limit}"
            )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids; skip_special leaves control tokens out. Raises RequestError for an id
        that is not a token."""
        table = self._bytes
        skipped = self.special_ids if skip_special else frozenset[int]()
        for token in ids:
            if not 0 <= token < len(table):
                raise RequestError("tokens", f"tokens: {token} is not in [0, {len(table)})")
        joined = b"".join([table[token] for token in ids if token not in skipped])
        if self.strips_leading_space and joined.startswith(b" "):
            joined = joined[1:]
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for (of a control token: its name)."""
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        """The text of one token by itself; bytes that are no character alone read U+FFFD."""
        return self._bytes[token].decode("utf-8", "replace")


def any_of(literals: Iterable[str]) -> str:
    """An expression that matches any of some texts, the longest that fits, branching by character:
    a vocabulary may hold thousands of control tokens, too many to try one by one."""
    tree: dict[str, Any] = {}
    for literal in literals:
        node = tree
        for char in literal:
            node = node.setdefault(char, {})
        node[""] = {}
    return _expression(tree)


def _expression(tree: dict[str, Any]) -> str:
    text = ""
    while len(tree) == 1 and "" not in tree:
        ((char, tree),) = tree.items()
        text += re.escape(char)
    branches = [re.escape(char) + _expression(tree[char]) for char in tree if char]
    if not branches:
        return text
    optional = "?" if "" in tree else ""
    return f"{text}(?:{'|'.join(branches)}){optional}"


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata (`tokenizer.ggml.*`). Raises ModelError for metadata
    that is incomplete, inconsistent or of an unsupported kind."""
    from headrace.text.gguf import build

    return Tokenizer(*build(metadata))


def from_folder(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json with tokenizer_config.json,
    special_tokens_map.json, generation_config.json and chat_template.jinja where they are. Raises
    ModelError for files that are missing, damaged or of an unsupported kind."""
    from headrace.text.folder import build

    return Tokenizer(*build(Path(path)))
