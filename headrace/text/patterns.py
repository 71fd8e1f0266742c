"""Bounds on regular expressions in constraints: length, nesting, and how many meet on one string.

Intersections are what the grammar compiler is slow at: a dozen expressions that one string must all
match can keep it busy for many seconds.
"""

from collections.abc import Callable, Iterable
from typing import Any

from headrace.errors import RequestError

MAX_DEPTH = 64
MAX_PATTERN = 4_096
MAX_PATTERNS = 16_384
MAX_MEETING = 4
MAX_VISITS = 20_000


def bound_nesting(source: str, field: str, what: str) -> None:
    """Raise RequestError when the brackets of a pattern or grammar nest too deep."""
    depth = 0
    for char in source:
        if char in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                raise RequestError(field, f"{field}: {what} nests deeper than {MAX_DEPTH} levels")
        elif char in ")]}":
            depth = max(0, depth - 1)


def bound_pattern(source: str, field: str, what: str) -> None:
    """Raise RequestError when a pattern is too long or nests too deep."""
    if len(source) > MAX_PATTERN:
        raise RequestError(field, f"{field}: {what} has more than {MAX_PATTERN} characters")
    bound_nesting(source, field, what)


def pattern_fault(pattern: str) -> str:
    """What is wrong with a pattern, empty if nothing is."""
    try:
        bound_pattern(pattern, "", "the pattern")
    except RequestError as error:
        return str(error).lstrip(": ")
    return ""


def bound_patterns(nodes: Iterable[Any], target: Callable[[str], Any], field: str) -> None:
    """Bound the work of all patterns together. nodes: all subschemas; target: what a `$ref` means.
    Raises RequestError."""
    total = 0
    for node in nodes:
        if not isinstance(node, dict):
            continue
        total += len(node.get("pattern", "")) + sum(map(len, node.get("patternProperties", ())))
        if "pattern" in node or "format" in node:
            _bound_meeting(node, target, field)
    if total > MAX_PATTERNS:
        raise RequestError(
            field, f"{field}: the schema's patterns have more than {MAX_PATTERNS} characters"
        )


def _bound_meeting(start: dict[str, Any], target: Callable[[str], Any], field: str) -> None:
    """Refuse a string that more than a few patterns meet on, through allOf, $ref and choices."""
    visits = 0
    branches: list[tuple[Any, int]] = [(start, 0)]
    while branches:
        first, meeting = branches.pop()
        together, choices = [first], []
        seen = set()
        while together:
            node = together.pop()
            visits += 1
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            meeting += ("pattern" in node) + ("format" in node)
            together += node.get("allOf", [])
            if "$ref" in node:
                together.append(target(node["$ref"]))
            choices += [*node.get("anyOf", []), *node.get("oneOf", [])]
            if meeting > MAX_MEETING or visits > MAX_VISITS:
                raise RequestError(
                    field, f"{field}: more than {MAX_MEETING} patterns meet on one string"
                )
        branches += [(choice, meeting) for choice in choices]
