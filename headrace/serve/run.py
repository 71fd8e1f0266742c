"""A resolved request while it runs in the engine: outputs in, pieces of text out."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from headrace.engine.messages import Logprob, Output, Submit
from headrace.errors import EngineDeadError
from headrace.serve.choice import Choice, Piece
from headrace.serve.metrics import Metrics
from headrace.serve.resolve import Plan, Served


class Stream(Protocol):
    """The outputs of one submit, of all its choices (see `engine.client.Stream`)."""

    def __aiter__(self) -> AsyncIterator[Output]: ...
    async def __anext__(self) -> Output: ...
    def waiting(self) -> list[Output]: ...


class Engine(Protocol):
    """What serving needs of an engine (see `engine.client.EngineClient`)."""

    async def submit(self, submit: Submit) -> Stream: ...
    def abort(self, request_id: str) -> None: ...
    def finish(self, request_id: str, index: int) -> None: ...


@dataclass(eq=False)
class Prompt:
    """One prompt of a request, with its choices."""

    number: int
    submit: Submit
    choices: list[Choice]
    cached_tokens: int = 0
    seen: bool = False
    scores: tuple[Logprob | None, ...] | None = None
    cumulative: dict[int, float] = field(default_factory=dict)
    last_output: dict[int, float] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """True once every choice has its finish reason."""
        return all(choice.ended for choice in self.choices)


class EngineFailure(Exception):
    """The engine ended a choice with an error after the answer may have begun.

    code: 422 where the request's own constraint led nowhere, else 500. field: at fault, or None.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        constraint = message.startswith("structured_outputs:")
        self.code = 422 if constraint else 500
        self.field = "structured_outputs" if constraint else None


Step = list[tuple[Prompt, Piece]]


class Run:
    """Runs a plan. Use as an async context manager: leaving it frees what is unfinished."""

    def __init__(
        self, plan: Plan, served: Served, engine: Engine, metrics: Metrics, arrived: float
    ) -> None:
        self.plan = plan
        self.prompts = [
            Prompt(
                number,
                submit,
                [Choice(index, served.tokenizer, plan.text) for index in range(submit.n)],
            )
            for number, submit in enumerate(plan.submits)
        ]
        self._engine = engine
        self._metrics = metrics
        self._arrived = arrived
        self._streams: list[Stream] = []

    async def __aenter__(self) -> "Run":
        self._metrics.open += 1
        try:
            for prompt in self.prompts:
                self._streams.append(await self._engine.submit(prompt.submit))
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._metrics.open -= 1
        for prompt in self.prompts:
            if not prompt.ended:
                self._engine.abort(prompt.submit.id)

    async def steps(self) -> AsyncIterator[Step]:
        """What came since the last look, until all choices have ended.

        A reader that lags gets the outputs of several steps at once. Raises RequestError or
        OverloadError when the engine refuses, EngineDeadError when it is lost, EngineFailure.
        """
        if len(self.prompts) == 1:
            prompt, stream = self.prompts[0], self._streams[0]
            async for output in stream:
                yield self._apply([(prompt, output), *((prompt, o) for o in stream.waiting())])
                if prompt.ended:
                    return
            self._check_whole()
            return
        queue: asyncio.Queue[tuple[Prompt, Output] | Exception | None] = asyncio.Queue()
        pumps = [
            asyncio.create_task(_pump(prompt, stream, queue))
            for prompt, stream in zip(self.prompts, self._streams, strict=True)
        ]
        try:
            running = len(pumps)
            while running:
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                running -= items.count(None)
                found = [item for item in items if isinstance(item, tuple)]
                if found:
                    yield self._apply(found)
                if all(prompt.ended for prompt in self.prompts):
                    return
            self._check_whole()
        finally:
            for pump in pumps:
                pump.cancel()

    def _check_whole(self) -> None:
        if not all(prompt.ended for prompt in self.prompts):
            raise EngineDeadError("the engine ended the request without a reason")

    def _apply(self, outputs: list[tuple[Prompt, Output]]) -> Step:
        now = time.monotonic()
        step: Step = []
        stopped: list[tuple[Prompt, int]] = []
        for prompt, output in outputs:
            if output.finish == "error":
                raise EngineFailure(output.error or "the engine failed")
            prompt.cached_tokens = output.cached_tokens
            if output.prompt_logprobs is not None:
                prompt.scores = output.prompt_logprobs
            if output.cumulative_logprob is not None:
                prompt.cumulative[output.index] = output.cumulative_logprob
            choice = prompt.choices[output.index]
            if choice.ended:
                if output.finish is not None and (prompt, output.index) in stopped:
                    stopped.remove((prompt, output.index))
                continue
            self._observe(prompt, output, now)
            piece = choice.push(output)
            if piece.finish is not None and output.finish is None:
                stopped.append((prompt, output.index))
            if not piece.empty:
                step.append((prompt, piece))
        if len(step) > 1:
            step = _joined(step)
        for prompt, index in stopped:
            self._engine.finish(prompt.submit.id, index)
        return step

    def _observe(self, prompt: Prompt, output: Output, now: float) -> None:
        if not prompt.seen:
            prompt.seen = True
            self._metrics.prompted(len(prompt.submit.prompt), output.cached_tokens)
        if not output.tokens:
            return
        self._metrics.generated(len(output.tokens))
        last = prompt.last_output.get(output.index)
        if last is not None:
            self._metrics.inter_token(now - last)
        elif not prompt.last_output:
            self._metrics.first_token(now - self._arrived)
        prompt.last_output[output.index] = now

    def usage(self) -> dict[str, object]:
        """Token counts so far."""
        prompt = sum(len(each.submit.prompt) for each in self.prompts)
        completion = sum(choice.num_tokens for each in self.prompts for choice in each.choices)
        cached = sum(each.cached_tokens for each in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


def _joined(step: Step) -> Step:
    """The same with one piece a choice: a client that lags gets fewer, larger pieces."""
    found: dict[tuple[int, int], tuple[Prompt, Piece]] = {}
    for prompt, piece in step:
        key = (prompt.number, piece.index)
        if key in found:
            found[key][1].extend(piece)
        else:
            found[key] = (prompt, piece)
    return list(found.values())


async def _pump(
    prompt: Prompt,
    stream: Stream,
    queue: "asyncio.Queue[tuple[Prompt, Output] | Exception | None]",
) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        try:
            async for output in stream:
                queue.put_nowait((prompt, output))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
