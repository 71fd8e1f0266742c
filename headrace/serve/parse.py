"""From the bytes of a body to a request, with errors that name the field and the limit."""

import asyncio
import difflib
import re
import typing
from functools import cache
from typing import Any, TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.serve.fields import MAX_MESSAGES

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(
    r"^(?P<what>.*) - at (?:`(?P<part>key|value)` in )?`\$\.?(?P<path>.*)`$", re.DOTALL
)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*?)`")


RENAMED = {
    "functions": "tools", "function_call": "tool_choice", "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens", "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty",
    "stop_words": "stop",
}  # fmt: skip
"""Names that other or older APIs have for fields of this one."""
LARGE_BODY = 64 << 10
"""Bytes from which a body is decoded in a thread."""


async def parsed(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """As `parse`; a large body does not hold up the event loop."""
    if len(body) < LARGE_BODY:
        return parse(body, decoder)
    return await asyncio.to_thread(parse, body, decoder)


def parse(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The request that `body` holds. Raises RequestError with status 400 and the field at fault.

    A body is decoded at full speed first; only one that fails is looked at again, without its
    nulls (null means absent, also for a field that is not known) and for the words.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        first = error
    except msgspec.DecodeError as error:
        raise RequestError(None, f"the body is not legal JSON: {_reason(error)}") from None
    except RecursionError:
        raise RequestError(None, "the body is nested too deeply") from None
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError:  # a number that nothing holds: the first error knows its field
        raise explain(first, decoder.type) from None
    except msgspec.DecodeError as error:
        raise RequestError(None, f"the body is not legal JSON: {_reason(error)}") from None
    except RecursionError:
        raise RequestError(None, "the body is nested too deeply") from None
    try:
        if not isinstance(value, dict):
            raise RequestError(None, "the body must be a JSON object")
        present = without_nulls(value, typing.cast("type[msgspec.Struct]", decoder.type))
        if present == value:
            raise explain(first, decoder.type)
        converted: T = msgspec.convert(present, type=decoder.type, str_keys=True)
        return converted
    except msgspec.ValidationError as error:
        raise explain(error, decoder.type) from None
    except RecursionError:
        raise RequestError(None, "the body is nested too deeply") from None


def without_nulls(value: Any, struct: type[msgspec.Struct]) -> Any:
    """The value without the null members of objects that are structs in `struct`; what the client
    may fill freely (schemas, metadata) is left as it is."""
    if not isinstance(value, dict):
        return value
    inner = _inner(struct)
    present = {}
    for key, item in value.items():
        if item is None:
            continue
        one, many = inner.get(key, (None, None))
        if many is not None and isinstance(item, list) and len(item) <= MAX_MESSAGES:
            item = [without_nulls(each, many) for each in item]
        elif one is not None:
            item = without_nulls(item, one)
        present[key] = item
    return present


@cache
def _inner(struct: Any) -> dict[str, tuple[Any, Any]]:
    """Per field: the struct that it may be, and the struct that its list may hold."""
    hints = typing.get_type_hints(struct)
    found = {}
    for name, kind in hints.items():
        many = _part(kind, list)
        found[name] = (_part(kind, msgspec.Struct), many and _part(many, msgspec.Struct))
    return found


def _part(kind: Any, wanted: Any) -> Any:
    """The struct in a type, or what its list holds; None where there is none."""
    origin = typing.get_origin(kind)
    if origin is list:
        return typing.get_args(kind)[0] if wanted is list else None
    if origin is not None:
        found = [_part(option, wanted) for option in typing.get_args(kind)]
        return next((option for option in found if option is not None), None)
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return kind if is_struct and wanted is msgspec.Struct else None


def _reason(error: msgspec.DecodeError) -> str:
    text = str(error).removeprefix("JSON is malformed: ")
    if "truncated" in text:
        return "it ends early, or a \\u escape is half of a surrogate pair"
    return text[:1].lower() + text[1:]


def explain(error: msgspec.ValidationError, kind: Any) -> RequestError:
    """The refusal for a value of the wrong type or out of range."""
    text = str(error)
    match = _AT.match(text)
    what, path = (match["what"], match["path"]) if match else (text, "")
    if unknown := _UNKNOWN.match(what):
        name = unknown["name"][:100]
        where = f"{path}.{name}" if path else name
        known = [field.encode_name for field in msgspec.structs.fields(kind)] if not path else []
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        hint = f"; use {RENAMED[name]}" if name in RENAMED else hint
        return RequestError(where, f"{where}: this field is not known{hint}")
    if missing := _MISSING.match(what):
        where = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(where, f"{where}: required")
    if not path:
        return RequestError(None, "the body must be a JSON object")
    what = what.replace("`", "").replace(" | null", "")
    what = what[:1].lower() + what[1:]
    path = path.removesuffix("[...]")  # the reader doesn't say which key
    if match and match["part"] == "key":
        what = f"a key: {what}"
    return RequestError(path, f"{path}: {what}{_limits(kind, path)}")


def _limits(kind: Any, path: str) -> str:
    """The range of a top-level field, as words to add to a refusal."""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    found = _properties(kind).get(name, {})
    options = [found, *found.get("anyOf", [])]
    words = {
        "minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most",
        "minLength": "length at least", "maxLength": "length at most",
        "minItems": "items at least", "maxItems": "items at most",
    }  # fmt: skip
    parts = [f"{words[key]} {value}" for item in options for key, value in item.items()
             if key in words]  # fmt: skip
    return f" ({name}: {', '.join(parts)})" if parts else ""


@cache
def _properties(kind: Any) -> dict[str, Any]:
    """The JSON schema of each field."""
    schema = msgspec.json.schema(kind)
    properties: dict[str, Any] = schema["$defs"][kind.__name__]["properties"]
    return properties
