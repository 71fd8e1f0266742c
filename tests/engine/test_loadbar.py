"""The bar of the weights: on a terminal alone, and only where loading takes time."""

import io
import sys

import pytest

from headrace.engine import loadbar
from headrace.engine.loadbar import LoadBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "patience", "shown"),
    [(Terminal(), -1.0, True), (Terminal(), 60.0, False), (io.StringIO(), -1.0, False)],
)
def test_when_it_shows(
    stream: io.StringIO, patience: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(loadbar, "_PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    with LoadBar() as bar:
        for done in range(10, 101, 10):
            bar(done, 100)
    assert ("loading weights" in stream.getvalue()) == shown


def test_a_model_loaded_in_one_go_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(loadbar, "_PATIENCE", -1.0)
    with LoadBar() as bar:
        bar(100, 100)
    assert stream.getvalue() == ""
