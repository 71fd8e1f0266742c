"""All configuration: few frozen objects, resolved once, with the text of each flag beside its
field.

A field's flag is its name with dashes, its environment variable `HEADRACE_` + the name upper-cased.
The command line wins over `--config` FILE, the file over the environment. An unknown name in any of
them is an error.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

DEFAULT_MODEL = "smollm2-135m"


def flag(default: Any, text: str, metavar: str | None = None) -> Any:
    """A configuration field with its help text."""
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is: a model, its memory and its scheduler's knobs. None = derived at start."""

    model: str = flag(DEFAULT_MODEL, "a .gguf file, a folder, or a short name", "MODEL")
    max_model_len: int | None = flag(
        None, "longest prompt plus output, in tokens; beyond the context with a window", "N"
    )
    block_size: int = flag(16, "tokens in a KV block, a multiple of 16", "N")
    max_num_seqs: int | None = flag(None, "sequences that run at once", "N")
    max_num_batched_tokens: int | None = flag(None, "token budget of a step", "N")
    mixed_prefill_tokens: int = flag(
        64, "prompt tokens of a step in which others decode; bounds their ITL (0: no bound)", "N"
    )
    max_num_queued_reqs: int | None = flag(None, "requests that may wait; more are refused", "N")
    scheduling_policy: Literal["fcfs", "priority"] = flag("fcfs", "order of waiting requests")
    watermark: float = flag(0.01, "share of KV blocks that admission leaves free", "SHARE")
    enable_prefix_caching: bool = flag(True, "reuse KV of equal prefixes")
    quantization: Literal["none", "int8", "int4"] = flag(
        "none", "quantize the 16-bit weights of a checkpoint while loading"
    )
    attention_sinks: int = flag(
        0, "first tokens that are kept beside --attention-window (StreamingLLM)", "N"
    )
    attention_window: int | None = flag(
        None, "see only the last W tokens, and the first --attention-sinks", "W"
    )
    kv_cache_memory_bytes: int | None = flag(None, "bytes of KV cache (4G, 512M, ...)", "BYTES")
    kv_cache_dtype: Literal["auto", "f16", "f32", "int8"] = flag("auto", "type of stored K and V")
    threads: int | None = flag(
        None, "worker threads (default: the cores this process may use)", "N"
    )
    pin_threads: bool = flag(False, "bind each worker thread to a core of its own")
    backend: Literal["auto", "cpu", "reference"] = flag("auto", "how to execute the model")
    level: Literal["auto", "avx512", "avx2", "portable"] = flag("auto", "CPU instruction level")
    strict_kernels: bool = flag(False, "refuse to start where an op would take a slower path")
    seed: int | None = flag(None, "seed of the requests that bring none", "N")
    trace: str | None = flag(None, "record all scheduler inputs and plans to FILE", "FILE")


@dataclass(frozen=True)
class ServerConfig:
    """What the HTTP server is, beside its engine."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on (0: any free one)", "N")
    served_model_name: str | None = flag(None, "name in the API (default: from MODEL)", "NAME")
    api_key: str | None = flag(None, "key that requests must bring as a bearer token", "KEY")
    shutdown_timeout: float = flag(30.0, "seconds to let requests finish at shutdown", "SECONDS")
    chat_template: str | None = flag(None, "file with a chat template to use instead", "FILE")
    generation_config: Literal["auto", "none", "vllm"] = flag(
        "auto", "take sampling defaults from the checkpoint, or not (none, vllm)"
    )
    enable_log_requests: bool = flag(False, "log each request")
