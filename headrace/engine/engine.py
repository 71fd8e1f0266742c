"""The engine: requests in, tokens out, one step at a time.

`Engine` joins the pure scheduler (`core`), the packing and a loaded back-end. It does no I/O and
owns no thread: the engine process (`process.py`) and the offline API (`llm.py`) drive it with
`step()`.
"""

import time
from collections.abc import Callable

from headrace.core.plan import Event, Request, StepPlan
from headrace.core.plan import Refused as CoreRefused
from headrace.core.scheduler import Scheduler
from headrace.cost.local import engine_estimator, remember
from headrace.engine.beams import Beams
from headrace.engine.books import Books
from headrace.engine.constrain import Constraints
from headrace.engine.load import LoadedModel
from headrace.engine.messages import Outputs, Refused, Submit
from headrace.engine.pack import Packer
from headrace.engine.results import Results
from headrace.engine.state import ParameterTable, RequestState, SequenceState
from headrace.errors import OverloadError, RequestError
from headrace.ops.batch import RaggedBatch
from headrace.text.grammar import Grammar
from headrace.trace import RecordingScheduler, TraceWriter

Clock = Callable[[], float]
Watch = Callable[[StepPlan, list[SequenceState]], None]
"""Called after each forward pass, before its results are applied, with the states of the sample
points in plan order: for experiments that read logits."""


STATS_SECONDS = 0.1
"""How old the counters that a client sees may be while nothing ends."""


class Engine:
    """One replica: a scheduler over one loaded model.

    clock: seconds, monotonic; its value is the `now` of the core. Not thread-safe: one thread calls
    `submit`, `abort`, `finish` and `step`.
    """

    def __init__(
        self, loaded: LoadedModel, clock: Clock = time.monotonic, watch: Watch | None = None
    ) -> None:
        self.loaded = loaded
        self._watch = watch
        plan = loaded.plan
        self.estimator = engine_estimator(
            loaded.model.program, plan.layout, loaded.model.weights, plan.limits.threads
        )
        self._trace = TraceWriter(loaded.trace) if loaded.trace is not None else None
        self.scheduler: Scheduler = (
            Scheduler(plan.pool, plan.knobs, self.estimator)
            if self._trace is None
            else RecordingScheduler(plan.pool, plan.knobs, self.estimator, self._trace)
        )
        self._executable = loaded.executable
        self._batch: RaggedBatch = loaded.executable.batch
        self._packer = Packer(self._batch)
        self._parameters = ParameterTable(self._batch)
        self._clock = clock
        self._books = Books(self.scheduler, self._parameters, clock)
        self._results = Results(self._batch, self._books)
        self._beams = Beams(self.scheduler, self._books, self._batch)
        self._next_number = 0
        self._constraints = Constraints(loaded.checkpoint.tokenizer, loaded.plan.limits.vocabulary)
        self._compiling: set[str] = set()
        self._held: dict[str, tuple[Submit, Grammar | None]] = {}
        self._refused: list[Refused] = []
        self._told = -STATS_SECONDS
        self.step_seconds = 0.0
        self.kernel_seconds = 0.0
        self.predicted_seconds = 0.0
        self.forced_tokens = 0

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or an output waits to be fetched."""
        books = self._books
        return bool(
            books.requests or books.pending or books.finished or self._compiling or self._held
        )

    @property
    def only_compiling(self) -> bool:
        """True when there is nothing to do but wait for a grammar: the driver may sleep a
        little."""
        return bool(self._compiling) and not self._books.requests

    def submit(self, submit: Submit) -> None:
        """Take a request. Raises RequestError or OverloadError; nothing is kept then."""
        if (
            submit.id in self._books.requests
            or submit.id in self._compiling
            or submit.id in self._held
        ):
            raise RequestError("request_id", f"request id {submit.id!r} is already in use")
        slots = self.scheduler.knobs.max_sequences
        if submit.beam is not None and submit.beam.width > slots:
            raise RequestError("n", f"{submit.beam.width} beams are more than the {slots} sequences"
                               " that run at once (--max-num-seqs)")  # fmt: skip
        if submit.grammar is None:
            self._admit(submit, None)
        else:
            self._compiling.add(submit.id)
            self._constraints.compile(submit)

    def _admit(self, submit: Submit, grammar: Grammar | None) -> None:
        """Hand a request to the scheduler; a beam search waits until all its beams find a slot."""
        width = 0 if submit.beam is None else submit.beam.width
        if width and self._beams.width + width > self.scheduler.knobs.max_sequences:
            self._held[submit.id] = (submit, grammar)
            return
        sampling = submit.sampling
        number, now = self._next_number, self._clock()
        request = Request(
            id=number,
            prompt=submit.prompt,
            max_tokens=submit.max_tokens,
            n=submit.n,
            stop_tokens=frozenset() if submit.beam else frozenset(submit.stop_tokens),
            min_tokens=submit.min_tokens,
            priority=submit.priority,
            namespace=submit.namespace,
            score_from=None if sampling.prompt_logprobs is None else 1,
        )
        try:
            self.scheduler.add(request, now)
        except CoreRefused as refused:
            if refused.overload:
                raise OverloadError(refused.message, retry_after=1.0) from None
            raise RequestError(refused.field, refused.message) from None
        self._next_number += 1
        state = RequestState(
            number=number, submit=submit, arrived=now, grammar=grammar, open_sequences=submit.n
        )
        if sampling.allowed is not None:
            state.mask = self._constraints.allowed_mask(sampling.allowed)
        if sampling.prompt_logprobs is not None:
            state.prompt_logprobs = [None] * len(submit.prompt)
        self._beams.open(state)
        self._books.open(state)

    def abort(self, request_id: str) -> None:
        """The client left. Unknown ids are ignored; no output follows."""
        if self._constraints.cancel(request_id):
            self._compiling.discard(request_id)
            return
        if self._held.pop(request_id, None) is not None:
            return
        state = self._books.requests.get(request_id)
        if state is None:
            return
        self.scheduler.abort(state.number, self._clock())
        self._books.forget(state, "abort")

    def finish(self, request_id: str, choice: int) -> None:
        """A stop string was found in one choice: that sequence ends, nothing more is sent of it."""
        state = self._books.requests.get(request_id)
        if state is None:
            return
        for event in self.scheduler.finish(state.number, choice, self._clock()):
            self._books.close(event)

    def step(self) -> Outputs | None:
        """Plan, run and apply one step. None when there was nothing to run or tell."""
        started = self._clock()
        if self._compiling:
            self._admit_compiled()
        if self._held:
            self._admit_held()
        plan = self.scheduler.step(started)
        if plan is not None:
            events = self._execute(plan)
            for event in events:
                self._books.tell(event)
            self.predicted_seconds = plan.seconds
            self.step_seconds = self._clock() - started
            self.estimator.observe(plan, self.step_seconds)
        books = self._books
        if not books.pending and not books.finished and not self._refused:
            return None
        stats = None
        if books.finished or not books.requests or started > self._told + STATS_SECONDS:
            self._told = started
            stats = self.stats()
        outputs = Outputs(tuple(books.pending), tuple(books.finished), stats, tuple(self._refused))
        books.pending, books.finished, self._refused = [], [], []
        return outputs

    def _admit_compiled(self) -> None:
        for submit, grammar in self._constraints.compiled():
            self._compiling.discard(submit.id)
            try:
                if isinstance(grammar, RequestError):
                    raise grammar
                self._admit(submit, grammar)
            except RequestError as error:
                self._refused.append(refusal(submit.id, error))

    def _admit_held(self) -> None:
        """Try the beam searches that wait for slots again, in order of arrival."""
        held, self._held = self._held, {}
        for submit, grammar in held.values():
            try:
                self._admit(submit, grammar)
            except RequestError as error:
                self._refused.append(refusal(submit.id, error))

    def fail_all(self, message: str) -> None:
        """End every request with an error; the next `step` tells their clients."""
        for state in list(self._books.requests.values()):
            self._books.fail(state, message)
        self._refused.extend(Refused(name, None, message, 503) for name in self._held)
        self._held.clear()

    def stats(self) -> dict[str, float]:
        """Counters and gauges for metrics (see docs/metrics.md)."""
        stats = self.scheduler.stats()
        values = {name: float(getattr(stats, name)) for name in type(stats).__slots__}
        values["step_seconds"] = self.step_seconds
        values["kernel_seconds"] = self.kernel_seconds
        values["predicted_seconds"] = self.predicted_seconds
        values.update(self.estimator.stats())
        values["forced_tokens"] = float(self.forced_tokens)
        values["mask_seconds"] = self._constraints.times.total
        values["mask_hidden_seconds"] = self._constraints.times.hidden
        values["masks"] = float(self._constraints.times.count)
        return values

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that nobody uses."""
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._constraints.close()
        self._executable.close()
        remember(self.estimator)
        if self._trace is not None:
            self._trace.close()

    # --- one step -----------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> list[Event]:
        books = self._books
        books.schedule(plan.sequences, self._clock())
        states = [books.sequence(sequence) for sequence in plan.samples[1::2]]
        self._packer.pack(plan)
        self._packer.pack_samples(plan, states, self._parameters)
        self._results.pack_scores(plan, len(states))
        batch = self._batch
        before = self._clock()
        masks = self._constraints.start_masks(batch, states)
        try:
            if masks is None:
                self._executable.run()
            else:
                self._executable.run("forward")
                self._constraints.join_masks(masks)
                self._executable.run("sample")
        except BaseException:
            self.scheduler.failed(plan.id, self._clock())
            raise
        now = self._clock()
        self.kernel_seconds = now - before
        if self._watch is not None:
            self._watch(plan, states)
        self._results.collect_scores(plan, len(states))
        tokens: list[tuple[int, ...]] = [
            (token,) for token in batch.out_token[: len(states)].tolist()
        ]
        if self._beams:
            logits = self._executable.read(self.loaded.model.program.logits)
            for index in self._beams.offer(plan, states, logits):
                tokens[index] = ()
        logprobs = self._results.logprobs(states)
        events = self.scheduler.done(plan.id, tokens, now)
        for index, state in enumerate(states):
            for token in tokens[index]:
                books.account(state, token, logprobs.get(index), now)
        if self._beams:
            self._beams.move(now)
        for state in states:
            if state.cursor is not None and state not in self._beams:
                events += self._follow_grammar(state, now)
        return events

    def _follow_grammar(self, state: SequenceState, now: float) -> list[Event]:
        """After a constrained token: append the tokens that the grammar leaves no choice about, or
        end a sequence that it lets say nothing more.

        Appending gives the text that sampling would; where log-probabilities are wanted each token
        takes its step.
        """
        cursor, request = state.cursor, state.request
        submit = request.submit
        if request.number not in self._books.by_number:
            return []
        if state.fault is not None:
            self._books.fail(request, state.fault)
            return []
        if cursor is None or self.scheduler.sequence(state.sequence).ended:
            return []
        if cursor.finished:
            if submit.stop_tokens and len(state.outputs) >= submit.min_tokens:
                return []
            return self.scheduler.finish(request.number, state.choice, now)
        try:
            forced = cursor.forced() if submit.sampling.logprobs is None else []
        except RequestError as error:
            self._books.fail(request, str(error))
            return []
        if not forced:
            return []
        events = self.scheduler.extend(state.sequence, forced)
        for event in events:
            for token in event.tokens:
                self._books.account(state, token, None, now)
        self.forced_tokens += len(forced)
        return events


def refusal(request_id: str, error: RequestError) -> Refused:
    """The message that tells a client why its request was not taken."""
    retry = error.retry_after if isinstance(error, OverloadError) else None
    return Refused(request_id, error.field, str(error), error.code, retry)
