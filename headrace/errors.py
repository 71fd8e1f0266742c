"""The errors that headrace raises on purpose.

Every error says what is wrong, names the field or the file, gives the limit, and says what to do
next where that is not obvious. Anything else that escapes is a bug.
"""


class HeadraceError(Exception):
    """Base of all errors raised on purpose. `str()` is one clear line for a person."""


class ConfigError(HeadraceError):
    """A flag or configuration field has a value that cannot be honoured."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelError(HeadraceError):
    """A model file is damaged, or holds something that headrace does not support."""


class MemoryPlanError(HeadraceError):
    """What was asked for does not fit the memory. The message holds the numbers."""


class KernelError(HeadraceError):
    """No back-end, or no kernel of the chosen back-end, accepts an op. Names what was tried."""


class RequestError(HeadraceError):
    """A request is refused. `field` is the request field at fault, `code` the HTTP status."""

    def __init__(self, field: str | None, message: str, code: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class OverloadError(RequestError):
    """The engine is full; the client may retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(None, message, code=503)
        self.retry_after = retry_after


class EngineDeadError(HeadraceError):
    """The engine process ended; requests in flight are lost."""
