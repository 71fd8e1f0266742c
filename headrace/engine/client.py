"""The API process's side of an engine process: submit, stream, abort."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from headrace.config import EngineConfig
from headrace.engine.messages import (
    Abort,
    Fatal,
    Finish,
    FromEngine,
    Observation,
    Output,
    Outputs,
    Ready,
    Refused,
    ResetCache,
    Shutdown,
    Submit,
)
from headrace.engine.wire import Encoder, Frames
from headrace.errors import EngineDeadError, OverloadError, RequestError


class Stream(AsyncIterator[Output]):
    """The outputs of one request, of all its choices, as they come.

    Ends after every choice has finished. Raises EngineDeadError when the engine process is lost.
    Outputs that arrive while the reader is busy wait here, so a slow client delays only itself.
    """

    def __init__(self, submit: Submit) -> None:
        self.id = submit.id
        self._open = set(range(submit.n))
        self._queue: deque[Output] = deque()
        self._arrived = asyncio.Event()
        self._error: Exception | None = None

    def take(self, output: Output) -> bool:
        """Add an output; True when the request is over with it."""
        self._queue.append(output)
        if output.finish is not None:
            self._open.discard(output.index)
        self._arrived.set()
        return not self._open

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self._error = error
        self._arrived.set()

    def end_choice(self, index: int) -> bool:
        """A choice was ended from this side (a stop string); True when it was the last."""
        self._open.discard(index)
        self._arrived.set()
        return not self._open

    def waiting(self) -> list[Output]:
        """Take all outputs that are here already, without waiting (to coalesce them)."""
        found = list(self._queue)
        self._queue.clear()
        return found

    async def __anext__(self) -> Output:
        while not self._queue:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._queue.popleft()


class EngineClient(asyncio.Protocol):
    """One engine process, from this process's event loop.

    stats: the engine's latest counters and gauges. on_finished: called with each request's timings.
    Lifecycle: `start` spawns the process and returns at once; `ready` joins it to the event loop.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", end: socket.socket) -> None:
        self._process = process
        self._socket = end
        self._frames: Frames[FromEngine] = Frames(FromEngine)
        self._encoder = Encoder()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[str, Stream] = {}
        self._ready: asyncio.Future[Ready] | None = None
        self._closed: asyncio.Future[None] | None = None
        self._death = "the engine process ended"
        self.stats: dict[str, float] = {}
        self.on_finished: Callable[[Observation], None] | None = None
        self.alive = False

    @classmethod
    def start(cls, config: EngineConfig) -> "EngineClient":
        """Spawn the engine process; it loads while this process goes on."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "headrace.engine.process",
                    str(theirs.fileno()),
                    msgspec.json.encode(config).decode(),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        return cls(process, ours)

    async def ready(self) -> Ready:
        """Wait until the engine can take requests. Raises EngineDeadError saying why it cannot."""
        loop = asyncio.get_running_loop()
        if self._ready is None:
            self._ready = loop.create_future()
            self._closed = loop.create_future()
            await loop.create_connection(lambda: self, sock=self._socket)
        return await asyncio.shield(self._ready)

    async def submit(self, submit: Submit) -> Stream:
        """Hand over a request.

        Raises EngineDeadError when the engine is gone. A refusal (RequestError, OverloadError) is
        raised by the stream in place of its first output.
        """
        if not self.alive:
            raise EngineDeadError(self._death)
        stream = Stream(submit)
        self._streams[submit.id] = stream
        self._send(submit)
        return stream

    def abort(self, request_id: str) -> None:
        """The client left: free the request. Unknown ids are ignored."""
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort((request_id,)))

    def finish(self, request_id: str, index: int) -> None:
        """A stop string was found in a choice: end that sequence."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._send(Finish(request_id, index))
            if stream.end_choice(index):
                del self._streams[request_id]

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that nobody uses."""
        self._send(ResetCache())

    async def shutdown(self, drain: float) -> None:
        """Let requests finish for up to `drain` seconds, then end the process."""
        if self.alive:
            self._send(Shutdown(drain))
            assert self._closed is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain + 2):
                    await asyncio.shield(self._closed)
        self.kill()

    def kill(self) -> None:
        """End the process now."""
        self.alive = False
        if self._transport is not None:
            self._transport.close()
        else:
            self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)  # it ends by itself when the socket closes
        for end in (self._process.terminate, self._process.kill):
            if self._process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=5)

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, Outputs):
                self._take(message)
            elif isinstance(message, Refused):
                self._refuse(message)
            elif isinstance(message, Ready):
                self.alive = True
                assert self._ready is not None
                self._ready.set_result(message)
            elif isinstance(message, Fatal):
                self._death = message.message

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        error = EngineDeadError(self._death)
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self.stats = {}
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    def _take(self, message: Outputs) -> None:
        if message.stats is not None:
            self.stats = message.stats
        for output in message.outputs:
            stream = self._streams.get(output.id)
            if stream is not None and stream.take(output):
                del self._streams[output.id]
        for refused in message.refused:
            self._refuse(refused)
        if self.on_finished is not None:
            for observation in message.finished:
                self.on_finished(observation)

    def _refuse(self, message: Refused) -> None:
        stream = self._streams.pop(message.id, None)
        if stream is not None:
            if message.retry_after is not None:
                stream.fail(OverloadError(message.message, message.retry_after))
            else:
                stream.fail(RequestError(message.field, message.message, message.code))

    def _send(self, message: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._encoder.frame(message))
