"""Workloads: rates, burstiness, lengths, sharing, sessions, files; the same stream however it is
split."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from headrace.errors import ConfigError
from headrace.sim.recorded import RecordedSource
from headrace.sim.workload import GeneratedSource, Job, Workload, shape, unique_part


def jobs(workload: Workload, keep: tuple[int, int] = (0, 1)) -> list[Job]:
    return list(GeneratedSource(workload, keep).arrivals())


def variation(found: list[Job]) -> float:
    times = [job.arrival for job in found]
    gaps = [b - a for a, b in pairwise(times)]
    return pstdev(gaps) / fmean(gaps)


def test_poisson_and_gamma_arrivals() -> None:
    poisson = jobs(Workload(4000, rate=20.0))
    bursty = jobs(Workload(4000, arrivals="gamma", rate=20.0, burstiness=0.25))
    for found in (poisson, bursty):
        assert len(found) == 4000
        assert found[-1].arrival == pytest.approx(200, rel=0.1)
        assert fmean(len(job.prompt) for job in found) == pytest.approx(300, rel=0.05)
        assert fmean(job.output for job in found) == pytest.approx(100, rel=0.05)
    assert variation(poisson) == pytest.approx(1, rel=0.1)
    assert variation(bursty) == pytest.approx(2, rel=0.15)


def test_parts_join_to_the_whole() -> None:
    workload = shape("chat", requests=400)
    whole = jobs(workload)
    parts = [job for part in range(3) for job in jobs(workload, (part, 3))]
    assert sorted(parts, key=lambda job: job.arrival) == whole
    assert {job.session % 3 for job in jobs(workload, (1, 3))} == {1}


def test_turns_grow_their_prompt_and_stay_within_the_budget() -> None:
    source = GeneratedSource(shape("chat", requests=300, turns=4))
    total = 0
    for first in source.arrivals():
        job: Job | None = first
        while job is not None:
            total += 1
            answer = (1,) * job.output
            following = source.answered(job, answer, job.arrival + 1.0)
            if following is not None:
                assert following.prompt[: len(job.prompt) + len(answer)] == job.prompt + answer
                assert following.arrival > job.arrival + 1.0
                assert following.session == job.session
            job = following
    assert total == 300


def test_documents_are_shared_by_popularity() -> None:
    found = jobs(shape("rag", requests=2000))
    heads = [job.prompt[:4000] for job in found]
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert len(counts) == 50
    assert counts[0] > 5 * counts[-1]
    tails = {job.prompt[4000:] for job in found}
    assert len(tails) == 2000


def test_closed_loop_keeps_its_users_busy() -> None:
    source = GeneratedSource(Workload(50, arrivals="closed", concurrency=8))
    open_jobs = list(source.arrivals())
    assert [job.arrival for job in open_jobs] == [0.0] * 8
    made = len(open_jobs)
    while open_jobs:
        job = open_jobs.pop()
        following = source.answered(job, (), 5.0)
        if following is not None:
            made += 1
            open_jobs.append(following)
    assert made == 50


def test_lengths_respect_the_limit() -> None:
    found = jobs(Workload(500, input_tokens=900, output_tokens=400, spread=1.5, limit=1024))
    assert max(len(job.prompt) + job.output for job in found) <= 1024
    assert min(min(len(job.prompt), job.output) for job in found) >= 1
    fixed = jobs(Workload(20, input_tokens=30, output_tokens=7, spread=0))
    assert {(len(job.prompt), job.output) for job in fixed} == {(30, 7)}


def test_bad_workloads_are_refused_by_field() -> None:
    for fields in ({"rate": 0.0}, {"turns": 0.5}, {"limit": 1}, {"shared": 9000}):
        with pytest.raises(ConfigError, match=r"rate|turns|limit"):
            Workload(10, **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown shape"):
        shape("poetry")


def test_csv_and_json_lines(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n"
    )
    first, second = RecordedSource(azure, speed=2.0).arrivals()
    assert (first.arrival, second.arrival) == (0, pytest.approx(2.0))
    assert (len(second.prompt), second.output) == (396, 109)
    mooncake = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 6, "hash_ids": [7, 8, 11]},
    ]
    mooncake.write_text("\n".join(json.dumps(row) for row in rows))
    first, second = RecordedSource(mooncake).arrivals()
    assert second.arrival == 1.5
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1030] != second.prompt[1024:]
    assert (len(first.prompt), len(second.prompt)) == (1100, 1030)


def test_damaged_files_name_the_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("arrival,input_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    with pytest.raises(ConfigError, match="request 2"):
        RecordedSource(bad)
    bad.write_text("arrival,input_tokens\n0,10\n")
    with pytest.raises(ConfigError, match="output_tokens"):
        RecordedSource(bad)
    bad.write_text("arrival,input_tokens,output_tokens\n")
    with pytest.raises(ConfigError, match="no request"):
        RecordedSource(bad)
    with pytest.raises(ConfigError, match="cannot read"):
        RecordedSource(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("key", [0, 5, -1, -7, 1 << 28, (3 << 32) + 5, 1 << 45])
def test_parts_are_told_apart_within_the_ids_of_the_core(key: int) -> None:
    for tokens in (1, 2, 3, 40):
        part = unique_part(key, tokens)
        assert len(part) == tokens
        assert all(0 <= token < 1 << 31 for token in part)
        others = [unique_part(key + step, tokens) for step in (-4096, -1, 1, 2, 4096)]
        assert all(other[0] != part[0] for other in others)
    assert unique_part(key, 2) != unique_part(key + (1 << 32), 2)
