"""What of JSON Schema a constraint may use, checked before anything is built from it.

Every keyword is honoured, is an annotation, or is refused by its name: none is ignored. Size,
nesting and numbers are bounded here, without recursion, so that nothing hostile reaches the grammar
compiler. A schema that no finite value satisfies (a `$ref` cycle with no way out) is refused.

Rules: `additionalProperties` absent means that any further property may come, as JSON Schema says.
Subschemas that no `$ref` reaches are not looked at. `$ref` is local.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from headrace.errors import RequestError
from headrace.text.keys import exact_keys
from headrace.text.patterns import MAX_DEPTH, bound_patterns, pattern_fault

# How constrained JSON is spelled: as json.dumps spells it.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_SOURCE = 256 * 1024
MAX_NODES = 2_000
MAX_COUNT = 100_000
MAX_STRING = 16_384
MAX_ONE_OF = 64
MAX_INTEGER = 1 << 53

DESCRIPTIONS = ("title", "description", "default", "example", "examples", "deprecated")
MARKS = ("readOnly", "writeOnly", "discriminator", "$schema", "$id", "$comment")
ANNOTATIONS = frozenset((*DESCRIPTIONS, *MARKS, "$defs", "definitions"))
# An x- name is an annotation by convention, but this one is an instruction to the grammar compiler.
FOREIGN_INSTRUCTION = "x-guidance"
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
MAPS_OF_SCHEMAS = ("properties", "patternProperties")
SCHEMAS = ("items", "additionalProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OTHERS = ("type", "enum", "const", "required", "pattern", "format", "$ref")
HONOURED = frozenset((*LISTS_OF_SCHEMAS, *MAPS_OF_SCHEMAS, *SCHEMAS, *COUNTS, *NUMBERS, *OTHERS))
NEUTRAL = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True}
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def checked_schema(source: str, field: str) -> Any:
    """The schema in a JSON text, without what has no effect. Raises RequestError for `field` that
    names the keyword at fault and its place."""
    schema = read_json(source, field)
    gates = _Gates()
    seen: dict[int, int] = {id(schema): gates.add_all()}
    queue: list[tuple[Any, str]] = [(schema, "#")]
    for node, place in queue:
        if len(queue) > MAX_NODES:
            raise RequestError(field, f"{field}: the schema has more than {MAX_NODES} subschemas")
        _check_node(node, place, field)
        _prove_one_of(schema, node, place, field)
        for child, where in _children(schema, node, place, field):
            if id(child) not in seen:
                seen[id(child)] = gates.add_all()
                queue.append((child, where))
    bound_patterns([node for node, _ in queue], lambda to: _target(schema, to, "", field), field)
    for node, _ in queue:
        _connect(schema, node, seen, gates, field)
    if not gates.opens(seen[id(schema)]):
        raise RequestError(
            field,
            f"{field}: no finite value satisfies the schema "
            "(it contradicts itself, or a $ref cycle has no way out)",
        )
    return {} if schema is True else schema


def read_json(source: str, field: str) -> Any:
    """The value of a bounded JSON text. Raises RequestError."""
    bound_source(source, field)
    depth = 0
    for found in BRACKETS.finditer(source):
        if found[0] in "[{":
            depth += 1
            if depth > 2 * MAX_DEPTH:
                raise RequestError(field, f"{field}: nested deeper than {MAX_DEPTH} levels")
        elif found[0] in "]}":
            depth -= 1
        elif len(found[0]) > MAX_STRING:
            raise RequestError(field, f"{field}: a string of more than {MAX_STRING} characters")
    try:
        return json.loads(source)
    except ValueError as error:
        raise RequestError(field, f"{field}: not valid JSON: {error}") from error


def bound_source(source: str, field: str) -> None:
    """Raise RequestError when a constraint's text is too long."""
    if len(source) > MAX_SOURCE:
        raise RequestError(
            field, f"{field}: {len(source)} characters, more than the limit of {MAX_SOURCE}"
        )


def _refuse(field: str, keyword: str, place: str, why: str) -> RequestError:
    return RequestError(field, f"{field}: schema keyword '{keyword}' at {place}: {why}")


def _check_node(node: Any, place: str, field: str) -> None:
    """Check one schema object's own keywords; take out those without effect."""
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        raise RequestError(field, f"{field}: the schema at {place} must be an object or a boolean")
    if place.count("/") > 2 * MAX_DEPTH:
        raise RequestError(field, f"{field}: nested deeper than {MAX_DEPTH} levels")
    for keyword in list(node):
        value = node[keyword]
        if keyword in NEUTRAL and value is NEUTRAL[keyword]:
            del node[keyword]
        elif keyword == "$id" and place != "#":
            raise _refuse(field, keyword, place, "is not supported below the root")
        elif keyword in HONOURED:
            why = _fault(keyword, value)
            if why:
                raise _refuse(field, keyword, place, why)
        elif keyword == FOREIGN_INSTRUCTION or not (
            keyword in ANNOTATIONS or keyword.startswith("x-")
        ):
            raise _refuse(field, keyword, place, "is not supported")
    inexact = exact_keys(node)
    if inexact is not None:
        raise _refuse(field, inexact[0], place, inexact[1])


def _fault(keyword: str, value: Any) -> str:
    """What is wrong with the value of an honoured keyword, empty if nothing is."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if keyword in COUNTS and not (isinstance(value, int) and number and 0 <= value <= MAX_COUNT):
        return f"must be an integer in [0, {MAX_COUNT}]"
    if keyword in NUMBERS and not (number and abs(value) <= MAX_INTEGER):
        return f"must be a number in [-{MAX_INTEGER}, {MAX_INTEGER}]"
    if keyword == "multipleOf" and value <= 0:
        return "must be above 0"
    if keyword == "items" and isinstance(value, list):
        return "must be a schema (use prefixItems for a list)"
    if keyword in MAPS_OF_SCHEMAS and not isinstance(value, dict):
        return "must be an object of schemas"
    if keyword in LISTS_OF_SCHEMAS and not (isinstance(value, list) and value):
        return "must be a list of at least one schema"
    if keyword == "enum" and not (isinstance(value, list) and value):
        return "must be a list of at least one value"
    if keyword == "required" and not _strings(value):
        return "must be a list of strings"
    if keyword == "type" and not (
        bool(value) and set(value) <= TYPES if _strings(value) else str(value) in TYPES
    ):
        return f"must be one or several of {', '.join(sorted(TYPES))}"
    if keyword in ("pattern", "format") and not isinstance(value, str):
        return "must be a string"
    if keyword in ("pattern", "patternProperties"):
        patterns = [value] if keyword == "pattern" else list(value)
        return next(filter(None, map(pattern_fault, patterns)), "")
    return ""


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _children(root: Any, node: Any, place: str, field: str) -> Iterator[tuple[Any, str]]:
    """The subschemas that take part in a schema object, with their places."""
    if not isinstance(node, dict):
        return
    for keyword in LISTS_OF_SCHEMAS:
        for index, child in enumerate(node.get(keyword, ())):
            yield child, f"{place}/{keyword}/{index}"
    for keyword in MAPS_OF_SCHEMAS:
        for name, child in node.get(keyword, {}).items():
            yield child, f"{place}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}"
    for keyword in SCHEMAS:
        if keyword in node:
            yield node[keyword], f"{place}/{keyword}"
    if "$ref" in node:
        yield _target(root, node["$ref"], place, field), str(node["$ref"])


def _target(root: Any, reference: Any, place: str, field: str) -> Any:
    """What a local reference points at."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _refuse(field, "$ref", place, f"{reference!r} is not a local reference (#/...)")
    value = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise _refuse(field, "$ref", place, f"{reference!r} does not exist")
    return value


def _prove_one_of(root: Any, node: Any, place: str, field: str) -> None:
    """Make oneOf anyOf where no value can satisfy two of its schemas. (The grammar compiler refuses
    the oneOf that it can't prove itself; it does not look through $ref, we do.)"""
    options = node.get("oneOf") if isinstance(node, dict) and "anyOf" not in node else None
    if options is None or len(options) > MAX_ONE_OF:
        return
    seen = [_resolved(root, option, place, field) for option in options]
    if all(_disjoint(root, a, b) for index, a in enumerate(seen) for b in seen[:index]):
        node["anyOf"] = node.pop("oneOf")


def _resolved(root: Any, node: Any, place: str, field: str) -> Any:
    """The schema at the end of a chain of plain references."""
    for _ in range(MAX_DEPTH):
        if not (isinstance(node, dict) and "$ref" in node):
            break
        node = _target(root, node["$ref"], place, field)
    return node


def _disjoint(root: Any, one: Any, other: Any) -> bool:
    """Whether surely no value satisfies both: other types, or objects told apart by a property that
    both require and that has no value in common."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    kinds, others = _kinds(one), _kinds(other)
    if not kinds & others:
        return True
    if kinds != {"object"} or others != {"object"}:
        return False
    for name in set(_list(one, "required")) & set(_list(other, "required")):
        values = [_values(schema, name) for schema in (one, other)]
        if None not in values and not set(values[0] or ()) & set(values[1] or ()):
            return True
    return False


def _kinds(node: dict[str, Any]) -> set[str]:
    """The JSON types that a schema lets through; an integer is a number too."""
    kinds = node.get("type", sorted(TYPES))
    found = {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in TYPES}
    return found | {"integer"} if "number" in found else found


def _list(node: dict[str, Any], keyword: str) -> list[str]:
    value = node.get(keyword)
    return value if isinstance(value, list) and _strings(value) else []


def _values(node: dict[str, Any], name: str) -> list[str] | None:
    """The few strings that a property may be; None where it may be something else."""
    properties = node.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if _strings(values) else None


class _Gates:
    """Finds what can come true: a gate opens when enough of the gates it waits for are open."""

    def __init__(self) -> None:
        self._missing: list[int] = []
        self._waiting: list[list[int]] = []

    def add_all(self) -> int:
        """A gate that needs all that is connected to it."""
        self._missing.append(0)
        self._waiting.append([])
        return len(self._missing) - 1

    def need(self, gate: int, other: int) -> None:
        """gate waits for other."""
        self._missing[gate] += 1
        self._waiting[other].append(gate)

    def need_any(self, gate: int, others: list[int]) -> None:
        """gate waits for one of others."""
        choice = self.add_all()
        for other in others:
            self._waiting[other].append(choice)
        self._missing[choice] = 1
        self.need(gate, choice)

    def opens(self, goal: int) -> bool:
        """Whether the goal opens."""
        ready = [gate for gate, missing in enumerate(self._missing) if missing == 0]
        for gate in ready:
            for waiting in self._waiting[gate]:
                self._missing[waiting] -= 1
                if self._missing[waiting] == 0:
                    ready.append(waiting)
        return self._missing[goal] <= 0


def _connect(root: Any, node: Any, seen: Mapping[int, int], gates: _Gates, field: str) -> None:
    """Make a schema wait for the subschemas of which any value of it holds one."""
    gate = seen[id(node)]
    if node is False:
        gates.need_any(gate, [])
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        gates.need(gate, seen[id(_target(root, node["$ref"], "", field))])
    for child in node.get("allOf", ()):
        gates.need(gate, seen[id(child)])
    for keyword in ("anyOf", "oneOf"):
        if keyword in node:
            gates.need_any(gate, [seen[id(child)] for child in node[keyword]])
    kinds = node.get("type", sorted(TYPES))
    for kind in [kinds] if isinstance(kinds, str) else []:
        for child in _parts_needed(kind, node):
            gates.need(gate, seen[id(child)])


def _parts_needed(kind: str, node: dict[str, Any]) -> Iterator[Any]:
    """The subschemas that every value of one type must hold a value of."""
    if kind == "object":
        properties = node.get("properties", {})
        yield from (properties[name] for name in node.get("required", ()) if name in properties)
    elif kind == "array":
        first = node.get("prefixItems", [])[: node.get("minItems", 0)]
        yield from first
        if node.get("minItems", 0) > len(first) and "items" in node:
            yield node["items"]
