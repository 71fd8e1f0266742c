"""llama.cpp's HTTP server, run from the package `xllamacpp` in an environment of its own.

    python peer_llama.py MODEL.gguf --port 9000 --threads 2 --slots 8 --context 1024

`benchmarks/peers.py` starts this. Each of the slots has its own `context` tokens of f16 KV.
"""

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True, help="sequences at once")
    parser.add_argument("--context", type=int, required=True, help="tokens of each")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()
