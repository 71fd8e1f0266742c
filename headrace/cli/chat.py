"""`headrace chat [MODEL]`: a conversation in the terminal.

Ctrl-C stops an answer, not the program. A line that ends in a backslash goes on in the next one; a
pasted text of several lines is one message.
"""

import argparse
import contextlib
import select
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from headrace.cli import talk
from headrace.cli.flags import add_model
from headrace.errors import HeadraceError

HELP = """[bold]/reset[/bold]        forget the conversation
[bold]/system TEXT[/bold]  set the system message
[bold]/undo[/bold]         drop the last exchange
[bold]/retry[/bold]        answer the last message again
[bold]/exit[/bold]         leave (or Ctrl-D)
Ctrl-C stops an answer. A backslash at the end of a line: the message goes on."""
PASTE_SECONDS = 0.03
"""Lines that follow each other within this time were pasted, and are one message."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the system message, and the flags of `talk`."""
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    talk.add_arguments(parser, max_tokens=None)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends; returns the exit status."""
    console = Console(highlight=False)
    with console.status("loading") if console.is_terminal else contextlib.nullcontext():
        talker = talk.open_talker(arguments)
    try:
        console.print(f"[bold]{escape(talker.name)}[/bold]  [dim]/help for commands[/dim]")
        Chat(talker, console, arguments.system).run()
    finally:
        talker.close()
    return 0


class Chat:
    """A conversation with what answers it."""

    def __init__(self, talker: talk.Talker, console: Console, system: str | None = None) -> None:
        self._talker = talker
        self._console = console
        self._system = system
        self._messages: list[talk.Message] = []

    def run(self) -> None:
        """Read messages and answer them until the input ends or /exit."""
        while True:
            try:
                text = read_message(self._console)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("[dim]/exit or Ctrl-D leaves[/dim]")
                continue
            if text.startswith("/"):
                if not self._command(text):
                    return
            elif text.strip():
                self.say(text)

    def say(self, text: str) -> None:
        """Send a message and print the answer as it comes."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._print(self._talker.chat(self._whole()))
        except HeadraceError as error:
            self._console.print(f"[red]{escape(str(error))}[/red]")
            self._messages.pop()
            return
        self._messages.append({"role": "assistant", "content": answer})
        self._console.print(f"[dim]{escape(self._talker.facts.line())}[/dim]")

    def _whole(self) -> list[talk.Message]:
        first = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*first, *self._messages]

    def _print(self, pieces: Iterator[str]) -> str:
        """Print pieces until they end or Ctrl-C; returns what was said."""
        said = []
        try:
            for text in pieces:
                said.append(text)
                self._console.file.write(text)
                self._console.file.flush()
        except KeyboardInterrupt:
            self._console.file.write(" [stopped]")
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        self._console.file.write("\n")
        return "".join(said)

    def _command(self, text: str) -> bool:
        """Do what a /command says; False ends the conversation."""
        name, _, rest = text[1:].partition(" ")
        if name in ("exit", "quit", "bye"):
            return False
        if name == "reset":
            self._messages.clear()
        elif name == "system":
            self._system = rest.strip() or None
        elif name in ("undo", "retry"):
            last = self._drop()
            if name == "retry" and last is not None:
                self.say(last)
        elif name == "help":
            self._console.print(HELP)
        else:
            self._console.print(f"[dim]no such command: /{escape(name)} (see /help)[/dim]")
        return True

    def _drop(self) -> str | None:
        """Forget the last exchange; returns its message."""
        if not self._messages:
            return None
        self._messages.pop()
        return self._messages.pop()["content"]


def read_message(console: Console) -> str:
    """A message: a line, those that follow a backslash, and those pasted with it.

    Raises EOFError at the end of the input.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() editing and history)
    lines = [_line("> " if interactive else "")]
    while True:
        if lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
        elif not (interactive and _more_waits()):
            return "\n".join(lines)
        try:
            lines.append(_line("… " if interactive and not _more_waits() else ""))
        except EOFError:
            return "\n".join(lines)


def _line(prompt: str) -> str:
    return input(prompt)


def _more_waits() -> bool:
    """Whether another line is there already: a paste."""
    return bool(select.select([sys.stdin], [], [], PASTE_SECONDS)[0])
