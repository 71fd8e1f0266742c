"""A small HTTP/1.1 client for load: streamed answers, time stamps, little CPU.

Events are not decoded one by one; a pattern finds whether an event holds text, and only the one
with the usage is parsed. So a load client on the same machine takes little from the server.
"""

import asyncio
import json
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|arguments)"\s*:\s*"(?!")')
USAGE = re.compile(rb'"usage"\s*:\s*\{')
FAILED = re.compile(rb'^data:\s*\{\s*"error"')


@dataclass
class Sample:
    """What one request saw. Times in seconds: ttft and e2e from the sending, itl between events
    with text. error: why it failed, else None."""

    started: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float:
        """Mean seconds of an output token after the first."""
        rest = self.output_tokens - 1
        return (self.e2e - self.ttft) / rest if rest > 0 else 0.0


class Exchange(asyncio.Protocol):
    """One connection; carries one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reusable = True
        self._buffer = bytearray()
        self._body = bytearray()
        self._sample = Sample()
        self._last = 0.0
        self._done: asyncio.Future[None] | None = None
        self._status = 0
        self._length: int | None = None
        self._chunked = False
        self._in_head = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, data: bytes, sample: Sample) -> "asyncio.Future[None]":
        """Send a request; the future is done when its answer is whole."""
        assert self.transport is not None
        self._sample = sample
        self._in_head = True
        self._body.clear()
        self._buffer.clear()
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self._done

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is not None and not self._done.done():
            if not self._in_head and self._length is None and not self._chunked:
                self._finish()
            else:
                self._fail(f"connection lost: {exc or 'closed by the server'}")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        if self._in_head:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        if self._chunked:
            self._take_chunks()
        else:
            self._body += self._buffer
            self._buffer.clear()
        if self._status == 200:
            self._events(now)
        if self._done is not None and not self._done.done():
            whole = self._length is not None and self._taken() >= self._length
            if whole and not self._chunked:
                self._finish()

    def _taken(self) -> int:
        return self._consumed + len(self._body)

    def _head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        self._status = int(lines[0].split(b" ", 2)[1])
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        length = headers.get(b"content-length")
        self._length = None if length is None else int(length)
        self._streamed = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._consumed = 0
        self._in_head = False
        if headers.get(b"connection") == b"close":
            self.reusable = False

    def _take_chunks(self) -> None:
        """Move whole chunks to the body; the empty one ends the answer."""
        buffer, start = self._buffer, 0
        while True:
            line = buffer.find(b"\r\n", start)
            if line < 0:
                break
            size = int(buffer[start:line].split(b";")[0], 16)
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            if size == 0:
                del buffer[: end + 2]
                if self._status == 200:
                    self._events(time.perf_counter())
                self._finish()
                return
            self._body += buffer[line + 2 : end]
            start = end + 2
        del buffer[:start]

    def _events(self, now: float) -> None:
        """Look at each whole event of a stream."""
        if not self._streamed:
            return
        body, start, sample = self._body, 0, self._sample
        while (end := body.find(b"\n\n", start)) >= 0:
            event = bytes(body[start:end])
            start = end + 2
            if not event.startswith(b"data:"):
                continue
            if TEXT.search(event):
                if sample.ttft == 0.0:
                    sample.ttft = now - sample.started
                else:
                    sample.itl.append(now - self._last)
                self._last = now
                sample.e2e = now - sample.started
            if USAGE.search(event):
                self._usage(json.loads(event[5:])["usage"])
            elif FAILED.match(event):
                sample.error = event[5:300].decode("utf-8", "replace")
        self._consumed += start
        del body[:start]

    def _usage(self, usage: dict[str, Any]) -> None:
        self._sample.prompt_tokens = usage.get("prompt_tokens") or 0
        self._sample.output_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        self._sample.cached_tokens = details.get("cached_tokens") or 0

    def _finish(self) -> None:
        if self._done is None or self._done.done():
            return
        sample = self._sample
        if self._status != 200:
            text = bytes(self._body[:300]).decode("utf-8", "replace")
            sample.error = f"status {self._status}: {text}"
        elif not self._streamed:
            sample.e2e = time.perf_counter() - sample.started
            sample.ttft = sample.e2e
            self._usage(json.loads(bytes(self._body)).get("usage") or {})
        elif sample.ttft == 0.0:
            sample.e2e = sample.ttft = time.perf_counter() - sample.started
        self._done.set_result(None)

    def _fail(self, reason: str) -> None:
        self._sample.error = self._sample.error or reason
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Sends requests to one server over connections that are used again."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme != "http":
            raise ValueError(f"{base_url}: only http:// is supported")
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._base = parts.path.rstrip("/")
        lines = [f"host: {self._host}:{self._port}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._lines = "\r\n".join(lines)
        self._free: deque[Exchange] = deque()

    async def post(self, path: str, body: bytes, timeout: float | None = None) -> Sample:
        """One request and what it saw. Failures are in the sample, none is raised."""
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._lines}\r\n"
        data = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        sample = Sample(started=time.perf_counter())
        try:
            async with asyncio.timeout(timeout):
                exchange = await self._connection()
                await exchange.send(data, sample)
        except TimeoutError:
            sample.error = f"no whole answer within {timeout} s"
            return sample
        except OSError as error:
            sample.error = f"cannot connect: {error}"
            return sample
        if exchange.reusable:
            self._free.append(exchange)
        return sample

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET. Raises OSError."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"GET {self._base}{path} HTTP/1.1\r\n{self._lines}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        top, _, body = answer.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in top.lower():
            body = _joined(body)
        return int(top.split(b" ", 2)[1]), body

    def close(self) -> None:
        """Close the connections."""
        for exchange in self._free:
            if exchange.transport is not None:
                exchange.transport.close()

    async def _connection(self) -> Exchange:
        while self._free:
            exchange = self._free.pop()
            if exchange.reusable:
                return exchange
        loop = asyncio.get_running_loop()
        _, exchange = await loop.create_connection(Exchange, self._host, self._port)
        return exchange


def _joined(body: bytes) -> bytes:
    """The content of a chunked body."""
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size.split(b";")[0], 16)
        parts.append(body[:count])
        body = body[count + 2 :]
        if count == 0:
            break
    return b"".join(parts)
