"""Raw TCP by blocking sockets, to measure the capacity of a link.

``receive HOST`` prints its port, then bits per second; ``send HOST PORT SECONDS`` sends for that time. Only the
standard library is imported.
"""

from __future__ import annotations

import socket
import sys
import time

BLOCK_BYTES = 1 << 20


def receive(host: str) -> None:
    """Receive from one sender until it ends; the first block, while TCP starts, does not count."""
    block = bytearray(BLOCK_BYTES)
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        skipped = 0
        while skipped < BLOCK_BYTES and (count := connection.recv_into(block)):
            skipped += count
        began, total = time.perf_counter(), 0
        while count := connection.recv_into(block):
            total += count
        print(8 * total / (time.perf_counter() - began), flush=True)


def send(host: str, port: int, seconds: float) -> None:
    """Send for ``seconds``."""
    block = bytes(BLOCK_BYTES)
    with socket.create_connection((host, port)) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(block)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", at]:
            receive(at)
        case ["send", to, number, duration]:
            send(to, int(number), float(duration))
        case _:
            raise SystemExit(__doc__)
