"""The Jinja2 sandbox for chat templates, with bounds on steps, seconds, numbers and text.

Jinja2's immutable sandbox hides attributes; it does not bound work. Here each round of a loop, each
call of a macro, a filter or a text's method is a step, numbers given to filters and methods are
small, and what is turned into text is weighed first. The bounds on numbers and text hold while a
template is compiled, too, where constants are folded.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 200_000
MAX_SECONDS = 1.0
MAX_CHARACTERS = 16_000_000
MAX_NUMBER = 10_000
MAX_ITEMS = 200_000
# Filters that pass parts on as they are: no text is made of the whole.
STRUCTURAL = frozenset(
    {"attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length"}
    | {"list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr"}
    | {"sort", "unique"}
)
LONG_NUMBER = re.compile(r"\d{5,}")


class TemplateLimitError(jinja2.TemplateError):
    """A template used up its steps, its seconds or its text."""


class Budget:
    """What one rendering may still use: steps, and seconds of its thread."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> str:
        """Count one round of a loop or one call of a macro."""
        self._steps -= 1
        if self._steps < 0:
            raise TemplateLimitError(f"the template takes more than {MAX_STEPS} steps")
        if self._steps % 1024 == 0 and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"the template takes more than {MAX_SECONDS} seconds")
        return ""


def joined(*parts: Any) -> str:
    """The `~` of a template."""
    weigh(parts)
    return "".join(map(str, parts))


def weigh(value: Any) -> Any:
    """The value, when its text is not too long. Raises TemplateLimitError."""
    characters = items = 0
    stack = [value]
    while stack:
        item = stack.pop()
        items += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        if characters > MAX_CHARACTERS or items > MAX_ITEMS or len(stack) > MAX_ITEMS:
            raise TemplateLimitError(f"the template makes more than {MAX_CHARACTERS} characters")
    return value


def _check_arguments(name: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what makes the result of a filter or a method huge: numbers (widths, counts), and a
    replacement or a separator that multiplies."""
    for value in arguments:
        if isinstance(value, (int, float)) and abs(value) > MAX_NUMBER and name != "range":
            raise TemplateLimitError(f"the template gives {name} a number above {MAX_NUMBER}")
    texts = [value for value in arguments if isinstance(value, str)]
    if name == "format" and texts and LONG_NUMBER.search(texts[0]):
        raise TemplateLimitError("the template formats with huge widths")
    if name == "list" and any(len(text) > MAX_ITEMS for text in texts):
        raise TemplateLimitError(f"the template makes more than {MAX_ITEMS} items")
    if name == "replace" and len(texts) >= 3:
        growth = texts[0].count(texts[1]) * len(texts[2])
    elif name in ("join", "indent", "wordwrap") and len(texts) >= 1:
        growth = sum(map(_length, arguments)) * max(map(len, texts))
    else:
        growth = 0
    if growth > MAX_CHARACTERS:
        raise TemplateLimitError(f"the template makes more than {MAX_CHARACTERS} characters")


def _guarded(
    name: str, function: Callable[..., Any], step: Callable[[], str]
) -> Callable[..., Any]:
    """A filter that counts as a step and weighs what it is given."""

    @functools.wraps(function)
    def guard(*arguments: Any, **named: Any) -> Any:
        step()
        given = (*arguments, *named.values())
        _check_arguments(name, given)
        if name not in STRUCTURAL:
            weigh(given)
        return function(*arguments, **named)

    return guard


def _guarded_format(pattern: str, function: Callable[..., str]) -> Callable[..., str]:
    """The `format` of a text, with its widths bounded and what it is given weighed."""

    @functools.wraps(function)
    def guard(*arguments: Any, **named: Any) -> str:
        given = (pattern, *arguments, *named.values())
        _check_arguments("format", given)
        weigh(given)
        return function(*arguments, **named)

    return guard


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (the attribute is Jinja2's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=weigh,
        )
        del self.globals["lipsum"]
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded(name, function, self.step)
        self.join = joined
        self._current = threading.local()

    def begin(self) -> None:
        """Give this thread a fresh budget, for one rendering."""
        self._current.budget = Budget()

    def step(self) -> str:
        """Count a step of this thread's rendering."""
        budget: Budget | None = getattr(self._current, "budget", None)
        return "" if budget is None else budget.step()

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and (
            _length(left) * _size(right) > MAX_CHARACTERS
            or _length(right) * _size(left) > MAX_CHARACTERS
            or _size(left) * _size(right) > 1 << 256
        ):
            raise TemplateLimitError(f"the template makes more than {MAX_CHARACTERS} items")
        if operator == "**" and (_size(left) > 1 << 32 or _size(right) > 64):
            raise TemplateLimitError("the template raises numbers to huge powers")
        if operator == "%" and isinstance(left, str):
            raise TemplateLimitError("the template formats with %, which is not supported")
        if operator == "+" and _length(left) + _length(right) > MAX_CHARACTERS:
            raise TemplateLimitError(f"the template makes more than {MAX_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            self.step()
            _check_arguments(function.__name__, (owner, *arguments, *named.values()))
            weigh((owner, arguments, named))
        return super().call(context, function, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _guarded_format(value.__self__, wrapped)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in loops:
            call = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            node.body.insert(0, nodes.Output([call], lineno=node.lineno))
        _bound_joins(tree)
        tree.set_lineno(1)
        return tree


def _bound_joins(tree: nodes.Template) -> None:
    """Replace each `~` by a call that bounds its result."""

    def bounded(node: Any) -> Any:
        if not isinstance(node, nodes.Concat):
            return node
        join = nodes.EnvironmentAttribute("join")
        return nodes.Call(join, node.nodes, [], None, None, lineno=node.lineno)

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
