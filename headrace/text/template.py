"""Chat templates: Jinja2 as checkpoints carry it, sandboxed and bounded (`sandbox`).

The environment is the one that templates are written for (that of `transformers`): trimmed blocks,
loop controls, `raise_exception`, `strftime_now`, a `tojson` that keeps Unicode, and the
training-only `generation` tag, which changes nothing here.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from headrace.errors import RequestError
from headrace.text.sandbox import (
    MAX_CHARACTERS,
    Sandbox,
    TemplateLimitError,
    weigh,
)

log = logging.getLogger(__name__)

FIELD = "messages"
MAX_SOURCE = 200_000
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, jinja2.Undefined):
        raise jinja2.UndefinedError("tojson of an undefined value")
    if isinstance(indent, int) and indent > 64:
        raise TemplateLimitError("the template indents by more than 64")
    weigh(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> Sandbox:
    environment = Sandbox()
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
        self._environment = _environment()
        try:
            if len(source) > MAX_SOURCE:
                raise TemplateLimitError(f"it is longer than {MAX_SOURCE} characters")
            self._template = self._environment.from_string(source)
        except Exception as error:  # Python's compiler has its own limits and errors
            self._fault = str(error) or type(error).__name__
            log.warning("the chat template is broken, chat requests will fail: %s", self._fault)

    @property
    def fault(self) -> str | None:
        """Why the template can't be used, None where it can."""
        return self._fault if self._template is None else None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation. Raises RequestError ('messages') with the template's own
        words where it rejects the conversation, fails on it or takes too much."""
        if self._template is None:
            raise RequestError(
                FIELD,
                f"the model's chat template is broken ({self._fault}); "
                "serve with --chat-template FILE to use another",
            )
        given = {**self._tokens, **variables, "messages": messages}
        try:
            return self._collect(self._template, given)
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

    def _collect(self, template: jinja2.Template, given: dict[str, Any]) -> str:
        self._environment.begin()
        pieces: list[str] = []
        room = MAX_CHARACTERS
        for piece in template.generate(given):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                raise TemplateLimitError(
                    f"the template makes more than {MAX_CHARACTERS} characters"
                )
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
