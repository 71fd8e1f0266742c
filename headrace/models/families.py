"""The families of dense decoders: one row each, differences as data.

`traits` are ModelSpec fields that hold for every member of a family. What a configuration decides
is read by `from_gguf` and `from_hf`; a family's own keys are read by its `gguf` and `hf` functions,
which return further ModelSpec fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.models.fields import Fields
from headrace.models.spec import Layer

Reader = Callable[[Fields, dict[str, Any]], dict[str, Any]]


def _nothing(fields: Fields, draft: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A row of the table. gguf_names: values of `general.architecture`. gguf_style: order of the
    rotated values in GGUF files (their converter permutes q and k of the Llama kin)."""

    name: str
    gguf_names: tuple[str, ...]
    gguf_style: Literal["halves", "pairs"] = "halves"
    traits: Mapping[str, Any] = field(default_factory=dict)
    gguf: Reader = _nothing


def alternating(count: int, window: int, full: Callable[[int], bool], local: str) -> Any:
    """Layers that see everything where `full` says so, else `window` with the rope `local`."""
    return tuple(Layer() if full(index) else Layer(window, local) for index in range(count))


FAMILIES: tuple[Family, ...] = (Family("llama", ("llama",), "pairs"),)
