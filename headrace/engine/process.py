"""The engine process: one engine behind a socket, started by `client.EngineClient`.

    python -m headrace.engine.process FD CONFIG

FD is the inherited end of a socket pair, CONFIG an `EngineConfig` as JSON. The process ends when
the other end closes, when told to, or on SIGTERM; it ignores SIGINT, which a terminal sends to the
whole group and which is the API process's to handle.
"""

import logging
import signal
import socket
import sys
import time

import msgspec

from headrace.config import EngineConfig
from headrace.engine.engine import Engine, refusal
from headrace.engine.load import load
from headrace.engine.messages import (
    Abort,
    Fatal,
    Finish,
    Ready,
    ResetCache,
    Shutdown,
    Submit,
    ToEngine,
)
from headrace.engine.wire import Channel
from headrace.errors import HeadraceError, RequestError

log = logging.getLogger("headrace.engine")

IDLE_SECONDS = 1.0
"""How long an idle engine sleeps before it looks after itself."""

COMPILING_SECONDS = 0.002
"""How long an engine sleeps that only waits for a grammar to be compiled."""


class EngineProcess:
    """The loop: take messages, step, send outputs."""

    def __init__(self, channel: Channel[ToEngine], engine: Engine) -> None:
        self._channel = channel
        self._engine = engine
        self._deadline: float | None = None
        self._checked = True

    def run(self) -> None:
        """Until told to end, or the other side is gone."""
        engine, channel = self._engine, self._channel
        while not channel.closed:
            wait = IDLE_SECONDS if not engine.has_work else 0.0
            if engine.only_compiling:
                wait = COMPILING_SECONDS
            messages = channel.receive(wait)
            for message in messages:
                self._take(message)
            if engine.has_work:
                self._checked = False
                self._step()
            elif self._deadline is not None:
                break
            elif not messages and not self._checked:
                engine.scheduler.check()
                self._checked = True
            if self._deadline is not None and time.monotonic() > self._deadline:
                engine.fail_all("the server is shutting down")
                self._step()
                break
        channel.drain(1.0)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            log.exception("a step failed; its requests end with an error")
            self._engine.fail_all(f"the engine failed in a step: {error}")
            outputs = self._engine.step()
        if outputs is not None:
            self._channel.send(outputs)

    def _take(self, message: ToEngine) -> None:
        engine = self._engine
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                engine.abort(request_id)
        elif isinstance(message, Finish):
            engine.finish(message.id, message.index)
        elif isinstance(message, ResetCache):
            engine.reset_prefix_cache()
        elif isinstance(message, Shutdown):
            self._deadline = time.monotonic() + message.drain

    def _submit(self, submit: Submit) -> None:
        try:
            self._engine.submit(submit)
        except RequestError as error:
            self._channel.send(refusal(submit.id, error))


def main(arguments: list[str]) -> int:
    """Run one engine; returns the exit status."""
    started = time.perf_counter()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(arguments[0]))
    channel: Channel[ToEngine] = Channel(end, ToEngine)
    try:
        config = msgspec.json.decode(arguments[1], type=EngineConfig)
        loaded = load(config, tell=log.warning)
        engine = Engine(loaded)
    except HeadraceError as error:
        channel.send(Fatal(str(error), "start"))
        channel.drain(1.0)
        return 1
    except Exception as error:
        log.exception("the engine cannot start")
        channel.send(Fatal(f"the engine cannot start: {error!r}", "start"))
        channel.drain(1.0)
        return 1
    plan = loaded.plan
    channel.send(
        Ready(
            max_model_len=plan.max_model_len,
            vocabulary=plan.limits.vocabulary,
            block_size=plan.pool.block_size,
            num_pages=plan.pool.num_pages,
            backend=loaded.backend.name,
            level=loaded.backend.level,
            threads=plan.limits.threads,
            memory=dict(plan.bytes),
            timeline=(*loaded.timeline, ("engine ready", time.perf_counter() - started)),
            kernels=loaded.kernels,
        )
    )
    loaded.executable.populate()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        EngineProcess(channel, engine).run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        engine.close()
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
