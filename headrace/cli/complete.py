"""`headrace complete [MODEL] [PROMPT]`: continue a text, as it comes."""

import argparse
import contextlib
import sys

from headrace.cli import talk
from headrace.errors import HeadraceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One word is the prompt, two are the model and the prompt."""
    parser.add_argument(
        "words", nargs="*", metavar="[MODEL] PROMPT",
        help="the text to continue, with the model before it; - or no prompt: standard input",
    )  # fmt: skip
    parser.add_argument("--model", default=argparse.SUPPRESS, metavar="MODEL",
                        help="a .gguf file, a folder, or a short name")  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="the text, as a flag")
    parser.add_argument("--echo", action="store_true", help="print the prompt too")
    parser.add_argument("--quiet", action="store_true", help="no line of figures at the end")
    talk.add_arguments(parser, max_tokens=128)


def run(arguments: argparse.Namespace) -> int:
    """Print the continuation; returns the exit status."""
    prompt = _prompt(arguments)
    talker = talk.open_talker(arguments)
    try:
        if arguments.echo:
            sys.stdout.write(prompt)
        pieces = talker.complete(prompt)
        with contextlib.suppress(KeyboardInterrupt):
            for text in pieces:
                sys.stdout.write(text)
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()  # before the figures, which go to standard error
        if not arguments.quiet:
            sys.stderr.write(f"[{talker.facts.line()}]\n")
    finally:
        talker.close()
    return 0


def _prompt(arguments: argparse.Namespace) -> str:
    words = list(arguments.words)
    wanted = 0 if arguments.prompt is not None else 1
    if len(words) > wanted and not hasattr(arguments, "model"):
        arguments.model = words.pop(0)
    if len(words) > wanted:
        raise HeadraceError(f"more words than a model and a prompt: {words[wanted]!r}; quote it")
    if arguments.prompt is not None:
        return str(arguments.prompt)
    text = words[0] if words else "-"
    if text != "-":
        return text
    if sys.stdin.isatty():
        raise HeadraceError("no prompt: give one as an argument, or on standard input")
    text = sys.stdin.read()
    if not text:
        raise HeadraceError("no prompt: standard input is empty")
    return text
