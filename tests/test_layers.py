"""The arrows of docs/architecture.md: which room may import which."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "headrace"

STANDARD_ONLY = {"core"}
ALLOWED = {
    "core": set(),
    "ops": set(),
    "models": {"ops.spec", "ops.program", "ops.weights", "ops.formats", "ops.batch"},
    "text": set(),
    "cost": {"core", "models", "ops.null", "ops.spec", "ops.cpu", "ops.program", "ops.weights"},
    "sim": {"core", "cost"},
    "engine": {"core", "cost", "ops", "models", "text"},
    "serve": {"engine.client", "engine.messages", "engine.params", "core.plan", "text"},
    "bench": set(),
    "cli": {"engine", "serve", "bench", "cost", "sim", "core", "models", "ops", "text"},
}
"""Room -> what it may import of headrace, besides itself and the modules beside the rooms."""

BESIDE = {"config", "errors", "checkpoint", "trace"}
"""Modules beside the rooms that any room but core and ops may use (these two: errors alone)."""


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, absolute."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules() -> list[Path]:
    return sorted(PACKAGE.glob("*/**/*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    beside = {"errors"} if room in {"core", "ops"} else BESIDE
    for name in imports(path):
        if not name.startswith("headrace."):
            continue
        inner = name.removeprefix("headrace.")
        top = inner.split(".")[0]
        if top == room or top in beside:
            continue
        if not (PACKAGE / top).exists() and not (PACKAGE / f"{top}.py").exists():
            continue  # a name of headrace/__init__.py
        allowed = any(inner == rule or inner.startswith(rule + ".") for rule in ALLOWED[room])
        # `from headrace.ops import spec` also lists the package itself
        is_package = any(rule.startswith(inner + ".") for rule in ALLOWED[room])
        assert allowed or is_package, f"{path}: {room} may not import {name}"


@pytest.mark.parametrize("room", sorted(STANDARD_ONLY))
def test_pure_rooms_import_the_standard_library_only(room: str) -> None:
    import sys

    for path in (PACKAGE / room).glob("**/*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top == "headrace" or top in sys.stdlib_module_names, f"{path}: {name}"
            banned = {"time", "random", "threading", "logging", "os", "io", "asyncio", "datetime"}
            assert top not in banned, f"{path}: core takes time as an argument, not from {name}"


def test_the_room_list_is_complete() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(ALLOWED)
