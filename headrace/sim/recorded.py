"""Workloads read from traffic files: CSV with a header, or JSON lines.

Columns by any of their public names: arrival time in seconds (`arrival`, `timestamp`, `TIMESTAMP`,
`Timestamp`; ISO dates are turned into seconds from the first; a `timestamp` beside `hash_ids` is in
milliseconds, as Mooncake's traces have it), prompt tokens (`input_tokens`, `input_length`,
`ContextTokens`, `Request tokens`), output tokens (`output_tokens`, `output_length`,
`GeneratedTokens`, `Response tokens`), and where given `session` and `hash_ids`: one id for each 512
tokens of the prompt, equal ids for equal content.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.sim.workload import LONGEST, Job, unique_part

_TIME = ("arrival", "timestamp", "TIMESTAMP", "Timestamp")
_INPUT = ("input_tokens", "input_length", "ContextTokens", "Request tokens")
_OUTPUT = ("output_tokens", "output_length", "GeneratedTokens", "Response tokens")
_HASH_TOKENS = 512


class RecordedSource:
    """The jobs of a traffic file, `speed` times as fast, at most `limit` tokens each.

    Raises ConfigError naming the file, the line and the column at fault.
    """

    def __init__(
        self, path: Path, speed: float = 1.0, limit: int = LONGEST, requests: int | None = None
    ) -> None:
        if speed <= 0:
            raise ConfigError("speed", f"{speed} is not positive")
        rows = _rows(path)
        jobs = [
            _job(path, number, row, limit)
            for number, row in enumerate(rows if requests is None else rows[:requests], 1)
        ]
        if not jobs:
            raise ConfigError("workload", f"{path} holds no request")
        jobs.sort(key=lambda job: job.arrival)
        first = jobs[0].arrival
        for job in jobs:
            job.arrival = (job.arrival - first) / speed
        self._jobs = jobs

    def arrivals(self) -> Iterator[Job]:
        return iter(self._jobs)

    def answered(self, job: Job, output: tuple[int, ...], now: float) -> Job | None:
        """A recorded request has no sequel: what followed is in the file."""
        return None


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                return list(csv.DictReader(file))
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise ConfigError("workload", f"cannot read {path}: {error}") from error


def _job(path: Path, number: int, row: Mapping[str, Any], limit: int) -> Job:
    hashes = row.get("hash_ids")
    try:
        arrival = _seconds(_column(row, _TIME)) / (1000.0 if hashes is not None else 1.0)
        tokens = max(1, min(int(_column(row, _INPUT)), limit - 1))
        output = max(1, min(int(_column(row, _OUTPUT)), limit - tokens))
        session = int(row.get("session") or number)
        if hashes is None:
            prompt = unique_part(number, tokens)
        else:
            parts = [unique_part(int(key), _HASH_TOKENS) for key in hashes]
            prompt = tuple(token for part in parts for token in part)[:tokens]
            prompt += unique_part(number, tokens - len(prompt)) if len(prompt) < tokens else ()
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError("workload", f"{path}, request {number}: {error}") from error
    prefix = int(hashes[0]) if hashes else 0
    return Job(arrival, prompt, output, session, prefix)


def _column(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise ValueError(f"has none of the columns {', '.join(names)}")


def _seconds(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return datetime.fromisoformat(str(value)[:26]).timestamp()
