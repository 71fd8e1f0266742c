"""Devices and links as data, and the profile of the machine that `headrace calibrate` measured.

A name is looked up in the shipped tables (`data/devices.toml`, `data/links.toml`), or is the path
of a TOML file of the same form, or 'local': the stored profile of this machine.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

LOCAL = "local"


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes/s in one direction. latency: seconds a message."""

    name: str
    title: str
    bandwidth: float
    latency: float
    source: str


@dataclass(frozen=True)
class Device:
    """What a step runs on.

    memory: bytes. bandwidth: bytes/s. rates: FLOP/s or integer op/s by number format. *_share: the
    part of them that an engine reaches (1 where they were measured by one). step_overhead: seconds
    a step takes beside its ops. overlap: 1 when computing hides behind moving bytes (the roofline's
    max), 0 when they add up (one core does both); between, in between.
    link, host_link: names of links; node: devices in one node. price_per_hour: dollars, assumed.
    """

    name: str
    title: str
    kind: str
    memory: float
    bandwidth: float
    rates: Mapping[str, float]
    source: str
    bandwidth_share: float = 1.0
    compute_share: float = 1.0
    step_overhead: float = 0.0
    overlap: float = 1.0
    node: int = 1
    link: str = "memory"
    host_link: str = "memory"
    price_per_hour: float = 0.0
    measured: Mapping[str, Any] = field(default_factory=dict)

    def bytes_per_second(self) -> float:
        """Achieved bytes/s from memory."""
        return self.bandwidth * self.bandwidth_share

    def rate(self, number: str) -> float:
        """Achieved FLOP/s in a number format; where the device has none of its own, that of the
        format its kernels would convert to (int4 -> int8; fp4, fp8 and int8 -> bf16 -> f32)."""
        for name in (number, *_FALLBACKS.get(number, ())):
            if name in self.rates:
                return self.rates[name] * self.compute_share
        raise ConfigError("hardware", f"{self.name} states no rate for {number} or f32")


_FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "fp4": ("bf16", "f32"),
    "int4": ("int8", "bf16", "f32"),
    "fp8": ("bf16", "f32"),
    "int8": ("bf16", "f32"),
    "bf16": ("f32",),
}


def _table(file: str) -> dict[str, dict[str, Any]]:
    text = resources.files("headrace.cost").joinpath("data", file).read_text("utf-8")
    return tomllib.loads(text)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("hardware", f"cannot read {path}: {error}") from error


def _device(name: str, row: Mapping[str, Any]) -> Device:
    known = {f.name for f in fields(Device)} - {"name"}
    unknown = sorted(set(row) - known)
    if unknown:
        raise ConfigError("hardware", f"{name}: unknown field {unknown[0]}; known: {sorted(known)}")
    try:
        return Device(name=name, **row)
    except TypeError as error:
        raise ConfigError("hardware", f"{name}: {error}") from error


def devices(path: Path | None = None) -> dict[str, Device]:
    """All devices by name: the shipped ones, with those of `path` added or replaced.

    Raises ConfigError where the file cannot be read or has an unknown field.
    """
    rows = _table("devices.toml")
    if path is not None:
        rows |= _read(path)
    return {name: _device(name, row) for name, row in rows.items()}


def links(path: Path | None = None) -> dict[str, Link]:
    """All links by name. Raises ConfigError like `devices`."""
    rows = _table("links.toml")
    if path is not None:
        rows |= _read(path)
    return {name: Link(name=name, **row) for name, row in rows.items()}


def find_device(name: str, path: Path | None = None) -> Device:
    """The device of that name, or the calibrated profile for 'local'.

    Raises ConfigError with the names that exist, or with the command that makes a profile.
    """
    if name == LOCAL:
        return load_profile()
    table = devices(path)
    if name not in table:
        raise ConfigError(
            "hardware", f"unknown device {name!r}; known: {', '.join(table)}, or {LOCAL}"
        )
    return table[name]


def find_link(name: str) -> Link:
    """The link of that name. Raises ConfigError with the names that exist."""
    table = links()
    if name not in table:
        raise ConfigError("link", f"unknown link {name!r}; known: {', '.join(table)}")
    return table[name]


def profile_path() -> Path:
    """Where the profile of this machine is stored: $XDG_CACHE_HOME/headrace/profile.json."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / "profile.json"


def save_profile(device: Device, path: Path | None = None) -> Path:
    """Store a profile; returns the file. Replaces the old one at once or not at all."""
    target = path or profile_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(device), indent=1, sort_keys=True), "utf-8")
    partial.replace(target)
    return target


def load_profile(path: Path | None = None) -> Device:
    """The stored profile of this machine. Raises ConfigError when there is none, or it is
    damaged."""
    source = path or profile_path()
    try:
        row = json.loads(source.read_text("utf-8"))
    except FileNotFoundError as error:
        message = "this machine has no profile yet; run `headrace calibrate` (10 seconds)"
        raise ConfigError("hardware", message) from error
    except (OSError, ValueError) as error:
        message = f"cannot read {source}: {error}; run `headrace calibrate` again"
        raise ConfigError("hardware", message) from error
    if not isinstance(row, dict):
        raise ConfigError("hardware", f"{source} is not a profile; run `headrace calibrate` again")
    name = str(row.pop("name", LOCAL))
    return _device(name, row)


def scaled(device: Device, count: int) -> Device:
    """`count` devices seen as one: memory, bandwidth, rates and price times count (tensor parallel,
    before its all-reduces)."""
    if count == 1:
        return device
    return replace(
        device,
        name=f"{count} x {device.name}",
        title=f"{count} x {device.title}",
        memory=device.memory * count,
        bandwidth=device.bandwidth * count,
        rates={name: rate * count for name, rate in device.rates.items()},
        price_per_hour=device.price_per_hour * count,
    )
