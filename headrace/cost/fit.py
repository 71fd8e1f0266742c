"""A small linear model that corrects the roofline while the engine runs.

Measured seconds y of a step are modelled as p = sum_i theta_i * x_i, x the roofline's terms of that
step (`roofline.TERMS`), each theta a number without unit near 1 or 0. Least squares on y / p - 1:
short and long steps weigh alike, and so predictions add up to what was measured (the error that is
published, p / y - 1, would be smallest for predictions that are too short, since noise only ever
adds). Robust by reweighting (Huber 1964; Holland and Welsch 1977): a page fault or a stolen core
must not move the model, but when every step disagrees the model is wrong, not the steps, and it
moves at once. A ridge towards the coefficients so far keeps what memory says nothing about; it
stiffens with the noise, lest small terms (attention over short contexts) chase it. No coefficient
is negative.

What is remembered is balanced: each kind of step (a size class) has a memory of its own, so that
a quiet minute of single rows doesn't push out what large steps cost. A kind that is full takes in
its steps as sums of some time each, which spans seconds of a noisy machine with few entries; and
entries lose weight as later ones come.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

_LEAST_RIDGE = 1e-3
_MOST_NOISE = 0.2
"""Usual error past which the machine isn't noisy but the model wrong."""


@dataclass(frozen=True)
class FitSettings:
    """memory: entries of each kind that the fit looks back on; kinds: how many there are. spell:
    seconds of steps that make one entry, once a kind is full. half_life: later entries, of all
    kinds, that halve the weight of one. ridge: entries, each off by the usual (median) error, that
    weigh as much as a change of a coefficient by 1. huber: multiples of the usual error past which
    an entry is weighed down. passes: rounds of reweighting. window: steps over which error is
    published."""

    memory: int = 48
    kinds: int = 12
    spell: float = 0.05
    half_life: float = 300.0
    ridge: float = 100.0
    huber: float = 2.0
    passes: int = 3
    window: int = 512


class WindowFit:
    """The coefficients and the steps that they were learned from. Not thread-safe.

    theta: coefficients as of the last `refit`, none negative.
    """

    def __init__(self, start: Sequence[float], settings: FitSettings | None = None) -> None:
        self._settings = settings = settings or FitSettings()
        self.theta: F64 = np.array(start, np.float64)
        self.observations = 0
        # Rows (terms..., seconds, number), by kind.
        self._entries: F64 = np.zeros((settings.kinds, settings.memory, len(start) + 2))
        self._taken = [0] * settings.kinds
        self._number = 0
        self._sums = [[0.0] * (len(start) + 1) for _ in range(settings.kinds)]

    def update(self, terms: Sequence[float], seconds: float, kind: int = 0) -> None:
        """Take one observation. seconds must be positive; kinds past the last count as it."""
        settings = self._settings
        kind = min(kind, settings.kinds - 1)
        self.observations += 1
        sums, taken = self._sums[kind], self._taken[kind]
        for index, value in enumerate(terms):
            sums[index] += value
        sums[-1] += seconds
        if taken >= settings.memory and sums[-1] < settings.spell:
            return
        self._entries[kind, taken % settings.memory] = (*sums, self._number)
        self._taken[kind] = taken + 1
        self._number += 1
        self._sums[kind] = [0.0] * len(sums)

    def refit(self) -> tuple[float, ...]:
        """Learn from what is remembered; returns the coefficients. Changes state."""
        settings = self._settings
        entries = np.concatenate(
            [
                kind[: min(taken, settings.memory)]
                for kind, taken in zip(self._entries, self._taken, strict=True)
            ]
        )
        terms, seconds = entries[:, :-2], entries[:, -2]
        age = 0.5 ** ((self._number - entries[:, -1]) / settings.half_life)
        weight, predicted, usual = age, seconds, 1e-3
        for _ in range(settings.passes):
            steps, wanted = terms / predicted[:, None], seconds / predicted
            theta = _solve(steps, wanted, weight, self.theta, _LEAST_RIDGE)
            found = np.maximum(terms @ theta, 1e-12)
            error = np.abs(seconds / found - 1.0)
            usual = max(float(np.median(error)), 1e-3)
            weight = age * np.minimum(1.0, settings.huber * usual / np.maximum(error, 1e-12))
            predicted = np.clip(found, seconds / 2.0, seconds * 2.0)
        ridge = max(_LEAST_RIDGE, settings.ridge * min(usual, _MOST_NOISE) ** 2)
        self.theta = theta = _solve(steps, wanted, weight, self.theta, ridge)
        return tuple(theta.tolist())


def _solve(steps: F64, wanted: F64, weight: F64, towards: F64, ridge: float) -> F64:
    """argmin over theta >= 0 of sum weight (wanted - steps @ theta)^2 + ridge |theta - towards|^2,
    by setting the most negative coefficient to 0 until none is."""
    weighted = steps * weight[:, None]
    gram = weighted.T @ steps + ridge * np.eye(len(towards))
    right = weighted.T @ wanted + ridge * towards
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
