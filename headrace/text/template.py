"""Chat templates: Jinja2 as checkpoints carry it, sandboxed and bounded.

The environment is the one that templates are written for (that of `transformers`): trimmed blocks,
loop controls, `raise_exception`, `strftime_now`, a `tojson` that keeps Unicode, and the
training-only `generation` tag, which changes nothing here. A template may come from anywhere, so it
can reach no attribute that Jinja2's immutable sandbox hides, and its steps, seconds and text are
bounded.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import RequestError

log = logging.getLogger(__name__)

MAX_STEPS = 1_000_000
MAX_SECONDS = 2.0
MAX_CHARACTERS = 32_000_000
FIELD = "messages"


class TemplateLimitError(jinja2.TemplateError):
    """A template used up its steps, its seconds or its text."""


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> str:
        """Count one round of a loop or one call of a macro."""
        self._steps -= 1
        if self._steps < 0:
            raise TemplateLimitError(f"the template takes more than {MAX_STEPS} steps")
        if self._steps % 1024 == 0 and time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the template takes more than {MAX_SECONDS} seconds")
        return ""

    @staticmethod
    def join(*parts: Any) -> str:
        """The `~` of the template."""
        text = "".join(map(str, parts))
        if len(text) > MAX_CHARACTERS:
            raise TemplateLimitError(f"the template makes more than {MAX_CHARACTERS} characters")
        return text


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (the attribute is Jinja2's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a step counted in each loop and macro and text growth bounded."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and (_length(left) * _size(right) > MAX_CHARACTERS
                                or _length(right) * _size(left) > MAX_CHARACTERS):  # fmt: skip
            raise TemplateLimitError(f"the template makes more than {MAX_CHARACTERS} items")
        if operator == "**" and (_size(left) > 1 << 32 or _size(right) > 64):
            raise TemplateLimitError("the template raises numbers to huge powers")
        if operator == "%" and isinstance(left, str):
            raise TemplateLimitError("the template formats with %, which is not supported")
        if operator == "+" and _length(left) + _length(right) > MAX_CHARACTERS:
            raise TemplateLimitError(f"the template makes more than {MAX_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        step, join = budget_names(source)
        loops: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in loops:
            call = nodes.Call(nodes.Name(step, "load"), [], [], None, None)
            node.body.insert(0, nodes.Output([call], lineno=node.lineno))
        _bound_joins(tree, join)
        tree.set_lineno(1)
        return tree


def budget_names(source: str) -> tuple[str, str]:
    """Names under which a template finds its budget: no source can hold its own hash."""
    digest = hashlib.blake2b(source.encode("utf-8", "replace"), digest_size=16).hexdigest()
    return f"step_{digest}", f"join_{digest}"


def _bound_joins(tree: nodes.Template, name: str) -> None:
    """Replace each `~` by a call that bounds its result."""

    def bounded(node: Any) -> Any:
        if not isinstance(node, nodes.Concat):
            return node
        call = nodes.Name(name, "load")
        return nodes.Call(call, node.nodes, [], None, None, lineno=node.lineno)

    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, value in parent.iter_fields():
            if isinstance(value, list):
                value[:] = map(bounded, value)
            else:
                setattr(parent, field, bounded(value))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, (int, float)) else 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, jinja2.Undefined):
        raise jinja2.UndefinedError("tojson of an undefined value")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. A broken one is told in the log now and is an error only when used."""

    def __init__(
        self, source: str, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template: jinja2.Template | None = None
        self._fault = ""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            self._fault = str(error) or type(error).__name__
            log.warning("the chat template is broken, chat requests will fail: %s", self._fault)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation. Raises RequestError ('messages') with the template's own
        words where it rejects the conversation, fails on it or takes too much."""
        if self._template is None:
            raise RequestError(
                FIELD,
                f"the model's chat template is broken ({self._fault}); "
                "serve with --chat-template FILE to use another",
            )
        budget = _Budget()
        given = {"messages": messages, **self._tokens, **variables}
        try:
            return self._collect(budget, given)
        except jinja2.TemplateError as error:
            raise RequestError(
                FIELD, f"the chat template refuses the conversation: {error.message}"
            ) from error
        except RecursionError as error:
            raise RequestError(FIELD, "the chat template nests too deep") from error
        except Exception as error:  # whatever a template's expressions raise
            raise RequestError(
                FIELD, f"the chat template fails on this conversation: {error}"
            ) from error

    def _collect(self, budget: _Budget, given: dict[str, Any]) -> str:
        assert self._template is not None
        pieces: list[str] = []
        room = MAX_CHARACTERS
        step, join = budget_names(self.source)
        for piece in self._template.generate({**given, step: budget.step, join: budget.join}):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                return budget.join(*pieces)
        return "".join(pieces)

    def mentions(self, role: str) -> bool:
        """Whether the template names a role."""
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def after_answer(self) -> str:
        """The text that the template puts right after an assistant's answer; empty if it renders no
        plain conversation."""
        answer = "\ue000"
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        try:
            text = self.render(talk, add_generation_prompt=False, tools=None, documents=None)
        except RequestError:
            return ""
        return text.rpartition(answer)[2] if answer in text else ""
