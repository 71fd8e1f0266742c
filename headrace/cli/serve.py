"""`headrace serve`."""

import argparse
import logging
import time

from headrace.cli import configure
from headrace.cli.flags import add_flags, add_model
from headrace.config import EngineConfig, ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and a flag for each configuration field."""
    add_model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags by name")
    add_flags(parser, EngineConfig, ServerConfig, without=("model",))


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    started = time.perf_counter() - time.process_time()
    engine, server = configure(arguments, EngineConfig, ServerConfig)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    from headrace.engine.client import EngineClient
    from headrace.serve.listen import bind

    listener = bind(server.host, server.port)
    client = EngineClient.start(engine)
    timeline = [("engine spawned", time.perf_counter() - started)]
    try:
        from headrace.serve.server import ApiProcess

        return ApiProcess(engine, server, client, listener, started, timeline).run()
    finally:
        client.kill()
