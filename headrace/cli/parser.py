"""The argument parser of every command."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.cli.flags import closest


class Parser(argparse.ArgumentParser):
    """Refuses unknown flags with the closest known one, in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """End with status 2, naming the first argument that is not known."""
        name = unknown[0].partition("=")[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        kind = "flag" if name.startswith("-") else "argument"
        self.error(f"no such {kind}: {name}{closest(name, known)}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
