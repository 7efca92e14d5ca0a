"""Ports without an answer: no connection, as behind a firewall that drops packets, or a connection without data."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_port() -> Iterator[int]:
    """Return a port whose backlog is full, so that the kernel leaves further connections unanswered."""
    with socket.socket() as listener, socket.socket() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting.connect(listener.getsockname())
        yield listener.getsockname()[1]


@contextmanager
def ports_by_stage() -> Iterator[dict[str, int]]:
    """Return ports by the stage at which a connection hangs.

    "connect" is never answered; after "accept" no data arrives.
    """
    with silent_port() as silent, socket.create_server(("127.0.0.1", 0)) as listener:
        yield {"connect": silent, "accept": listener.getsockname()[1]}
