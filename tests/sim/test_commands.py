"""The commands as a user calls them."""

import json
from pathlib import Path

import pytest

from headrace.cli import main

PLAN = ["plan", "llama-3.1-8b", "--hardware", "h100", "--slo", "ttft=1s,tpot=30ms"]
SMALL = [
    "simulate", "smollm2-135m", "--hardware", "ryzen-7950x", "--requests", "40", "--rate", "8",
    "--output-tokens", "20", "--processes", "1", "--max-model-len", "2048",
]  # fmt: skip


def out(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(words) == status
    return capsys.readouterr().out


def test_plan_prints_json_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    traffic = "rate=30,prompt=300,output=60"
    text = out(capsys, *PLAN, "--traffic", traffic, "--tensor", "1", "--html", str(page), "--json")
    found = json.loads(text)
    best = found["choices"][0]
    assert best["tpot"] <= 0.03
    assert best["dollars_per_million"]["cached"] < best["dollars_per_million"]["input"]
    assert found["verified"]["kept"]
    assert found["verified"]["report"]["attainment"] >= 0.9
    html = page.read_text()
    assert html.count("<svg") == 4
    for words in ("TPOT promise 30 ms", "knee, batch", "goodput peak", "TTFT promise 1000 ms"):
        assert words in html


def test_plan_tells_what_binds_and_helps(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, *PLAN, "--no-verify", "--break-even")
    for words in ("what binds", "time goes to", "weights in fp8", "W* =", "pcie5x16"):
        assert words in text


def test_a_promise_that_no_batch_keeps_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(
        capsys, "plan", "llama-3.1-405b", "--hardware", "h200", "--slo", "tpot=1ms", status=1
    )
    assert "keeps the promise at no batch" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "llama-9b", "--hardware", "h100"], "llama-9b"),
        (["plan", "llama-3.1-8b", "--hardware", "h999"], "unknown device 'h999'"),
        (["plan", "llama-3.1-70b", "--hardware", "l4", "--tensor", "1"], "141.1 GB"),
        (["plan", "llama-3.1-8b", "--hardware", "h100", "--slo", "speed=1"], "slo"),
        (["fit", "llama-3.1-8b", "--memory", "1GiB"], "does not fit"),
        ([*SMALL, "--kv-cache-memory-bytes", "1M"], "one sequence of 2048 tokens needs"),
        ([*SMALL, "--rate", "0"], "rate"),
        (["replay", "/nowhere/trace"], "cannot read"),
    ],
)
def test_mistakes_end_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_fit_is_monotonic_and_within_the_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "fit.html"
    text = out(capsys, "fit", "qwen3-8b", "--memory", "24GB", "--json", "--html", str(page))
    found = json.loads(text)
    rows = found["fits"]
    contexts = [row["context"] for row in rows]
    assert contexts == sorted(contexts, reverse=True)
    assert contexts[0] > 4000
    for row in rows:
        total = row["weights"] + row["kv"] + row["workspace"]
        if row["context"]:
            assert total <= 24e9
            if row["context"] < 40960:
                assert total + row["concurrency"] * 144 * 1024 * 17 > 24e9, "nothing is left over"
    assert "<svg" in page.read_text()


def test_simulate_records_a_trace_that_replays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, page = tmp_path / "t.jsonl", tmp_path / "s.html"
    text = out(capsys, *SMALL, "--json", "--trace", str(trace), "--html", str(page))
    found = json.loads(text)
    assert found["requests"] == 40
    assert found["ttft"]["p50"] > 0
    assert page.read_text().count("<svg") == 5
    replayed = tmp_path / "r.html"
    assert "every plan is as recorded" in out(capsys, "replay", str(trace), "--html", str(replayed))
    assert replayed.read_text().count("<svg") == 3
    lines = trace.read_text().splitlines(keepends=True)
    adds = [i for i, line in enumerate(lines) if line.startswith('["add"')]
    del lines[adds[3]]
    trace.write_text("".join(lines))
    found = json.loads(out(capsys, "replay", str(trace), "--json", status=1))
    assert not found["identical"]


def test_simulate_reads_traffic_files_and_shapes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "traffic.csv"
    file.write_text("arrival,input_tokens,output_tokens\n0,100,10\n1,50,5\n")
    text = out(capsys, *SMALL[:4], "--workload", str(file))
    assert "2, 0" in text
    words = [*SMALL, "--shape", "chat", "--replicas", "2", "--routing", "prefix"]
    assert "prompt tokens from the cache" in out(capsys, *words)
    closed = json.loads(out(capsys, *SMALL, "--concurrency", "4", "--json"))
    assert closed["mean_running"] <= 4
