"""The C++ module; its docstrings are in csrc/bind.cpp."""

from typing import Any

def __getattr__(name: str) -> Any: ...
