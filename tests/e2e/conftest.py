"""A real server, with the real model, in its own processes."""

import contextlib
import importlib.util
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import httpx
import pytest


@dataclass
class Server:
    """A running `headrace serve`. url has no /v1."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    seconds: float

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        text = httpx.get(self.url + "/metrics", timeout=10).text
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in /metrics"
        return sum(float(value) for value in found)

    def settled(self, name: str, value: float, seconds: float = 20.0) -> float:
        """Wait until a metric has that value; returns what it was at the end."""
        end = time.monotonic() + seconds
        while (got := self.metric(name)) != value and time.monotonic() < end:
            time.sleep(0.05)
        return got

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)

    def complete(self, prompt: object, **body: object) -> dict[str, object]:
        answer = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        result: dict[str, object] = answer.json()
        return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(log: Path, *flags: str) -> Iterator[Server]:
    """Start a server with these flags, wait until it is ready, end it by SIGTERM."""
    port = free_port()
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", "--port", str(port), *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/health", timeout=5).status_code == 200:
                    break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() - started < 120, log.read_text()
            time.sleep(0.02)
        yield Server(url, process, log, time.monotonic() - started)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert status == 0, log.read_text()


ServerMaker = Callable[..., "contextlib.AbstractContextManager[Server]"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model with a small context, shared by the tests of the session."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, "--max-model-len", "2048", "--max-num-seqs", "64") as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> ServerMaker:
    """Start a server of one's own: `with start("--flag", ...) as server`."""
    return lambda *flags: serving(tmp_path / "log", *flags)


@pytest.fixture(scope="session")
def determinism() -> ModuleType:
    """scripts/determinism.py as a module."""
    path = Path(__file__).parent.parent.parent / "scripts" / "determinism.py"
    spec = importlib.util.spec_from_file_location("determinism", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
