"""Flags, configuration file and environment, made from the fields of `config`.

The command line wins over `--config` FILE, the file over the environment (`HEADRACE_` + the name,
upper-cased). A name that is not known is refused in all three, with the closest one that is.
"""

import argparse
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar

from headrace.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from headrace.errors import ConfigError

PREFIX = "HEADRACE_"
OTHER_VARIABLES = frozenset({"CACHE"})
"""Variables of that prefix that are no flags: where fetched models are kept."""
UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*$", re.IGNORECASE)

T = TypeVar("T", EngineConfig, ServerConfig)


def size(text: str) -> int:
    """Bytes of a text like 4G, 512M, 8GiB (powers of 1024) or 4GB (powers of 1000)."""
    match = SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 512M, 4G, 8GiB or bytes")
    number, unit, ending = match[1], match[2].lower(), match[3].lower()
    if unit and ending != "b":
        return int(float(number) * 1024 ** ("kmgt".index(unit) + 1))
    return int(float(number) * UNITS[unit])


def _kind(kind: Any) -> Any:
    """The type of a field, without None."""
    if isinstance(kind, UnionType):
        (kind,) = [option for option in typing.get_args(kind) if option is not type(None)]
    return kind


def convert(field: "dataclasses.Field[Any]", kind: Any, value: Any) -> Any:
    """The value of a field from text or from YAML. Raises ConfigError naming the flag."""
    kind = _kind(kind)
    name = flag_of(field.name)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(name, f"{value!r} is none of {', '.join(map(str, choices))}")
        return value
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("1", "true", "yes", "on"):
            return True
        if str(value).lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(name, f"{value!r} is neither true nor false")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(name, f"{value!r} is not a single value")
    try:
        if kind is int and field.metadata.get("metavar") == "BYTES":
            return size(str(value))
        if kind is int:
            return int(str(value))
        return float(value) if kind is float else str(value)
    except ValueError as error:
        kinds = {int: "a whole number", float: "a number"}
        why = str(error) if kind is int and "size" in str(error) else ""
        raise ConfigError(name, why or f"{value!r} is not {kinds.get(kind, 'valid')}") from None


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, which may be left out; then it is not in the result."""
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=f"a .gguf file, a folder, or a short name (default: {DEFAULT_MODEL})",
    )


def add_flags(
    parser: argparse.ArgumentParser, *configs: type[Any], without: Iterable[str] = ()
) -> None:
    """A flag for each field; only flags that were given appear in the result."""
    for config in configs:
        group = parser.add_argument_group(str(config.__name__).removesuffix("Config").lower())
        kinds = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name not in without:
                _add(group, field, _kind(kinds[field.name]))


def _add(group: Any, field: "dataclasses.Field[Any]", kind: Any) -> None:
    text = field.metadata.get("help", "")
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if kind is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(flag_of(field.name), action=action, help=text, **options)
        return
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        options["metavar"] = "{" + ",".join(map(str, choices)) + "}"
    else:
        options["metavar"] = field.metadata.get("metavar") or field.name.upper()
    if field.default is not None:
        text += f" (default: {field.default})"
    group.add_argument(flag_of(field.name), help=text.replace("%", "%%"), **options)


def read_file(path: str) -> dict[str, Any]:
    """The names and values of a YAML file, dashes in names as underscores. Raises ConfigError."""
    import yaml

    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("--config", f"{path}: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError("--config", f"{path} must hold names and values")
    return {name.replace("-", "_"): item for name, item in value.items()}


def resolve(
    configs: Sequence[type[Any]],
    given: Mapping[str, Any],
    file: Mapping[str, Any],
    environment: Mapping[str, str],
) -> list[Any]:
    """One object per class of `configs`. Raises ConfigError for unknown names and bad values."""
    every = [EngineConfig, ServerConfig]
    known = {field.name for config in every for field in dataclasses.fields(config)}
    variables = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in OTHER_VARIABLES
    }
    for name in variables:
        if name not in known:
            raise ConfigError(PREFIX + name.upper(), f"no such variable{closest(name, known)}")
    for name in file:
        if name not in known:
            raise ConfigError("--config", f"{name} is not known{closest(name, known)}")
    chosen = {**variables, **{k: v for k, v in file.items() if v is not None}, **given}
    results = []
    for config in configs:
        kinds = typing.get_type_hints(config)
        values = {
            field.name: convert(field, kinds[field.name], chosen[field.name])
            for field in dataclasses.fields(config)
            if field.name in chosen
        }
        results.append(config(**values))
    return results


def closest(name: str, known: Iterable[str]) -> str:
    """A hint at a known name like this one, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
