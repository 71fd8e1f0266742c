"""Damage checkpoints for as long as wanted and see that each ends in a clear error.

    python scripts/fuzz.py [--seconds 60] [--first-seed 0]

Stops at the first file that crashes, hangs or takes much memory, and keeps it in fuzz-failure/.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.convert import convert  # noqa: E402
from tests.models.mutate import mutate  # noqa: E402
from tests.models.test_fuzz import FAMILIES, attempt  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    tracemalloc.start()
    end = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sources = []
        for name in ("llama", "gemma3", "gpt2", "phi3"):
            target = folder / f"{name}.gguf"
            convert(FAMILIES / name, FAMILIES / name / "model.safetensors", target, vocabulary=96)
            sources.append(target.read_bytes())
        damaged = folder / "damaged.gguf"
        for seed in itertools.count(arguments.first_seed):
            if time.monotonic() > end:
                break
            raw = sources[seed % len(sources)]
            kind, data = mutate(raw, seed, raw.rindex(b"weight") + 60)
            damaged.write_bytes(data)
            try:
                attempt(damaged, tokenizer=True)
            except BaseException:
                kept = ROOT / "fuzz-failure"
                kept.mkdir(exist_ok=True)
                shutil.copy(damaged, kept / f"{kind}-{seed}.gguf")
                print(f"seed {seed} ({kind}) failed; the file is in {kept}")
                raise
    print(f"seeds {arguments.first_seed} to {seed - 1}: every one refused or consistent")


if __name__ == "__main__":
    main()
