"""Client grammars: GBNF or Lark text, checked before the grammar compiler sees it.

The compiler and the matcher recurse along terminals that are made of other terminals; such chains
are short here, so that no stack runs out. JSON schemas inside (`%json`) are held to the rules of
`schema`.
"""

import json
import re

from llguidance.gbnf_to_lark import any_to_lark

from headrace.errors import RequestError
from headrace.text.patterns import MAX_DEPTH, bound_nesting
from headrace.text.schema import checked_schema

MAX_GRAMMAR = 32 * 1024
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|//[^\n]*|#[^\n]*')
DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)[^:\n]*:", re.MULTILINE)
TERMINAL = re.compile(r"\b_?[A-Z]\w*")
SCHEMA = re.compile(r"%json\s*(?=[\[{])")


def lark_source(source: str, field: str) -> str:
    """The grammar in Lark's form. Raises RequestError."""
    if len(source) > MAX_GRAMMAR:
        raise RequestError(
            field, f"{field}: the grammar has more than {MAX_GRAMMAR} characters: {len(source)}"
        )
    bound_nesting(source, field, "the grammar")
    try:
        converted = any_to_lark(source)
    except Exception as error:  # the converter raises its own and RecursionError
        raise RequestError(field, f"{field}: the grammar can't be read: {error}") from error
    _bound_terminals(converted, field)
    _check_schemas(converted, field)
    return str(converted)


def _check_schemas(lark: str, field: str) -> None:
    for found in SCHEMA.finditer(lark):
        try:
            schema, _ = json.JSONDecoder().raw_decode(lark, found.end())
        except ValueError as error:
            raise RequestError(field, f"{field}: %json holds no valid JSON: {error}") from error
        checked_schema(json.dumps(schema), field)


def _bound_terminals(lark: str, field: str) -> None:
    """Raise RequestError when terminals made of terminals nest too deep, or go in circles."""
    text = LITERAL.sub(" ", lark)
    starts = list(DEFINITION.finditer(text))
    parts: dict[str, set[str]] = {}
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[start.end() : None if following is None else following.start()]
        parts.setdefault(start[1], set()).update(TERMINAL.findall(body))
    terminals = {name: parts[name] for name in parts if TERMINAL.fullmatch(name)}
    left = set(terminals)
    for _ in range(MAX_DEPTH):  # each round takes out those whose parts are all out
        left = {name for name in left if terminals[name] & left}
        if not left:
            return
    raise RequestError(
        field, f"{field}: terminals of the grammar nest deeper than {MAX_DEPTH} levels"
    )
