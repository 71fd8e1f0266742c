"""Who lives, who waits, who runs: the states of sequences and the moves between them."""

from headrace.core.memory import Memory
from headrace.core.plan import Request
from headrace.core.policy import Queue, order
from headrace.core.sequence import Owner, Sequence


class Population:
    """All sequences and their owners.

    running: by id, in order of seating. steady, others: the running ones as of the last `sort`
    (`steady_ids` and `steady_slots` in the same order); `sorted` is False when that is out of date.
    living: sequences that have not been buried. unadmitted: requests that never ran.
    """

    def __init__(self, memory: Memory, slots: int) -> None:
        self.memory = memory
        self.policy = "fcfs"
        self.queue = Queue()
        self.running: dict[int, Sequence] = {}
        self.owners: dict[int, Owner] = {}
        self.sequences: dict[int, Sequence] = {}
        self.free_slots = list(range(slots - 1, -1, -1))
        self.sorted = True
        self.steady: list[Sequence] = []
        self.others: list[Sequence] = []
        self.steady_ids: list[int] = []
        self.steady_slots: list[int] = []
        self.living = 0
        self.unadmitted = 0
        self.preemptions = 0
        self._seated: list[Sequence] = []
        self._odd = False
        self._ending: list[Sequence] = []
        self._gone: list[Sequence] = []
        self._next_sequence = 0
        self._next_arrival = 0

    # Birth

    def open(self, request: Request) -> None:
        """Take in a request; its first sequence waits, the others are unborn."""
        owner = Owner(request, self._next_arrival)
        self._next_arrival += 1
        self.owners[request.id] = owner
        tokens = list(request.prompt)
        for choice in range(request.n):
            self.create(owner, choice, tokens)
        carrier = owner.living[0]
        if request.score_from is not None:
            carrier.score = min(request.score_from, carrier.prompt)
        if request.n > 1:
            owner.unborn = list(owner.living)
        self.unadmitted += 1
        self.queue.push(carrier)

    def create(self, owner: Owner, choice: int, tokens: list[int]) -> Sequence:
        """A new sequence, in no state yet."""
        sequence = Sequence(self._next_sequence, owner, choice, tokens)
        self._next_sequence += 1
        self._set_order(sequence)
        self.sequences[sequence.id] = sequence
        owner.living.append(sequence)
        self.living += 1
        return sequence

    def reorder(self, policy: str) -> None:
        """Order everybody by another policy."""
        self.policy = policy
        self.sorted = False
        for sequence in self.sequences.values():
            self._set_order(sequence)
        self.queue.reorder()

    def _set_order(self, sequence: Sequence) -> None:
        owner = sequence.owner
        sequence.order = order(owner.request, owner.arrival, sequence.id, self.policy)

    # Running

    def seat(self, sequence: Sequence) -> None:
        """Give a sequence that is not in the queue a slot, but no table yet."""
        sequence.slot = self.free_slots.pop()
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        self.running[sequence.id] = sequence
        self._seated.append(sequence)
        self.sorted = False

    def unseat(self, sequence: Sequence, keep: bool) -> None:
        """Take slot and blocks from a sequence. keep: leave its last rows in the prefix tree."""
        sequence.highest = max(sequence.highest, sequence.computed)
        self.memory.release(sequence, keep)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        del self.running[sequence.id]
        self.sorted = False

    def send_back(self, sequence: Sequence, keep: bool) -> None:
        """From running to waiting."""
        sequence.owner.counting = False
        self.unseat(sequence, keep)
        self.queue.push(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Send a sequence back so that others can go on."""
        sequence.owner.preemptions += 1
        self.preemptions += 1
        self.send_back(sequence, keep=True)

    def sort(self) -> None:
        """Part the running sequences into steady ones and others. Steady ones stay so while each
        sample yields one token (else see `mark_odd`); only the rest is looked at."""
        rest = self.others + self._seated
        steady = [sequence for sequence in self.steady if sequence.slot >= 0]
        if self._odd:
            rest += steady
            steady = []
        self.others = []
        for sequence in rest:
            if sequence.slot >= 0:
                (steady if is_steady(sequence) else self.others).append(sequence)
        self.others.sort(key=lambda sequence: sequence.order)
        self.steady = steady
        self.steady_ids = [sequence.id for sequence in steady]
        self.steady_slots = [sequence.slot for sequence in steady]
        self._seated = []
        self._odd = False
        self.sorted = True

    def mark_odd(self) -> None:
        """Some steady sequence may have more or less than one token to compute."""
        self._odd = True
        self.sorted = False

    # Death

    def end(self, sequence: Sequence) -> None:
        """Let a sequence end; `bury` takes back what it holds."""
        sequence.ended = True
        self._ending.append(sequence)

    def bury(self) -> None:
        """Take back what ended sequences hold. Nothing is in flight."""
        for sequence in self._ending:
            owner = sequence.owner
            if sequence in owner.unborn:
                owner.unborn.remove(sequence)
                heirs = [other for other in owner.unborn if not other.ended]
                if heirs and (sequence.slot >= 0 or sequence.waiting):
                    self._bequeath(sequence, heirs[0])
            if sequence.slot >= 0:
                self.unseat(sequence, keep=True)
            elif sequence.waiting:
                self.queue.discard(sequence)
            owner.living.remove(sequence)
            if not owner.living and not owner.admitted:
                self.unadmitted -= 1
            self.living -= 1
            self._gone.append(sequence)
        self._ending.clear()

    def _bequeath(self, sequence: Sequence, heir: Sequence) -> None:
        """Another unborn sequence goes on computing the prompt."""
        heir.score = sequence.score
        heir.highest = sequence.highest
        if sequence.waiting:
            self.queue.discard(sequence)
            self.queue.push(heir)
            return
        heir.slot, sequence.slot = sequence.slot, -1
        for name in ("blocks", "low", "room", "nodes", "promise", "computed", "scheduled"):
            setattr(heir, name, getattr(sequence, name))
        del self.running[sequence.id]
        self._run(heir)

    def forget_gone(self) -> None:
        """Drop the state of buried sequences, which callers could still read until now."""
        for sequence in self._gone:
            del self.sequences[sequence.id]
            if not sequence.owner.living:
                self.owners.pop(sequence.request, None)
        self._gone.clear()

    def check(self, slots: int) -> None:
        """Recount. Raises AssertionError with what differs."""
        held = [sequence.slot for sequence in self.running.values()]
        assert sorted(self.free_slots + held) == list(range(slots)), "a slot is lost or shared"
        living = sum(sequence in sequence.owner.living for sequence in self.sequences.values())
        assert living == self.living, f"{self.living} living, counted {living}"
        unadmitted = sum(1 for owner in self.owners.values() if owner.living and not owner.admitted)
        assert unadmitted == self.unadmitted, f"{self.unadmitted} wait, counted {unadmitted}"

    def check_sorted(self) -> None:
        """Whether `sort` told the sequences apart, when nothing is in flight."""
        steady = {s.id for s in self.running.values() if is_steady(s)}
        assert steady == set(self.steady_ids), "steady sequences are not told apart"
        others = {sequence.id for sequence in self.others}
        assert others == set(self.running) - steady, "a running sequence is forgotten"


def is_steady(sequence: Sequence) -> bool:
    """One token to compute, one row of logits, one sample."""
    return (
        len(sequence.tokens) - sequence.scheduled == 1
        and sequence.left > 0
        and sequence.score >= sequence.prompt
        and not sequence.owner.unborn
    )
