"""Typed reading of a checkpoint's configuration that refuses what it does not know, by name."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from headrace.errors import ModelError

REQUIRED = object()


class Fields:
    """Values of a configuration. Every key that is read is remembered; `finish` refuses the rest.

    source: the file, for messages. prefix: put before each key (GGUF: 'llama.'). aliases: other
    spelling in files -> the key as it is asked for here.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        prefix: str = "",
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._values = values
        self.source = source
        self._prefix = prefix
        self._read: set[str] = set()
        self._spelled: dict[str, str] = {}
        for alias, key in aliases.items():
            if values.get(alias) is not None:
                if key in values or key in self._spelled:
                    other = self._spelled.get(key, key)
                    raise ModelError(f"{source}: {alias} and {other} say the same thing twice")
                self._spelled[key] = alias

    def _key(self, key: str) -> str:
        return self._prefix + self._spelled.get(key, key)

    def fail(self, key: str, message: str) -> ModelError:
        """The error to raise for one key."""
        return ModelError(f"{self.source}: {self._key(key)}: {message}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(self._key(key)) is not None

    def raw(self, key: str, default: Any = REQUIRED) -> Any:
        """The value as it is; null counts as absent."""
        self._read.add(self._key(key))
        value = self._values.get(self._key(key))
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.fail(key, "is missing")
        return default

    def integer(self, key: str, default: Any = REQUIRED, *, most: int = 1 << 31) -> int:
        """A whole number from 1 to `most` (0 only as the default). A list of equal ones counts as
        one."""
        value = self.raw(key, default)
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                raise self.fail(key, "differs from layer to layer, which is not supported")
            value = value[0]
        if value is default and default is not REQUIRED:
            return int(default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.fail(key, f"{value!r} is not a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A finite number."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise self.fail(key, f"{value!r} is not a finite number")
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """True or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"{value!r} is neither true nor false")
        return value

    def choice(self, key: str, choices: Mapping[Any, Any], default: Any = REQUIRED) -> Any:
        """The value that `choices` gives for the one in the file; any other is refused."""
        value = self.raw(key, default)
        if not isinstance(value, str | int | bool) or value not in choices:
            known = ", ".join(repr(one) for one in choices)
            raise self.fail(key, f"{value!r} is not supported (known: {known})")
        return choices[value]

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of that many finite numbers."""
        value = self.raw(key)
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(isinstance(one, int | float) and abs(one) < 1e30 for one in value)
        ):
            raise self.fail(key, f"is not a list of {length} numbers")
        return tuple(float(one) for one in value)

    def expect(self, key: str, *allowed: Any) -> None:
        """The key is absent, or has a value that changes nothing here."""
        value = self.raw(key, allowed[0])
        if value not in allowed:
            raise self.fail(key, f"{value!r} is not supported")

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Refuse keys with the prefix that nobody read and that are not known to be harmless; null
        says nothing."""
        harmless = {self._prefix + key for key in ignored}
        for key, value in self._values.items():
            known = key in self._read or key in harmless or value is None
            if key.startswith(self._prefix) and not known:
                raise ModelError(
                    f"{self.source}: {key} = {_short(value)} is not known to headrace, so the "
                    "model might be computed wrongly; it is refused"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
