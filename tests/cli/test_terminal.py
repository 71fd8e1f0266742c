"""`complete` and `chat` against a running server with the fake engine behind it."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from headrace.cli import main
from headrace.cli.chat import Chat
from headrace.cli.talk import Facts
from headrace.errors import HeadraceError
from headrace.serve.resolve import Served
from tests.serve.conftest import CONTEXT, MODEL, Site
from tests.serve.live import serving
from tests.serve.vocabulary import small_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def site(tokenizer) -> Site:
    return Site(tokenizer, Served(MODEL, tokenizer, CONTEXT))


def test_complete_prints_the_text_and_the_figures(site: Site, capsys, monkeypatch) -> None:
    site.text, site.engine.cached_tokens = " wörld 🙂", 3
    with serving(site) as url:
        assert main(["complete", "Hello", "--url", url, "--echo", "--temperature", "0.5"]) == 0
        captured = capsys.readouterr()
        assert captured.out == "Hello wörld 🙂\n"
        assert "3 cached" in captured.err
        assert main(["complete", "--prompt", "Hello", "--url", url, "--quiet"]) == 0
        assert capsys.readouterr() == (" wörld 🙂\n", "")
        monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
        assert main(["complete", "--url", url, "--quiet", "--stop", "🙂"]) == 0
        assert capsys.readouterr().out == " wörld \n"
    prompts = [site.tokenizer.decode(submit.prompt) for submit in site.engine.submits]
    assert prompts == ["Hello", "Hello", "from a pipe"]
    assert site.engine.submits[0].sampling.temperature == 0.5


def test_complete_says_what_is_wrong(site: Site, capsys, monkeypatch) -> None:
    with serving(site) as url:
        assert main(["complete", "a " * 300, "--url", url]) == 1
        assert "limit of 128" in capsys.readouterr().err
        assert main(["complete", "model", "prompt", "more", "--url", url]) == 1
        assert "quote it" in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert main(["complete", "--url", url]) == 1
        assert "standard input is empty" in capsys.readouterr().err
    assert main(["complete", "a", "--url", url]) == 1
    assert url in capsys.readouterr().err


def test_chat_talks_until_the_input_ends(site: Site, capsys, monkeypatch) -> None:
    lines = (
        "first\nsecond \\\nline\n/help\n/nonsense\n/undo\n/retry\n/system Be brief.\nx\n/reset\ny\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with serving(site) as url:
        assert main(["chat", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Hello world.") == 5
    assert "tok/s" in shown
    assert "no such command: /nonsense" in shown
    talks = [site.tokenizer.decode(submit.prompt) for submit in site.engine.submits]
    assert len(talks) == 5
    assert "second \nline" in talks[1]
    assert talks[1].count("Hello world.") == 1
    assert talks[2] == talks[0]
    assert talks[3].startswith("system\nBe brief.")
    assert "first" not in talks[4]


class Script:
    """Answers with a script; an exception in it is raised there."""

    name = "script"

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self.facts = Facts(tokens=3, seconds=1.0, first=0.5)
        self.answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []
        self.closed = 0

    def chat(self, messages) -> Iterator[str]:
        self.asked.append([dict(message) for message in messages])
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.closed += 1

    def complete(self, prompt: str) -> Iterator[str]:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_ctrl_c_stops_the_answer_not_the_program() -> None:
    script = Script(["half ", KeyboardInterrupt()], ["whole"], [HeadraceError("too long")], ["x"])
    out = io.StringIO()
    chat = Chat(script, Console(file=out, width=200))
    for text in ("one", "two", "three", "four"):
        chat.say(text)
    assert "half  [stopped]" in out.getvalue()
    assert "too long" in out.getvalue()
    roles = [message["role"] for message in script.asked[3]]
    assert roles == ["user", "assistant"] * 2 + ["user"]
    assert script.asked[1][1]["content"] == "half "
    assert "three" not in str(script.asked[3])
    assert script.closed == 4


def test_collect_env_tells_no_secret(capsys, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "sesame")
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    assert "sesame" not in shown
    assert "HEADRACE_API_KEY" in shown
    assert "numpy" in shown
