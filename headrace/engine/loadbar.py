"""A progress bar of the weights on standard error, on a terminal and only where loading takes
time."""

import sys
import time
from typing import Any

_PATIENCE = 0.5  # seconds: most models are loaded before anyone would look at a bar


class LoadBar:
    """Call it with (bytes done, bytes in all), as `ops.spec.LoadProgress`; the context removes what
    it drew."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._shown: Any = None
        self._task: Any = None
        self._quiet = not sys.stderr.isatty()

    def __enter__(self) -> "LoadBar":
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._quiet or (self._shown is None and not self._due(done, total)):
            return
        if self._shown is None:
            self._show(total)
        self._shown.update(self._task, completed=done)

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()

    def _due(self, done: int, total: int) -> bool:
        return done < total and time.perf_counter() - self._started > _PATIENCE

    def _show(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        columns = ("loading weights", BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        self._shown = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._shown.add_task("", total=total)
        self._shown.start()
