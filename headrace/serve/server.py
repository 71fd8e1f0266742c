"""The API process: an engine process, an application and a listening socket, from start to end.

The socket is bound and the engine process spawned before this module is even imported (see
`cli.serve`); the tokenizer is read here while the engine loads. The first SIGTERM or SIGINT drains,
the second ends at once.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from headrace import __version__
from headrace.config import EngineConfig, ServerConfig
from headrace.engine.client import EngineClient
from headrace.engine.messages import Ready
from headrace.errors import ConfigError, HeadraceError
from headrace.serve.app import App
from headrace.serve.connection import connection_class, raise_file_limit
from headrace.serve.listen import address
from headrace.serve.metrics import Metrics
from headrace.serve.resolve import Served
from headrace.text.chat import chat_template

if TYPE_CHECKING:
    from headrace.checkpoint import Checkpoint

log = logging.getLogger("headrace.serve")

CUT_SECONDS = 1.0
"""Seconds between the error that ends a late request and the end of its connection."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handling: signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def http_config(app: App, max_connections: int) -> uvicorn.Config:
    """uvicorn without what an API has no use for."""
    return uvicorn.Config(
        app,
        http=connection_class(max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
    )


class ApiProcess:
    """One server, for one run."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        client: EngineClient,
        listener: socket.socket,
        started: float,
        timeline: list[tuple[str, float]],
    ) -> None:
        self._engine_config = engine_config
        self._config = config
        self._client = client
        self._listener = listener
        self._started = started
        self._timeline = timeline
        self._status = 0
        self._stops = 0

    def run(self) -> int:
        """Serve until told to end; returns the exit status."""
        self._mark("imports")
        template = _template_source(self._config.chat_template)
        return asyncio.run(self._serve(template))

    def _mark(self, what: str) -> None:
        self._timeline.append((what, time.perf_counter() - self._started))

    async def _serve(self, template: str | None) -> int:
        client = self._client
        self._metrics = Metrics(self._name(), lambda: client.stats)
        client.on_finished = self._metrics.finished
        self._app = App(
            client,
            self._metrics,
            lambda: client.alive,
            self._config.api_key,
            self._config.enable_log_requests,
        )
        self._server = HttpServer(http_config(self._app, raise_file_limit()))
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_tell)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
        url = address(self._listener)
        tasks = [
            asyncio.create_task(self._load(url, template)),
            asyncio.create_task(self._app.ping_streams()),
        ]
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()
            await client.shutdown(0.0)
        return self._status

    def _name(self) -> str:
        model = self._engine_config.model
        path = Path(model)
        name = path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else model
        return self._config.served_model_name or name

    # --- start --------------------------------------------------------------------------------

    async def _load(self, url: str, template: str | None) -> None:
        """Bring the model up, serve it, then watch the engine."""
        try:
            checkpoint, ready = await asyncio.gather(self._open(), self._client.ready())
            served = self._served(checkpoint, ready)
            self._app.serve(served, chat_template(served.tokenizer, template))
        except Exception as error:
            if not isinstance(error, HeadraceError):
                log.exception("the server cannot start")
            sys.stderr.write(f"headrace: {error}\n")
            self._app.fail(error)
            self._end(1)
            return
        self._metrics.ready(ready)
        self._mark("ready")
        sys.stderr.write(banner(served.name, url, ready, self._timeline))
        sys.stderr.flush()
        while self._client.alive:
            await asyncio.sleep(0.25)
        if not self._stops:
            log.error("the engine process ended; the server ends too")
            self._end(1)

    async def _open(self) -> "Checkpoint":
        def read() -> "Checkpoint":
            from headrace.checkpoint import open_checkpoint

            checkpoint = open_checkpoint(self._engine_config.model)
            checkpoint.tokenizer()
            self._mark("tokenizer")
            return checkpoint

        return await asyncio.to_thread(read)

    def _served(self, checkpoint: "Checkpoint", ready: Ready) -> Served:
        defaults = checkpoint.generation_config if self._config.generation_config == "auto" else {}
        return Served(
            name=self._name(),
            tokenizer=checkpoint.tokenizer(),
            max_model_len=ready.max_model_len,
            defaults=defaults,
            seed=self._engine_config.seed,
            priorities=self._engine_config.scheduling_policy == "priority",
        )

    # --- end ----------------------------------------------------------------------------------

    def _stop(self, name: str) -> None:
        self._stops += 1
        if self._stops > 1:
            sys.stderr.write(f"{name} again: ending now\n")
            self._app.cut()
            self._force()
            return
        limit = self._config.shutdown_timeout
        if self._metrics.open:
            sys.stderr.write(
                f"{name}: {self._metrics.open} requests may finish within {limit:g} s\n"
            )
        self._end(0)
        loop = asyncio.get_running_loop()
        loop.call_later(limit, self._app.cut)
        loop.call_later(limit + CUT_SECONDS, self._force)

    def _end(self, status: int) -> None:
        """Take no more requests; the server ends when the last is answered."""
        self._status = self._status or status
        self._app.drain()
        self._server.should_exit = True

    def _force(self) -> None:
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no one awaited; running out of file handles is one line, not a traceback."""
    if str(context.get("message")).startswith("socket.accept() out of system resource"):
        log.warning("no file handle is left for a connection; raise the limit (ulimit -n)")
    else:
        loop.default_exception_handler(context)


def _template_source(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--chat-template", f"{path}: {error}") from None


def banner(name: str, url: str, ready: Ready, timeline: list[tuple[str, float]]) -> str:
    """What is served where, in which memory, and how the start-up went."""
    memory = ", ".join(f"{part} {_bytes(size)}" for part, size in ready.memory.items())
    engine = ", ".join(f"{what} {seconds:.2f}" for what, seconds in ready.timeline)
    api = _steps(sorted(timeline, key=lambda step: step[1]))
    kernels = ", ".join(f"{op} {path}" for op, path in ready.kernels.items())
    return (
        f"headrace {__version__} serves {name} on {url}/v1\n"
        f"  engine    {ready.backend} {ready.level}, {ready.threads} threads, context"
        f" {ready.max_model_len}, {ready.num_pages} KV pages of {ready.block_size} tokens\n"
        f"  memory    {memory}\n"
        f"  kernels   {kernels}\n"
        f"  start-up  {timeline[-1][1]:.2f} s; engine: {engine}; server: {api}\n"
    )


def _steps(timeline: list[tuple[str, float]]) -> str:
    """The steps of a start-up, given when each ended, with the seconds that each took."""
    parts, before = [], 0.0
    for what, at in timeline:
        parts.append(f"{what} {at - before:.2f}")
        before = at
    return ", ".join(parts)


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
