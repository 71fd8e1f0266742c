"""What clients do to servers: leave, stall, send too much, guess paths; and how a server ends."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from headrace.serve import app as app_module
from headrace.serve import connection, http
from headrace.serve.app import App
from headrace.serve.resolve import Served
from headrace.text.chat import chat_template
from tests.serve.conftest import CONTEXT, Site, error_of, events, run_async
from tests.serve.live import serving

GENERATIONS = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
]


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        yield wire


def request(path: str, body: object, headers: str = "") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def is_well(url: str) -> bool:
    answer = httpx.post(url + "/v1/completions", json={"prompt": "a"}, timeout=10)
    return answer.status_code == 200


# --- clients that leave -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), GENERATIONS)
def test_a_client_that_leaves_is_aborted_at_once(site: Site, path, body, stream) -> None:
    site.ends = False
    site.engine.pause = 0.02
    with serving(site) as url:
        with connected(url) as wire:
            wire.sendall(request(path, {**body, "stream": stream, "n": 2}))
            assert until(lambda: site.engine.submits)
            time.sleep(0.05)
        assert until(lambda: site.engine.aborted, 1.0)
        assert until(lambda: site.metrics.open == 0, 1.0)
        site.ends, site.engine.pause = True, 0.0
        assert is_well(url)


def test_each_prompt_of_a_list_is_aborted(site: Site) -> None:
    site.ends = False
    site.engine.pause = 0.02
    with serving(site) as url:
        with connected(url) as wire:
            wire.sendall(request("/v1/completions", {"prompt": ["a", "b", "c"]}))
            assert until(lambda: len(site.engine.submits) == 3)
        assert until(lambda: len(site.engine.aborted) == 3, 1.0)


def test_one_that_leaves_disturbs_no_other(site: Site) -> None:
    site.engine.pause = 0.02
    with serving(site) as url, connected(url) as other:
        other.sendall(request("/v1/completions", {"prompt": "a", "max_tokens": 50}))
        with connected(url) as wire:
            wire.sendall(request("/v1/completions", {"prompt": "b", "stream": True}))
            assert until(lambda: len(site.engine.submits) == 2)
        answer = b""
        while b"usage" not in answer:
            answer += other.recv(65536)
        assert b"Hello world." in answer


@run_async
async def test_what_waits_for_a_lagging_client_goes_out_in_one_piece(site: Site) -> None:
    """The engine goes on; the client gets all of it, in fewer, larger chunks."""
    site.ends = False
    sent: list[bytes] = []
    lagging = asyncio.Event()
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 100}).encode()

    async def receive() -> dict[str, object]:
        if body not in seen:
            seen.append(body)
            return {"type": "http.request", "body": body}
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 3:
            await lagging.wait()

    seen: list[bytes] = []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asked = asyncio.create_task(site.app()(scope, receive, send))
    while len(sent) < 3:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)
    assert len(sent) == 3
    lagging.set()
    await asked
    assert len(sent) <= 6
    assert b"".join(sent).count(b"data: ") < 20
    ids = site.tokenizer.encode(site.text) * 100
    parts = [json.loads(p) for p in b"".join(sent).split(b"data: ")[1:-1]]
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert text == site.tokenizer.decode(ids[:100])


# --- too much, too slow -----------------------------------------------------------------------


@run_async
async def test_a_long_body_is_refused_with_its_limit(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY", 1 << 20)
    error = error_of(await site.complete("a" * (1 << 20)), 413)
    assert "1 MiB" in error["message"]
    assert site.engine.submits == []


def test_a_long_body_over_a_socket(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY", 1 << 20)
    with serving(site) as url:
        answer = httpx.post(url + "/v1/completions", json={"prompt": "a" * (3 << 20)}, timeout=20)
        assert answer.status_code == 413
        assert is_well(url)


@pytest.mark.parametrize("start", [b"", b"{"])
def test_a_body_that_trickles_is_cut_off(site: Site, monkeypatch, start: bytes) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.3)
    with serving(site) as url, connected(url) as wire:
        wire.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + start
        )
        answer = b"".join(iter(lambda: wire.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert is_well(url)


@pytest.mark.parametrize("head", [b"x: " + b"a" * (8 << 20), b"y: b\r\n" * 20000, b"a" * 200000])
def test_a_long_head_is_refused(site: Site, head: bytes) -> None:
    with serving(site) as url, connected(url) as wire:
        with suppress(OSError):
            wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        with suppress(OSError):
            answer = wire.recv(65536)
            assert answer[9:12] in (b"431", b"400", b"")
        assert is_well(url)


def test_a_head_that_trickles_and_a_silent_connection_are_closed(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    with serving(site) as url, connected(url) as silent, connected(url) as slow:
        slow.sendall(b"POST /v1")
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert silent.recv(65536) == b""
        assert is_well(url)


def test_connections_above_the_limit_get_a_503(site: Site) -> None:
    with serving(site, max_connections=5) as url:
        wires = [socket.create_connection(url.removeprefix("http://").split(":")) for _ in range(8)]
        try:
            time.sleep(0.1)
            answers = []
            for wire in wires:
                wire.setblocking(False)
                with suppress(OSError):
                    answers.append(wire.recv(1000))
            assert [answer[9:12] for answer in answers] == [b"503"] * 3
        finally:
            for wire in wires:
                wire.close()
        assert until(lambda: is_well(url))


@pytest.mark.parametrize("raw", [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00"])
def test_what_is_no_http_is_refused(site: Site, raw: bytes) -> None:
    with serving(site) as url, connected(url) as wire:
        wire.sendall(raw)
        assert wire.recv(65536)[:12] in (b"HTTP/1.1 400", b"")
        assert is_well(url)


@run_async
async def test_a_long_text_leaves_the_event_loop_free(site: Site) -> None:
    """Tokenizing happens in a thread; a text that is surely too long is refused before."""
    long = "a" * 200_000
    task = asyncio.create_task(site.complete(long))
    started = time.monotonic()
    while not task.done():
        before = time.monotonic()
        await asyncio.sleep(0.001)
        assert time.monotonic() - before < 0.5
    assert time.monotonic() - started < 5
    assert "limit" in error_of(await task)["message"]


# --- the key ----------------------------------------------------------------------------------

PATHS = [
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/ping",
    "/ready", "/version", "/load", "/metrics", "/openapi.json", "/docs", "//v1/completions",
    "/v1/completions/", "/V1/completions", "/invocations", "/", "/health/", "//health", "/Health",
    "/health/../v1/models", "/healthz", "/%68ealth/x",
]  # fmt: skip


@run_async
async def test_the_key_guards_every_path_but_health(site: Site) -> None:
    site.key = "secret"
    for path in PATHS:
        for method in ("GET", "POST", "HEAD", "PUT", "OPTIONS", "DELETE"):
            answer = await site.send(method, path)
            assert answer.status_code == 401, (method, path)
    for given in ("Bearer wrong", "Bearer secre", "Bearer secrets", "secret", "Basic secret",
                  "Bearer", "bearer secret", "Bearer " + "x" * 5000):  # fmt: skip
        answer = await site.send("GET", "/v1/models", headers={"Authorization": given})
        assert error_of(answer, 401)["type"] == "AuthenticationError"
    assert (await site.send("GET", "/v1/models?api_key=secret")).status_code == 401
    assert (await site.send("GET", "/health")).status_code == 200
    right = {"Authorization": "Bearer secret"}
    assert (await site.send("GET", "/v1/models", headers=right)).status_code == 200


@run_async
async def test_keys_are_compared_in_constant_time(site: Site, monkeypatch) -> None:
    seen = []
    original = app_module.hmac.compare_digest
    monkeypatch.setattr(
        app_module.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or original(a, b)
    )
    site.key = "secret"
    for given in ("", "Bearer x", "Bearer " + "y" * 9000):
        await site.send("GET", "/v1/models", headers={"Authorization": given})
    assert {len(a) for a, _ in seen} == {len(b) for _, b in seen} == {32}


# --- the small paths --------------------------------------------------------------------------


@run_async
async def test_small_paths(site: Site) -> None:
    models = (await site.send("GET", "/v1/models")).json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("tiny", CONTEXT)]
    assert (await site.send("GET", "/v1/models/tiny")).json() == models[0]
    for other in ("", "x", "tiny/", "../tiny"):
        assert "tiny" in error_of(await site.send("GET", f"/v1/models/{other}"), 404)["message"]
    for path in ("/health", "/ping", "/ready"):
        assert (await site.send("GET", path)).status_code == 200
    assert (await site.send("GET", "/load")).json() == {"server_load": 0}
    assert set((await site.send("GET", "/version")).json()) == {"version"}
    assert "text/html" in (await site.send("GET", "/docs")).headers["content-type"]
    assert error_of(await site.send("GET", "/nothing"), 404)["type"] == "NotFoundError"
    refused = await site.send("GET", "/v1/completions")
    assert error_of(refused, 405)
    assert refused.headers["allow"] == "POST"
    lora = {"lora_name": "x", "lora_path": "../../etc"}
    error_of(await site.post("/v1/load_lora_adapter", lora), 404)


@run_async
async def test_tokenize_and_detokenize_are_inverse(site: Site) -> None:
    text = "the 🙂 <|im_end|> end"
    answer = (await site.post("/tokenize", {"prompt": text, "return_token_strs": True})).json()
    ids = site.tokenizer.encode(text)
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids) == len(answer["token_strs"])
    assert answer["max_model_len"] == CONTEXT
    assert (await site.post("/detokenize", {"tokens": ids})).json() == {"prompt": text}
    talk = {"messages": [{"role": "user", "content": "a"}]}
    tokens = (await site.post("/tokenize", talk)).json()["tokens"]
    await site.chat("a")
    assert tuple(tokens) == site.engine.submits[0].prompt
    for body in ({}, {"prompt": "a", **talk}, {"prompt": 5}, {"prompt": "a", "max_tokens": 8}):
        error_of(await site.post("/tokenize", body))
    for body in ({"tokens": [999999]}, {"tokens": [-1]}, {"tokens": "a"}, {}):
        error_of(await site.post("/detokenize", body))


# --- start and end ----------------------------------------------------------------------------


@run_async
async def test_requests_wait_for_the_model_and_learn_of_its_failure(site: Site) -> None:
    from headrace.errors import MemoryPlanError

    app = App(site.engine, site.metrics, lambda: True)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t", trust_env=False) as web:
        assert (await web.get("/health")).status_code == 503
        early = asyncio.create_task(web.post("/v1/completions", json={"prompt": "a"}))
        await asyncio.sleep(0.05)
        assert not early.done()
        app.serve(Served("tiny", site.tokenizer, CONTEXT), chat_template(site.tokenizer))
        assert (await early).status_code == 200
        app.drain()
        assert (await web.get("/health")).status_code == 503
        late = await web.post("/v1/completions", json={"prompt": "a"})
        error_of(late, 503)
        assert late.headers["retry-after"]
        broken = App(site.engine, site.metrics, lambda: True)
        broken.fail(MemoryPlanError("the model needs 9 GiB, there are 3 GiB"))
    transport = httpx.ASGITransport(app=broken)
    async with httpx.AsyncClient(transport=transport, base_url="http://t", trust_env=False) as web:
        answer = await web.post("/v1/completions", json={"prompt": "a"})
        assert "9 GiB" in error_of(answer, 503)["message"]


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_cutting_tells_the_clients(site: Site, stream: bool) -> None:
    site.ends, site.engine.pause = False, 0.01
    app = site.app()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t", trust_env=False) as web:
        body = {"prompt": "a", "max_tokens": 100, "stream": stream}
        asked = asyncio.create_task(web.post("/v1/completions", json=body))
        while not site.engine.submits:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        app.cut()
        answer = await asked
    if stream:
        assert "shut down" in events(answer)[-1]["error"]["message"]
    else:
        assert "shut down" in error_of(answer, 503)["message"]
    assert len(site.engine.aborted) == 1


@run_async
async def test_a_silent_stream_is_opened_and_kept_open_with_comments(
    site: Site, monkeypatch
) -> None:
    from headrace.serve import answer

    monkeypatch.setattr(answer, "FIRST_PING", 0.05)
    monkeypatch.setattr(app_module, "PING_EVERY", 0.1)
    site.engine.pause = 0.4
    site.text = "a"
    app = site.app()
    pings = asyncio.create_task(app.ping_streams())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t", trust_env=False) as web:
        reply = await web.post("/v1/completions", json={"prompt": "a", "stream": True})
    pings.cancel()
    first, _, rest = reply.text.partition("data: ")
    assert first.startswith(": waiting\n\n")
    assert ": waiting\n\n" in rest
    assert "".join(chunk["choices"][0]["text"] for chunk in events(reply)) == "a"


# --- many at once -----------------------------------------------------------------------------

SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from headrace.serve import http
from headrace.serve.connection import raise_file_limit
from headrace.serve.resolve import Served
from tests.serve.conftest import Site
from tests.serve.live import serving
from tests.serve.vocabulary import small_tokenizer
http.BODY_SECONDS = 1.0
tokenizer = small_tokenizer()
site = Site(tokenizer, Served("tiny", tokenizer, 128))
with serving(site, raise_file_limit()) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_more_connections_than_file_handles() -> None:
    """Of 160 clients some read slowly, some never send a body: each gets an answer or a clean
    close, and the handles are back afterwards."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    handles = Path(f"/proc/{server.pid}/fd")
    before = len(list(handles.iterdir()))

    async def client(number: int) -> str:
        host, port = url.removeprefix("http://").split(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            raw = request("/v1/completions", {"prompt": "a", "stream": True},
                          "connection: close\r\n")  # fmt: skip
            writer.write(raw[:-20] if number % 5 == 0 else raw)
            answer = b""
            while part := await reader.read(40 if number % 2 else 65536):
                answer += part
                await asyncio.sleep(0.02 if number % 2 and len(answer) < 200 else 0)
            writer.close()
        except OSError:
            return "closed"
        return answer[9:12].decode() or "closed"

    async def clients() -> list[str]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*map(client, range(160)))

    found = asyncio.run(clients())
    assert set(found) <= {"200", "503", "408", "closed"}
    assert found.count("200") >= 20
    assert is_well(url)
    assert until(lambda: len(list(handles.iterdir())) <= before)
    server.communicate("", timeout=20)
    assert server.returncode == 0
