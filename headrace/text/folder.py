"""A tokenizer from a Hugging Face folder.

`tokenizer.json` is the encoder. The begin and end rules are its post-processor's; what ends a
generation comes from tokenizer_config.json, special_tokens_map.json and generation_config.json (or
config.json, where that file is missing: transformers makes the one from the other).
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headrace.errors import ModelError
from headrace.text.bytelevel import spelled_bytes
from headrace.text.pieces import piece_bytes
from headrace.text.tokenizer import Facts

SIDE_FILES = ("special_tokens_map.json", "tokenizer_config.json")


def build(folder: Path) -> tuple[tokenizers.Tokenizer, Facts]:
    """The encoder and its facts."""
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        described = json.loads(path.read_text("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: not a readable tokenizer: {error}") from error
    names: dict[str, Any] = {}
    for side in SIDE_FILES:
        names |= read_json(folder / side)
    _add_declared(backend, names)
    tokens = {
        "bos": _token(backend, names, "bos_token"),
        "eos": _token(backend, names, "eos_token"),
    }
    table, strips = _token_bytes(path, backend, described)
    prefix, suffix = _around(backend)
    added = backend.get_added_tokens_decoder()
    settings = read_json(folder / "generation_config.json") or read_json(folder / "config.json")
    generation = settings.get("eos_token_id")
    ends = generation if isinstance(generation, list) else [generation]
    return backend, Facts(
        vocabulary=len(table),
        token_bytes=table,
        special=frozenset(token for token, entry in added.items() if entry.special),
        bos=tokens["bos"],
        eos=tokens["eos"],
        ends=frozenset(end for end in ends if isinstance(end, int) and 0 <= end < len(table)),
        prefix=prefix,
        suffix=suffix,
        strips_leading_space=strips,
        swallowing=frozenset(t for t, entry in added.items() if entry.lstrip or entry.rstrip),
        folding=3 if backend.normalizer is not None else 1,
        chat_template=_template(folder, names),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


def _add_declared(backend: tokenizers.Tokenizer, names: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json declares, in the order of their ids."""
    declared = names.get("added_tokens_decoder") or {}
    known = backend.get_added_tokens_decoder()
    for token in sorted(map(int, declared)):
        entry = declared[str(token)]
        if token not in known and isinstance(entry, dict):
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            options = {flag: bool(entry.get(flag, False)) for flag in flags}
            backend.add_tokens([AddedToken(str(entry.get("content")), **options)])


def _token(backend: tokenizers.Tokenizer, names: dict[str, Any], key: str) -> int | None:
    """Id of the token that a config names: its text, or an object with `content`."""
    value = names.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    token: int | None = backend.token_to_id(text) if isinstance(text, str) else None
    return token


def _token_bytes(
    path: Path, backend: tokenizers.Tokenizer, described: dict[str, Any]
) -> tuple[list[bytes], bool]:
    """Bytes of every id, and whether decoding drops one leading space."""
    by_id = {token: piece for piece, token in backend.get_vocab(with_added_tokens=True).items()}
    pieces = [by_id.get(token, "") for token in range(max(by_id, default=-1) + 1)]
    decoder = described.get("decoder") or {}
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        table, strips = spelled_bytes(pieces), False
    elif kinds & {"ByteFallback", "Metaspace"} and kinds <= {
        "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"
    }:  # fmt: skip
        table = piece_bytes(pieces)
        strips = "Strip" in kinds or any(
            part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
            for part in parts
        )
    else:
        raise ModelError(f"{path}: decoder {sorted(map(str, kinds))} is not supported")
    for token, entry in backend.get_added_tokens_decoder().items():
        table[token] = entry.content.encode()
    return table, strips


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    return (), ()


def _template(folder: Path, names: dict[str, Any]) -> str | None:
    """The chat template: its own file first, else the config's (of several, the default)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    value = names.get("chat_template") or read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
