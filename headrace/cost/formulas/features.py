"""Speculation, experts and adapters: what a feature costs and gains."""

from collections.abc import Sequence


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens a target pass emits when each of `drafts` is accepted with that probability, the pass
    adding one of its own: (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2022).

    The law is geometric: 75 % over 8 drafts gives 3.70, not 0.75 * 8.
    """
    if acceptance >= 1.0:
        return float(drafts + 1)
    return (1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance)


def speculation_speedup(
    acceptance: float, drafts: int, draft_cost: float, verify_cost: float = 1.0
) -> float:
    """Tokens/s with speculation over without: E / (c k + v) (Leviathan et al. 2022).

    draft_cost: seconds of one draft step over one target step. verify_cost: seconds of a target
    pass over k + 1 tokens over a pass over one: 1 while memory-bound (small batches), near k + 1
    when compute-bound.
    """
    return expected_tokens(acceptance, drafts) / (draft_cost * drafts + verify_cost)


def best_drafts(
    acceptance: float, draft_cost: float, verify_slope: float = 0.0, most: int = 16
) -> tuple[int, float]:
    """The draft length k in [0, most] with the best speed-up, and that speed-up (1.0 at k = 0).

    verify_slope: added cost of the verifying pass per drafted token, in target steps.
    """
    choices = (
        (speculation_speedup(acceptance, k, draft_cost, 1.0 + verify_slope * k), -k)
        for k in range(most + 1)
    )
    speedup, negative = max(choices)
    return -negative, speedup


def experts_touched(tokens: int, experts: int, top_k: int) -> float:
    """Expected share of a layer's experts that at least one of `tokens` rows uses, under uniform
    routing: 1 - (1 - k/E)^b."""
    return 1.0 - (1.0 - top_k / experts) ** tokens


def tokens_per_expert(tokens: int, experts: int, top_k: int) -> float:
    """Mean rows that an expert sees: b k / E, its linear layers' intensity."""
    return tokens * top_k / experts


def imbalance(loads: Sequence[float]) -> float:
    """Busiest over mean. The busiest expert sets the step's time, the mean is what was paid for."""
    return max(loads) * len(loads) / sum(loads)


def rebalanced_bias(bias: Sequence[float], loads: Sequence[float], rate: float) -> list[float]:
    """One update of the router's per-expert bias, added for routing only: down where overloaded, up
    where underloaded (DeepSeek-V3's auxiliary-loss-free balancing)."""
    mean = sum(loads) / len(loads)
    return [b - rate * ((load > mean) - (load < mean)) for b, load in zip(bias, loads, strict=True)]


def adapter_params(rank: int, shapes: Sequence[tuple[int, int]]) -> int:
    """Parameters of a LoRA adapter on matrices of (out, in) features: r (in + out) each
    (Hu et al. 2021)."""
    return sum(rank * (inputs + outputs) for outputs, inputs in shapes)


def adapter_step_multiplier(adapter_bytes: float, distinct: int, base_bytes: float) -> float:
    """Seconds of a memory-bound step that reads `distinct` adapters beside the base weights, over
    the step without: adapters are not shared by the batch."""
    return 1.0 + distinct * adapter_bytes / base_bytes
