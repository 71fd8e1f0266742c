"""A predictor of step seconds from a handful of coefficients: what the core itself can offer.

The cost model (`headrace.cost`) predicts from the exact work of a model's program; this one serves
where a line is enough: tests, and simulations of a machine that was only measured from outside.
"""

from dataclasses import dataclass

from headrace.core.plan import Estimator, StepPlan


@dataclass(frozen=True, slots=True)
class LinearEstimator(Estimator):
    """seconds = step + token * tokens + key * (query, key) pairs + logits * rows of logits.

    All coefficients are in seconds.
    """

    step: float
    token: float
    key: float = 0.0
    logits: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        return (
            self.step
            + self.token * len(plan.tokens)
            + self.key * pairs(plan)
            + self.logits * plan.num_logits
        )


def pairs(plan: StepPlan) -> int:
    """(query, key) pairs of causal attention in the plan, in one layer that keeps all positions."""
    return sum(
        count * start + count * (count + 1) // 2
        for start, count in zip(plan.starts, plan.counts, strict=True)
    )
