"""A small linear model that corrects the roofline while the engine runs.

Measured seconds y of a step are modelled as y = sum_i theta_i * x_i, x the roofline's terms of that
step (`roofline.TERMS`), each theta a number without unit near 1 or 0. Least squares over the last
steps on relative errors (x / y against 1), so that short and long steps weigh alike and the sum
that is minimised is the one that is published. Robust by reweighting (Huber 1964; Holland and
Welsch 1977): a page fault or a stolen core must not move the model, but when every step disagrees
the model is wrong, not the steps, and it moves at once. A ridge towards the coefficients so far
keeps what the last steps say nothing about. No coefficient is negative.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FitSettings:
    """memory: steps that the fit looks back on. ridge: weight of a unit of change of a coefficient
    against the squared relative error of one step. huber: multiples of the usual (median) error
    past which a step is weighed down. passes: rounds of reweighting. window: steps over which error
    is published."""

    memory: int = 512
    ridge: float = 1e-3
    huber: float = 2.0
    passes: int = 4
    window: int = 512


class WindowFit:
    """The coefficients and the steps that they were learned from. Not thread-safe.

    theta: coefficients as of the last `refit`, none negative.
    """

    def __init__(self, start: Sequence[float], settings: FitSettings | None = None) -> None:
        self._settings = settings or FitSettings()
        self.theta: F64 = np.array(start, np.float64)
        self._steps: F64 = np.zeros((self._settings.memory, len(start)))
        self.observations = 0

    def update(self, terms: Sequence[float], seconds: float) -> None:
        """Take one observation. seconds must be positive."""
        self._steps[self.observations % len(self._steps)] = terms
        self._steps[self.observations % len(self._steps)] /= seconds
        self.observations += 1

    def refit(self) -> tuple[float, ...]:
        """Learn from the steps that are remembered; returns the coefficients. Changes state."""
        settings = self._settings
        steps = self._steps[: min(self.observations, len(self._steps))]
        theta, weight = self.theta, np.ones(len(steps))
        for _ in range(settings.passes):
            theta = _solve(steps, weight, self.theta, settings.ridge)
            error = np.abs(1.0 - steps @ theta)
            limit = settings.huber * max(float(np.median(error)), 1e-3)
            weight = np.minimum(1.0, limit / np.maximum(error, 1e-12))
        self.theta = theta
        return tuple(theta.tolist())


def _solve(steps: F64, weight: F64, towards: F64, ridge: float) -> F64:
    """argmin over theta >= 0 of sum weight (1 - steps @ theta)^2 + ridge |theta - towards|^2, by
    setting the most negative coefficient to 0 until none is."""
    weighted = steps * weight[:, None]
    gram = weighted.T @ steps + ridge * np.eye(len(towards))
    right = weighted.sum(axis=0) + ridge * towards
    free = list(range(len(towards)))
    while free:
        found = np.linalg.solve(gram[np.ix_(free, free)], right[free])
        worst = int(found.argmin())
        if found[worst] >= 0.0:
            theta: F64 = np.zeros(len(towards))
            theta[free] = found
            return theta
        del free[worst]
    return np.zeros(len(towards))


class ErrorWindow:
    """Error of the last predictions: MAPE and bias, kept as running sums."""

    def __init__(self, size: int) -> None:
        self._errors: deque[float] = deque()
        self._size = size
        self._absolute = 0.0
        self._signed = 0.0

    def add(self, predicted: float, measured: float) -> None:
        """Take one step. measured must be positive."""
        error = predicted / measured - 1.0
        self._errors.append(error)
        self._absolute += abs(error)
        self._signed += error
        if len(self._errors) > self._size:
            oldest = self._errors.popleft()
            self._absolute -= abs(oldest)
            self._signed -= oldest

    def __len__(self) -> int:
        return len(self._errors)

    @property
    def mape(self) -> float:
        """Mean absolute relative error, 0.1 = 10 %; 0 before the first step."""
        return max(0.0, self._absolute) / len(self._errors) if self._errors else 0.0

    @property
    def bias(self) -> float:
        """Mean relative error; positive = predictions are too long."""
        return self._signed / len(self._errors) if self._errors else 0.0
