"""A port that answers no connection, as behind a firewall that drops packets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_port() -> Iterator[int]:
    """The kernel leaves further connections unanswered while one waits to be accepted."""
    with socket.socket() as listener, socket.socket() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting.connect(listener.getsockname())
        yield listener.getsockname()[1]
