"""The worker of a chaos run, which is a program: ``python -m tests.support.chaos.workload SETTINGS RANK``.

It pushes as fast as its pace allows, each push with its own place in every slice (``oracle``), and logs when each push
starts and how it ends. Each line is written immediately, so that a kill loses none. It knows nothing of faults. At the
end all workers meet at a barrier, and each writes its weights to a file.

Log lines are ``KIND SECONDS REST``: S and the number of this start; B, A or D and the number of a push that began, was
acknowledged or dropped; E, code and text of the error that ended it. SECONDS are of the machine's monotonic clock.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from psdist import optim
from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.errors import PsdistError, ServerLostError
from psdist.settings.config import TransportName
from psdist.settings.exit_codes import FAILURE, INFRASTRUCTURE, OK
from tests.support.chaos.oracle import Outcome, Push, place

if TYPE_CHECKING:
    from psdist.client.sync_client import Client, Parameters

Kind = Literal["S", "B", "A", "D", "E"]
Mode = Literal["bsp", "ssp", "asp"]

_STALENESS: Final = 3
#: Number of different gradients of the dense parameters, used round-robin.
_GRADIENTS: Final = 8


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """The work of all workers of a run.

    slices, slots: number of slices of the counting parameter set, and places in each.
    dense: elements of a second parameter set, updated by Adam with clipping, whose bytes show any change of order or
        value; 0 omits it.
    pace_seconds: shortest time from the start of a push to the next.
    busy_seconds: time for which SIGUSR1 makes a worker hold its interpreter.
    """

    directory: str
    scheduler: str
    workers: int
    mode: Mode = "bsp"
    slices: int = 12
    slots: int = 4096
    dense: int = 0
    pace_seconds: float = 0.0
    busy_seconds: float = 0.0
    transport: TransportName = "auto"

    def save(self, path: Path) -> None:
        """Write the file that ``load`` reads."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> WorkloadSettings:
        """Read a file written by ``save``."""
        return cls(**json.loads(path.read_text()))

    def log(self, rank: int) -> Path:
        """Return the log of a worker, over all its incarnations."""
        return Path(self.directory) / f"worker-{rank}.events"

    def final(self, rank: int, what: str) -> Path:
        """Return the file of a worker's weights at the end, as float32."""
        return Path(self.directory) / f"final-{rank}-{what}.f32"

    @property
    def stop_file(self) -> Path:
        """The file that ends the workers: in BSP before the step in it, otherwise immediately."""
        return Path(self.directory) / "stop"


class EventLog:
    """A worker's log. Each line is written to the system immediately."""

    def __init__(self, path: Path) -> None:
        earlier = path.read_text().splitlines() if path.exists() else []
        self.start = sum(line.startswith("S") for line in earlier)
        self.begun = sum(line.startswith("B") for line in earlier)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.write("S", self.start)

    def write(self, kind: Kind, what: object) -> None:
        """Write a line."""
        os.write(self._fd, f"{kind} {time.monotonic():.6f} {what}\n".encode())


class EventReader:
    """Incremental reader of a worker's log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._start = 0
        self._open: Push | None = None
        self._ended: list[Push] = []
        #: Code and text of each error that ended an incarnation.
        self.errors: list[str] = []

    def read(self) -> None:
        """Read the new lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.decode().splitlines():
            self._take(*line.split(" ", 2))

    def _take(self, kind: str, seconds: str, what: str) -> None:
        now, push = float(seconds), self._open
        if kind in "AD" and push is not None:
            outcome: Outcome = "acknowledged" if kind == "A" else "dropped"
            self._ended.append(Push(push.number, push.start, outcome, push.begin, now))
            self._open = None
        elif push is not None:
            self._ended.append(push)
            self._open = None
        if kind == "S":
            self._start = int(what)
        elif kind == "B":
            self._open = Push(int(what), self._start, "unknown", now)
        elif kind == "E":
            self.errors.append(what)

    @property
    def pushes(self) -> list[Push]:
        """All pushes so far, including the one under way."""
        return [*self._ended, *([self._open] if self._open is not None else [])]

    def acknowledged_since(self, moment: float) -> Push | None:
        """Return the first acknowledged push that started after ``moment``."""
        later: Iterable[Push] = reversed(self._ended)
        found = None
        for push in later:
            if push.begin <= moment:
                break
            found = push if push.outcome == "acknowledged" else found
        return found


# --- the process ------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run the worker to its end; returns the exit status."""
    settings, rank = WorkloadSettings.load(Path(argv[0])), int(argv[1])
    log = EventLog(settings.log(rank))
    signal.signal(signal.SIGUSR1, lambda *_: _hold_interpreter(settings.busy_seconds))
    from psdist.client.sync_client import Client

    try:
        with Client(settings.scheduler, worker_id=f"worker-{rank}", rank=rank, transport=settings.transport) as client:
            _ChaosWorker(settings, rank, client, log).run()
    except PsdistError as error:
        log.write("E", f"{error.code} {error.message}")
        return INFRASTRUCTURE if isinstance(error, ServerLostError) else FAILURE
    return OK


class _ChaosWorker:
    def __init__(self, settings: WorkloadSettings, rank: int, client: Client, log: EventLog) -> None:
        self._settings, self._rank, self._client, self._log = settings, rank, client, log
        self._synchronous = settings.mode == "bsp"
        modes: dict[Mode, Consistency] = {"bsp": BSP(), "ssp": SSP(_STALENESS), "asp": ASP()}
        consistency = modes[settings.mode]
        self._next = log.begun
        self._counts = client.parameters(
            "counts",
            {"counts": np.zeros(settings.slices * settings.slots, np.float32)},
            optim.SGD(lr=1.0),
            consistency,
            slice_elements=settings.slots,
        )
        self._buffers = self._counts.gradient_buffers()
        self._places = self._buffers["counts"].reshape(settings.slices, settings.slots)
        self._places[...] = 0
        self._dense: Parameters | None = None
        if settings.dense:
            values = np.linspace(-1, 1, settings.dense, dtype=np.float32)
            optimizer = optim.Adam(lr=1e-2, max_grad_norm=1.0)
            self._dense = client.parameters("dense", {"dense": values}, optimizer, consistency)
        rng = np.random.default_rng(rank)
        self._gradients = rng.standard_normal((_GRADIENTS, settings.dense), dtype=np.float32)

    def run(self) -> None:
        """Push until told to stop, and write the weights."""
        begin = time.monotonic()
        while not self._is_over():
            self._push()
            begin = max(begin + self._settings.pace_seconds, time.monotonic() - self._settings.pace_seconds)
            time.sleep(max(0.0, begin - time.monotonic()))  # This emulates the pace of a real load.
        self._client.barrier("end")
        self._save("counts", self._counts)
        if self._dense is not None:
            self._save("dense", self._dense)

    def _is_over(self) -> bool:
        if not self._settings.stop_file.exists():
            return False
        return not self._synchronous or self._counts.step >= int(self._settings.stop_file.read_text())

    def _push(self) -> None:
        number = self._counts.step if self._synchronous else self._next
        where = place(number, self._rank, self._settings.workers, self._settings.slots)
        dropped = self._dropped()
        self._places[:, where] = -1
        self._log.write("B", number)
        self._counts.push_pull(self._buffers, copy=False)
        if self._dense is not None:
            self._dense.push_pull({"dense": self._gradients[number % _GRADIENTS]}, copy=False)
        self._log.write("A" if self._dropped() == dropped else "D", number)
        self._places[:, where] = 0
        self._next += 1

    def _dropped(self) -> int:
        return self._counts.statistics().dropped

    def _save(self, what: str, parameters: Parameters) -> None:
        self._settings.final(self._rank, what).write_bytes(parameters.pull()[what].tobytes())


def _hold_interpreter(seconds: float) -> None:
    """Keep all other threads from running Python, as a long C call does that holds the interpreter."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
