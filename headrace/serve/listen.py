"""The listening socket, bound before anything slow: a port in use is told at once."""

import socket

from headrace.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError saying why there can be none."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
        bound.setblocking(False)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("--port", f"cannot listen on {host} port {port}: {reason}") from None
    return bound


def address(listener: socket.socket) -> str:
    """The URL under which a socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
