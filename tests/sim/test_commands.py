"""The commands as a user calls them."""

import json
from pathlib import Path

import pytest

from headrace.cli import main

PLAN = ["plan", "llama-3.1-8b", "--hardware", "h100", "--slo", "ttft=1s,tpot=30ms"]
TINY = str(Path(__file__).parents[1] / "golden" / "families" / "llama")
SMALL = [
    "simulate", "smollm2-135m-bf16", "--hardware", "ryzen-7950x", "--requests", "40", "--rate", "8",
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


def test_checkpoints_are_planned_by_their_own_tensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    traffic = ["--traffic", "rate=5,prompt=40,output=20", "--json"]
    found = json.loads(out(capsys, "plan", TINY, "--hardware", "epyc-9654", *traffic))
    held = sum(file.stat().st_size for file in Path(TINY).glob("*.safetensors"))
    assert found["choices"][0]["weight_bytes_per_device"] == pytest.approx(held, rel=0.05)
    assert main(["plan", TINY, "--hardware", "epyc-9654", "--weights", "int4"]) == 1
    assert "brings its own formats" in capsys.readouterr().err
    assert main(["plan", TINY]) == 1
    assert "headrace calibrate" in capsys.readouterr().err


def test_fit_of_a_checkpoint_is_the_engines_own_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", TINY, "--memory", "128MiB", "--backend", "reference", "--kv", "f32", "--json"]
    rows = json.loads(out(capsys, *words))["fits"]
    parts = ("weights", "kv", "workspace", "batch", "process")
    for row in rows:
        if row["context"]:
            assert sum(row[part] for part in parts) <= 128 << 20
    contexts = [row["context"] for row in rows]
    assert contexts == sorted(contexts, reverse=True)
    assert contexts[0] > 0


def test_doctor_names_what_it_finds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["doctor", TINY, "--backend", "reference", "--kv-cache-dtype", "f32"]
    words += ["--kv-cache-memory-bytes", "1M", "--max-model-len", "128", "--slo", "tpot=1us"]
    found = [one["what"] for one in json.loads(out(capsys, *words, "--json", status=1))]
    assert "this machine was never measured" in found
    assert "the promise on TPOT cannot be kept, not even for one request" in found
    assert "-> headrace calibrate" in out(capsys, *words, status=1)


@pytest.mark.parametrize(
    "flag",
    ["--replicas=0", "--tensor=0", "--max-num-seqs=0", "--jitter=-1", "--jitter=nan",
     "--processes=0", "--block-size=x", "--mixed-prefill-tokens=-1"],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_by_its_flag(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*SMALL, flag])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert flag.split("=")[0] in message
    assert "number" in message
