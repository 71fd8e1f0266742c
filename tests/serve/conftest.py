"""Fixtures of the HTTP tests: the application over a fake engine, reached without a socket."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from headrace.serve.app import App
from headrace.serve.metrics import Metrics
from headrace.serve.resolve import Served
from headrace.text.chat import chat_template
from headrace.text.tokenizer import Tokenizer
from tests.serve.fake import FakeEngine
from tests.serve.vocabulary import small_tokenizer

MODEL = "tiny"
CONTEXT = 128


@dataclass
class Site:
    """The application, its engine, and a way to ask. say: the text that every choice gets."""

    tokenizer: Tokenizer
    served: Served
    engine: FakeEngine = field(init=False)
    text: str = "Hello world."
    ends: bool = True
    key: str | None = None
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.engine = FakeEngine(self._script)
        self.metrics = Metrics(MODEL, lambda: self.engine.stats)

    def _script(self, submit: Any, index: int) -> list[int]:
        ids = self.tokenizer.encode(self.text, add_special=False)
        return [*ids, self.tokenizer.eos or 0] if self.ends else ids * 100

    def app(self) -> App:
        app = App(self.engine, self.metrics, lambda: True, self.key)
        app.serve(self.served, chat_template(self.tokenizer))
        return app

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app())
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", trust_env=False
        ) as client:
            return await client.request(method, path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.send("POST", path, json=body, **options)

    async def complete(self, prompt: Any = "One", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": prompt, "max_tokens": 99, **fields})

    async def chat(self, content: Any = "One", **fields: Any) -> httpx.Response:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, the end mark checked and left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, its shape checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    return dict(body["error"])


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture
def site(tokenizer: Tokenizer) -> Site:
    return Site(tokenizer, Served(MODEL, tokenizer, CONTEXT))


Async = Callable[..., Any]


def run_async(test: Async) -> Async:
    """Run an async test to its end."""
    import asyncio

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(test(*args, **kwargs))

    return wrapped
