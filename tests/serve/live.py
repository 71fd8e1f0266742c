"""The application of a `Site` on a real socket, in a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from headrace.serve.listen import address, bind
from headrace.serve.server import HttpServer, http_config
from tests.serve.conftest import Site


@contextlib.contextmanager
def serving(site: Site, max_connections: int = 200) -> Iterator[str]:
    """The URL under which the site is served, as `headrace serve` would."""
    listener = bind("127.0.0.1", 0)
    url = address(listener)
    started = threading.Event()
    server: list[HttpServer] = []

    async def serve() -> None:
        server.append(HttpServer(http_config(site.app(), max_connections)))
        started.set()
        await server[0].serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield url
    finally:
        server[0].should_exit = True
        thread.join(10)
        assert not thread.is_alive()
