"""The sampler: each rule against a plain implementation, on every back-end."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from headrace.ops import noise
from headrace.ops.batch import MAX_TOP_LOGPROBS, Limits
from headrace.ops.program import ProgramBuilder
from headrace.ops.spec import Backend, Executable, Program
from tests.ops.quantize import exact
from tests.ops.rig import TOKENS, every_backend, layout

VOCABULARY, PADDED = 97, 104
INFINITY = float("inf")


@dataclass(frozen=True)
class Point:
    """One sample point. allowed: ids that the mask lets through, or None for no mask."""

    row: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seen: dict[int, int] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    allowed: frozenset[int] | None = None
    seed: int = 0
    choice: int = 0
    position: int = 1
    forced: int = -1
    top_logprobs: int = -1


@dataclass(frozen=True)
class Answer:
    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def table() -> np.ndarray:
    """Rows of logits: random, with ties, flat, steep, and small integers. Padding is tempting."""
    rng = np.random.default_rng(5)
    rows = np.zeros((TOKENS, PADDED), np.float32)
    rows[0:16] = 3 * rng.standard_normal((16, PADDED))
    rows[16:32] = rng.integers(-3, 4, (16, PADDED))
    rows[32:40] = rng.choice([0.0, 2.5], (8, PADDED))
    rows[40:44] = -1.5
    rows[44:] = 30 * rng.standard_normal((20, PADDED))
    rows[:, VOCABULARY:] = 100
    return rows


def program() -> tuple[Program, dict]:
    build = ProgramBuilder()
    x = build.embed("table", TOKENS, PADDED)
    out = build.logits(x, "identity", PADDED)
    weights = {"table": exact("table", table()), "identity": exact("identity", np.eye(PADDED))}
    return build.finish(x, out), weights


def load(backend: Backend, samples: int = 64) -> Executable:
    limits = Limits(TOKENS, TOKENS, TOKENS, samples, 1, 1, 1, 64, VOCABULARY, 1)
    built, weights = program()
    executable = backend.load(built, weights, layout(), limits)
    batch = executable.batch
    batch.token[:], batch.position[:] = np.arange(TOKENS), 0
    batch.slice_row[: TOKENS + 1] = np.arange(TOKENS + 1)
    batch.slice_slot[:] = 0
    batch.logits_row[:] = np.arange(TOKENS)
    batch.num_tokens = batch.num_logits = batch.num_slices = TOKENS
    return executable


def answers(executable: Executable, points: list[Point]) -> list[Answer]:
    """Run the points in one step."""
    batch = executable.batch
    batch.num_samples = len(points)
    batch.reserve(
        penalties=sum(len(p.seen) for p in points),
        biases=sum(len(p.bias) for p in points),
        masks=len(points),
    )
    penalties, biases = [], []
    for i, p in enumerate(points):
        batch.sample_row[i], batch.forced[i] = p.row, p.forced
        batch.temperature[i], batch.top_k[i] = p.temperature, p.top_k
        batch.top_p[i], batch.min_p[i] = p.top_p, p.min_p
        batch.repetition[i], batch.presence[i] = p.repetition, p.presence
        batch.frequency[i], batch.seed[i] = p.frequency, p.seed
        batch.choice[i], batch.sample_position[i] = p.choice, p.position
        batch.top_logprobs[i] = p.top_logprobs
        penalties += p.seen.items()
        biases += p.bias.items()
        batch.penalty_start[i + 1], batch.bias_start[i + 1] = len(penalties), len(biases)
        batch.mask_index[i] = -1 if p.allowed is None else i
        batch.masks[i] = 0
        for token in p.allowed or ():
            batch.masks[i, token // 32] |= np.uint32(1 << token % 32)
    for j, (token, count) in enumerate(penalties):
        batch.penalty_token[j], batch.penalty_count[j] = token, count
    for j, (token, value) in enumerate(biases):
        batch.bias_token[j], batch.bias_value[j] = token, value
    executable.run()
    return [
        Answer(
            int(batch.out_token[i]),
            float(batch.out_logprob[i]) if p.top_logprobs >= 0 else 0.0,
            int(batch.out_rank[i]) if p.top_logprobs >= 0 else 0,
            [
                (int(batch.out_top_token[i, j]), float(batch.out_top_logprob[i, j]))
                for j in range(min(p.top_logprobs, MAX_TOP_LOGPROBS))
            ],
        )
        for i, p in enumerate(points)
    ]


# --- The plain implementation: lists and sorting, one rule after another --------------------------


def plain_noise(p: Point, token: int) -> float:
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    key = mix(mix(p.seed + gamma & mask) ^ (p.choice << 32 | p.position))
    bits = mix(key + gamma * (token + 1) & mask)
    return -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))


def plain_logits(logits: list[float], p: Point) -> list[float]:
    out = [float(np.float32(x)) for x in logits]
    if p.allowed is not None:
        out = [x if i in p.allowed else -INFINITY for i, x in enumerate(out)]
    for token, value in p.bias.items():
        out[token] += float(np.float32(value))
    for token, count in p.seen.items():
        repetition = float(np.float32(p.repetition))
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= (p.presence if count else 0) + p.frequency * count
    return out


def plain_survivors(logits: list[float], p: Point) -> tuple[list[int], float]:
    """Ids left by min-p, top-k and top-p, and how close a rule was to deciding otherwise."""
    best = max(logits)
    weight = {i: math.exp((x - best) / p.temperature) for i, x in enumerate(logits)}
    order = sorted((i for i in weight if weight[i] > 0), key=lambda i: (-logits[i], i))
    gaps = [abs(weight[i] - p.min_p) for i in order] if p.min_p > 0 else []
    order = [i for i in order if weight[i] >= p.min_p]
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.top_p < 1:
        total, running, kept = sum(weight[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            running += weight[i]
            gaps.append(abs(running / total - p.top_p))
            if running >= p.top_p * total:
                break
        order = kept
    return order, min((gap for gap in gaps if gap > 0), default=1.0)


def plain_token(logits: list[float], p: Point) -> tuple[int, float]:
    """The token, and the smallest difference that decided it."""
    if p.forced >= 0:
        return p.forced, 1.0
    changed = plain_logits(logits, p)
    best = max(changed)
    if p.temperature == 0 or best == -INFINITY:
        near = [best - x for x in changed if 0 < best - x < INFINITY]
        return changed.index(best), min(near, default=1.0)
    order, gap = plain_survivors(changed, p)
    scores = {i: (changed[i] - best) / p.temperature + plain_noise(p, i) for i in sorted(order)}
    token = max(scores, key=lambda i: (scores[i], -i))
    near = [scores[token] - x for i, x in scores.items() if i != token]
    return token, min([gap, *near])


def plain_report(logits: list[float], token: int) -> Answer:
    best = max(logits)
    total = best + math.log(sum(math.exp(x - best) for x in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    top = [(i, logits[i] - total) for i in order]
    return Answer(token, logits[token] - total, 1 + order.index(token), top)


# --- The tests ----------------------------------------------------------------------------------


def random_points(rng: np.random.Generator, count: int) -> list[Point]:
    """Every knob turned now and then, extremes often."""

    def some(values: list) -> object:
        return values[rng.integers(len(values))]

    points = []
    for _ in range(count):
        ids = rng.permutation(VOCABULARY)
        allowed = frozenset(ids[: some([1, 2, 30, 97])].tolist())
        biases = {int(i): some([-INFINITY, -5.0, 0.25, 4.0, 100.0]) for i in ids[:4]}
        seen = {int(i): int(rng.integers(0, 4)) for i in ids[2:22]}
        points.append(
            Point(
                row=int(rng.integers(TOKENS)),
                temperature=some([0.0, 1e-30, 1e-6, 0.3, 0.8, 1.0, 2.0, 50.0]),
                top_k=some([0, -1, 1, 2, 5, 40, 97, 1000]),
                top_p=some([0.0, 1e-9, 0.1, 0.5, 0.75, 0.95, 1.0]),
                min_p=some([0.0, 0.0, 0.01, 0.3, 1.0]),
                repetition=some([1.0, 1.0, 1.3, 0.5]),
                presence=some([0.0, 0.0, 0.6, -1.0]),
                frequency=some([0.0, 0.0, 0.3, -0.5]),
                seen=some([{}, seen]),
                bias=some([{}, {}, biases]),
                allowed=some([None, None, allowed]),
                seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
                choice=some([0, 1, 7]),
                position=int(rng.integers(1, 8192)),
                forced=some([-1, -1, -1, -1, 3]),
                top_logprobs=some([-1, 0, 1, 5, 64]),
            )
        )
    return points


@every_backend
def test_points_equal_the_plain_sampler(backend: Backend) -> None:
    """Hundreds of points with all knobs mixed in one batch; close calls (by 1e-5) may differ."""
    executable = load(backend)
    points = random_points(np.random.default_rng(17), 384)
    close = 0
    for start in range(0, len(points), 64):
        part = points[start : start + 64]
        got = answers(executable, part)
        logits = executable.read(program()[0].logits)[:, :VOCABULARY]
        for p, answer in zip(part, got, strict=True):
            token, gap = plain_token(logits[p.row].tolist(), p)
            if gap < 1e-5:
                close += answer.token != token
                token = answer.token
            assert answer.token == token, p
            if p.top_logprobs < 0:
                continue
            want = plain_report(logits[p.row].tolist(), token)
            assert answer.rank == want.rank
            assert answer.logprob == pytest.approx(want.logprob, abs=2e-5, rel=1e-5)
            listed = want.top[: p.top_logprobs]
            assert [token for token, _ in answer.top] == [token for token, _ in listed]
            assert [x for _, x in answer.top] == pytest.approx(
                [x for _, x in listed], abs=2e-5, rel=1e-5
            )
    executable.close()
    assert close <= (0 if backend.name == "reference" else 2)


@every_backend
def test_a_point_alone_equals_the_same_point_in_a_batch(backend: Backend) -> None:
    executable = load(backend)
    points = random_points(np.random.default_rng(23), 64)
    together = answers(executable, points)
    for i in range(0, 64, 3):
        assert answers(executable, [points[i]]) == [together[i]]
    executable.close()


@every_backend
def test_nothing_allowed_takes_the_lowest_id(backend: Backend) -> None:
    executable = load(backend)
    nothing = frozenset[int]()
    banned = dict.fromkeys(range(VOCABULARY), -INFINITY)
    points = [
        replace(p, temperature=t)
        for p in (Point(allowed=nothing), Point(bias=banned))
        for t in (0.0, 1.0)
    ]
    assert [answer.token for answer in answers(executable, points)] == [0] * 4
    executable.close()


@every_backend
def test_ties_are_cut_at_the_lowest_ids(backend: Backend) -> None:
    """Row 40 is flat: top-k and top-p keep a prefix of the ids, whatever the seed."""
    executable = load(backend)
    first = frozenset(range(9, 25))
    for kept, options in (
        ({9, 10, 11}, {"top_k": 3}),
        ({9, 10, 11, 12}, {"top_p": 0.25}),
        ({9, 10, 11, 12, 13}, {"top_p": 0.2501}),
        ({9}, {"top_p": 0.0}),
        (set(first), {"min_p": 1.0}),
    ):
        points = [Point(row=40, allowed=first, seed=s, **options) for s in range(64)]
        assert {answer.token for answer in answers(executable, points)} == kept
    executable.close()


@every_backend
@pytest.mark.parametrize("varied", ["seed", "position", "choice"])
def test_draws_follow_the_distribution(backend: Backend, varied: str) -> None:
    """Chi-square of 2,000 draws against the softmax of the survivors, at one in a million."""
    executable = load(backend, samples=2000)
    base = Point(row=2, temperature=1.7, top_k=24, top_p=0.95, bias={4: -INFINITY})
    points = [replace(base, **{varied: i}) for i in range(1, 2001)]
    drawn = [answer.token for answer in answers(executable, points)]
    logits = executable.read(program()[0].logits)[base.row, :VOCABULARY].tolist()
    executable.close()
    changed = plain_logits(logits, base)
    kept, _ = plain_survivors(changed, base)
    weight = np.exp(np.array([changed[i] / base.temperature for i in kept]))
    want = len(drawn) * weight / weight.sum()
    got = np.array([drawn.count(i) for i in kept])
    assert got.sum() == len(drawn), "a token that the filters removed was drawn"
    assert want.min() > 5
    square, degrees = float(((got - want) ** 2 / want).sum()), len(kept) - 1
    # Wilson and Hilferty: the cube root of chi-square / degrees is nearly normal.
    part = 2 / (9 * degrees)
    assert ((square / degrees) ** (1 / 3) - (1 - part)) / math.sqrt(part) < 4.75


def test_infinite_and_missing_logits() -> None:
    """What a broken model may hand to the sampler; only the reference can be fed such rows."""
    from headrace.ops.batch import RaggedBatch
    from headrace.ops.reference_sample import sample

    rows = np.zeros((4, VOCABULARY), np.float32)
    rows[0, [7, 9]] = np.inf
    rows[1] = np.nan
    rows[2], rows[2, 11] = -np.inf, 2.0
    rows[3, 5] = np.nan
    batch = RaggedBatch(Limits(4, 4, 4, 8, 1, 1, 1, 4, VOCABULARY), 1)
    batch.num_samples = 8
    batch.sample_row[:] = np.arange(8) % 4
    batch.temperature[4:] = 1.0
    batch.seed[:] = 3
    batch.top_logprobs[:] = 1
    sample(rows, batch)
    assert batch.out_token[:4].tolist() == [7, 0, 11, 0]
    assert batch.out_token[4] in (7, 9)
    assert batch.out_token[5:7].tolist() == [0, 11]
    assert batch.out_token[7] != 5
    assert batch.out_logprob[[0, 2]] == pytest.approx([-math.log(2), 0.0])


def test_noise_is_the_documented_hash() -> None:
    for p in (Point(), Point(seed=2**64 - 1, choice=7, position=8191)):
        ids = np.array([0, 1, 49151])
        got = noise.gumbel(p.seed, p.choice, p.position, ids)
        assert got.tolist() == pytest.approx([plain_noise(p, int(i)) for i in ids], rel=1e-12)
