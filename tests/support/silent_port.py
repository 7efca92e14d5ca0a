"""Ports that answer nobody: no connection, as behind a firewall that drops packets, or nothing on it."""

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


@contextmanager
def ports_by_stage() -> Iterator[dict[str, int]]:
    """By the stage that a connection ends in: "connect" is never answered; after "accept" nobody says anything."""
    with silent_port() as silent, socket.create_server(("127.0.0.1", 0)) as listener:
        yield {"connect": silent, "accept": listener.getsockname()[1]}
