"""The engine: requests in, tokens out, one step at a time.

`Engine` joins the pure scheduler (`core`), the packing and a loaded back-end. It does no I/O and
owns no thread: the engine process (`process.py`) and the offline API (`llm.py`) drive it with
`step()`.
"""

import time
from collections.abc import Callable

import numpy as np

from headrace.core.plan import Event, Request, StepPlan
from headrace.core.plan import Refused as CoreRefused
from headrace.core.scheduler import Scheduler
from headrace.cost.local import engine_estimator
from headrace.engine.beam import BeamSearch, log_softmax
from headrace.engine.constrain import Constraints
from headrace.engine.load import LoadedModel
from headrace.engine.messages import Logprob, Observation, Output, Outputs, Refused, Submit
from headrace.engine.pack import Packer, biases, has_penalties, needs_lists
from headrace.engine.state import ParameterTable, RequestState, SequenceState
from headrace.errors import OverloadError, RequestError
from headrace.ops.batch import RaggedBatch
from headrace.text.grammar import Cursor, Grammar
from headrace.trace import RecordingScheduler, TraceWriter

Clock = Callable[[], float]
Watch = Callable[[StepPlan, list[SequenceState]], None]
"""Called after each forward pass, before its results are applied, with the states of the sample
points in plan order: for experiments that read logits."""


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
        self._requests: dict[str, RequestState] = {}
        self._by_number: dict[int, RequestState] = {}
        self._sequences: dict[int, SequenceState] = {}
        self._next_number = 0
        self._constraints = Constraints(loaded.checkpoint.tokenizer, loaded.plan.limits.vocabulary)
        self._searches: dict[int, BeamSearch] = {}
        self._compiling: set[str] = set()
        self._refused: list[Refused] = []
        self._pending: list[Output] = []
        self._finished: list[Observation] = []
        self.step_seconds = 0.0
        self.kernel_seconds = 0.0
        self.predicted_seconds = 0.0
        self.forced_tokens = 0

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or an output waits to be fetched."""
        return bool(self._requests or self._pending or self._finished or self._compiling)

    @property
    def only_compiling(self) -> bool:
        """True when there is nothing to do but wait for a grammar: the driver may sleep a
        little."""
        return bool(self._compiling) and not self._requests

    def submit(self, submit: Submit) -> None:
        """Take a request. Raises RequestError or OverloadError; nothing is kept then."""
        if submit.id in self._requests or submit.id in self._compiling:
            raise RequestError("request_id", f"request id {submit.id!r} is already in use")
        if submit.grammar is None:
            self._admit(submit, None)
        else:
            self._compiling.add(submit.id)
            self._constraints.compile(submit)

    def _admit(self, submit: Submit, grammar: Grammar | None) -> None:
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
        if submit.beam is not None:
            self._searches[number] = BeamSearch(
                submit.beam, frozenset(submit.stop_tokens), submit.max_tokens, sampling.logprobs
            )
        self._requests[submit.id] = state
        self._by_number[number] = state

    def abort(self, request_id: str) -> None:
        """The client left. Unknown ids are ignored; no output follows."""
        if self._constraints.cancel(request_id):
            self._compiling.discard(request_id)
            return
        state = self._requests.get(request_id)
        if state is None:
            return
        self.scheduler.abort(state.number, self._clock())
        self._forget(state, "abort")

    def finish(self, request_id: str, choice: int) -> None:
        """A stop string was found in one choice: that sequence ends, nothing more is sent of it."""
        state = self._requests.get(request_id)
        if state is None:
            return
        for event in self.scheduler.finish(state.number, choice, self._clock()):
            self._close(state, event)

    def step(self) -> Outputs | None:
        """Plan, run and apply one step. None when there was nothing to run or tell."""
        started = self._clock()
        if self._compiling:
            self._admit_compiled()
        plan = self.scheduler.step(started)
        if plan is not None:
            events = self._execute(plan)
            for event in events:
                self._output(event)
            self.predicted_seconds = plan.seconds
            self.step_seconds = self._clock() - started
            self.estimator.observe(plan, self.step_seconds)
        if not self._pending and not self._finished and not self._refused:
            return None
        outputs = Outputs(
            tuple(self._pending), tuple(self._finished), self.stats(), tuple(self._refused)
        )
        self._pending, self._finished, self._refused = [], [], []
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

    def fail_all(self, message: str) -> None:
        """End every request with an error; the next `step` tells their clients."""
        for state in list(self._requests.values()):
            self._fail(state, message)

    def _fail(self, request: RequestState, message: str) -> None:
        self.scheduler.abort(request.number, self._clock())
        self._pending.extend(
            Output(request.submit.id, index, (), request.cached_tokens, "error", error=message)
            for index in range(request.submit.n)
        )
        self._forget(request, "error")

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
        values["mask_exposed_seconds"] = self._constraints.times.exposed
        return values

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that nobody uses."""
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._constraints.close()
        self._executable.close()
        if self._trace is not None:
            self._trace.close()

    # --- one step -----------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> list[Event]:
        states = self._states(plan)
        self._packer.pack(plan)
        self._packer.pack_samples(plan, states, self._parameters)
        self._pack_score_targets(plan, len(states))
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
        self._collect_scores(plan, len(states))
        tokens: list[tuple[int, ...]] = [
            (token,) for token in batch.out_token[: len(states)].tolist()
        ]
        if self._searches:
            self._offer_rows(plan, states, tokens)
        logprobs = self._logprobs(states)
        events = self.scheduler.done(plan.id, tokens, now)
        for index, state in enumerate(states):
            for token in tokens[index]:
                self._account(state, token, logprobs.get(index), now)
        if self._searches:
            self._move_beams(now)
        for state in states:
            if state.cursor is not None and state.request.number not in self._searches:
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
        if state.fault is not None:
            self._fail(request, state.fault)
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
            self._fail(request, str(error))
            return []
        if not forced:
            return []
        events = self.scheduler.extend(state.sequence, forced)
        for event in events:
            for token in event.tokens:
                self._account(state, token, None, now)
        self.forced_tokens += len(forced)
        return events

    def _offer_rows(
        self, plan: StepPlan, states: list[SequenceState], tokens: list[tuple[int, ...]]
    ) -> None:
        """Hand the rows of beams to their searches; the core gets no token for them yet."""
        logits = None
        for index, state in enumerate(states):
            search = self._searches.get(state.request.number)
            if search is None:
                continue
            if logits is None:
                logits = self._executable.read(self.loaded.model.program.logits)
            raw = log_softmax(logits[plan.samples[2 * index], : self._batch.limits.vocabulary])
            scores = raw.copy()
            for token, value in biases(state).items():
                scores[token] += value
            if self._batch.mask_index[index] >= 0:
                mask = self._batch.masks[self._batch.mask_index[index]]
                allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(scores)]
                scores[allowed == 0] = -np.inf
            search.offer(state.sequence, raw, scores)
            tokens[index] = ()

    def _move_beams(self, now: float) -> None:
        """Advance every search that has all its rows: fork, extend and drop its sequences."""
        for number, search in list(self._searches.items()):
            if not search.complete:
                continue
            request = self._by_number[number]
            chosen = search.choose()
            if not chosen:
                self._end_search(request, search)
                continue
            parents = [beam.sequence for beam in search.live]
            if not search.born:
                sequences = parents[: len(chosen)]
            else:
                sequences = self._fork_beams(parents, [c.place for c in chosen])
            for sequence in set(parents) - set(sequences):
                self.scheduler.drop(sequence)
                self._release(request, sequence)
            for candidate, sequence in zip(chosen, sequences, strict=True):
                self.scheduler.extend(sequence, (candidate.token,))
                self._account(self._sequence(sequence), candidate.token, None, now)
            search.move(chosen, sequences)

    def _fork_beams(self, parents: list[int], places: list[int]) -> list[int]:
        """The sequence of each chosen candidate: its parent's own for the first child of a parent,
        a fork for the others."""
        taken: set[int] = set()
        sequences = []
        for place in places:
            parent = parents[place]
            if parent not in taken:
                taken.add(parent)
                sequences.append(parent)
                continue
            child = self.scheduler.fork(parent)
            source, state = self._sequence(parent), self._sequence(child)
            state.outputs = list(source.outputs)
            state.cursor = None if source.cursor is None else source.cursor.copy()
            sequences.append(child)
        return sequences

    def _end_search(self, request: RequestState, search: BeamSearch) -> None:
        """Tell the best beams and free the request."""
        submit = request.submit
        for index in range(submit.n):
            found = search.best[index] if index < len(search.best) else None
            self._pending.append(
                Output(
                    id=submit.id,
                    index=index,
                    tokens=found.tokens if found else (),
                    cached_tokens=request.cached_tokens,
                    finish="stop" if found and found.stop_token is not None else "length",
                    stop_token=found.stop_token if found else None,
                    logprobs=found.logprobs if found and search.alternatives is not None else None,
                    cumulative_logprob=found.total if found else None,
                )
            )
        self.scheduler.abort(request.number, self._clock())
        self._forget(request, "stop")

    def _release(self, request: RequestState, sequence: int) -> None:
        """Drop the state of one sequence."""
        state = request.sequences.pop(sequence, None)
        if state is not None:
            self._parameters.remove(state.row)
            del self._sequences[sequence]

    def _states(self, plan: StepPlan) -> list[SequenceState]:
        """The state of each sample point; first sight of a request stamps its start."""
        for sequence in plan.sequences:
            if sequence not in self._sequences:
                state = self._sequence(sequence).request
                if state.scheduled is None:
                    state.scheduled = self._clock()
                    usage = self.scheduler.usage(state.number)
                    state.cached_tokens = usage.cached_tokens
        return [self._sequence(sequence) for sequence in plan.samples[1::2]]

    def _sequence(self, sequence: int) -> SequenceState:
        state = self._sequences.get(sequence)
        if state is None:
            known = self.scheduler.sequence(sequence)
            request = self._by_number[known.request]
            submit = request.submit
            counts = None
            if has_penalties(submit.sampling):
                counts = dict.fromkeys(submit.prompt, 0)
            state = SequenceState(
                request=request,
                sequence=sequence,
                choice=known.choice,
                row=self._parameters.add(submit, known.choice),
                special=needs_lists(submit),
                counts=counts,
                cursor=_cursor(request),
                mask=request.mask,
            )
            self._sequences[sequence] = state
            request.sequences[sequence] = state
        return state

    def _pack_score_targets(self, plan: StepPlan, first: int) -> None:
        """What each scored position asks for: the known id there, and how many alternatives."""
        for index in range(len(plan.scores) // 3):
            submit = self._sequence(plan.scores[3 * index + 1]).request.submit
            position = plan.scores[3 * index + 2]
            self._batch.forced[first + index] = submit.prompt[position]
            self._batch.top_logprobs[first + index] = submit.sampling.prompt_logprobs or 0

    def _collect_scores(self, plan: StepPlan, first: int) -> None:
        """Move the log-probabilities of scored prompt positions to their requests."""
        for index in range(len(plan.scores) // 3):
            request = self._sequence(plan.scores[3 * index + 1]).request
            position = plan.scores[3 * index + 2]
            if request.prompt_logprobs is not None:
                wanted = request.submit.sampling.prompt_logprobs or 0
                entry = self._logprob(first + index, wanted, request.submit.prompt[position])
                request.prompt_logprobs[position] = entry

    def _logprob(self, index: int, wanted: int, token: int) -> Logprob:
        batch = self._batch
        top = zip(
            batch.out_top_token[index, :wanted].tolist(),
            batch.out_top_logprob[index, :wanted].tolist(),
            strict=True,
        )
        return Logprob(
            token, float(batch.out_logprob[index]), int(batch.out_rank[index]), tuple(top)
        )

    def _logprobs(self, states: list[SequenceState]) -> dict[int, Logprob]:
        """By sample point, for the sequences that want them."""
        return {
            index: self._logprob(index, wanted, int(self._batch.out_token[index]))
            for index, state in enumerate(states)
            if (wanted := state.request.submit.sampling.logprobs) is not None
        }

    def _account(
        self, state: SequenceState, token: int, logprob: Logprob | None, now: float
    ) -> None:
        """Advance what depends on known tokens."""
        state.outputs.append(token)
        if state.counts is not None:
            state.counts[token] = state.counts.get(token, 0) + 1
        if state.cursor is not None:
            try:
                state.cursor.accept((token,))
            except RequestError as error:  # nothing can follow: this request alone ends
                state.fault = str(error)
        if logprob is not None:
            state.cumulative_logprob += logprob.logprob
            state.logprobs.append(logprob)
        request = state.request
        request.generated += 1
        if request.first_token is None:
            request.first_token = now

    def _output(self, event: Event) -> None:
        state = self._sequence(event.sequence)
        request = state.request
        submit = request.submit
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs is not None and event.choice == 0 and not request.told_prompt:
            request.told_prompt = True
        else:
            prompt_logprobs = None
        logprobs = None
        if submit.sampling.logprobs is not None:
            logprobs, state.logprobs = tuple(state.logprobs), []
        done = event.finish is not None
        self._pending.append(
            Output(
                id=submit.id,
                index=event.choice,
                tokens=event.tokens,
                cached_tokens=request.cached_tokens,
                finish=event.finish,
                stop_token=event.stop_token,
                logprobs=logprobs,
                prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
                cumulative_logprob=state.cumulative_logprob if done else None,
            )
        )
        if done:
            self._close(state.request, event)

    def _close(self, request: RequestState, event: Event) -> None:
        """A sequence ended: drop its state, and the request's with the last of them."""
        self._release(request, event.sequence)
        request.open_sequences -= 1
        if request.open_sequences == 0:
            self._forget(request, event.finish or "abort")

    def _forget(self, request: RequestState, reason: str) -> None:
        """Drop a request's state and note its timings."""
        for sequence in list(request.sequences):
            self._release(request, sequence)
        self._searches.pop(request.number, None)
        del self._requests[request.submit.id]
        del self._by_number[request.number]
        now = self._clock()
        scheduled = now if request.scheduled is None else request.scheduled
        first = now if request.first_token is None else request.first_token
        self._finished.append(
            Observation(
                queue=scheduled - request.arrived,
                prefill=max(first - scheduled, 0.0),
                decode=now - first,
                prompt_tokens=len(request.submit.prompt),
                generation_tokens=request.generated,
                cached_tokens=request.cached_tokens,
                preemptions=request.preemptions,
                finish=reason,
            )
        )


def _cursor(request: RequestState) -> Cursor | None:
    """A cursor at the beginning of the request's grammar, if it has one."""
    spec = request.submit.grammar
    if request.grammar is None or spec is None:
        return None
    return request.grammar.start(spec.after)


def refusal(request_id: str, error: RequestError) -> Refused:
    """The message that tells a client why its request was not taken."""
    retry = error.retry_after if isinstance(error, OverloadError) else None
    return Refused(request_id, error.field, str(error), error.code, retry)
