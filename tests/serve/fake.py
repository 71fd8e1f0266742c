"""An engine that says what a script tells it to, for tests of the HTTP API."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable

from headrace.engine.messages import Logprob, Output, Submit
from headrace.errors import RequestError

Script = Callable[[Submit, int], list[int]]


class FakeStream:
    """Outputs of one submit."""

    def __init__(self, open_choices: int) -> None:
        self.open = set(range(open_choices))
        self.queue: deque[Output] = deque()
        self.arrived = asyncio.Event()
        self.error: Exception | None = None

    def __aiter__(self) -> "FakeStream":
        return self

    def waiting(self) -> list[Output]:
        found = list(self.queue)
        self.queue.clear()
        return found

    def take(self, output: Output) -> None:
        self.queue.append(output)
        if output.finish is not None:
            self.open.discard(output.index)
        self.arrived.set()

    async def __anext__(self) -> Output:
        while not self.queue:
            if self.error is not None:
                raise self.error
            if not self.open:
                raise StopAsyncIteration
            self.arrived.clear()
            await self.arrived.wait()
        return self.queue.popleft()


class FakeEngine:
    """Each choice gets the tokens that `script(submit, index)` gives, `burst` at a time.

    A token in `stop_tokens` ends a choice, so does the end of the script (as 'length'). pause:
    seconds between outputs. refuse: an error to raise in place of the first output.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.burst = 1
        self.pause = 0.0
        self.refuse: RequestError | None = None
        self.fail_after: int | None = None
        self.cached_tokens = 0
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.stats: dict[str, float] = {"pages_total": 10.0}
        self._streams: dict[str, FakeStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, submit: Submit) -> FakeStream:
        self.submits.append(submit)
        stream = FakeStream(submit.n)
        self._streams[submit.id] = stream
        task = asyncio.create_task(self._speak(submit, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def finish(self, request_id: str, index: int) -> None:
        if request_id in self._streams:
            self.finished.append((request_id, index))
            self._streams[request_id].open.discard(index)
            self._streams[request_id].arrived.set()

    async def _speak(self, submit: Submit, stream: FakeStream) -> None:
        if self.refuse is not None:
            stream.error = self.refuse
            stream.arrived.set()
            return
        scripts = [self.script(submit, index)[: submit.max_tokens] for index in range(submit.n)]
        scores = prompt_scores(submit)
        for place in itertools.count(step=self.burst):
            await asyncio.sleep(self.pause)
            if submit.id not in self._streams:
                return
            if self.fail_after is not None and place >= self.fail_after:
                stream.take(Output(submit.id, 0, (), 0, "error", error="the engine broke"))
                return
            for index in sorted(stream.open):
                stream.take(self._output(submit, index, scripts[index], place, scores))
                scores = None
            if not stream.open:
                self._streams.pop(submit.id, None)
                return

    def _output(
        self,
        submit: Submit,
        index: int,
        script: list[int],
        place: int,
        scores: tuple[Logprob | None, ...] | None,
    ) -> Output:
        tokens = script[place : place + self.burst]
        finish, stop_token = None, None
        for number, token in enumerate(tokens):
            if token in submit.stop_tokens and place + number >= submit.min_tokens:
                tokens = tokens[: number + 1]
                finish, stop_token = "stop", token
                break
        else:
            if place + self.burst >= len(script):
                finish = "length"
        wanted = submit.sampling.logprobs
        return Output(
            id=submit.id,
            index=index,
            tokens=tuple(tokens),
            cached_tokens=self.cached_tokens,
            finish=finish,
            stop_token=stop_token,
            logprobs=None if wanted is None else tuple(score(t, wanted) for t in tokens),
            prompt_logprobs=scores,
        )


def score(token: int, wanted: int) -> Logprob:
    """A log-probability that depends on the token alone."""
    own = -0.25 - token % 7
    top = tuple(((token + place) % 250, own - place) for place in range(wanted))
    return Logprob(token, own, 1, top)


def prompt_scores(submit: Submit) -> tuple[Logprob | None, ...] | None:
    wanted = submit.sampling.prompt_logprobs
    if wanted is None:
        return None
    return (None, *(score(token, wanted) for token in submit.prompt[1:]))
