"""Answers for the terminal commands, from a model in this process or from a running server."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.cli import configure
from headrace.cli.flags import add_flags
from headrace.config import EngineConfig
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    import httpx

    from headrace.engine.llm import LLM

Message = Mapping[str, str]


@dataclass
class Facts:
    """What an answer took. seconds: from the question to the end; first: to the first text."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first: float = 0.0
    seconds: float = 0.0
    finish: str | None = None

    def line(self) -> str:
        """One line for a person."""
        decode = self.seconds - self.first
        rate = (self.tokens - 1) / decode if self.tokens > 1 and decode > 0 else 0.0
        cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
        cut = ", cut at max tokens" if self.finish == "length" else ""
        return (
            f"{self.tokens} tokens at {rate:.1f} tok/s, first after {self.first * 1000:.0f} ms,"
            f" prompt {self.prompt_tokens} tokens{cached}{cut}"
        )


class Talker(Protocol):
    """Something that answers. Leaving an iteration early stops the answer."""

    name: str
    facts: Facts

    def chat(self, messages: Sequence[Message]) -> Iterator[str]: ...
    def complete(self, prompt: str) -> Iterator[str]: ...
    def close(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Flags of both commands: sampling, a server's URL, and the engine's own."""
    add = parser.add_argument
    add("--url", metavar="URL", help="ask this running server instead of loading a model")
    add("--api-key", metavar="KEY", help="key of that server")
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="longest answer")
    for name, kind, text in (
        ("temperature", float, "0 is greedy"),
        ("top-p", float, "keep this share of probability"),
        ("top-k", int, "keep this many tokens"),
        ("min-p", float, "drop tokens below this share of the best"),
        ("repetition-penalty", float, "above 1: repeat less"),
    ):
        add(f"--{name}", type=kind, metavar="X" if kind is float else "N", help=text)
    add("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    add("--config", metavar="FILE", help="YAML file with flags by name")
    add_flags(parser, EngineConfig, without=("model",))


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
    given = {name: getattr(arguments, name) for name in names}
    if hasattr(arguments, "seed"):
        given["seed"] = int(arguments.seed)
    return {name: value for name, value in given.items() if value is not None}


def open_talker(arguments: argparse.Namespace) -> Talker:
    """The one that the flags ask for."""
    fields = sampling(arguments)
    if arguments.url is not None:
        return Remote(arguments.url, arguments.api_key, fields)
    (config,) = configure(arguments, EngineConfig)
    from headrace.engine.llm import LLM

    options = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}
    return Local(LLM(options.pop("model"), **options), fields)


class Local:
    """A model in this process."""

    def __init__(self, llm: "LLM", fields: dict[str, Any]) -> None:
        from headrace.engine.params import SamplingParams

        self._llm = llm
        defaults = {
            name: value
            for name, value in llm.loaded.checkpoint.generation_config.items()
            if name in SamplingParams.__dataclass_fields__
        }
        self._params = SamplingParams(**{"max_tokens": None, **defaults, **fields})
        self.name = llm.loaded.checkpoint.name
        self.facts = Facts()

    def chat(self, messages: Sequence[Message]) -> Iterator[str]:
        """The answer to a conversation."""
        return self._stream(self._llm.chat_ids(messages))

    def complete(self, prompt: str) -> Iterator[str]:
        """The continuation of a text."""
        return self._stream(self._llm.tokenizer.encode(prompt))

    def _stream(self, ids: list[int]) -> Iterator[str]:
        self.facts = facts = Facts(prompt_tokens=len(ids))
        started = time.perf_counter()
        for text, result in self._llm.stream_output(ids, self._params):
            facts.seconds = time.perf_counter() - started
            facts.first = facts.first or facts.seconds
            facts.tokens = len(result.outputs[0].token_ids)
            facts.cached_tokens = result.num_cached_tokens
            facts.finish = result.outputs[0].finish_reason
            if text:
                yield text

    def close(self) -> None:
        """Free the model."""
        self._llm.close()


class Remote:
    """A running server."""

    def __init__(self, url: str, key: str | None, fields: dict[str, Any]) -> None:
        import httpx

        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=base, headers=headers, timeout=None)
        self._fields = fields
        self.facts = Facts()
        try:
            answer = self._client.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise HeadraceError(f"--url {url}: {error}") from None
        if answer.status_code != 200:
            raise HeadraceError(f"--url {url}: {_problem(answer)}")
        self.name = str(answer.json()["data"][0]["id"])

    def chat(self, messages: Sequence[Message]) -> Iterator[str]:
        """The answer to a conversation."""
        body = {"messages": list(messages), **self._fields}
        return self._stream("/v1/chat/completions", body)

    def complete(self, prompt: str) -> Iterator[str]:
        """The continuation of a text."""
        return self._stream("/v1/completions", {"prompt": prompt, **self._fields})

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        self.facts = facts = Facts()
        started = time.perf_counter()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise HeadraceError(_problem(answer))
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise HeadraceError(event["error"]["message"])
                if usage := event.get("usage"):
                    facts.prompt_tokens = usage["prompt_tokens"]
                    facts.tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    facts.cached_tokens = details.get("cached_tokens") or 0
                for choice in event["choices"]:
                    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    facts.finish = choice.get("finish_reason") or facts.finish
                    if text:
                        facts.seconds = time.perf_counter() - started
                        facts.first = facts.first or facts.seconds
                        yield text

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _problem(answer: "httpx.Response") -> str:
    """The message of an error answer."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
