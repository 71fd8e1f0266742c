"""The prefix tree: hits equal brute force, equal prefixes are computed once, none are confused."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.plan import Group, Knobs, PoolConfig, Request
from headrace.core.prefix import Node, pack
from tests.core.machine import Machine

GROUPS = [(Group(),), (Group(), Group(window=7, pages_per_block=2)), (Group(window=5),)]


def machine(
    size: int = 16,
    groups: tuple[Group, ...] = (Group(),),
    pages: int = 4000,
    positions: int = 1200,
    slots: int = 64,
    **knobs: int,
) -> Machine:
    pool = PoolConfig(pages, size, groups, positions, slots)
    return Machine(pool, Knobs(max_sequences=slots, **knobs), vocabulary=1000)


def serve(
    engine: Machine, identity: int, prompt: Iterable[int], output: int = 3, **fields: object
) -> int:
    """Run one request to its end; its cached tokens."""
    engine.add(Request(identity, tuple(prompt), output, **fields))  # type: ignore[arg-type]
    cached = 0
    while engine.scheduler.has_work:
        engine.step()
        engine.done()
        cached = engine.scheduler.usage(identity).cached_tokens
    return cached


def common(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 5),
    st.sampled_from(GROUPS),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=24),
            st.integers(1, 8),
            st.sampled_from([(), ("x",)]),
            st.one_of(st.none(), st.integers(1, 24)),
        ),
        min_size=2,
        max_size=12,
    ),
)
def test_hit_is_the_longest_match(size, groups, requests):
    """Without eviction a request reuses the longest prefix that was ever computed, to the token."""
    engine = machine(size, groups, positions=40)
    engine.vocabulary = 2
    computed: dict[tuple[str, ...], list[list[int]]] = {}
    for identity, (prompt, output, namespace, score) in enumerate(requests):
        limit = len(prompt) - 1
        if score is not None and score < len(prompt):
            limit = score - 1
        histories = computed.setdefault(namespace, [])
        expected = min(limit, max((common(prompt, other) for other in histories), default=0))
        fields = {"namespace": namespace, "score_from": score}
        assert serve(engine, identity, prompt, output, **fields) == expected
        histories.append([*prompt, *engine.outputs[identity, 0]][:-1])


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_full_hit(length):
    """B037: a prompt found wholly in the cache still computes a token, and yields the same."""
    engine = machine()
    prompt = list(range(length))
    assert serve(engine, 1, prompt, 5) == 0
    assert serve(engine, 2, prompt, 5) == length - 1
    assert engine.outputs[1, 0] == engine.outputs[2, 0] != []
    changed = [*prompt[: length // 2], 999, *prompt[length // 2 + 1 :]]
    assert serve(engine, 3, changed, 5) == length // 2


def arrive_together(engine: Machine, shared: int = 1000, own: int = 30, count: int = 32) -> int:
    """Prompt tokens computed when requests that share a prefix arrive together."""
    draw = random.Random(0)
    prefix = [draw.randrange(1000) for _ in range(shared)]
    for identity in range(count):
        suffix = [draw.randrange(1000) for _ in range(own)]
        engine.add(Request(identity, tuple(prefix + suffix), 4))
    cached = {}
    while engine.scheduler.has_work:
        engine.step()
        engine.done()
        cached |= {
            i: engine.scheduler.usage(i).cached_tokens for i in engine.scheduler.population.owners
        }
    engine.rest()
    stats = engine.scheduler.stats()
    prompts = count * (shared + own)
    computed = stats.computed_tokens - 3 * count
    assert computed + sum(cached.values()) == prompts
    assert stats.prefix_queries == prompts
    assert stats.prefix_hits == sum(cached.values())
    return computed


@pytest.mark.parametrize(
    ("budget", "chunk"), [(512, 512), (512, 128), (300, 100), (64, 8), (40, 40)]
)
def test_common_prefix_is_computed_once(budget, chunk):
    engine = machine(pages=4000, max_tokens=budget, chunk=chunk)
    computed = arrive_together(engine)
    ideal = 1000 + 32 * 30
    assert ideal <= computed <= ideal + 128


def test_common_prefix_in_a_small_pool():
    """The pool holds a few whole prompts only; admission waits rather than thrash."""
    engine = machine(pages=200, max_tokens=512, chunk=512)
    computed = arrive_together(engine)
    assert computed <= 1000 + 32 * 30 + 32 * 16
    assert engine.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("chunk", [7, 64])
def test_leader_disappears(chunk):
    """Followers of a prefix whose leader is aborted go on by themselves, and nothing is redone."""
    engine = machine(max_tokens=256, chunk=chunk)
    prefix = tuple(range(600))
    for identity in range(8):
        engine.add(Request(identity, (*prefix, identity), 2))
    for identity in range(4):
        engine.step()
        engine.abort(identity)
        engine.done()
    engine.run()
    assert all(engine.finished[identity, 0] == "length" for identity in range(4, 8))
    assert engine.scheduler.stats().computed_tokens <= 600 + 8 * (2 * 16 + 2)


def test_who_waits_for_a_leader():
    """A follower waits for a neighbour that fills its next block in the same plan; one that comes
    before the neighbour in order does not wait for what may not happen."""
    pool = PoolConfig(100, 16, (Group(),), 100, 4)
    engine = Machine(pool, Knobs(max_tokens=8, chunk=4, policy="priority"), vocabulary=1000)
    prompt = tuple(range(40))
    engine.add(Request(1, prompt, 2))
    engine.step()
    engine.done()
    engine.add(Request(2, prompt, 2, priority=-1))
    plan = engine.step()
    assert plan is not None
    assert (plan.sequences, plan.reasons) == ([0], [(1, "prefix")])
    engine.done()
    plan = engine.step()
    assert plan is not None
    assert (plan.sequences, plan.starts) == ([1, 0], [0, 8])
    engine.done()
    engine.run()


class Same(int):
    """A token id whose hash says nothing."""

    def __hash__(self) -> int:
        return 1


def test_hash_is_never_trusted():
    """B032: with every hash equal, different prompts still never share."""
    engine = machine()
    prompts = [tuple(map(Same, range(start, start + 40))) for start in (0, 1, 40)]
    for identity, prompt in enumerate(prompts):
        assert serve(engine, identity, prompt) == 0
    assert serve(engine, 9, prompts[0]) == 39


def test_what_a_hit_depends_on():
    """B031, B032: any change of parent, tokens or any part of the namespace is another prefix."""
    engine = machine()
    prompt = list(range(48))
    serve(engine, 1, prompt, namespace=("model", "adapter 1", "salt"))
    others = [("model", "adapter 2", "salt"), ("model", "adapter 1", "other"), (), ("model",)]
    others += [("model", "adapter 1salt"), ("salt", "adapter 1", "model")]
    for identity, namespace in enumerate(others, start=2):
        assert serve(engine, identity, prompt, namespace=namespace) == 0
    assert serve(engine, 98, [7, *prompt[1:]], namespace=("model", "adapter 1", "salt")) == 0
    assert serve(engine, 99, prompt, namespace=("model", "adapter 1", "salt")) == 47


def test_conversation():
    """Each turn reuses all of the turns before but the one token that was never computed."""
    engine = machine()
    history: list[int] = []
    for turn in range(6):
        prompt = [*history, *range(turn * 100, turn * 100 + 23)]
        assert serve(engine, turn, prompt, 9) == max(0, len(history) - 1)
        history = [*prompt, *engine.outputs[turn, 0]]


def test_caching_off():
    pool = PoolConfig(100, 16, (Group(),), 100, 4, prefix_caching=False)
    engine = Machine(pool, Knobs())
    assert serve(engine, 1, range(50)) == serve(engine, 2, range(50)) == 0
    assert engine.scheduler.stats().pages_cached == 0


def test_reset():
    engine = machine()
    serve(engine, 1, range(50))
    assert engine.scheduler.stats().pages_cached == 4
    engine.reset()
    assert engine.scheduler.stats().pages_cached == 0
    assert not engine.scheduler.memory.tree.roots
    assert serve(engine, 2, range(50)) == 0


def test_eviction_is_least_recently_used():
    """A pool of three prompts: the one used longest ago goes, from its end."""
    engine = machine(pages=12, positions=64)
    for identity, start in enumerate((0, 100, 200)):
        serve(engine, identity, range(start, start + 62), 1)
    assert serve(engine, 3, range(62), 1) == 61
    serve(engine, 4, range(300, 316), 1)
    assert serve(engine, 5, range(62), 1) == 61
    assert serve(engine, 6, range(200, 262), 1) == 61
    assert serve(engine, 7, range(100, 162), 1) < 61


def resident(engine: Machine, prompt: Iterable[int]) -> int:
    """Full blocks of a prompt that the tree holds."""
    tree = engine.scheduler.memory.tree
    tokens = list(prompt)
    node: Node | None = tree.roots[()]
    for count in range(len(tokens) // tree.size):
        assert node is not None
        node = tree.find(node, pack(tokens[count * tree.size : (count + 1) * tree.size]))
        if node is None:
            return count
    return len(tokens) // tree.size


def test_eviction_order_within_paths():
    """A path that was used again in part loses the rest first, then older paths from their ends,
    and what was used last goes last."""
    engine = machine(pages=8, positions=80)
    first, second = range(64), range(100, 164)
    serve(engine, 0, first, 1)
    serve(engine, 1, second, 1)
    assert (resident(engine, first), resident(engine, second)) == (4, 4)
    serve(engine, 2, [*range(32), 999], 1)
    left = []
    for identity in range(3, 10):
        left.append((resident(engine, first), resident(engine, second)))
        serve(engine, identity, range(1000 * identity, 1000 * identity + 16), 1)
    assert left == [(3, 4), (2, 4), (2, 3), (2, 2), (2, 1), (2, 0), (2, 0)]
    assert (resident(engine, first), resident(engine, second)) == (1, 0)


def test_window_holds_no_more_than_its_window():
    """A hit ends where a window no longer holds what the next query sees."""
    groups = (Group(window=20),)
    engine = machine(16, groups, pages=200, positions=400)
    engine.add(Request(1, tuple(range(200)), 100))
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        engine.done()
        most = max(most, engine.scheduler.stats().pages_used)
    assert most <= engine.scheduler.memory.most_pages(400, 200)
    assert serve(engine, 2, range(200), 1) == 199
    tight = machine(16, groups, pages=20, positions=400, chunk=16, max_tokens=16)
    serve(tight, 1, range(300), 50)
    serve(tight, 2, range(1000, 1300), 50)
    assert serve(tight, 3, range(300), 1) == 0
