"""A tokenizer from a GGUF file's metadata.

The keys are `tokenizer.ggml.*` as the GGUF specification names them. `model` gpt2 is byte-level
BPE, cut first as `pre` says.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from headrace.errors import ModelError
from headrace.text.bytelevel import spelled_bytes
from headrace.text.pretokenizers import PLAIN, PRE_TOKENIZERS, PreTokenizer
from headrace.text.tokenizer import Facts

log = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER, UNUSED, BYTE = 2, 3, 4, 5, 6
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Marks that end a document or a turn in the families that use them; taken only when the vocabulary
# holds them as control tokens. What a chat template ends its turns with is found from the template.
END_MARKS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<|endofturn|>",
        "<|end_of_role|>",
        "<｜end▁of▁sentence｜>",
        "<EOT>",
        "</s>",
    }
)


def build(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Facts]:
    """The encoder and its facts."""
    model = metadata.get(PREFIX + "model")
    if model is None:
        raise ModelError(f"{PREFIX}model is missing: the file holds no tokenizer")
    if model != "gpt2":
        raise ModelError(f"{PREFIX}model {model!r} is not supported (supported: gpt2)")
    pieces = _array(metadata, "tokens", str)
    types = _array(metadata, "token_type", int, [1] * len(pieces))
    if len(types) != len(pieces):
        raise ModelError(f"{PREFIX}token_type has {len(types)} entries for {len(pieces)} tokens")
    return _byte_level(metadata, pieces, types)


def _byte_level(
    metadata: Mapping[str, Any], pieces: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, Facts]:
    cut = _pre_tokenizer(metadata)
    backend = tokenizers.Tokenizer(_bpe(pieces, _merges(metadata), cut.ignore_merges))
    backend.pre_tokenizer = cut.build()
    normalizer = cut.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    token_bytes = spelled_bytes(pieces)
    for token, kind in enumerate(types):
        if kind in (CONTROL, USER):
            token_bytes[token] = pieces[token].encode()
    add_tokens(backend, pieces, types)
    folding = 3 if cut.nfc else 1
    return backend, facts(metadata, pieces, types, token_bytes, cut.add_bos, folding)


def facts(
    metadata: Mapping[str, Any],
    pieces: list[str],
    types: list[int],
    token_bytes: list[bytes],
    add_bos: bool,
    folding: int,
) -> Facts:
    """What the metadata says beside the encoder. add_bos: the rule where the file is silent."""
    vocabulary = len(pieces)
    while vocabulary and types[vocabulary - 1] == UNUSED:
        vocabulary -= 1
    special = frozenset(token for token, kind in enumerate(types) if kind in (UNKNOWN, CONTROL))
    bos = token_id(metadata, "bos_token_id", len(pieces))
    eos = token_id(metadata, "eos_token_id", len(pieces))
    ends = {token for token in special if pieces[token] in END_MARKS}
    ends |= {id for key in END_KEYS if (id := token_id(metadata, key, len(pieces))) is not None}
    with_bos = metadata.get(PREFIX + "add_bos_token", add_bos)
    with_eos = metadata.get(PREFIX + "add_eos_token", False)
    return Facts(
        vocabulary=vocabulary,
        token_bytes=token_bytes,
        special=special,
        bos=bos,
        eos=eos,
        ends=frozenset(ends),
        prefix=(bos,) if with_bos and bos is not None else (),
        suffix=(eos,) if with_eos and eos is not None else (),
        folding=folding,
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    """An id named by the metadata, None where it names none (absent, or all bits set)."""
    value = metadata.get(PREFIX + key)
    if value is None or value in (-1, 0xFFFFFFFF):
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise ModelError(f"{PREFIX}{key} {value!r} is not one of the {count} tokens")
    return value


def add_tokens(backend: tokenizers.Tokenizer, pieces: list[str], types: list[int]) -> None:
    """Tell the encoder which pieces are found in the text before any cutting."""
    backend.add_tokens(
        [
            AddedToken(pieces[token], special=kind == CONTROL, normalized=False)
            for token, kind in enumerate(types)
            if kind in (CONTROL, USER)
        ]
    )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get(PREFIX + "pre")
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    said = "is missing" if name is None else f"{name!r} is unknown"
    log.warning(
        "%spre %s: text is cut as for gpt-2, which may differ from the model's own tokenizer",
        PREFIX,
        said,
    )
    return PLAIN


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(_array(metadata, "merges", str)):
        left, gap, right = merge.partition(" ")
        if not (left and gap and right):
            raise ModelError(f"{PREFIX}merges[{index}] {merge!r} is not two pieces")
        merges.append((left, right))
    return merges


def _bpe(pieces: Sequence[str], merges: list[tuple[str, str]], ignore_merges: bool) -> models.BPE:
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    try:
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{PREFIX}merges do not fit {PREFIX}tokens: {error}") from error


def _array(
    metadata: Mapping[str, Any], key: str, kind: type, default: list[Any] | None = None
) -> list[Any]:
    value = metadata.get(PREFIX + key, default)
    if value is None:
        raise ModelError(f"{PREFIX}{key} is missing")
    values = list(value)
    if values and not all(isinstance(item, kind) for item in (values[0], values[-1])):
        raise ModelError(f"{PREFIX}{key} does not hold {kind.__name__} values")
    return values
