"""The `headrace` command.

A command is a module with `add_arguments(parser)` and `run(arguments) -> int` (the exit status);
it is imported only when it is called, and nothing else is for `--help`. Expected errors end in one
line and status 1, a wrong command line in status 2.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace import __version__

if TYPE_CHECKING:
    import argparse

    from headrace.config import EngineConfig, ServerConfig

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("headrace.cli.serve", "serve a model by the OpenAI API"),
    "chat": ("headrace.cli.chat", "talk to a model in the terminal"),
    "complete": ("headrace.cli.complete", "continue a text"),
    "bench limits": ("headrace.cli.measure.limits", "measure what this machine can do"),
    "bench kernels": ("headrace.cli.measure.kernels", "measure each op beside the limits"),
    "bench latency": ("headrace.cli.measure.latency", "measure one batch, prompt to last token"),
    "bench throughput": ("headrace.cli.measure.throughput", "measure many prompts, offline"),
    "bench serve": ("headrace.bench.serve", "load a server and measure it"),
    "inspect": ("headrace.cli.inspect", "show what is in a model file and how it will run here"),
    "plan": ("headrace.cli.plan", "say what a service takes, and how to run it"),
    "fit": ("headrace.cli.fit", "say which contexts and how many sequences fit a memory"),
    "simulate": ("headrace.cli.simulate", "run a workload over replicas in virtual time"),
    "replay": ("headrace.cli.replay", "check that a recorded run makes the same decisions again"),
    "calibrate": ("headrace.cli.calibrate", "measure this machine for plans and predictions"),
    "doctor": (
        "headrace.cli.doctor",
        "say what this set-up does badly, and the predicted gain",
    ),
    "collect-env": ("headrace.cli.environment", "print what a bug report needs"),
}
"""Name -> (module, one line of help). A name of two words is a sub-command."""


def usage(prefix: str = "") -> str:
    """The commands, those that begin with `prefix`, as a page."""
    words = f"{prefix} " if prefix else ""
    rows = [(name, text) for name, (_, text) in COMMANDS.items() if name.startswith(words)]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join(
        [
            f"headrace {__version__}: an LLM serving engine",
            "",
            f"usage: headrace {words}COMMAND [--help] ...",
            "",
            *lines,
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        sys.stdout.write(f"headrace {__version__}\n")
        return 0
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    if name not in COMMANDS:
        if any(known.startswith(f"{name} ") for known in COMMANDS):
            sys.stdout.write(usage(name))
            return 0 if words[1:] in (["-h"], ["--help"]) else 2
        from headrace.cli.flags import closest

        sys.stderr.write(f"headrace: no such command: {name}{closest(name, COMMANDS)}\n")
        return 2
    return run(name, words[len(name.split()) :])


def run(name: str, words: Sequence[str]) -> int:
    """Run one command with its arguments."""
    import importlib
    import os

    from headrace.cli.parser import Parser
    from headrace.errors import HeadraceError

    module, text = COMMANDS[name]
    try:
        command = importlib.import_module(module)
        parser = Parser(prog=f"headrace {name}", description=text)
        command.add_arguments(parser)
        parsed, unknown = parser.parse_known_args(words)
        if unknown:
            parser.refuse_unknown(unknown)
        status: int = command.run(parsed)
        return status
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130


def configure(
    parsed: "argparse.Namespace", *configs: "type[EngineConfig] | type[ServerConfig]"
) -> list[Any]:
    """The configuration objects from flags, `--config` file and environment."""
    import os

    from headrace.cli.flags import read_file, resolve

    given = {name: value for name, value in vars(parsed).items() if name != "config"}
    file = read_file(parsed.config) if getattr(parsed, "config", None) else {}
    fields = {name for config in configs for name in config.__dataclass_fields__}
    return resolve(configs, {k: v for k, v in given.items() if k in fields}, file, os.environ)
