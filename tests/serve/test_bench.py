"""The load client against a real socket with the fake engine behind it."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.http import Client, Exchange, Sample
from headrace.bench.report import figures, meets, percentile
from headrace.bench.workload import Source, file_asks, gaps, prefix_asks, random_asks
from headrace.cli import main
from tests.serve.conftest import Site
from tests.serve.live import serving


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_it_measures_what_the_server_did(site: Site, tmp_path: Path, capsys, backend: str) -> None:
    site.ends = False
    site.engine.pause = 0.002
    with serving(site) as url:
        status = main(
            ["bench", "serve", "--base-url", url, "--num-prompts", "12", "--max-concurrency", "4",
             "--input-len", "20", "--output-len", "7", "--backend", backend, "--num-warmups", "1",
             "--goodput", "ttft:10000", "tpot:10000", "--save-detailed", "--json", "--result-dir",
             str(tmp_path), "--result-filename", "r.json", "--percentile-metrics",
             "ttft,tpot,itl,e2el"]
        )  # fmt: skip
    assert status == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["output_lens"] == [7] * 12
    assert result["total_output_tokens"] == 84
    assert result["total_input_tokens"] == sum(result["input_lens"]) > 0
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["median_ttft_ms"] >= 2
    assert all(len(itl) >= 1 for itl in result["itls"])
    assert len(site.engine.submits) == 13
    assert result["median_e2el_ms"] >= result["median_ttft_ms"]


def test_failures_are_counted_and_told(site: Site, capsys) -> None:
    with serving(site) as url:
        words = ["bench", "serve", "--base-url", url, "--num-prompts", "2", "--input-len", "500"]
        assert main(words) == 1
    captured = capsys.readouterr()
    assert "2 requests failed" in captured.err
    assert "status 400" in captured.err
    assert "Failed requests" in captured.out
    assert main(["bench", "serve", "--base-url", url, "--num-prompts", "1"]) == 1
    assert "cannot ask for a model name" in capsys.readouterr().err


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_those_of_numpy(values):
    import numpy as np

    for share in (0, 1, 50, 90, 99, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share))


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    samples = [Sample(ttft=t, e2e=t + 1, output_tokens=11) for t in (0.1, 0.2, 0.9)]
    assert [meets(s, {"ttft": 500, "tpot": 101}) for s in samples] == [True, True, False]
    result = figures(samples, 2.0, ["tpot"], [50], {"ttft": 500})
    assert result["request_goodput"] == 1.0
    assert result["median_tpot_ms"] == pytest.approx(100)


def test_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        waits = list(gaps(4000, 10.0, burstiness, 1, None))
        mean = sum(waits) / len(waits)
        variance = sum((w - mean) ** 2 for w in waits) / len(waits)
        assert mean == pytest.approx(0.1, rel=0.1)
        assert mean**2 / variance == pytest.approx(burstiness, rel=0.2)
    assert set(gaps(5, float("inf"), 1.0, 1, None)) == {0.0}
    ramp = list(gaps(2000, float("inf"), 1000.0, 1, (1.0, 100.0, "linear")))
    assert ramp[0] == pytest.approx(1.0, rel=0.2)
    assert ramp[-1] == pytest.approx(0.01, rel=0.2)


def test_workloads_share_what_they_say() -> None:
    source = Source(3, "ids", 5000)
    asks = random_asks(source, 4, 10, 7, 5, 0.0)
    assert {tuple(ask.prompt[:5]) for ask in asks} == {tuple(asks[0].prompt[:5])}
    assert len({tuple(ask.prompt) for ask in asks}) == 4
    assert {len(ask.prompt) for ask in asks} == {15}
    groups = prefix_asks(source, 6, 2, 8, 3, 5)
    assert len({tuple(ask.prompt[:8]) for ask in groups}) == 2
    varied = random_asks(Source(1, "text", 0), 200, 10, 10, 0, 0.5)
    sizes = {len(ask.prompt.split()) for ask in varied}
    assert sizes == set(range(5, 16))
    again = random_asks(Source(1, "text", 0), 200, 10, 10, 0, 0.5)
    assert varied == again


def test_files_of_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt":"one"}\n{"prompt":"two","output_len":3}\n')
    asks = file_asks(str(lines), "custom", 3, None)
    assert [(a.prompt, a.output_len) for a in asks] == [("one", 128), ("two", 3), ("one", 128)]
    shared = tmp_path / "b.json"
    turns = [{"value": "ask"}, {"value": "a" * 40}]
    shared.write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    assert [a.output_len for a in file_asks(str(shared), "sharegpt", 2, None)] == [10, 10]
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        file_asks(str(empty), "custom", 1, None)


ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"".join(
        b"%x\r\n%b\r\n" % (len(part), part)
        for part in (
            b'data: {"choices":[{"delta":{"content":""}}]}\n\n',
            b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choi',
            b'ces":[{"text":"\\""}]}\n\n: ping\n\n',
            b'data: {"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
        )
    )
    + b"0\r\n\r\n"
)


@given(st.lists(st.integers(1, len(ANSWER) - 1), max_size=12))
def test_an_answer_is_read_the_same_however_it_is_cut(cuts):
    places = [0, *sorted(set(cuts)), len(ANSWER)]

    class Wire:
        def write(self, data: bytes) -> None:
            pass

    async def read() -> Sample:
        exchange, sample = Exchange(), Sample()
        exchange.transport = Wire()  # type: ignore[assignment]
        done = exchange.send(b"", sample)
        for start, end in itertools.pairwise(places):
            exchange.data_received(ANSWER[start:end])
        assert done.done()
        assert exchange.reusable
        return sample

    sample = asyncio.run(read())
    assert (sample.error, sample.prompt_tokens, sample.output_tokens) == (None, 3, 2)
    assert len(sample.itl) == 1


def test_only_plain_http_is_spoken() -> None:
    with pytest.raises(ValueError, match="http://"):
        Client("https://example.org", {})
