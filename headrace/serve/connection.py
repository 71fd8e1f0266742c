"""HTTP connections with limits: head size, head time, number of connections.

uvicorn's protocol has none of these for `httptools`; without them one client can fill the memory
with headers, or hold every file handle with requests that never come.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.serve.http import error_body

MAX_HEAD = 64 << 10
"""Bytes of a request line and its headers."""
HEAD_SECONDS = 20.0
"""Seconds that a head may take to arrive."""
LINGER_SECONDS = 1.0
"""How long a refused connection is still read, so that the client sees the answer."""
SPARE_FILES = 64
"""File handles that are kept for other things than connections, and for those being refused."""
CROWDED_SECONDS = 0.1
"""As LINGER_SECONDS, where there are too many connections."""


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have; returns how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(16, min(soft if soft > 0 else 65536, 65536) - SPARE_FILES)


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol, bounded. max_connections: more are answered 503 and closed."""

    max_connections = 1024

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = True
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections", CROWDED_SECONDS)
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            if self._timer is None:
                self._start_timer()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD and not self._refused:
            self._refuse(431, f"the request head is longer than {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._field_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._field_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value) + 4
        if self._field_bytes <= MAX_HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        self._head_bytes = 0
        if self._field_bytes > MAX_HEAD:
            self._refuse(431, f"the request head is longer than {MAX_HEAD} bytes")
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        if not self._refused:
            super().on_message_complete()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._head_bytes:
            self._refuse(408, "the request head came too slowly")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, linger: float = LINGER_SECONDS) -> None:
        """Answer without the application, and close soon."""
        self._refused = True
        self._stop_timer()
        body = error_body(message, status)
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(body)
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.loop.call_later(linger, self.transport.close)


def connection_class(max_connections: int) -> type[Any]:
    """The protocol class with that limit."""
    return type("LimitedConnection", (Connection,), {"max_connections": max_connections})
