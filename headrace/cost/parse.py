"""Quantities as people type them on a command line."""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable

from headrace.cost.capacity import Promise, Traffic
from headrace.errors import ConfigError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {
    "": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


def _quantity(field: str, text: str, units: dict[str, float]) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = match[2].lower() if match else None
    if match is None or unit not in units:
        known = ", ".join(name for name in units if name)
        raise ConfigError(field, f"{text!r} is not a number with a unit of {known}")
    return float(match[1]) * units[unit]


def at_least(low: float, kind: type[int] | type[float] = int) -> Callable[[str], int | float]:
    """What argparse turns a flag's text into: a whole number (or any) from `low` up."""
    noun = "whole number" if kind is int else "number"

    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a {noun}") from None
        if not low <= value < float("inf"):
            raise ArgumentTypeError(f"{text} is not a {noun} of at least {low:g}")
        return value

    return convert


def seconds(field: str, text: str) -> float:
    """'50ms', '2s', '1.5', '3m' in seconds. Raises ConfigError naming the field."""
    return _quantity(field, text, _SECONDS)


def size(field: str, text: str) -> int:
    """'8GiB', '512M', '16GB' in bytes; k, M, G and T alone are powers of 1024."""
    return int(_quantity(field, text, {key: float(value) for key, value in _BYTES.items()}))


def pairs(field: str, text: str, known: Iterable[str]) -> dict[str, str]:
    """'a=1,b=2' as a dictionary. Raises ConfigError naming an unknown key."""
    found: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            raise ConfigError(field, f"{part!r} is not one of {', '.join(f'{k}=…' for k in known)}")
        found[key] = value
    return found


def promise(text: str) -> Promise:
    """'ttft=500ms,tpot=50ms', either part alone, or '' for none."""
    found = pairs("slo", text, ("ttft", "tpot"))
    return Promise(**{key: seconds("slo", value) for key, value in found.items()})


def traffic(text: str) -> Traffic:
    """'rate=20,prompt=1000,output=200,cached=0.3,longest=8192', any parts."""
    found = pairs("traffic", text, ("rate", "prompt", "output", "cached", "longest"))
    values = {key: number("traffic", value) for key, value in found.items()}
    longest = int(values.pop("longest", 0))
    return Traffic(**values, longest=longest)


def number(field: str, text: str) -> float:
    """A plain number. Raises ConfigError naming the field."""
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(field, f"{text!r} is not a number") from error
