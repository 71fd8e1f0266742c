"""The compiled price of a plan against the null back-end's counts, and against the seeds'
formulas."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.plan import StepPlan
from headrace.cost.catalog import Precision, PricedModel, find_model, names
from headrace.cost.formulas import rates
from headrace.cost.hardware import Device, find_device, find_link
from headrace.cost.roofline import TERMS, StepModel
from headrace.errors import ConfigError, ModelError
from headrace.models import decoder, sketch
from headrace.models.sketch import Ranks
from headrace.models.spec import Layer, ModelSpec, Rope
from headrace.ops import null, spec
from headrace.ops.null import StepShape

PLAIN = Device("plain", "one FLOP and one byte a second", "gpu", 1e12, 1.0, {"bf16": 1.0}, "test")


@pytest.fixture(scope="module")
def tiny() -> PricedModel:
    """Windows, sinks and experts in few layers."""
    architecture = sketch.Architecture(
        "tiny", 96, 32, 4, 2, 16, 64, (None, 8, None, 8), 512, False,
        experts=sketch.Experts(8, 2, 16, shared=16, dense_layers=1), sinks=True,
    )  # fmt: skip
    from headrace.cost.catalog import from_architecture

    return from_architecture(architecture, Precision(), Ranks())


slices = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(slices, st.integers(0, 6))
def test_terms_are_the_null_counts(
    tiny: PricedModel, parts: list[tuple[int, int]], logits: int
) -> None:
    """With one FLOP/s, one byte/s and no overlap, the terms are sums of FLOPs and bytes."""
    model = tiny.on(replace(PLAIN, overlap=0.0))
    plan = StepPlan(
        0, starts=[s for s, _ in parts], counts=[c for _, c in parts], num_logits=logits,
        samples=[0] * 2 * logits,
    )  # fmt: skip
    terms = dict(zip(TERMS, model.terms(plan), strict=True))
    assert terms["excess"] <= terms["computing"] <= terms["excess"] + terms["moving"]
    terms["moving"] += terms["computing"]
    wanted = dict.fromkeys(("moving", "attention", "cache", "logits"), 0.0)
    shape = StepShape(parts, logits, logits)
    works = null.count(tiny.program, tiny.layout, tiny.weight_bytes, shape)
    for op, (_, _, work) in zip(tiny.program.ops, works, strict=True):
        name = "moving"
        if isinstance(op, spec.Attention):
            name = "attention"
            wanted["cache"] += work.kv_read
        elif isinstance(op, spec.Logits | spec.Sample):
            name = "logits"
        moved = work.weight_bytes + work.kv_read + work.kv_written
        wanted[name] += work.flops + 4 * work.elements + moved + (work.read + work.written) / 2
    if not logits:
        wanted["logits"] = 0.0  # nobody reads the table then
    for name, value in wanted.items():
        assert terms[name] == pytest.approx(value, rel=1e-9), name


@settings(max_examples=30, deadline=None)
@given(slices)
def test_overlap_lies_between_the_longer_part_and_the_sum(
    tiny: PricedModel, parts: list[tuple[int, int]]
) -> None:
    starts, counts = [s for s, _ in parts], [c for _, c in parts]
    hidden, half, summed = (
        tiny.on(replace(PLAIN, overlap=overlap)).seconds(starts, counts)
        for overlap in (1.0, 0.5, 0.0)
    )
    assert hidden <= half <= summed <= 2 * hidden


def test_price_grows_with_every_amount(tiny: PricedModel) -> None:
    model = tiny.on(find_device("h100"))
    small = model.seconds([10, 20], [1, 1])
    for starts, counts in (([10, 20, 30], [1, 1, 1]), ([10, 40], [1, 1]), ([10, 20], [1, 9])):
        assert model.seconds(starts, counts) > small


def test_8b_on_h100_agrees_with_the_seeds() -> None:
    """N3: batch 64, 2,048 of context, at full bandwidth: 9.90 ms by the formula. The program reads
    a little more (buffers) and one embedding table less."""
    device = replace(find_device("h100"), bandwidth_share=1.0, compute_share=1.0, step_overhead=0.0)
    step = find_model("llama-3.1-8b").on(device).seconds([2047] * 64, [1] * 64)
    assert step == pytest.approx(9.90e-3, rel=0.03)
    prefill = find_model("llama-3.1-8b").on(replace(device, compute_share=0.5))
    floor = rates.prefill_seconds(4000, 7.5e9, 989e12 / 2, 32, 4096)
    assert prefill.seconds([0], [4000], 1) == pytest.approx(floor, rel=0.05)


PUBLISHED = {
    "llama-3.1-8b": (8.03, 8.03), "llama-3.1-70b": (70.6, 70.6), "qwen3-30b-a3b": (30.5, 3.3),
    "mixtral-8x7b": (46.7, 12.9), "deepseek-v3": (671, 37), "gpt-oss-120b": (116.8, 5.1),
    "gpt-oss-20b": (20.9, 3.6), "qwen2.5-72b": (72.7, 72.7), "smollm2-135m-bf16": (0.135, 0.135),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    model = find_model(name)
    assert model.params / 1e9 == pytest.approx(total, rel=0.01)
    assert model.active / 1e9 == pytest.approx(active, rel=0.1)


def test_every_shipped_configuration_is_priced() -> None:
    device = find_device("b200")
    for name in names():
        model = find_model(name)
        assert model.on(device).seconds([100], [1]) > 0
        assert model.kv_token_bytes() > 0
    kinds = {op.kind for name in names() for op in find_model(name).program.ops}
    kinds |= {op.kind for op in find_model("deepseek-v3", ranks=Ranks(tensor=8)).program.ops}
    kinds |= {op.kind for op in find_model("deepseek-v3", ranks=Ranks(expert=8)).program.ops}
    assert kinds == {op.KIND for op in spec.ALL_OPS} - {"lora"}


def test_a_sketch_costs_what_the_real_declaration_costs() -> None:
    """The config-only program of a dense model and the one that runs count the same work."""
    architecture = sketch.Architecture("a", 320, 64, 4, 2, 16, 96, (None,) * 3, 512, False)
    real = decoder.program(
        ModelSpec(
            "llama", 320, 64, 4, 2, 16, 96, 512, (Layer(),) * 3, {"global": Rope(1e4, 16)}, 0.25,
            1e-5, False,
        ),
        {"global": 1.0},
    )  # fmt: skip
    drawn = sketch.program(architecture)
    layout = spec.KVLayout(sketch.groups(architecture), 2, 16)
    shape = StepShape([(3, 9), (40, 1)], 2, 2)

    def work(program: spec.Program) -> null.Work:
        held = {name: 2.0 * prod(shape) for name, shape in program.shapes.items()}
        return null.Counter(program, layout, held).step(shape)

    assert work(drawn) == work(real)


def test_ranks_share_the_work_and_pay_the_wire() -> None:
    device, link = find_device("h100"), find_link("nvlink4")
    whole = find_model("llama-3.1-70b")
    parts = find_model("llama-3.1-70b", ranks=Ranks(tensor=8))
    assert parts.rank_bytes < whole.rank_bytes / 8 * 1.15
    one, eight = whole.on(device), parts.on(device, link)
    assert one.seconds([1000] * 32, [1] * 32) / 8 < eight.seconds([1000] * 32, [1] * 32)
    assert eight.wire.step == pytest.approx(160 * link.latency)
    assert parts.on(device).wire.step == 0
    with pytest.raises(ModelError, match="experts"):
        find_model("llama-3.1-70b", ranks=Ranks(expert=2))
    with pytest.raises(ModelError, match="at most 32"):
        find_model("deepseek-v3", ranks=Ranks(expert=64))


def test_formats_are_checked_and_change_bytes() -> None:
    plain = find_model("llama-3.1-8b")
    four = find_model("llama-3.1-8b", Precision(weights="int4", kv="fp8"))
    assert plain.kv_token_bytes() == 128 * 1024 == 2 * four.kv_token_bytes()
    assert 2.5 < plain.rank_bytes / four.rank_bytes < 3.9, "embeddings stay in 16 bits"
    with pytest.raises(ConfigError, match="int5"):
        Precision(weights="int5")


def test_windows_hold_less() -> None:
    model = find_model("gpt-oss-20b")
    assert model.kv_bytes(8192) < 0.52 * 8192 * 2 * model.kv_token_bytes()
    assert model.kv_bytes(64) == 64 * 2 * model.kv_token_bytes()


def test_a_model_survives_its_dictionary(tiny: PricedModel) -> None:
    model = tiny.on(find_device("a100"))
    assert StepModel.from_dict(model.to_dict()) == model
