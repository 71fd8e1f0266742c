"""`headrace fit` against reality: planned bytes beside the memory that a warm server holds.

    python benchmarks/fit.py [--model MODEL] [--contexts 1024,8192] [--caps 1,32]

For each context and batch cap a server is started, answers a few prompts, and is left alone until
its memory no longer grows (the KV is made resident in the background); then the proportional set
sizes (PSS) of its processes are summed. Linux only.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import httpx

from headrace.config import DEFAULT_MODEL
from headrace.engine.memory import human

PORT = 18473


def family(root: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def pss(root: int) -> int:
    """Bytes of the processes, shared pages counted in part."""
    total = 0
    for pid in family(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def settled(root: int, quiet: int = 6, patience: float = 90.0) -> int:
    """The PSS once it has grown by less than 1 MiB for `quiet` seconds."""
    ends, last, still = time.monotonic() + patience, 0, 0
    while time.monotonic() < ends and still < quiet:
        now = pss(root)
        still = still + 1 if now - last < 1 << 20 else 0
        last = now
        time.sleep(1.0)
    return last


def held(model: str, context: int, cap: int, kv: int) -> int:
    """Bytes that a warm server holds."""
    words = [
        sys.executable, "-m", "headrace", "serve", model, "--port", str(PORT), "--max-model-len",
        str(context), "--max-num-seqs", str(cap), "--kv-cache-memory-bytes", str(kv),
    ]  # fmt: skip
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=300) as client:
            for _ in range(600):
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            name = client.get("/v1/models").json()["data"][0]["id"]
            for length in (8, 64, min(256, context - 8)):
                body = {"model": name, "prompt": list(range(1000, 1000 + length)), "max_tokens": 4}
                client.post("/v1/completions", json=body).raise_for_status()
        return settled(server.pid)
    finally:
        server.terminate()
        server.wait(30)


def planned(model: str, context: int, cap: int, kv: int) -> int:
    """Bytes of the engine's memory plan."""
    from headrace.checkpoint import open_checkpoint
    from headrace.config import EngineConfig
    from headrace.engine.load import usable_cores
    from headrace.engine.memory import make_plan
    from headrace.ops.backends import open_backend

    config = EngineConfig(model, max_model_len=context, max_num_seqs=cap, kv_cache_memory_bytes=kv)
    threads = usable_cores()
    loaded = open_checkpoint(model).model(context)
    return make_plan(config, loaded, open_backend("auto", "auto", threads), threads).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--caps", default="1,8,32")
    parser.add_argument("--kv", type=int, default=256 << 20, help="bytes of KV")
    arguments = parser.parse_args()
    print(f"{'context':>8} {'at once':>8} {'planned':>12} {'held':>12} {'off by':>8}")
    for context in map(int, arguments.contexts.split(",")):
        for cap in map(int, arguments.caps.split(",")):
            plan = planned(arguments.model, context, cap, arguments.kv)
            real = held(arguments.model, context, cap, arguments.kv)
            off = f"{real / plan - 1:+.1%}"
            print(f"{context:8} {cap:8} {human(plan):>12} {human(real):>12} {off:>8}", flush=True)


if __name__ == "__main__":
    main()
