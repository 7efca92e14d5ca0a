"""Process keys, the table of running processes, the supervisor's events and effects, and the messages of
``scheduler_calls``. Pure."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from psdist.settings import exit_codes

Role = Literal["worker", "server", "scheduler", "snapshot", "watch"]


class ProcessKey(NamedTuple):
    """A process of a run: ``worker`` and its rank, ``server`` and its number, any other role and 0."""

    role: Role
    number: int

    def __str__(self) -> str:
        return f"{self.role} {self.number}" if self.role in ("worker", "server") else self.role


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A running process.

    quick_deaths: how many of its previous starts, in a row, ended soon.
    last_error: the report of the previous start (``Exited.error``).
    was_grouped: True if the previous start made a group of all workers.
    """

    started: float
    attempt: int = 0
    connected: bool = False
    quick_deaths: int = 0
    last_error: str = ""
    was_grouped: bool = False


class ProcessTable:
    """The running processes. ``ever_connected``: True if any worker ever registered at the scheduler."""

    def __init__(self, keys: Iterable[ProcessKey], now: float) -> None:
        self._running = {key: RunningProcess(now) for key in keys}
        self.ever_connected = False

    def __contains__(self, key: ProcessKey) -> bool:
        return key in self._running

    def with_role(self, role: Role) -> dict[ProcessKey, RunningProcess]:
        """Return the processes of a role."""
        return {key: process for key, process in self._running.items() if key.role == role}

    def attempt(self, key: ProcessKey) -> int:
        """Return the number of this process's current start, from 0."""
        return self._running[key].attempt if key in self._running else 0

    def start(self, key: ProcessKey, process: RunningProcess) -> None:
        """Add a process that is started now."""
        self._running[key] = process

    def connect(self, key: ProcessKey) -> None:
        """Record that a worker, which may have ended, registered."""
        self.ever_connected = True
        if key in self._running:
            self._running[key] = replace(self._running[key], connected=True)

    def remove(self, key: ProcessKey) -> RunningProcess:
        """Remove a process that ended."""
        return self._running.pop(key)


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exited:
    """Exit of a process.

    returncode: -n for signal n.
    connected: True if a worker had ever registered.
    error: a worker's report of an error before its first step, as in ``launcher_reports``.
    group_age: seconds since a worker made its newest process group of all workers; None if it made none.
    steps: steps that a worker made, by parameter set; None if it did not report them.
    """

    key: ProcessKey
    returncode: int
    connected: bool = False
    error: str = ""
    group_age: float | None = None
    steps: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Connected:
    """Registration of a worker at the scheduler."""

    key: ProcessKey


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Signal of the user or the system that tells the run to end."""

    signum: int


@dataclass(frozen=True, slots=True)
class RunFailed:
    """Failure of the run although no process ended: for example, the scheduler does not come up."""

    message: str
    status: int
    key: ProcessKey | None = None


@dataclass(frozen=True, slots=True)
class ServersWanted:
    """The scheduler's request for ``servers`` servers, not counting those in ``draining``; those in ``stop`` are to be
    stopped."""

    servers: int
    draining: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkersWanted:
    """The scheduler's request for ``workers`` workers here. New ones get ranks from ``next_rank`` on."""

    workers: int
    next_rank: int = 0


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Passage of time. suspended: processes that are stopped now, as by SIGSTOP."""

    suspended: frozenset[ProcessKey] = frozenset()


Event = Exited | Connected | Interrupted | RunFailed | ServersWanted | WorkersWanted | TimePassed


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start or restart a process; ``attempt`` counts from 0."""

    key: ProcessKey
    attempt: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Send a signal to a process and its descendants."""

    key: ProcessKey
    signum: int


@dataclass(frozen=True, slots=True)
class Say:
    """Print a message of the launcher."""

    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """All processes ended. Exit with ``status``; show the hidden last lines of ``culprit``, then ``message``."""

    status: int
    message: str = ""
    culprit: ProcessKey | None = None


Effect = Start | Kill | Say | Finish


# --- messages of scheduler_calls --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """The number of servers and workers that the scheduler wants from the launcher.

    servers, workers: their numbers; 0 if none was set.
    draining: ids of servers that are being drained; they are not counted in ``servers``.
    stop: ids of drained servers to be stopped.
    lost: why the run cannot continue; empty while it can.
    next_rank: the rank of the next worker that is started.
    """

    servers: int
    draining: list[str]
    stop: list[str]
    lost: str
    workers: int = 0
    next_rank: int = 0

    @classmethod
    def from_line(cls, line: str) -> ScaleRequest | None:
        """Parse a line of ``watch``; returns None for any other line."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class RankRequest:
    """An agent's request: ``processes`` ranks in a world of ``nodes_min`` to ``nodes_max`` nodes.

    scheduler: its address, host:port; several divided by commas.
    agent_id: name of the agent, unique in the run.
    timeout_seconds: longest search for the scheduler. The wait for other nodes has no limit.
    local_address: this node's address for the other nodes; empty to detect it.
    gave_up: why the agent ends; then the request reports this and asks for no ranks.
    """

    scheduler: str
    run_id: str
    agent_id: str
    processes: int
    nodes_min: int
    nodes_max: int
    host: str
    timeout_seconds: float
    local_address: str = ""
    gave_up: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a node in the world.

    master_address: host:port where the script of rank 0 may listen, for torch.distributed; empty if unknown.
    run_id: of the scheduler's run.
    """

    node_rank: int
    nodes: int
    first_rank: int
    world_size: int
    master_address: str = ""
    run_id: str = ""


# --- texts ------------------------------------------------------------------------------------------------------------


def describe(returncode: int) -> str:
    """Describe how a process ended: an exit code, or the name of a signal."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def status_of(returncode: int) -> int:
    """Return the status that a shell shows for ``returncode``: 128 + n for signal n."""
    return returncode if returncode >= 0 else exit_codes.SIGNAL_BASE - returncode


def enumerate_keys(keys: Iterable[ProcessKey]) -> str:
    """Return names of processes, separated by commas."""
    return ", ".join(map(str, keys))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``2 workers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
