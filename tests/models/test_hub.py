"""Hub ids: from a cache laid out like the hub's, and from a hub that runs here."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint import open_checkpoint
from headrace.errors import ModelError
from headrace.models import hub
from tests.models.test_parity import FAMILIES

COMMIT = "c0ffee" + "0" * 34
FOLDER = FAMILIES / "llama"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    return tmp_path


def lay_out(cache: Path) -> Path:
    """What the hub's library leaves: blobs, and links to them in a snapshot."""
    place = cache / "models--acme--tiny"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        blob = place / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        blob.write_bytes((FOLDER / name).read_bytes())
        (snapshot / name).symlink_to(blob)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_cache_laid_out_like_the_hubs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = lay_out(home / "hub")
    for name in ("acme/tiny", f"acme/tiny@{COMMIT}"):
        checkpoint = open_checkpoint(name)
        assert (checkpoint.path, checkpoint.name) == (snapshot, name)
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setenv("HF_HOME", "/nonexistent")
    assert open_checkpoint("acme/tiny").path == snapshot


def test_offline_and_unreachable_hubs_are_told_apart(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"acme/other: .* could not be fetched: .*refused"):
        open_checkpoint("acme/other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids to fetch it"):
        open_checkpoint("acme/other")


@pytest.mark.parametrize("name", ["../etc/passwd", "a/b/c", "/a/b", "-x/y", ".x/y", "a/..", "a"])
def test_other_names_are_no_ids(name: str) -> None:
    assert not hub.is_hub_id(name)


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model; large files come from another path, by redirect."""

    seen: list[tuple[str, str | None]]
    corrupt = False

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
        name = self.path.rpartition("/")[2]
        if self.path == "/api/models/acme/tiny/revision/main":
            names = [{"rfilename": one} for one in [*files, "README.md", "original/x.pth"]]
            self.answer(json.dumps({"sha": COMMIT, "siblings": names}).encode())
        elif self.path == f"/acme/tiny/resolve/{COMMIT}/model.safetensors":
            self.send_response(302)
            self.send_header("Location", "/storage/model.safetensors")
            self.end_headers()
        elif self.path.startswith(("/storage", "/acme/tiny/resolve")) and name in files:
            digest = "0" * 64 if self.corrupt else hashlib.sha256(files[name]).hexdigest()
            self.answer(files[name], f'"{digest}"')
        else:
            self.send_error(404)

    def answer(self, body: bytes, etag: str | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("X-Linked-Etag", etag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("OneHub", (Hub,), {"seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
        yield handler
        running.shutdown()
        thread.join()


def test_fetched_once(server: type[Hub], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    seen: list[str] = []
    checkpoint = open_checkpoint("acme/tiny", lambda what, done, total: seen.append(what))
    assert checkpoint.path == home / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    names = {path.name for path in checkpoint.path.iterdir()}
    assert names == {"config.json", "model.safetensors"}
    assert "fetching acme/tiny model.safetensors" in seen
    tokens = dict(server.seen)
    assert tokens[f"/acme/tiny/resolve/{COMMIT}/config.json"] == "Bearer secret"
    assert tokens["/storage/model.safetensors"] is None
    requests = len(server.seen)
    open_checkpoint("acme/tiny").model()
    assert len(server.seen) == requests


def test_unknown_and_damaged_files(server: type[Hub], home: Path) -> None:
    with pytest.raises(ModelError, match="the hub answers 404 Not Found"):
        open_checkpoint("acme/none")
    server.corrupt = True
    with pytest.raises(ModelError, match=r"SHA-256 .*, the hub says 0000"):
        open_checkpoint("acme/tiny")
    assert hub.cached("acme/tiny") is None
