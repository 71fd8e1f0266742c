"""Two clocks for one event loop: virtual time jumps, real time waits."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the simulation began."""

    def now(self) -> float:
        """The present."""

    def wait(self, until: float) -> None:
        """Return when it is `until`; at once if that has passed."""


class VirtualClock:
    """Time is what the next event says."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait(self, until: float) -> None:
        self._now = max(self._now, until)


class RealClock:
    """The machine's monotonic clock, `speed` times as fast. Event handling takes time of its own
    here, as it does in the engine; `late` is the worst that an event was handled behind time."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start = time.monotonic()
        self.late = 0.0

    def now(self) -> float:
        return (time.monotonic() - self._start) * self._speed

    def wait(self, until: float) -> None:
        left = (until - self.now()) / self._speed
        if left > 0:
            time.sleep(left)
        else:
            self.late = max(self.late, -left * self._speed)
