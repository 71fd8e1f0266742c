"""The OpenAPI document, made from the request structs, and a page that shows it."""

import html
from functools import cache
from typing import Any

import msgspec

from headrace import __version__
from headrace.serve.fields import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    FunctionCall,
    FunctionTool,
    Generation,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
)

BODIES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or a conversation"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
PLAIN = {
    "/v1/models": ("The served model, in a list", "application/json"),
    "/v1/models/{model}": ("The served model; another name is 404", "application/json"),
    "/health": ("200 when completions can be served, else 503; needs no key", "text/plain"),
    "/ping": ("As /health", "text/plain"),
    "/ready": ("As /health", "text/plain"),
    "/version": ("The version", "application/json"),
    "/load": ("Requests being answered", "application/json"),
    "/metrics": ("Metrics in Prometheus' text format", "text/plain"),
    "/openapi.json": ("This document", "application/json"),
    "/docs": ("This document as a page", "text/html"),
}
ERRORS = {
    "400": "The request is refused; the message names the field and the limit",
    "401": "The API key is missing or wrong",
    "404": "There is no such model",
    "408": "The body came too slowly",
    "413": "The body is too long",
    "415": "The body is said to be other than plain JSON",
    "422": "A constraint led nowhere",
    "500": "An internal error",
    "503": "The server is full, starting or stopping; see Retry-After",
}
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


def _operation(path: str) -> dict[str, Any]:
    failures = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status, text in ERRORS.items()
    }
    kind, summary = BODIES[path]
    answers = {"application/json": {"schema": {"type": "object"}}}
    if path.startswith("/v1/"):
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": {"description": "The answer", "content": answers}, **failures},
        }
    }


def _reading(path: str) -> dict[str, Any]:
    summary, content = PLAIN[path]
    answers = {"200": {"description": summary, "content": {content: {}}}}
    refused = {status: {"description": ERRORS[status]} for status in ("401", "404", "503")}
    operation: dict[str, Any] = {"summary": summary, "responses": answers | refused}
    if "{model}" in path:
        place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [place]
    return {"get": operation}


@cache
def document() -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    kinds = [kind for kind, _ in BODIES.values()]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__},
        "paths": {
            **{path: _operation(path) for path in BODIES},
            **{path: _reading(path) for path in PLAIN},
        },
        "components": {
            "schemas": {**schemas, "Error": ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return msgspec.json.encode(whole)


def limits(schema: dict[str, Any]) -> str:
    """The type and range of a field's schema, in words."""
    words = {
        "minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "minLength": "length >=",
        "maxLength": "length <=", "minItems": "items >=", "maxItems": "items <=",
        "maxProperties": "entries <=",
    }  # fmt: skip
    parts = []
    for option in schema.get("anyOf", [schema]):
        if option.get("type") == "null":
            continue
        name = option.get("$ref", "").rpartition("/")[2] or str(option.get("type", "any"))
        if name == "array":
            name = f"list of {limits(option.get('items', {})) or 'any'}"
        bounds = [f"{sign} {option[key]}" for key, sign in words.items() if key in option]
        parts.append(" ".join([name, ", ".join(bounds)]).strip())
    return " or ".join(parts)


def field_rows(kind: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """(field, type and range, meaning) of each field of a struct."""
    _, schemas = msgspec.json.schema_components([kind], ref_template="#/{name}")
    properties: dict[str, Any] = schemas[kind.__name__]["properties"]
    return [
        (name, limits(schema), str(schema.get("description", "")))
        for name, schema in properties.items()
    ]


@cache
def page() -> bytes:
    """A page with every path and field; it loads nothing from elsewhere."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>headrace API</title>"
        "<meta name=viewport content='width=device-width'>"
        "<style>body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;"
        "padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8884}code{font-size:.9em}"
        ":root{color-scheme:light dark}</style>"
        f"<h1>headrace {__version__}</h1><p><a href=/openapi.json>openapi.json</a></p>"
    ]
    for path, (kind, summary) in BODIES.items():
        parts.append(f"<h2><code>POST {path}</code></h2><p>{html.escape(summary)}</p><table>")
        parts.append("<tr><th>field<th>type<th>meaning")
        for name, shape, text in field_rows(kind):
            cells = "".join(f"<td>{html.escape(cell)}" for cell in (shape, text))
            parts.append(f"<tr><td><code>{name}</code>{cells}")
        parts.append("</table>")
    parts.append("<h2>Also</h2><table>")
    for path, (summary, _) in PLAIN.items():
        parts.append(f"<tr><td><code>GET {path}</code><td>{html.escape(summary)}")
    parts.append("</table>")
    return "".join(parts).encode()


def markdown() -> str:
    """Tables of every field, for docs/api.md."""
    nested: list[type[msgspec.Struct]] = [
        StreamOptions, ResponseFormat, JsonSchemaFormat, StructuredOutputs, Message, ContentPart,
        ToolCall, FunctionCall, Tool, FunctionTool, ToolChoice, ToolName,
    ]  # fmt: skip
    parts = []
    shared = {name for name, _, _ in field_rows(Generation)}
    parts.append(_table("Fields of completions and chat completions", field_rows(Generation)))
    for kind in [*(kind for kind, _ in BODIES.values()), *nested]:
        own = field_rows(kind)
        title = f"`{kind.__name__}`"
        if issubclass(kind, Generation):
            own = [row for row in own if row[0] not in shared]
            title += ", besides the shared ones"
        parts.append(_table(title, own))
    return "\n".join(parts)


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"### {title}", "", "| field | type | meaning |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {shape.replace('|', '&#124;')} | {text} |" for name, shape, text in rows
    ]
    return "\n".join([*lines, ""])
