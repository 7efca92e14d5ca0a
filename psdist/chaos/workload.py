"""The worker of a chaos run, a process of its own: ``python -m psdist.chaos.workload SETTINGS RANK``.

It pushes as fast as it may, each push with a place of its own in every slice (``oracle``), and writes into its log what
it began and what was acknowledged, each line at once, so that being killed loses none. It knows nothing of faults. At
the end all meet at a barrier, and each leaves the weights that it sees in a file.

Log lines are ``KIND SECONDS REST``: L life, B number, A number, D number (begun, acknowledged, dropped), E code and
text of the error that ended it. SECONDS are those of the machine's monotonic clock, which all its processes share.
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
from typing import TYPE_CHECKING, Any, Final, Literal

from psdist.chaos.oracle import Outcome, Push, place
from psdist.errors import PsdistError, ServerLostError
from psdist.settings.config import TransportName
from psdist.settings.exit_codes import FAILURE, INFRASTRUCTURE, OK

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from psdist.client.sync_client import Client, Parameters
    from psdist.consistency import Consistency

Kind = Literal["L", "B", "A", "D", "E"]
Mode = Literal["bsp", "ssp", "asp"]

_STALENESS: Final = 3
#: Gradients of the dense parameters are taken from so many, in turns.
_GRADIENTS: Final = 8


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What all workers of a run do.

    slices, slots: the counting parameters have so many slices of so many places.
    dense: elements of a second set of parameters, updated by Adam with clipping, whose bytes tell any change of order
        or value; 0 leaves it out.
    pace_seconds: a push begins at the earliest so long after the one before.
    busy_seconds: so long SIGUSR1 has a worker hold its interpreter.
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
        """Writes the file that ``load`` reads."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> WorkloadSettings:
        """Reads what ``save`` wrote."""
        return cls(**json.loads(path.read_text()))

    def log(self, rank: int) -> Path:
        """The log of a worker, over all its incarnations."""
        return Path(self.directory) / f"worker-{rank}.events"

    def final(self, rank: int, what: str) -> Path:
        """Where a worker leaves the weights that it sees at the end, as float32."""
        return Path(self.directory) / f"final-{rank}-{what}.f32"

    @property
    def stop_file(self) -> Path:
        """When it is there, workers end: in BSP before the step that is in it, else at once."""
        return Path(self.directory) / "stop"


class EventLog:
    """Where a worker writes. Each line is handed to the system at once."""

    def __init__(self, path: Path) -> None:
        earlier = path.read_text().splitlines() if path.exists() else []
        self.life = sum(line.startswith("L") for line in earlier)
        self.begun = sum(line.startswith("B") for line in earlier)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.write("L", self.life)

    def write(self, kind: Kind, what: object) -> None:
        """One line."""
        os.write(self._fd, f"{kind} {time.monotonic():.6f} {what}\n".encode())


class EventReader:
    """Follows the log of a worker while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._life = 0
        self._open: Push | None = None
        self._ended: list[Push] = []
        #: Code and text of each error that ended an incarnation.
        self.errors: list[str] = []

    def read(self) -> None:
        """Takes what is new."""
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
            self._ended.append(Push(push.number, push.life, outcome, push.begin, now))
            self._open = None
        elif push is not None:
            self._ended.append(push)
            self._open = None
        if kind == "L":
            self._life = int(what)
        elif kind == "B":
            self._open = Push(int(what), self._life, "unknown", now)
        elif kind == "E":
            self.errors.append(what)

    @property
    def pushes(self) -> list[Push]:
        """All pushes so far, the one that is under way included."""
        return [*self._ended, *([self._open] if self._open is not None else [])]

    def acknowledged_since(self, moment: float) -> Push | None:
        """The first push that was begun after ``moment`` and is acknowledged."""
        later: Iterable[Push] = reversed(self._ended)
        found = None
        for push in later:
            if push.begin <= moment:
                break
            found = push if push.outcome == "acknowledged" else found
        return found


# --- the process ------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Runs the worker to its end; the exit status."""
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
        self._next = log.begun
        self._counts = self._count_parameters()
        self._buffers = self._counts.gradient_buffers()
        self._places = self._buffers["counts"].reshape(settings.slices, settings.slots)
        self._places[...] = 0
        self._dense = self._dense_parameters() if settings.dense else None
        self._gradients = self._dense_gradients()

    def _count_parameters(self) -> Parameters:
        import numpy as np

        from psdist import optim

        elements = self._settings.slices * self._settings.slots
        return self._client.parameters(
            "counts",
            {"counts": np.zeros(elements, np.float32)},
            optim.SGD(lr=1.0),
            _consistency(self._settings.mode),
            slice_elements=self._settings.slots,
        )

    def _dense_parameters(self) -> Parameters:
        import numpy as np

        from psdist import optim

        values = np.linspace(-1, 1, self._settings.dense, dtype=np.float32)
        optimizer = optim.Adam(lr=1e-2, max_grad_norm=1.0)
        return self._client.parameters("dense", {"dense": values}, optimizer, _consistency(self._settings.mode))

    def _dense_gradients(self) -> NDArray[np.float32]:
        import numpy as np

        rng = np.random.default_rng(self._rank)
        return rng.standard_normal((_GRADIENTS, self._settings.dense), dtype=np.float32)

    def run(self) -> None:
        """Pushes until it is told to stop, and leaves the weights."""
        begin = time.monotonic()
        while not self._is_over():
            self._push()
            begin = max(begin + self._settings.pace_seconds, time.monotonic() - self._settings.pace_seconds)
            time.sleep(max(0.0, begin - time.monotonic()))  # The pace of the load, which is what is emulated.
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
    """Lets no other thread of this process run Python, as a long call of C code does that keeps the interpreter."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _consistency(mode: Mode) -> Consistency:
    from psdist.consistency import ASP, BSP, SSP

    choices: dict[str, Any] = {"bsp": BSP(), "ssp": SSP(staleness=_STALENESS), "asp": ASP()}
    chosen: Consistency = choices[mode]
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
