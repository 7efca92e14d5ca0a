"""Taking turns: contenders of a benchmark run side by side, but only one of them works at a time.

Every worker process of a contender connects to a unix socket of the benchmark (``serve``) and then waits, blocked in a
read, until it is told to make so many steps; it makes them, answers with their times, and waits again. So a noisy
moment of the machine hits all contenders alike, and no contender's processes use the CPU in another's turn.

Lines of JSON both ways. Only the standard library is imported, because peers run in environments of their own. What it
is not: a launcher; who starts the processes is in ``contenders``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Names the unix socket to a contender's processes.
VARIABLE = "BENCH_TURNS"
_LINE_BYTES_MAX = 1 << 24


@dataclass(frozen=True)
class Settings:
    """What every contender's processes are told, as JSON on their command line.

    compute_ms: length of an emulated forward and backward pass; 0 for none.
    codec, pull_codec: of psdist's gradients and weights, by their names in ``codec_choice`` or in psdist; "" is
        ``wire_dtype``.
    copy: psdist's plain calls, with arrays of the user's own. layer_elements, slice_elements: of psdist's tensors and
        slices; 0 slice_elements are psdist's choice. transport, replicas: of psdist.
    role, rank: which of a contender's processes it is.
    """

    params: int = 25_000_000
    workers: int = 2
    servers: int = 2
    replicas: int = 1
    transport: str = "auto"
    wire_dtype: str = "float32"
    consistency: str = "bsp"
    optimizer: str = "adam"
    copy: bool = False
    compute_ms: float = 0.0
    role: str = ""
    rank: int = 0
    layer_elements: int = 1 << 20
    slice_elements: int = 0
    codec: str = ""
    pull_codec: str = ""

    def text(self) -> str:
        """The settings as an argument."""
        return json.dumps(asdict(self))


def settings() -> Settings:
    """The settings of this process."""
    return Settings(**json.loads(sys.argv[1]))


def directory() -> Path:
    """A directory that this contender's processes share, and nobody else uses."""
    return Path(os.environ[VARIABLE]).parent


class Line:
    """One end of a connection: JSON values, a line each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")

    def send(self, value: Any) -> None:
        """Sends a value."""
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        """The next value; None if the other end is gone."""
        data = self._reader.readline(_LINE_BYTES_MAX)
        return json.loads(data) if data.endswith(b"\n") else None

    def close(self) -> None:
        """Closes the connection, which ends the other process."""
        self._reader.close()
        self._connection.close()


def listen(path: Path) -> socket.socket:
    """A socket for contenders to connect to."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def connect(environ: Mapping[str, str] | None = None) -> Line:
    """Connects a worker process to its benchmark."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect((os.environ if environ is None else environ)[VARIABLE])
    return Line(connection)


def timed(step: Callable[[], object], steps: int) -> list[float]:
    """Seconds of each of ``steps`` steps."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return times


def in_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of ``works``, which this process does in turns. The first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds = timed(work, 1)
            if number:
                times[name] += seconds
    return times


def serve(turn: Callable[[int], list[float]], facts: Mapping[str, Any] | None = None) -> None:
    """A worker process's side: takes turns until the benchmark disconnects.

    turn: makes so many steps and returns their seconds. facts: what the benchmark is told about this process.
    """
    line = connect()
    line.send(dict(facts or {}))
    try:
        while (order := line.receive()) is not None:
            line.send({"seconds": turn(int(order["steps"]))})
    finally:
        line.close()
