"""Whether moving KV would pay here: the three measurements of seed 2, section 9.

W* is the link speed at which a prompt's KV arrives as fast as it could be computed. A cached prefix
is worth fetching from where the link is faster than W*; a prefill/decode split costs W* / W of the
prefill in transfer.
"""

from dataclasses import dataclass

from headrace.cost.catalog import PricedModel
from headrace.cost.formulas.transfer import (
    fetch_or_recompute,
    offload_slowdown,
    transfer_seconds,
)
from headrace.cost.hardware import Device, find_link, links
from headrace.cost.roofline import StepModel

PROMPT = 4096


@dataclass(frozen=True)
class Verdict:
    """One link. bandwidth: bytes/s. share: transfer over prefill of the same prompt. saved: seconds
    that fetching PROMPT tokens saves over computing them, negative where it loses. slowdown: of a
    step that reads all its KV across the link."""

    link: str
    bandwidth: float
    share: float
    saved: float
    slowdown: float

    @property
    def pays(self) -> bool:
        """Whether cached KV is worth fetching over the link."""
        return self.saved > 0


@dataclass(frozen=True)
class BreakEven:
    """prefill: prompt tokens/s, at PROMPT tokens. kv_bytes: of one token. bandwidth: W*,
    bytes/s."""

    prefill: float
    kv_bytes: float
    bandwidth: float
    verdicts: tuple[Verdict, ...]


def break_even(
    model: PricedModel, device: Device, steps: StepModel, prefill: float | None = None
) -> BreakEven:
    """What each link would do. prefill: measured prompt tokens/s, else the priced ones. Links are
    those of the table, and what was measured where the device is this machine."""
    prompt = min(PROMPT, model.max_positions)
    if prefill is None:
        prefill = prompt / _prefill_seconds(steps, prompt)
    seconds = prompt / prefill
    kv_bytes = model.kv_token_bytes()
    verdicts = []
    for name, speed in _links(device).items():
        choice, gain = fetch_or_recompute(prompt, kv_bytes, prefill, speed)
        verdicts.append(
            Verdict(
                name,
                speed,
                transfer_seconds(prompt * kv_bytes, speed) / seconds,
                gain if choice == "fetch" else -gain,
                offload_slowdown(device.bytes_per_second(), speed),
            )
        )
    verdicts.sort(key=lambda verdict: -verdict.bandwidth)
    return BreakEven(prefill, kv_bytes, kv_bytes * prefill, tuple(verdicts))


def _prefill_seconds(steps: StepModel, prompt: int, chunk: int = 512) -> float:
    """Seconds of computing a prompt alone, chunk by chunk."""
    return sum(
        steps.seconds([start], [min(chunk, prompt - start)], 1) for start in range(0, prompt, chunk)
    )


def _links(device: Device) -> dict[str, float]:
    """Speeds by name, bytes/s."""
    if device.measured:
        return {
            "another process (copy)": device.measured["copy"],
            "another process (loopback)": device.measured["loopback"],
            "disk": device.measured["disk_read"],
            "25gbe": find_link("25gbe").bandwidth,
            "10gbe": find_link("10gbe").bandwidth,
        }
    near = {device.link, device.host_link, "ndr400", "100gbe", "25gbe", "10gbe"} - {"memory"}
    return {name: link.bandwidth for name, link in links().items() if name in near}
