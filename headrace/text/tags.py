"""Structural tags: free text in which a tag, once begun, must hold what its schema says.

Two forms are read, both as JSON: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`,
and the same under `"format": {"type": "triggered_tags", "triggers": [...], "tags": [{"begin",
"content": {"type": "json_schema", "json_schema": ...}, "end"}]}`.
"""

import json
from typing import Any

from llguidance import StructTag

from headrace.errors import RequestError
from headrace.text.schema import COMPACT, checked_schema, read_json

MAX_TAGS = 256


def tag_grammar(source: str, field: str) -> str:
    """The constraint in llguidance's form. Raises RequestError."""
    value = read_json(source, field)
    triggers, tags = _read(value, field)
    if not tags or len(tags) > MAX_TAGS:
        raise RequestError(field, f"{field}: structural_tag must hold 1 to {MAX_TAGS} structures")
    if not triggers or not all(isinstance(item, str) and item for item in triggers):
        raise RequestError(field, f"{field}: structural_tag.triggers must be non-empty strings")
    parts = []
    for index, (begin, schema, end) in enumerate(tags):
        trigger = next((item for item in triggers if begin.startswith(item)), None)
        if trigger is None:
            raise RequestError(
                field, f"{field}: the begin of structure {index} starts with no trigger"
            )
        checked = checked_schema(json.dumps(schema), field)
        grammar = {**checked, "x-guidance": COMPACT}
        parts.append(StructTag(trigger=trigger, begin=begin, grammar=grammar, end=end))
    return str(StructTag.to_grammar(parts, assume_special=False))


def _read(value: Any, field: str) -> tuple[list[Any], list[tuple[str, Any, str]]]:
    """Triggers, and (begin, schema, end) of each tag."""
    if not isinstance(value, dict):
        raise RequestError(field, f"{field}: structural_tag must be an object")
    form = value.get("format")
    if isinstance(form, dict):
        if form.get("type") != "triggered_tags":
            raise RequestError(
                field,
                f"{field}: structural_tag.format.type {form.get('type')!r} is not supported "
                "(supported: triggered_tags)",
            )
        _known(form, {"type", "triggers", "tags"}, "structural_tag.format", field)
        tags = form.get("tags")
    else:
        form = value
        _known(form, {"type", "triggers", "structures"}, "structural_tag", field)
        tags = form.get("structures")
    triggers = form.get("triggers")
    if not isinstance(tags, list) or not isinstance(triggers, list):
        raise RequestError(field, f"{field}: structural_tag needs lists of structures and triggers")
    return triggers, [_tag(index, tag, field) for index, tag in enumerate(tags)]


def _tag(index: int, tag: Any, field: str) -> tuple[str, Any, str]:
    place = f"structural_tag structure {index}"
    if not isinstance(tag, dict):
        raise RequestError(field, f"{field}: {place} must be an object")
    schema = tag.get("schema")
    content = tag.get("content")
    if isinstance(content, dict):
        if content.get("type") != "json_schema":
            raise RequestError(
                field, f"{field}: {place}: content type {content.get('type')!r} is not supported"
            )
        schema = content.get("json_schema")
    _known(tag, {"type", "begin", "schema", "content", "end"}, place, field)
    begin, end = tag.get("begin"), tag.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str) or schema is None:
        raise RequestError(field, f"{field}: {place} needs begin, schema and end")
    return begin, schema, end


def _known(value: dict[str, Any], names: set[str], place: str, field: str) -> None:
    for name in value:
        if name not in names:
            raise RequestError(field, f"{field}: {place}: '{name}' is not supported")
