"""The estimator of a running engine: roofline terms times fitted coefficients, and its own
error."""

from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any

from headrace.core.plan import Estimator, StepPlan
from headrace.cost.fit import ErrorWindow, FitSettings, WindowFit
from headrace.cost.roofline import TERMS, Amounts, StepModel

_FIRST = (1, 2, 4, 8, 16, 32, 64, 128)
_MOST_STEPS = 256


class StepEstimator(Estimator):
    """Predicts the seconds of a plan and learns from what steps took.

    `seconds` uses coefficients that change only after the 1st, 2nd, 4th, ... 128th observation
    and every `refit_every` seconds of steps (or 256 of them), when `version` goes up: they steer
    the scheduler, so a trace must be able to record each change, and a fit must cost little beside
    the steps.
    """

    def __init__(
        self,
        model: StepModel,
        coefficients: Sequence[float] | None = None,
        refit_every: float = 1.0,
        settings: FitSettings | None = None,
    ) -> None:
        self.model = model
        self.coefficients = tuple(coefficients or model.start())
        self.version = 0
        settings = settings or FitSettings()
        self.errors = ErrorWindow(settings.window)
        self._fit = WindowFit(self.coefficients, settings)
        self._refit_every = refit_every
        self._since = 0.0
        self.learning = True
        self._last: tuple[StepPlan, Amounts, tuple[float, ...]] | None = None
        self._measured: tuple[Amounts, float] | None = None

    @property
    def observations(self) -> int:
        """Steps that it has learned from."""
        return self._fit.observations

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of one execution of `plan`. Does not change what is predicted."""
        return float(sum(map(mul, self.coefficients, self._priced(plan)[1])))

    def _priced(self, plan: StepPlan) -> tuple[Amounts, tuple[float, ...]]:
        """Amounts and terms of a plan; those of the last one are kept for `observe`."""
        if self._last is None or self._last[0] is not plan:
            amounts = self.model.amounts(plan)
            self._last = (plan, amounts, self.model.price(amounts))
        return self._last[1], self._last[2]

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A plan took that long. Changes the fit, the published error, and now and then the
        coefficients. Steps of no time are passed over."""
        if seconds <= 0.0:
            return
        amounts, terms = self._priced(plan)
        self._measured = (amounts, seconds)
        self.errors.add(sum(map(mul, self.coefficients, terms)), seconds)
        if not self.learning:
            return
        self._fit.update(terms, seconds, amounts.tokens.bit_length())
        self._since += seconds
        count = self._fit.observations
        if self._since >= self._refit_every or count in _FIRST or count % _MOST_STEPS == 0:
            self._since = 0.0
            self.coefficients = self._fit.refit()
            self.version += 1

    def set_coefficients(self, coefficients: Sequence[float]) -> None:
        """Take recorded coefficients (replay)."""
        self.coefficients = tuple(coefficients)
        self.version += 1

    def stats(self) -> dict[str, float]:
        """For `/metrics`: error over the last steps (shares), coefficients, and of the last step
        mfu and mbu: shares of the device's arithmetic and bandwidth that it used."""
        compute = moved = 0.0
        if self._measured is not None:
            amounts, seconds = self._measured
            compute, moved = (spent / seconds for spent in self.model.limits(amounts))
        values = {
            "mfu": compute,
            "mbu": moved,
            "cost_mape": self.errors.mape,
            "cost_bias": self.errors.bias,
            "cost_observations": float(self._fit.observations),
        }
        values.update(
            (f"cost_{name}", value) for name, value in zip(TERMS, self.coefficients, strict=True)
        )
        return values

    def to_dict(self) -> dict[str, Any]:
        """What a replay needs to predict the same seconds."""
        return {"model": self.model.to_dict(), "coefficients": list(self.coefficients)}

    @staticmethod
    def from_dict(row: Mapping[str, Any]) -> "StepEstimator":
        """An estimator that predicts as the recorded one did."""
        return StepEstimator(StepModel.from_dict(row["model"]), row["coefficients"])
