"""Object keys in schemas, where the grammar compiler needs help to be exact.

- A pattern of `patternProperties` whose every key is a property already leaves nothing to come: the
  compiler would still let a comma through and then find no key. Such a pattern becomes part of the
  properties that it matches.
- Keys may come twice, which a JSON reader takes for one; so `minProperties` is honoured only as far
  as it can't be met by repeating a key.
"""

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

MAX_PAIRS = 200


def exact_keys(node: dict[str, Any]) -> tuple[str, str] | None:
    """Make the keys of one schema object exact, in place; the keyword at fault and why where that
    can't be done."""
    required = _names(node.get("required"))
    properties = node.get("properties", {})
    least = node.get("minProperties", 0)
    if least <= len(set(required)):
        node.pop("minProperties", None)
    elif least > len(set(required)) + 1 or not set(required) <= set(properties):
        return "minProperties", "can't be kept when keys may repeat: require the keys by name"
    patterns = node.get("patternProperties", {})
    names = list(dict.fromkeys([*properties, *required]))
    if len(patterns) * len(names) > MAX_PAIRS:
        return "patternProperties", f"has more than {MAX_PAIRS} pairs of a pattern and a property"
    for pattern in list(patterns) if names else []:
        matching = [name for name in names if _matches(pattern, name)]
        if matching and not _has_other_keys(pattern, matching):
            _move(node, pattern, matching)
    return None


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _matcher(schema: dict[str, Any]) -> LLMatcher:
    strict: Any = {"whitespace_flexible": False}
    text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=strict)
    return LLMatcher(LLTokenizer("byte"), text, log_level=0)


def _matches(pattern: str, name: str) -> bool:
    """Whether a key matches a pattern, by the compiler's own reading of it."""
    return not _matcher({"type": "string", "const": name, "pattern": pattern}).is_error()


def _has_other_keys(pattern: str, names: list[str]) -> bool:
    """Whether a key that is none of names matches: after all of them, may another key come?"""
    matcher = _matcher(
        {
            "type": "object",
            "properties": {name: {"type": "null"} for name in names},
            "required": names,
            "patternProperties": {pattern: {"type": "null"}},
            "additionalProperties": False,
        }
    )
    so_far = json.dumps(dict.fromkeys(names), separators=(",", ":"))[:-1] + ","
    matcher.consume_tokens(list(so_far.encode()))
    return not matcher.is_error() and any(matcher.compute_bitmask()) and not matcher.is_error()


def _move(node: dict[str, Any], pattern: str, names: list[str]) -> None:
    """Make a pattern part of the properties that it matches."""
    patterns = dict(node["patternProperties"])
    schema = patterns.pop(pattern)
    properties = dict(node.get("properties", {}))
    for name in names:
        properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
    node["properties"] = properties
    if patterns:
        node["patternProperties"] = patterns
    else:
        del node["patternProperties"]
