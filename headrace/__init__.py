"""headrace: an LLM serving engine. State a latency promise; it derives every knob.

from headrace import LLM, SamplingParams

llm = LLM("smollm2-135m")
print(llm.generate("Water runs", SamplingParams(max_tokens=16))[0].outputs[0].text)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.llm import LLM, CompletionOutput, RequestOutput
    from headrace.engine.params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "headrace.engine.llm",
    "CompletionOutput": "headrace.engine.llm",
    "RequestOutput": "headrace.engine.llm",
    "SamplingParams": "headrace.engine.params",
}


def __getattr__(name: str) -> Any:
    """Import the public names when first used: `headrace --help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
