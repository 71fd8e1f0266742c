"""Flags, file and environment: which wins, and what is refused."""

import argparse
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.cli import COMMANDS, configure, main
from headrace.cli.flags import add_flags, flag_of, resolve, size
from headrace.cli.parser import Parser
from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError

BOTH = [EngineConfig, ServerConfig]


def configured(*words: str, file: str | None = None) -> tuple[EngineConfig, ServerConfig]:
    parser = Parser(prog="headrace serve")
    parser.add_argument("--config")
    add_flags(parser, EngineConfig, ServerConfig)
    parsed = parser.parse_args([*words, *(("--config", file) if file else ())])
    engine, server = configure(parsed, EngineConfig, ServerConfig)
    return engine, server


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("1024", 1024), ("4G", 4 << 30), ("4g", 4 << 30), ("512M", 512 << 20),
        ("8GiB", 8 << 30), ("8 GiB", 8 << 30), ("4GB", 4 * 10**9), ("1.5G", 3 << 29),
        ("2k", 2048), ("2kb", 2000), ("1T", 1 << 40), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value
    engine, _ = configured("--kv-cache-memory-bytes", text)
    assert engine.kv_cache_memory_bytes == value


@pytest.mark.parametrize("text", ["", "G", "4X", "-4G", "4Gi B", "four", "1e9"])
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        configured(f"--kv-cache-memory-bytes={text}")


def test_the_command_line_wins_over_the_file_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 2\nmax-num-seqs: 7\nenable_prefix_caching: false\nhost:\n")
    monkeypatch.setenv("HEADRACE_PORT", "3")
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("HEADRACE_THREADS", "5")
    monkeypatch.setenv("HEADRACE_CACHE", "/somewhere")
    engine, server = configured("--port", "1", file=str(file))
    assert (server.port, engine.max_num_seqs, engine.threads) == (1, 7, 5)
    assert not engine.enable_prefix_caching
    assert server.host == ServerConfig().host
    assert configured("--enable-prefix-caching", file=str(file))[0].enable_prefix_caching


def test_unknown_names_are_refused_everywhere_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, hint in (("--prot", "--port"), ("--tensor-parallel-size", "")):
        with pytest.raises(SystemExit) as caught:
            main(["serve", flag, "2"])
        assert caught.value.code == 2
        told = capsys.readouterr().err
        assert flag in told
        assert hint in told
    file = tmp_path / "c.yaml"
    file.write_text("prot: 2")
    with pytest.raises(ConfigError, match="prot is not known; did you mean port"):
        configured(file=str(file))
    monkeypatch.setenv("HEADRACE_PROT", "3")
    with pytest.raises(ConfigError, match=r"HEADRACE_PROT.*did you mean port"):
        configured()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "http"), ("--port", "1.5"), ("--watermark", "much"), ("--backend", "gpu"),
        ("--scheduling-policy", "lifo"), ("--max-num-seqs", ""), ("--shutdown-timeout", "soon"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_name_their_flag(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        configured(f"{flag}={value}")


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "1: 2\n", "a: [\n", "port: [1, 2]\n", "port: true\n"]
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"--config|--port"):
        configured(file=str(file))
    with pytest.raises(ConfigError, match="--config"):
        configured(file=str(tmp_path / "missing"))


def test_every_field_has_a_flag_with_its_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, ServerConfig)
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    for config in BOTH:
        for name, field in config.__dataclass_fields__.items():
            assert field.metadata["help"] in (actions[flag_of(name)].help or "").replace("%%", "%")
    assert "--no-enable-prefix-caching" in actions


VALUES: dict[str, Any] = {
    "port": st.integers(0, 65535), "max_num_seqs": st.integers(1, 10**6),
    "watermark": st.floats(0, 1), "strict_kernels": st.booleans(), "seed": st.integers(0, 2**63),
    "served_model_name": st.text(st.characters(codec="ascii", categories=["L"]), min_size=1),
}  # fmt: skip


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_text_of_a_value_gives_the_value(chosen):
    """Through the environment, which has only text, as through a file, which has types."""
    texts = {f"HEADRACE_{name.upper()}": str(value) for name, value in chosen.items()}
    assert resolve(BOTH, {}, {}, texts) == resolve(BOTH, {}, chosen, {})


def test_help_is_quick_and_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and text in shown for name, (_, text) in COMMANDS.items())
    heavy = {"argparse", "dataclasses", "numpy", "msgspec", "uvicorn", "asyncio", "rich", "httpx"}
    code = (
        "import sys; sys.argv[1:] = ['--help']; from headrace.cli import main; main();"
        f"sys.exit(any(name in sys.modules for name in {heavy}))"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done
    assert time.perf_counter() - started < 5  # 0.1 s on a quiet machine


def test_words_that_are_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["srve"]) == 2
    assert "did you mean serve" in capsys.readouterr().err
    assert main(["bench"]) == 2
    assert "bench serve" in capsys.readouterr().out
    assert main(["--version"]) == 0


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*name.split(), "--help"])
    assert caught.value.code == 0
    assert f"headrace {name}" in capsys.readouterr().out


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_no_flag_is_ignored(config: type) -> None:
    """Each field is read somewhere outside the file that declares it."""
    package = Path(headrace.__file__).parent
    text = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "config.py")
    for field in fields(config):
        assert re.search(rf"\.{field.name}\b", text), f"--{field.name} is never read"
