"""The HTTP API as one ASGI application: paths, the key, and what each handler does."""

import asyncio
import hashlib
import hmac
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from headrace import __version__
from headrace.errors import EngineDeadError, HeadraceError, OverloadError, RequestError
from headrace.serve.answer import answer, fail
from headrace.serve.chat_shape import ChatShape
from headrace.serve.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from headrace.serve.http import (
    ClientGone,
    EventStream,
    Exchange,
    Receive,
    Scope,
    Send,
    as_answer,
    error_body,
)
from headrace.serve.message import reading_of, tool_plan
from headrace.serve.metrics import Metrics
from headrace.serve.parse import parsed
from headrace.serve.prompts import chat_prompt, completion_prompts
from headrace.serve.resolve import Plan, Served, plan
from headrace.serve.run import Engine, Run
from headrace.serve.shapes import CompletionShape, Shape, encode, new_id
from headrace.text.chat import ChatTemplate, chat_template

log = logging.getLogger("headrace.serve")
Handler = Callable[[Exchange], Awaitable[None]]

OPEN_PATHS = frozenset({"/health"})
"""What answers without a key."""
PING_EVERY = 10.0
"""Seconds of silence after which a stream gets a comment."""


class App:
    """The ASGI application.

    A request waits for `serve` to have been called, or for `fail`: the server may listen while the
    engine is still loading. alive: whether the engine runs. paths: what it answers, by path and
    method (one that ends in / takes a name after it).
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        alive: Callable[[], bool],
        api_key: str | None = None,
        log_requests: bool = False,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._alive = alive
        self._key = None if api_key is None else _digest(b"Bearer " + api_key.encode())
        self._log_requests = log_requests
        self._served: Served | None = None
        self._template: ChatTemplate | None = None
        self._failure: Exception | None = None
        self._settled = asyncio.Event()
        self._created = int(time.time())
        self._streams: set[EventStream] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._draining = False
        self._cutting = False
        self._numbers = itertools.count()
        self._completion_body = msgspec.json.Decoder(CompletionRequest)
        self._chat_body = msgspec.json.Decoder(ChatRequest)
        self._tokenize_body = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize_body = msgspec.json.Decoder(DetokenizeRequest)
        self.paths: Mapping[str, Mapping[str, Handler]] = {
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/models": {"GET": self._models},
            "/v1/models/": {"GET": self._model},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/ready": {"GET": self._health},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._show_metrics},
            "/openapi.json": {"GET": self._openapi},
            "/docs": {"GET": self._docs},
        }

    # --- life ---------------------------------------------------------------------------------

    def serve(self, served: Served, template: ChatTemplate | None) -> None:
        """The model is ready: answer requests from now on."""
        self._served, self._template = served, template
        self._settled.set()

    def fail(self, error: Exception) -> None:
        """The engine will not come: refuse every request with this error."""
        self._failure = error
        self._settled.set()

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self._draining = True

    def cut(self) -> None:
        """End the requests that still run with an error."""
        self._cutting = True
        for task in list(self._running):
            task.cancel()

    async def ping_streams(self) -> None:
        """Keep silent streams open with comments, for ever."""
        while True:
            await asyncio.sleep(PING_EVERY / 4)
            now = time.monotonic()
            late = [stream for stream in self._streams if now - stream.last > PING_EVERY]
            for stream in late:
                asyncio.ensure_future(stream.ping())  # noqa: RUF006

    async def _ready(self) -> Served:
        await self._settled.wait()
        if self._failure is not None:
            raise EngineDeadError(str(self._failure))
        if self._draining:
            raise OverloadError("the server is shutting down", retry_after=5.0)
        assert self._served is not None
        return self._served

    # --- ASGI ---------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"this server speaks HTTP only, not {scope['type']}")
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except ClientGone:
            return
        except Exception as error:
            if isinstance(error, OverloadError):
                self._metrics.refused()
            if not isinstance(error, HeadraceError):
                log.exception("an error while answering %s %s", exchange.method, exchange.path)
            if exchange.started:
                raise
            status, body, headers = as_answer(error)
            await exchange.answer(status, body, headers=headers)
        finally:
            if self._log_requests:
                seconds = time.monotonic() - exchange.arrived
                log.info("%s %s %.3f s", exchange.method, exchange.path, seconds)

    async def _route(self, exchange: Exchange) -> None:
        if not self._allowed(exchange):
            headers = [(b"www-authenticate", b"Bearer")]
            text = "the API key is missing or wrong; send Authorization: Bearer KEY"
            await exchange.answer(401, error_body(text, 401), headers=headers)
            return
        path = exchange.path
        if path.startswith("/v1/models/"):
            path = "/v1/models/"
        methods = self.paths.get(path)
        if methods is None:
            path = exchange.path[:200]
            await exchange.answer(404, error_body(f"there is no path {path}", 404))
            return
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = methods.get(method)
        if handler is None:
            text = f"{exchange.path} takes {', '.join(methods)}, not {exchange.method}"
            headers = [(b"allow", ", ".join(methods).encode())]
            await exchange.answer(405, error_body(text, 405), headers=headers)
            return
        await handler(exchange)

    def _allowed(self, exchange: Exchange) -> bool:
        """Whether the key is right; compared as digests, in constant time."""
        if self._key is None or (exchange.path in OPEN_PATHS):
            return True
        given = exchange.header(b"authorization") or b""
        return hmac.compare_digest(_digest(given), self._key)

    # --- generation ---------------------------------------------------------------------------

    async def _completions(self, exchange: Exchange) -> None:
        request = await parsed(await exchange.body(), self._completion_body)
        served = await self._ready()
        served.check_name(request.model)
        ids, texts = await completion_prompts(request, served)
        answer_id = new_id("cmpl", request.request_id)
        max_tokens = 16 if request.max_tokens is None else request.max_tokens
        resolved = plan(request, served, ids, max_tokens, self._engine_id(answer_id))
        echo = None
        if request.echo:
            echo = [
                served.tokenizer.decode(submit.prompt, skip_special=False)
                if text is None or request.truncate_prompt_tokens is not None
                else text
                for submit, text in zip(resolved.submits, texts, strict=True)
            ]
        shape = CompletionShape(answer_id, served, resolved.text, resolved.n, echo)
        await self._answer(exchange, resolved, served, shape)

    async def _chat(self, exchange: Exchange) -> None:
        request = await parsed(await exchange.body(), self._chat_body)
        served = await self._ready()
        served.check_name(request.model)
        template = self._template
        if request.chat_template is not None:
            template = chat_template(served.tokenizer, request.chat_template)
            if template is not None and template.fault is not None:
                text = f"chat_template: the template is broken ({template.fault})"
                raise RequestError("chat_template", text)
        tools = tool_plan(request, template)
        shown = [] if tools is None else tools.tools or []
        ids = await chat_prompt(request, served, template, shown)
        if not ids:
            text = "messages: the chat template makes an empty prompt of them"
            raise RequestError("messages", text)
        limits = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(
                "max_completion_tokens",
                "max_completion_tokens: differs from max_tokens; give one of them",
            )
        answer_id = new_id("chatcmpl", request.request_id)
        max_tokens = next(iter(limits), None)
        reading = reading_of(request, tools, served, template, ids)
        resolved = plan(
            request, served, [ids], max_tokens, self._engine_id(answer_id),
            None if tools is None else tools.grammar, reading.keep, reading.after,
        )  # fmt: skip
        last = request.messages[-1]
        echo = ""
        if request.echo and last.role == "assistant" and isinstance(last.content, str):
            echo = last.content
        shape = ChatShape(answer_id, served, resolved.text, reading, echo)
        await self._answer(exchange, resolved, served, shape)

    def _engine_id(self, answer_id: str) -> str:
        """An id of its own in the engine, whatever the client named the request."""
        return f"{answer_id}-{next(self._numbers)}"

    async def _answer(
        self, exchange: Exchange, resolved: Plan, served: Served, shape: Shape
    ) -> None:
        for submit in resolved.submits:
            self._metrics.submitted(resolved.n, submit.max_tokens)
        task = asyncio.current_task()
        assert task is not None
        gone = asyncio.create_task(exchange.gone())
        left = False

        def leave(_: object) -> None:
            nonlocal left
            if not gone.cancelled():
                left = True
                task.cancel()

        gone.add_done_callback(leave)
        stream = EventStream(exchange) if resolved.stream else None
        self._running.add(task)
        if stream is not None:
            self._streams.add(stream)
        try:
            async with Run(resolved, served, self._engine, self._metrics, exchange.arrived) as run:
                await answer(exchange, run, shape, stream)
            self._metrics.answered(time.monotonic() - exchange.arrived)
        except asyncio.CancelledError:
            if left:
                raise ClientGone from None
            if not self._cutting:
                raise
            task.uncancel()
            await fail(exchange, stream, EngineDeadError("the server was shut down"))
        finally:
            gone.remove_done_callback(leave)
            gone.cancel()
            self._running.discard(task)
            if stream is not None:
                self._streams.discard(stream)

    # --- the small ones -----------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        served = await self._ready()
        models = [self._card(served)]
        await exchange.answer(200, encode({"object": "list", "data": models}))

    async def _model(self, exchange: Exchange) -> None:
        served = await self._ready()
        served.check_name(exchange.path.removeprefix("/v1/models/"))
        await exchange.answer(200, encode(self._card(served)))

    def _card(self, served: Served) -> dict[str, object]:
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "root": served.name,
            "parent": None,
            "max_model_len": served.max_model_len,
            "permission": [],
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        request = await parsed(await exchange.body(), self._tokenize_body)
        served = await self._ready()
        served.check_name(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("prompt", "prompt: give either prompt or messages")
        if request.prompt is not None:
            text = CompletionRequest(
                prompt=request.prompt, add_special_tokens=request.add_special_tokens,
                truncate_prompt_tokens=-1,
            )  # fmt: skip
            (ids,), _ = await completion_prompts(text, served)
        else:
            ids = await chat_prompt(request, served, self._template)
        result = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids,
                  "token_strs": None}  # fmt: skip
        if request.return_token_strs:
            result["token_strs"] = [served.tokenizer.token_text(token) for token in ids]
        await exchange.answer(200, encode(result))

    async def _detokenize(self, exchange: Exchange) -> None:
        request = await parsed(await exchange.body(), self._detokenize_body)
        served = await self._ready()
        served.check_name(request.model)
        for token in request.tokens:
            if token >= served.tokenizer.vocabulary:
                raise RequestError(
                    "tokens",
                    f"tokens: id {token} is outside the vocabulary of"
                    f" {served.tokenizer.vocabulary}",
                )
        text = served.tokenizer.decode(request.tokens, skip_special=False)
        await exchange.answer(200, encode({"prompt": text}))

    async def _health(self, exchange: Exchange) -> None:
        ready = self._served is not None and self._alive() and not self._draining
        await exchange.answer(200 if ready else 503, b"", b"text/plain")

    async def _version(self, exchange: Exchange) -> None:
        await exchange.answer(200, encode({"version": __version__}))

    async def _load(self, exchange: Exchange) -> None:
        await exchange.answer(200, encode({"server_load": self._metrics.open}))

    async def _show_metrics(self, exchange: Exchange) -> None:
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        await exchange.answer(200, self._metrics.text(), kind)

    async def _openapi(self, exchange: Exchange) -> None:
        from headrace.serve.openapi import document

        await exchange.answer(200, document())

    async def _docs(self, exchange: Exchange) -> None:
        from headrace.serve.openapi import page

        await exchange.answer(200, page(), b"text/html; charset=utf-8")


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
