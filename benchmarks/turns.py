"""Taking turns: contenders of a benchmark run side by side, but only one of them works at a time.

Every worker process of a contender connects to a unix socket of the benchmark (``serve``) and then waits, blocked in a
read, for an order of steps. It makes them, answers with their times, and waits again. A noisy moment of the machine
therefore affects all contenders equally, and no contender's processes use the CPU in another's turn.

Lines of JSON both ways. Only the standard library is imported, because peers run in environments of their own.
Processes are started by ``contenders``.
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

#: Variable with the unix socket, for a contender's processes.
VARIABLE = "BENCH_TURNS"
_LINE_BYTES_MAX = 1 << 24


@dataclass(frozen=True)
class Settings:
    """Settings of every contender's processes, as JSON on their command line.

    compute_ms: length of an emulated forward and backward pass; 0 for none.
    codec, pull_codec: codecs of psdist's gradients and weights, by their names in ``codec_choice`` or in psdist; "" is
        ``wire_dtype``.
    copy: psdist's plain calls, with arrays of the user's own.
    layer_elements, slice_elements: sizes of psdist's tensors and slices; 0 slice_elements are psdist's choice.
    transport, replicas: settings of psdist.
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
        """Return the settings as an argument."""
        return json.dumps(asdict(self))


def settings() -> Settings:
    """Return the settings of this process."""
    return Settings(**json.loads(sys.argv[1]))


def directory() -> Path:
    """Return a directory that only this contender's processes use."""
    return Path(os.environ[VARIABLE]).parent


class Line:
    """One end of a connection: JSON values, a line each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")

    def send(self, value: Any) -> None:
        """Send a value."""
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        """Return the next value, or None if the other end is gone."""
        data = self._reader.readline(_LINE_BYTES_MAX)
        return json.loads(data) if data.endswith(b"\n") else None

    def close(self) -> None:
        """Close the connection, which ends the other process."""
        self._reader.close()
        self._connection.close()


def listen(path: Path) -> socket.socket:
    """Return a socket for contenders to connect to."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def connect(environ: Mapping[str, str] | None = None) -> Line:
    """Connect a worker process to its benchmark."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect((os.environ if environ is None else environ)[VARIABLE])
    return Line(connection)


def timed(step: Callable[[], object], steps: int) -> list[float]:
    """Return the seconds of each of ``steps`` steps."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return times


def in_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each of ``works``, which this process runs in turns. The first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds = timed(work, 1)
            if number:
                times[name] += seconds
    return times


def serve(turn: Callable[[int], list[float]], facts: Mapping[str, Any] | None = None) -> None:
    """Run a worker process's side: take turns until the benchmark disconnects.

    turn: makes a given number of steps and returns their seconds.
    facts: facts about this process for the benchmark.
    """
    line = connect()
    line.send(dict(facts or {}))
    try:
        while (order := line.receive()) is not None:
            line.send({"seconds": turn(int(order["steps"]))})
    finally:
        line.close()
