"""Every golden number (N1..N23), and the errors of the sources that must not be built in."""

import math

import numpy as np
import pytest

from headrace.cost.formulas import features, memory, rates, traffic, transfer

H100_BYTES, H100_BF16, H100_FP8 = 3.35e12, 989e12, 1979e12
F = 4.0e14
P8, P70 = 8e9, 70e9
KIB, GIB = 1024, 2**30
KV8 = memory.kv_bytes_per_token(32, 8, 128, 2)
KV70 = memory.kv_bytes_per_token(80, 8, 128, 2)
KV70_FP8 = memory.kv_bytes_per_token(80, 8, 128, 1)


def at(digits: int, value: float) -> float:
    return round(value, digits)


def test_n1_ridge_points() -> None:
    assert at(1, rates.ridge_point(H100_BF16, H100_BYTES)) == 295.2
    assert at(1, rates.ridge_point(H100_FP8, H100_BYTES)) == 590.7
    ridge = rates.ridge_point(H100_BF16, H100_BYTES)
    assert rates.attainable_flops(ridge, H100_BF16, H100_BYTES) == pytest.approx(H100_BF16)
    assert rates.attainable_flops(1.0, H100_BF16, H100_BYTES) == H100_BYTES


def test_n2_kv_per_token() -> None:
    assert (KV8 / KIB, KV70 / KIB, KV70_FP8 / KIB) == (128, 320, 160)


def test_n3_8b_batch_64() -> None:
    kv = 64 * 2048 * KV8
    step = rates.step_seconds(16e9, kv, rates.decode_flops(P8, 64), H100_BYTES, H100_BF16)
    assert at(2, kv / 1e9) == 17.18
    assert at(2, step * 1e3) == 9.90
    assert round(64 / step, -1) == 6460


def test_n4_70b_fp8_on_two_cards() -> None:
    kv = 64 * 2048 * KV70_FP8
    step = rates.step_seconds(70e9, kv, rates.decode_flops(P70, 64), 2 * H100_BYTES, 2 * H100_FP8)
    assert at(2, kv / 1e9) == 21.47
    assert at(2, step * 1e3) == 13.65
    assert round(64 / step) == 4688


def test_n5_money() -> None:
    assert at(3, traffic.cost_per_million(2.5, 3500)) == 0.198
    assert at(4, traffic.cost_per_million(2.5, 30_000)) == 0.0231
    assert at(3, traffic.cost_per_million(20, 10_000)) == 0.556
    assert at(3, traffic.cost_per_million(20, 10_000, 0.4)) == 1.389


def test_n6_break_even_links() -> None:
    assert at(2, transfer.break_even_bandwidth(KV8, P8, F) / 1e9) == 3.28
    assert at(2, transfer.break_even_bandwidth(KV70, P70, F) / 1e9) == 0.94
    assert at(2, transfer.break_even_bandwidth(KV70_FP8, P70, F) / 1e9) == 0.47


def test_n7_transfer_shares_and_the_wrong_head_count() -> None:
    assert KV70 * 8192 / GIB == 2.5
    shares = [
        at(1, 100 * transfer.transfer_share(KV70, P70, F, link))
        for link in (450e9, 64e9, 50e9, 3.125e9)
    ]
    assert shares == [0.2, 1.5, 1.9, 30.0]
    by_query_heads = memory.kv_bytes_per_token(80, 64, 128, 2)
    assert by_query_heads / KV70 == 8
    assert round(transfer.transfer_seconds(KV70 * 8192, 50e9) * 1e3) == 54


def test_n8_4k_prompt_over_rdma() -> None:
    assert at(3, 4096 * KV70 / 1e9) == 1.342
    assert at(1, transfer.transfer_seconds(4096 * KV70, 50e9) * 1e3) == 26.8


def test_n9_active_kv_offload() -> None:
    read = 32 * 8192 * KV70
    assert at(1, read / 1e9) == 85.9
    assert at(1, transfer.transfer_seconds(read, H100_BYTES) * 1e3) == 25.6
    assert at(2, transfer.transfer_seconds(read, 64e9)) == 1.34
    assert round(transfer.offload_slowdown(H100_BYTES, 64e9)) == 52


def test_n10_long_sequence() -> None:
    assert at(1, memory.kv_bytes(128 * KIB, [(KV70, None)]) / 1e9) == 42.9


def test_n11_attention_crossover() -> None:
    n = rates.attention_crossover(P70, 80, 8192)
    assert round(n) == 53_406
    assert rates.attention_crossover(P70, 80, 8192, causal=True) == 2 * n
    linear = rates.prefill_seconds(8192, P70, F)
    whole = rates.prefill_seconds(8192, P70, F, 80, 8192)
    assert whole / linear < 1.1, "an 8k prompt is far from quadratic"
    at_n = rates.prefill_seconds(round(2 * n), P70, F, 80, 8192)
    assert at_n / rates.prefill_seconds(round(2 * n), P70, F) == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("acceptance", "drafts", "tokens"),
    [(0.8, 4, 3.36), (0.6, 4, 2.31), (0.8, 8, 4.33), (0.75, 8, 3.70)],
)
def test_n12_speculation(acceptance: float, drafts: int, tokens: float) -> None:
    assert at(2, features.expected_tokens(acceptance, drafts)) == tokens
    simulated = 1 + sum(acceptance**i for i in range(1, drafts + 1))
    assert features.expected_tokens(acceptance, drafts) == pytest.approx(simulated)


def test_n13_experts_touched() -> None:
    assert at(1, 100 * features.experts_touched(32, 256, 8)) == 63.8
    assert at(1, 100 * features.experts_touched(128, 256, 8)) == 98.3
    assert features.tokens_per_expert(128, 256, 8) == 4


ATTENTION = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]


def test_n14_n15_adapters() -> None:
    params = {r: 32 * features.adapter_params(r, ATTENTION) for r in (8, 16, 64)}
    assert [at(2, p / 1e6) for p in params.values()] == [6.82, 13.63, 54.53]
    assert [at(1, 2 * p / 1e6) for p in params.values()] == [13.6, 27.3, 109.1]
    step = [
        at(3, features.adapter_step_multiplier(2 * params[r], n, 16e9))
        for r in (16, 64)
        for n in (1, 32, 128)
    ]
    assert step == [1.002, 1.055, 1.218, 1.007, 1.218, 1.872]


def test_n16_expert_imbalance() -> None:
    experts, top_k, tokens = 256, 8, 8192
    rng = np.random.default_rng(0)

    def load(scores: np.ndarray) -> list[float]:
        eighth = np.partition(scores, experts - top_k, axis=1)[:, [experts - top_k]]
        return [float(count) for count in (scores >= eighth).sum(0)]

    affinity = rng.normal(0, 1, (tokens, experts))
    popular = affinity + rng.normal(0, 0.6, experts)
    bias = [0.0] * experts
    for _ in range(60):
        bias = features.rebalanced_bias(bias, load(popular + bias), 0.05)
    found = [features.imbalance(load(s)) for s in (affinity, popular, popular + bias)]
    assert [at(2, x) for x in found] == [1.16, 8.75, 1.14]


def test_n17_goodput_table_and_its_alarm() -> None:
    prompts = np.random.default_rng(0).lognormal(np.log(900), 1.0, 4000).tolist()
    waits = ((np.arange(4000) + 0.5) / 4000).tolist()
    table = {
        n: traffic.goodput_point(
            n, prompts, waits, 256, P8, 16e9, H100_BYTES, F, ttft=2.0, itl=0.025
        )
        for n in (4, 8, 16, 24, 32, 48, 64, 128, 256)
    }
    rows = [
        (n, round(p.throughput), round(100 * p.met), round(p.goodput)) for n, p in table.items()
    ]
    assert rows == [
        (4, 703, 100, 703), (8, 1213, 100, 1212), (16, 1900, 90, 1714), (24, 2344, 74, 1741),
        (32, 2653, 63, 1673), (48, 3056, 48, 1482), (64, 3308, 39, 1297), (128, 3736, 0, 0),
        (256, 3736, 0, 0),
    ]  # fmt: skip
    assert max(table, key=lambda n: table[n].goodput) == 24
    assert traffic.goodput_falls(table[24], table[64])
    assert not traffic.goodput_falls(table[8], table[16])


def test_n18_n21_bits_per_weight() -> None:
    mxfp4 = memory.bits_per_weight(4, 32, 8)
    nvfp4 = memory.bits_per_weight(4, 16, 8)
    assert (mxfp4, at(2, 16 / mxfp4), nvfp4, at(2, 16 / nvfp4)) == (4.25, 3.76, 4.5, 3.56)
    assert memory.weight_bytes(120e9, mxfp4) / 1e9 == 63.75
    assert memory.weight_bytes(120e9, 16) / 1e9 == 240


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def snap(values: np.ndarray) -> np.ndarray:
    index = np.abs(np.subtract.outer(np.abs(values), E2M1)).argmin(axis=-1)
    return np.sign(values) * E2M1[index]


def test_n19_mxfp4_by_the_ocp_rule_beats_the_snippet() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(0, 1, 4096)
    w[137] = 50.0
    blocks = w.reshape(-1, 32)
    largest = np.abs(blocks).max(1, keepdims=True)

    def rms(q: np.ndarray) -> float:
        return float(np.sqrt(((q.ravel() - w) ** 2).mean()))

    snippet_scale = 2.0 ** np.floor(np.log2(largest / 6))
    snippet = snap(blocks / snippet_scale) * snippet_scale
    step = 50.0 / 7.0
    int4 = np.clip(np.round(w / step), -7, 7) * step
    assert (at(3, rms(snippet)), at(3, rms(int4))) == (0.220, 0.997)
    assert at(1, 100 * (snippet == 0).mean()) == 5.2
    assert at(1, 100 * (int4 == 0).mean()) == 99.9
    ocp_scale = np.array([[2.0 ** memory.ocp_scale_exponent(float(x))] for x in largest[:, 0]])
    assert at(3, rms(snap(blocks / ocp_scale) * ocp_scale)) == 0.143
    with pytest.raises(ValueError, match="largest"):
        memory.ocp_scale_exponent(0.0)


def test_n20_all_to_all() -> None:
    dispatch = transfer.all_to_all_bytes(8192, 8, 7168, 1)
    combine = transfer.all_to_all_bytes(8192, 8, 7168, 2)
    assert (round(dispatch / 1e6), round(combine / 1e6, -1)) == (470, 940)
    nvlink = dispatch / 726e9 + combine / 740e9
    rdma = dispatch / 90e9 + combine / 81e9
    assert (at(2, nvlink * 1e3), at(1, rdma * 1e3)) == (1.92, 16.8)


def test_n22_little() -> None:
    assert traffic.in_flight(20, 10) == 200


def test_n23_prefill_floor() -> None:
    slow, fast = (rates.prefill_rate(P8, H100_BF16 * mfu) for mfu in (0.4, 0.6))
    assert (round(slow, -3), round(fast, -3)) == (25_000, 37_000)
    first = [rates.prefill_seconds(4000, P8, H100_BF16 * mfu) for mfu in (0.6, 0.4)]
    assert [round(s * 1e3, -1) for s in first] == [110, 160]


def test_intensities() -> None:
    assert rates.linear_intensity(1, 8192, 8192) == pytest.approx(1.0, rel=1e-3)
    assert rates.linear_intensity(64, 8192, 8192) == pytest.approx(64, rel=0.02)
    assert rates.decode_attention_intensity(32, 32) == 1
    assert rates.decode_attention_intensity(64, 8) == 8
    mla = rates.latent_attention_intensity(128, 512, 64)
    assert 200 < mla < 256
    assert memory.latent_bytes_per_token(61, 512, 64) == 61 * 576 * 2
    windowed = memory.kv_bytes(10_000, [(100.0, None), (500.0, 512)])
    assert windowed == 100 * 10_000 + 500 * 512


def test_speculation_helps_where_memory_binds() -> None:
    small_batch = features.best_drafts(0.8, draft_cost=0.05)
    large_batch = features.best_drafts(0.8, draft_cost=0.05, verify_slope=0.9)
    assert small_batch[0] > 4
    assert small_batch[1] > 2
    assert large_batch == (0, 1.0)
    assert features.expected_tokens(1.0, 4) == 5


def test_curve_knee_and_promise() -> None:
    curve = rates.batch_curve([2**i for i in range(11)], 16e9, 2048 * KV8, P8, H100_BYTES, F)
    seconds = [p.seconds for p in curve]
    throughput = [p.throughput for p in curve]
    assert seconds == sorted(seconds)
    assert throughput == sorted(throughput)
    best = rates.largest_batch(curve, 0.02)
    assert best is not None
    assert best.batch == 128
    assert best.seconds <= 0.02 < curve[8].seconds
    assert rates.largest_batch(curve, 0.001) is None
    bend = rates.knee([(float(p.batch), p.throughput) for p in curve])
    assert 16e9 / (2048 * KV8) / 4 < curve[bend].batch < 16e9 / (2048 * KV8) * 8
    assert rates.decode_ceiling(H100_BYTES, 16e9) == pytest.approx(throughput[0], rel=0.02)
    with pytest.raises(ValueError, match="points"):
        rates.knee([])


def test_fetch_flips_at_break_even() -> None:
    prefill = rates.prefill_rate(P70, F)
    link = transfer.break_even_bandwidth(KV70, P70, F)
    assert transfer.fetch_or_recompute(1000, KV70, prefill, link * 1.01)[0] == "fetch"
    assert transfer.fetch_or_recompute(1000, KV70, prefill, link * 0.99)[0] == "recompute"
    assert transfer.overlap_ratio(0.2, 1.0) == 0.8
    assert transfer.overlap_ratio(0.0, 0.0) == 1.0
    assert transfer.all_reduce_seconds(1e6, 1, 1e9) == 0
    assert math.isclose(transfer.all_reduce_seconds(1e6, 4, 1e9, 1e-6), 1.5e-3 + 6e-6)


def test_capacity_counts_whole_blocks() -> None:
    assert memory.max_sequences(10 * 32 * 100.0, 17, 100.0, block=16) == 10
