"""Recording what steers a scheduler, and replaying it through the core.

A trace is JSON lines. The first is a header:

    {"trace": "headrace", "version": 3, "pool": {...}, "knobs": {...}, "estimator": {...} | null}

each further one an input, in order, as an array that starts with its name:

    ["add", now, request, refused]       ["abort", now, request id]
    ["finish", now, request id, choice]  ["knobs", knobs]
    ["extend", sequence id, tokens]      ["fork", sequence id]
    ["drop", sequence id]                ["reset"]
    ["coefficients", [...]]              those in force from here on
    ["step", now, plan | null]           the plan that came of it
    ["done", now, plan id, tokens]       ["failed", now, plan id]

Nothing else reaches the core, so feeding the inputs to a fresh scheduler must give the recorded
plans, field by field; `replay` says whether it does, and where not.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from headrace.core.estimate import LinearEstimator
from headrace.core.plan import (
    Estimator,
    Event,
    Knobs,
    PoolConfig,
    Refused,
    Request,
    StepPlan,
    Tokens,
)
from headrace.core.scheduler import Scheduler
from headrace.cost.estimator import StepEstimator
from headrace.errors import ConfigError

TRACE_VERSION = 3


class TraceWriter:
    """An open trace file. Lines are buffered; `close` (or leaving the `with`) writes the rest."""

    def __init__(self, path: str | Path) -> None:
        """Raises ConfigError where the file cannot be written."""
        try:
            self._file: BinaryIO = Path(path).open("wb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise ConfigError("trace", f"cannot write {path}: {error.strerror}") from error
        self._encode = msgspec.json.Encoder().encode

    def write(self, record: object) -> None:
        """Append one line. Nothing is written once closed."""
        if not self._file.closed:
            self._file.write(self._encode(record))
            self._file.write(b"\n")

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RecordingScheduler(Scheduler):
    """A scheduler that writes down its inputs and plans as they happen."""

    def __init__(
        self,
        pool: PoolConfig,
        knobs: Knobs,
        estimator: Estimator | None,
        writer: TraceWriter,
    ) -> None:
        super().__init__(pool, knobs, estimator)
        self._writer = writer
        self._version = getattr(estimator, "version", 0)
        writer.write(
            {
                "trace": "headrace",
                "version": TRACE_VERSION,
                "pool": pool,
                "knobs": knobs,
                "estimator": _estimator_to_dict(estimator),
            }
        )

    def add(self, request: Request, now: float) -> None:
        """See `Scheduler.add`."""
        try:
            super().add(request, now)
        except Refused:
            self._writer.write(("add", now, request, True))
            raise
        self._writer.write(("add", now, request, False))

    def abort(self, request_id: int, now: float) -> list[Event]:
        """See `Scheduler.abort`."""
        self._writer.write(("abort", now, request_id))
        return super().abort(request_id, now)

    def finish(self, request_id: int, choice: int, now: float) -> list[Event]:
        """See `Scheduler.finish`."""
        self._writer.write(("finish", now, request_id, choice))
        return super().finish(request_id, choice, now)

    def set_knobs(self, knobs: Knobs) -> None:
        """See `Scheduler.set_knobs`."""
        super().set_knobs(knobs)
        self._writer.write(("knobs", knobs))

    def extend(self, sequence_id: int, tokens: Iterable[int]) -> list[Event]:
        """See `Scheduler.extend`."""
        tokens = tuple(tokens)
        self._writer.write(("extend", sequence_id, tokens))
        return super().extend(sequence_id, tokens)

    def fork(self, sequence_id: int) -> int:
        """See `Scheduler.fork`."""
        self._writer.write(("fork", sequence_id))
        return super().fork(sequence_id)

    def drop(self, sequence_id: int) -> None:
        """See `Scheduler.drop`."""
        self._writer.write(("drop", sequence_id))
        super().drop(sequence_id)

    def reset_prefix_cache(self) -> None:
        """See `Scheduler.reset_prefix_cache`."""
        self._writer.write(("reset",))
        super().reset_prefix_cache()

    def step(self, now: float) -> StepPlan | None:
        """See `Scheduler.step`."""
        estimator = self.estimator
        if isinstance(estimator, StepEstimator) and estimator.version != self._version:
            self._version = estimator.version
            self._writer.write(("coefficients", estimator.coefficients))
        plan = super().step(now)
        self._writer.write(("step", now, plan))
        return plan

    def done(self, plan_id: int, tokens: Tokens, now: float) -> list[Event]:
        """See `Scheduler.done`."""
        self._writer.write(("done", now, plan_id, tokens))
        events = super().done(plan_id, tokens, now)
        if not self.has_work:
            self._writer.flush()
        return events

    def failed(self, plan_id: int, now: float) -> list[Event]:
        """See `Scheduler.failed`."""
        self._writer.write(("failed", now, plan_id))
        return super().failed(plan_id, now)


def _estimator_to_dict(estimator: Estimator | None) -> dict[str, Any] | None:
    if estimator is None or type(estimator) is Estimator:
        return None
    if isinstance(estimator, StepEstimator):
        return {"kind": "step", **estimator.to_dict()}
    if isinstance(estimator, LinearEstimator):
        return {"kind": "linear", **asdict(estimator)}
    raise ConfigError("trace", f"a {type(estimator).__name__} cannot be recorded")


def _estimator_from_dict(row: dict[str, Any] | None) -> Estimator | None:
    if row is None:
        return None
    kind = row.pop("kind")
    return StepEstimator.from_dict(row) if kind == "step" else LinearEstimator(**row)


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found. difference: the first plan that is not as recorded, in words, or None.

    measured, predicted: seconds of all steps, from the trace's clock and its estimator. cut: the
    last line was incomplete, as after a crash; what stood before it was replayed.
    """

    requests: int
    refused: int
    steps: int
    plans: int
    seconds: float
    measured: float
    predicted: float
    difference: str | None
    cut: bool

    @property
    def identical(self) -> bool:
        """Every plan is as recorded."""
        return self.difference is None


@dataclass
class _Counts:
    requests: int = 0
    refused: int = 0
    steps: int = 0
    plans: int = 0
    first: float | None = None
    last: float = 0.0
    measured: float = 0.0
    predicted: float = 0.0


Watch = Callable[[float, float, float, StepPlan], None]
"""Called after each executed step of a replay: when it began, seconds it took, seconds predicted,
and its plan."""


def replay(path: str | Path, watch: Watch | None = None) -> ReplayReport:
    """Feed a recorded trace to a fresh scheduler and compare plan by plan, up to the first that
    differs. Raises ConfigError for a file that is no trace, of another version, or damaged."""
    lines = _Lines(Path(path))
    header = lines.header()
    try:
        estimator = _estimator_from_dict(header["estimator"])
        pool = msgspec.convert(header["pool"], PoolConfig)
        knobs = msgspec.convert(header["knobs"], Knobs)
        scheduler = Scheduler(pool, knobs, estimator)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("trace", f"{path}: its header is damaged: {error!r}") from error
    counts = _Counts()
    started: dict[int, tuple[float, StepPlan]] = {}
    difference = None
    for number, record in lines.records():
        try:
            difference = _apply(scheduler, estimator, record, counts, started, watch)
        except (KeyError, IndexError, TypeError, ValueError, msgspec.ValidationError) as error:
            raise ConfigError("trace", f"{path}, line {number}: {error!r}") from error
        if difference is not None:
            difference = f"line {number}: {difference}"
            break
    seconds = counts.last - (counts.first or 0.0)
    return ReplayReport(
        counts.requests, counts.refused, counts.steps, counts.plans, seconds, counts.measured,
        counts.predicted, difference, lines.cut,
    )  # fmt: skip


def _apply(
    scheduler: Scheduler,
    estimator: Estimator | None,
    record: list[Any],
    counts: _Counts,
    started: dict[int, tuple[float, StepPlan]],
    watch: Watch | None,
) -> str | None:
    """Feed one record; the difference it shows, or None."""
    kind, *rest = record
    match kind:
        case "add":
            return _add(scheduler, rest, counts)
        case "step":
            return _step(scheduler, rest, counts, started)
        case "done":
            now, plan_id, tokens = rest
            begun, plan = started.pop(plan_id)
            counts.measured += now - begun
            counts.predicted += plan.seconds
            counts.last = now
            if watch is not None:
                watch(begun, now - begun, plan.seconds, plan)
            scheduler.done(plan_id, tokens, now)
        case "failed":
            scheduler.failed(rest[1], rest[0])
            started.pop(rest[1])
        case "abort":
            scheduler.abort(rest[1], rest[0])
        case "finish":
            scheduler.finish(rest[1], rest[2], rest[0])
        case "knobs":
            scheduler.set_knobs(msgspec.convert(rest[0], Knobs))
        case "coefficients":
            if not isinstance(estimator, StepEstimator):
                raise ValueError("coefficients without a model to multiply")
            estimator.set_coefficients(rest[0])
        case "extend":
            scheduler.extend(rest[0], tuple(rest[1]))
        case "fork":
            scheduler.fork(rest[0])
        case "drop":
            scheduler.drop(rest[0])
        case "reset":
            scheduler.reset_prefix_cache()
        case _:
            raise ValueError(f"unknown record {kind!r}")
    return None


def _add(scheduler: Scheduler, rest: list[Any], counts: _Counts) -> str | None:
    now, row, was_refused = rest
    request = msgspec.convert(row, Request)
    counts.requests += 1
    counts.first = now if counts.first is None else counts.first
    refused = False
    try:
        scheduler.add(request, now)
    except Refused:
        refused = True
        counts.refused += 1
    if refused == was_refused:
        return None
    return f"request {request.id} was {'refused' if was_refused else 'taken'} then, not now"


def _step(
    scheduler: Scheduler,
    rest: list[Any],
    counts: _Counts,
    started: dict[int, tuple[float, StepPlan]],
) -> str | None:
    now, row = rest
    plan = scheduler.step(now)
    counts.steps += 1
    if (plan is None) != (row is None):
        return f"a plan was {'made' if plan is None else 'not made'} then, not now"
    if plan is None:
        return None
    counts.plans += 1
    started[plan.id] = (now, plan)
    return compare(msgspec.convert(row, StepPlan), plan)


def compare(recorded: StepPlan, made: StepPlan) -> str | None:
    """The first field in which two plans differ, with both values, or None."""
    for one in fields(StepPlan):
        before, after = getattr(recorded, one.name), getattr(made, one.name)
        if before != after:
            where = ""
            if isinstance(before, list) and isinstance(after, list):
                index = next(
                    (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                    min(len(before), len(after)),
                )
                where = f"[{index}]"
                before, after = before[index : index + 4], after[index : index + 4]
            return f"plan {recorded.id}: {one.name}{where} was {before}, is {after}"
    return None


class _Lines:
    """The lines of a trace file, decoded. cut: the last one was incomplete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cut = False

    def header(self) -> dict[str, Any]:
        """The first line, checked."""
        try:
            with self._path.open("rb") as file:
                header = msgspec.json.decode(file.readline())
        except OSError as error:
            raise ConfigError("trace", f"cannot read {self._path}: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError("trace", f"{self._path} is not a trace: {error}") from error
        if not isinstance(header, dict) or header.get("trace") != "headrace":
            raise ConfigError("trace", f"{self._path} is not a trace of headrace")
        if header.get("version") != TRACE_VERSION:
            raise ConfigError(
                "trace",
                f"{self._path} has version {header.get('version')}; this headrace reads "
                f"{TRACE_VERSION}: replay it with the headrace that wrote it",
            )
        return header

    def records(self) -> Iterator[tuple[int, list[Any]]]:
        """(line number, record) of the lines after the header."""
        with self._path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    self.cut = True
                    return
                try:
                    record = msgspec.json.decode(line)
                except msgspec.DecodeError as error:
                    raise ConfigError("trace", f"{self._path}, line {number}: {error}") from error
                if not isinstance(record, list) or not record:
                    raise ConfigError("trace", f"{self._path}, line {number} is no record")
                yield number, record
