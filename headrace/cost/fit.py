"""A small linear model that corrects the roofline while the engine runs.

Measured seconds y of a step are modelled as y = sum_i theta_i * x_i, x the roofline's terms of that
step (`roofline.TERMS`), each theta a number without unit near 1 or 0. Recursive least squares with
exponential forgetting (Haykin, Adaptive Filter Theory, ch. 10) on relative errors (x / y against
1), so that short and long steps weigh alike and the sum that is minimised is the one that is
published. An observation far outside the usual error is weighed down (Huber 1964): a page fault or
a stolen core must not move the model. Coefficients are kept at or above 0 by projecting along the
covariance.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FitSettings:
    """forgetting: weight of the past per observation; 0.998 remembers about 500 steps.
    prior: variance of each coefficient around its start. noise: relative error expected of a step.
    huber: multiples of the usual error past which an observation is weighed down. warmup:
    observations before that begins. window: steps over which error is published."""

    forgetting: float = 0.998
    prior: float = 1.0
    noise: float = 0.03
    huber: float = 3.0
    warmup: int = 32
    window: int = 512


class RecursiveFit:
    """The coefficients, their covariance, and nothing else. Not thread-safe."""

    def __init__(self, start: Sequence[float], settings: FitSettings | None = None) -> None:
        self._settings = settings or FitSettings()
        size = len(start)
        self.theta: list[float] = [float(value) for value in start]
        self._covariance = [
            [self._settings.prior if row == column else 0.0 for column in range(size)]
            for row in range(size)
        ]
        self._usual = 0.0
        self.observations = 0

    def update(self, terms: Sequence[float], seconds: float) -> float:
        """Take one observation; returns its relative error before the update. Changes state.

        seconds must be positive.
        """
        settings = self._settings
        x = [term / seconds for term in terms]
        error = 1.0 - sum(t * v for t, v in zip(self.theta, x, strict=True))
        weight = self._weight(abs(error))
        covariance = self._covariance
        gain = [sum(c * v for c, v in zip(row, x, strict=True)) for row in covariance]
        spread = sum(g * v for g, v in zip(gain, x, strict=True))
        noise = settings.noise**2 / weight
        scale = 1.0 / (noise + spread)
        grow = 1.0 / settings.forgetting
        self.theta = [t + g * scale * error for t, g in zip(self.theta, gain, strict=True)]
        for row, row_gain in zip(covariance, gain, strict=True):
            factor = row_gain * scale
            for column, column_gain in enumerate(gain):
                row[column] = (row[column] - factor * column_gain) * grow
        # A direction without news forgets too, but never more than was unknown at the start.
        for index, row in enumerate(covariance):
            if row[index] > settings.prior:
                shrink = (settings.prior / row[index]) ** 0.5
                for column in range(len(row)):
                    row[column] *= shrink
                    covariance[column][index] *= shrink
        self.observations += 1
        return error

    def _weight(self, size: float) -> float:
        """1 for a usual error, less past `huber` times the usual; keeps the running usual error."""
        settings = self._settings
        weight = 1.0
        if self.observations >= settings.warmup:
            limit = settings.huber * max(self._usual, settings.noise)
            weight = min(1.0, limit / size) if size > 0 else 1.0
            size = min(size, limit)
        rate = max(1.0 / (self.observations + 1), 0.02)
        self._usual += rate * (size - self._usual)
        return weight

    def coefficients(self) -> tuple[float, ...]:
        """The coefficients, none negative: each negative one is set to 0 and the others take what
        the covariance says they would have been, given that."""
        theta = list(self.theta)
        held: set[int] = set()
        while min(theta) < 0.0:
            worst = min(range(len(theta)), key=theta.__getitem__)
            held.add(worst)
            variance = self._covariance[worst][worst]
            ratio = theta[worst] / variance if variance > 0.0 else 0.0
            for index in range(len(theta)):
                if index not in held:
                    theta[index] -= self._covariance[index][worst] * ratio
            for index in held:
                theta[index] = 0.0
        return tuple(theta)


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
