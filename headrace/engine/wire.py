"""Frames over a socket pair: a 4-byte little-endian length, then one msgpack message.

The API process holds one end, the engine process the other. Either side sees the end of the other
as the end of the stream, so nothing needs to watch process ids.
"""

import select
import socket
import struct
from typing import Generic, TypeVar

import msgspec

Message = TypeVar("Message")
LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30


class Frames(Generic[Message]):
    """Bytes in, messages out. `kind` is the union of messages expected."""

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes; returns the messages that are now whole."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        with memoryview(buffer) as view:
            while len(view) - start >= LENGTH.size:
                (size,) = LENGTH.unpack_from(view, start)
                if size > MAX_FRAME:
                    raise ValueError(f"a frame of {size} bytes is above the limit {MAX_FRAME}")
                end = start + LENGTH.size + size
                if end > len(view):
                    break
                messages.append(self._decoder.decode(view[start + LENGTH.size : end]))
                start = end
        if start:
            del buffer[:start]
        return messages


class Encoder:
    """Messages to frames."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: object) -> bytes:
        """One message as a frame."""
        body = self._encoder.encode(message)
        return LENGTH.pack(len(body)) + body


class Channel(Generic[Message]):
    """The engine process's end: sends never block the engine, receives wait at most `timeout`."""

    def __init__(self, end: socket.socket, kind: object) -> None:
        end.setblocking(False)
        self._socket = end
        self._frames: Frames[Message] = Frames(kind)
        self._encoder = Encoder()
        self._unsent = bytearray()
        self.closed = False

    def send(self, message: object) -> None:
        """Queue a message and send what the socket takes."""
        self._unsent += self._encoder.frame(message)
        self._flush()

    def receive(self, timeout: float) -> list[Message]:
        """Messages that have arrived, waiting up to `timeout` seconds for the first."""
        wants_write = bool(self._unsent)
        readable, writable, _ = select.select(
            [self._socket], [self._socket] if wants_write else [], [], timeout
        )
        if writable:
            self._flush()
        messages: list[Message] = []
        while readable and not self.closed:
            try:
                data = self._socket.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                self.closed = True
                break
            if not data:
                self.closed = True
            messages.extend(self._frames.feed(data))
        return messages

    def drain(self, seconds: float) -> None:
        """Send what is queued, for at most that long."""
        if self._unsent and not self.closed:
            select.select([], [self._socket], [], seconds)
            self._flush()

    def close(self) -> None:
        """Close this end; the other side sees the end of the stream."""
        self.closed = True
        self._socket.close()

    def _flush(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._unsent[:sent]
