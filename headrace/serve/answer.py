"""Send the answer of a run: whole, or as it grows."""

import asyncio
import logging

from headrace.errors import HeadraceError, RequestError
from headrace.serve.choice import Piece
from headrace.serve.http import FIRST_PING, EventStream, Exchange, as_answer, error_body
from headrace.serve.run import EngineFailure, Prompt, Run
from headrace.serve.shapes import Shape

log = logging.getLogger("headrace.serve")


async def answer(exchange: Exchange, run: Run, shape: Shape, stream: EventStream | None) -> None:
    """Answer one request. Raises what `Run.steps` raises as long as nothing was sent."""
    try:
        if stream is None:
            await exchange.answer(200, await _whole(run, shape))
        else:
            await _stream(run, shape, stream)
    except RequestError as error:
        await fail(exchange, stream, run.plan.named(error))
    except (EngineFailure, HeadraceError) as error:
        if isinstance(error, EngineFailure) and error.code == 500:
            log.error("the engine failed a request: %s", error)
        await fail(exchange, stream, error)


async def fail(
    exchange: Exchange, stream: EventStream | None, error: EngineFailure | HeadraceError
) -> None:
    """Tell the client of an error: as a status, or as an event once a stream has begun. Raises the
    error itself where that makes the status."""
    if not exchange.started:
        if isinstance(error, HeadraceError):
            raise error
        assert isinstance(error, EngineFailure)
        await exchange.answer(error.code, error_body(str(error), error.code, error.field))
    elif stream is not None:
        body = as_answer(error)[1]
        if isinstance(error, EngineFailure):
            body = error_body(str(error), error.code, error.field)
        await stream.end(b"data: " + body + b"\n\n")


async def _stream(run: Run, shape: Shape, stream: EventStream) -> None:
    opened: set[tuple[int, int]] = set()
    pings: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    timer = loop.call_later(FIRST_PING, lambda: pings.append(loop.create_task(stream.ping())))
    try:
        async for step in run.steps():
            timer.cancel()
            events = []
            for prompt, piece in step:
                key = (prompt.number, piece.index)
                if key not in opened:
                    opened.add(key)
                    events.append(shape.opening(run, prompt, piece.index))
                events.append(shape.chunk(run, prompt, piece))
            if events:
                await stream.send(b"".join(events))
    finally:
        timer.cancel()
    await stream.end(shape.usage(run) if run.plan.include_usage else b"")


async def _whole(run: Run, shape: Shape) -> bytes:
    pieces = {
        (prompt.number, choice.index): Piece(choice.index)
        for prompt in run.prompts
        for choice in prompt.choices
    }
    async for step in run.steps():
        for prompt, piece in step:
            pieces[prompt.number, piece.index].extend(piece)
    chosen = []
    for prompt in run.prompts:
        for place, index in enumerate(_best(run, prompt)):
            chosen.append((prompt, place, pieces[prompt.number, index]))
    return shape.whole(run, chosen)


def _best(run: Run, prompt: Prompt) -> list[int]:
    """Indexes of the choices to return, best mean log-probability first where there are more than
    asked for; beams come ranked already."""
    indexes = [choice.index for choice in prompt.choices]
    plan = run.plan
    if plan.best_of > plan.n and not plan.beams:
        means = [choice.logprob_sum / max(choice.num_tokens, 1) for choice in prompt.choices]
        indexes.sort(key=lambda index: (-means[index], index))
    return indexes[: plan.n]
