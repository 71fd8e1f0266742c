"""Plain ASGI: bodies with limits, JSON answers, error bodies, server-sent events.

The streaming path is raw on purpose: one `send` a step, no middleware, no background tasks.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from headrace.errors import EngineDeadError, OverloadError, RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

MAX_BODY = 16 << 20
"""Bytes of a request body; a longer one is 413."""
MAX_DISCARD = 64 << 20
"""Bytes of a too long body that are read and dropped, so that the client gets to see the 413."""
BODY_SECONDS = 20.0
"""A body may take this long, and a second more for each BODY_RATE bytes that came."""
BODY_RATE = 64 << 10
FIRST_PING = 2.0
"""Seconds without an output after which a stream is opened all the same, with a comment."""

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


def error_body(message: str, status: int, field: str | None = None) -> bytes:
    """The nested error object of the OpenAI API."""
    kind = TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    error = {"message": message, "type": kind, "param": field, "code": status}
    return msgspec.json.encode({"error": error})


def as_answer(error: Exception) -> tuple[int, bytes, list[Header]]:
    """Status, body and headers that tell a client of an error."""
    if isinstance(error, OverloadError):
        retry = str(max(1, round(error.retry_after))).encode()
        return error.code, error_body(str(error), error.code), [(b"retry-after", retry)]
    if isinstance(error, RequestError):
        # the rest of a body that is too long or too slow is not waited for
        closing = [(b"connection", b"close")] if error.code in (408, 413) else []
        return error.code, error_body(str(error), error.code, error.field), closing
    if isinstance(error, EngineDeadError):
        return 503, error_body(str(error), 503), []
    return 500, error_body("an internal error; the server's log has the details", 500), []


class Exchange:
    """One HTTP request and its answer."""

    __slots__ = ("_receive", "_send", "arrived", "headers", "method", "path", "scope", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: list[Header] = scope["headers"]
        self.arrived = time.monotonic()
        self.started = False
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def body(self) -> bytes:
        """The whole body. Raises RequestError 413 (too long), 408 (too slow), or 415 (said to be
        other than plain JSON; a browser can't be made to send that to a foreign server)."""
        whole = await self._whole_body()  # also of one that is refused: its sender reads then
        self._check_type()
        return whole

    async def _whole_body(self) -> bytes:
        message = await self._message(BODY_SECONDS)
        part: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return _bounded(part, len(part))
        parts, size, kept = [part], len(part), len(part)
        started = time.monotonic()
        while True:
            limit = started + BODY_SECONDS + size / BODY_RATE - time.monotonic()
            message = await self._message(limit)
            part = message.get("body", b"")
            size += len(part)
            if size <= MAX_BODY:
                parts.append(part)
                kept = size
            elif size > MAX_DISCARD:
                break
            if not message.get("more_body", False):
                break
        if size > kept:
            parts.clear()
        return _bounded(b"".join(parts), size)

    def _check_type(self) -> None:
        kind = self.header(b"content-type")
        media = b"" if kind is None else kind.partition(b";")[0].strip().lower()
        if media and media != b"application/json" and not media.endswith(b"+json"):
            shown = media[:100].decode("latin-1")
            text = f"the content type is {shown}; send Content-Type: application/json"
            raise RequestError(None, text, code=415)
        coding = (self.header(b"content-encoding") or b"identity").strip().lower()
        if coding != b"identity":
            shown = coding[:100].decode("latin-1")
            raise RequestError(None, f"a body in {shown} is not read; send it plain", code=415)

    async def _message(self, limit: float) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout(limit):
                message = await self._receive()
        except TimeoutError:
            raise RequestError(None, "the request body came too slowly", code=408) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def gone(self) -> None:
        """Return once the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: list[Header] | None = None,
    ) -> None:
        """Send a whole answer."""
        await self.open(
            status,
            [
                (b"content-type", content_type),
                (b"content-length", str(len(body)).encode()),
                *(headers or []),
            ],
        )
        await self._send({"type": "http.response.body", "body": body})

    async def open(self, status: int, headers: list[Header]) -> None:
        """Send the head of an answer, with the client's own request id."""
        self.started = True
        if (request_id := self.header(b"x-request-id")) is not None:
            headers.append((b"x-request-id", request_id[:256]))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the body; waits while the client lags."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class ClientGone(Exception):
    """The client closed the connection; nobody waits for an answer."""


def _bounded(body: bytes, size: int) -> bytes:
    if size > MAX_BODY:
        raise RequestError(
            None, f"the body is longer than the limit of {MAX_BODY >> 20} MiB", code=413
        )
    return body


class EventStream:
    """The server-sent events of one answer. `ping` may be called from elsewhere at any time."""

    __slots__ = ("_closed", "_exchange", "_writing", "last")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._closed = False
        self._writing = False
        self.last = time.monotonic()

    @property
    def started(self) -> bool:
        """True once the head is sent: from then on errors travel as events."""
        return self._exchange.started

    async def send(self, events: bytes) -> None:
        """Send whole events."""
        if not self._exchange.started:
            await self._open()
        self.last = time.monotonic()
        self._writing = True
        await self._exchange.write(events)
        self._writing = False

    async def ping(self) -> None:
        """Tell the client, and what lies between, that the answer is still coming."""
        if not self._closed and not self._writing:
            await self.send(b": waiting\n\n")

    async def end(self, events: bytes = b"") -> None:
        """Send the last events and the end mark."""
        if not self._exchange.started:
            await self._open()
        self._closed = True
        await self._exchange.write(events + b"data: [DONE]\n\n", more=False)

    async def _open(self) -> None:
        await self._exchange.open(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        )
