"""A tokenizer from a GGUF file's metadata.

The keys are `tokenizer.ggml.*` as the GGUF specification names them. `model` gpt2 is byte-level
BPE, cut first as `pre` says; llama is scored pieces in the manner of SentencePiece.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from headrace.errors import ModelError
from headrace.text.bytelevel import spelled_bytes
from headrace.text.pieces import piece_bytes, piece_model, space_normalizer
from headrace.text.pretokenizers import PLAIN, PRE_TOKENIZERS, PreTokenizer
from headrace.text.tokenizer import Facts

log = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5
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

# How Gemma's turns look, for files without a template of their own. There is no system turn: its
# text begins the first turn of the user.
GEMMA_TURNS = """\
{{- bos_token }}
{%- set talk = messages[1:] if messages[0].role == 'system' else messages %}
{%- set first = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}
{%- for message in talk %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' ~ role ~ '\n' ~ (first if loop.first else '') }}
    {{- message.content | trim ~ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""


def build(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Facts]:
    """The encoder and its facts."""
    model = metadata.get(PREFIX + "model")
    if model is None:
        raise ModelError(f"{PREFIX}model is missing: the file holds no tokenizer")
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{PREFIX}model {model!r} is not supported (supported: gpt2, llama)")
    pieces = _array(metadata, "tokens", str)
    types = _array(metadata, "token_type", int, [1] * len(pieces))
    if len(types) != len(pieces):
        raise ModelError(f"{PREFIX}token_type has {len(types)} entries for {len(pieces)} tokens")
    if model == "llama":
        return _scored_pieces(metadata, pieces, types)
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


def _scored_pieces(
    metadata: Mapping[str, Any], pieces: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, Facts]:
    scores = _array(metadata, "scores", float)
    if len(scores) != len(pieces):
        raise ModelError(f"{PREFIX}scores has {len(scores)} entries for {len(pieces)} tokens")
    prefix = bool(metadata.get(PREFIX + "add_space_prefix", True))
    unknown = next(
        (piece for piece, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None
    )
    mergeable = [kind == NORMAL for kind in types]
    backend = tokenizers.Tokenizer(piece_model(pieces, scores, mergeable, unknown))
    backend.normalizer = space_normalizer(prefix)
    token_bytes = piece_bytes(pieces)
    for token, kind in enumerate(types):
        if kind == CONTROL:
            token_bytes[token] = pieces[token].encode()
    swallowing = _swallowing(metadata, pieces, types)
    add_tokens(backend, pieces, types, swallowing)
    found = facts(metadata, pieces, types, token_bytes, add_bos=True, folding=1)
    return backend, replace(found, strips_leading_space=prefix, swallowing=swallowing)


def _swallowing(metadata: Mapping[str, Any], pieces: list[str], types: list[int]) -> frozenset[int]:
    """Tokens that take in the white space after them: the file can't say, the family is known."""
    if metadata.get("general.architecture") != "phi3":
        return frozenset()
    others = {"<unk>", "<s>", "<|endoftext|>"}
    return frozenset(
        token for token, kind in enumerate(types) if kind == CONTROL and pieces[token] not in others
    )


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
        chat_template=_template(metadata, pieces),
    )


def _template(metadata: Mapping[str, Any], pieces: list[str]) -> str | None:
    """The file's chat template, or that of its family where the file has none."""
    source = metadata.get("tokenizer.chat_template")
    if isinstance(source, str):
        return source
    if str(metadata.get("general.architecture", "")).startswith("gemma") and (
        "<start_of_turn>" in pieces and "<end_of_turn>" in pieces
    ):
        log.info("the file holds no chat template: Gemma's turns are used")
        return GEMMA_TURNS
    return None


def token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    """An id named by the metadata, None where it names none (absent, or all bits set)."""
    value = metadata.get(PREFIX + key)
    if value is None or value in (-1, 0xFFFFFFFF):
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise ModelError(f"{PREFIX}{key} {value!r} is not one of the {count} tokens")
    return value


def add_tokens(
    backend: tokenizers.Tokenizer,
    pieces: list[str],
    types: list[int],
    swallowing: frozenset[int] = frozenset(),
) -> None:
    """Tell the encoder which pieces are found in the text before any cutting."""
    backend.add_tokens(
        [
            AddedToken(
                pieces[token],
                special=kind == CONTROL,
                normalized=False,
                rstrip=token in swallowing,
            )
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
