"""The engine's books: its requests and sequences, and the messages that wait to be sent."""

from collections.abc import Callable

from headrace.core.plan import Event
from headrace.core.scheduler import Scheduler
from headrace.engine.constrain import DEAD_END
from headrace.engine.messages import Logprob, Observation, Output
from headrace.engine.pack import has_penalties, needs_lists
from headrace.engine.state import ParameterTable, RequestState, SequenceState
from headrace.errors import RequestError
from headrace.text.grammar import Cursor


class Books:
    """State of all requests by id, number (the core's) and sequence.

    pending, finished: outputs and timings since the last `take`. clock: seconds, the engine's.
    """

    def __init__(
        self, scheduler: Scheduler, parameters: ParameterTable, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._parameters = parameters
        self._clock = clock
        self.requests: dict[str, RequestState] = {}
        self.by_number: dict[int, RequestState] = {}
        self.sequences: dict[int, SequenceState] = {}
        self.pending: list[Output] = []
        self.finished: list[Observation] = []

    def open(self, request: RequestState) -> None:
        """Enter a request."""
        self.requests[request.submit.id] = request
        self.by_number[request.number] = request

    def sequence(self, sequence: int) -> SequenceState:
        """The state of a sequence, made when it is first asked for."""
        state = self.sequences.get(sequence)
        if state is None:
            known = self._scheduler.sequence(sequence)
            request = self.by_number[known.request]
            submit = request.submit
            state = SequenceState(
                request=request,
                sequence=sequence,
                choice=known.choice,
                row=self._parameters.add(submit, known.choice),
                special=needs_lists(submit),
                counts=dict.fromkeys(submit.prompt, 0) if has_penalties(submit.sampling) else None,
                cursor=_cursor(request),
                mask=request.mask,
            )
            self.sequences[sequence] = state
            request.sequences[sequence] = state
        return state

    def schedule(self, sequences: list[int], now: float) -> None:
        """The sequences are in a plan: first sight of a request stamps its start."""
        for sequence in sequences:
            if sequence not in self.sequences:
                request = self.sequence(sequence).request
                if request.scheduled is None:
                    request.scheduled = now

    def account(
        self, state: SequenceState, token: int, logprob: Logprob | None, now: float
    ) -> None:
        """Advance what depends on known tokens."""
        state.outputs.append(token)
        if state.counts is not None:
            state.counts[token] = state.counts.get(token, 0) + 1
        if state.cursor is not None:
            try:
                if not state.cursor.accept((token,)):
                    state.fault = state.fault or DEAD_END
            except RequestError as error:  # nothing can follow: this request alone ends
                state.fault = str(error)
        if logprob is not None:
            state.cumulative_logprob += logprob.logprob
            state.logprobs.append(logprob)
        request = state.request
        request.generated += 1
        if request.first_token is None:
            request.first_token = now

    def tell(self, event: Event) -> None:
        """Queue the output of an event of the core, and close what it ends. Events of requests that
        have ended meanwhile are dropped."""
        request = self.by_number.get(event.request)
        if request is None:
            return
        state = self.sequence(event.sequence)
        self._read_usage(request)
        prompt_logprobs = None
        if request.prompt_logprobs is not None and event.choice == 0 and not request.told_prompt:
            request.told_prompt = True
            prompt_logprobs = tuple(request.prompt_logprobs)
        logprobs = None
        if request.submit.sampling.logprobs is not None:
            logprobs, state.logprobs = tuple(state.logprobs), []
        done = event.finish is not None
        self.pending.append(
            Output(
                id=request.submit.id,
                index=event.choice,
                tokens=event.tokens,
                cached_tokens=request.cached_tokens,
                finish=event.finish,
                stop_token=event.stop_token,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                cumulative_logprob=state.cumulative_logprob if done else None,
            )
        )
        if done:
            self.close(event)

    def close(self, event: Event) -> None:
        """A sequence ended: drop its state, and the request's with the last of them."""
        request = self.by_number[event.request]
        self.release(request, event.sequence)
        request.open_sequences -= 1
        if request.open_sequences == 0:
            self.forget(request, event.finish or "abort")

    def release(self, request: RequestState, sequence: int) -> None:
        """Drop the state of one sequence."""
        state = request.sequences.pop(sequence, None)
        if state is not None:
            self._parameters.remove(state.row)
            del self.sequences[sequence]

    def fail(self, request: RequestState, message: str) -> None:
        """End a request with an error that its client is told."""
        self._scheduler.abort(request.number, self._clock())
        self.pending.extend(
            Output(request.submit.id, index, (), request.cached_tokens, "error", error=message)
            for index in range(request.submit.n)
        )
        self.forget(request, "error")

    def forget(self, request: RequestState, reason: str) -> None:
        """Drop a request's state and note its timings."""
        for sequence in list(request.sequences):
            self.release(request, sequence)
        del self.requests[request.submit.id]
        del self.by_number[request.number]
        now = self._clock()
        scheduled = now if request.scheduled is None else request.scheduled
        first = now if request.first_token is None else request.first_token
        self.finished.append(
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

    def _read_usage(self, request: RequestState) -> None:
        usage = self._scheduler.usage(request.number)
        request.cached_tokens = usage.cached_tokens
        request.preemptions = usage.preemptions


def _cursor(request: RequestState) -> Cursor | None:
    """A cursor at the beginning of the request's grammar, if it has one."""
    spec = request.submit.grammar
    if request.grammar is None or spec is None:
        return None
    return request.grammar.start(spec.after)
