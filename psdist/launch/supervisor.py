"""Decides what the exit of a process means for its run. Pure: events in, effects out, ``now`` is an argument.

The machine knows three groups, stopped in this order: workers, servers, scheduler. Where there is a storage, one more
process runs between workers and servers: the ``snapshot``, which saves what was trained. While the run goes on:

* A worker that fails is started again with its rank, up to ``restarts_max`` times. Then everything is stopped, and the
  first worker that had no restart left is the *cause*: the run ends with its status.
* A worker that ends well without ever having connected is the cause if a running worker is connected: that one waits
  for a peer that never comes.
* The scheduler is started again, and so is a server if others have a copy of its shards, or a snapshot has them
  (``durable``). A process that ends by itself ``QUICK_DEATHS_MAX`` times in a row, each time soon after its start, is
  the cause. Where there is no copy, a server that ends badly is the cause; one that ends well has handed its shards
  over. A scheduler that refuses its settings, or cannot begin with them, is the cause at once.
* Servers are started, and drained ones are stopped, as the scheduler wants (``ServersWanted``). The number of a server
  that was stopped is not used again.
* When all workers have ended well, the servers and then the scheduler are stopped, and the run ends well.

Stopping is SIGTERM, then SIGKILL after ``grace_seconds``, group by group. A second signal from the user kills at once.
A first signal that comes while the run is ending anyway changes nothing. The snapshot has no time limit. It is left out
if no worker ever connected, if the scheduler is gone, and if servers or the scheduler are the cause. Nothing that
happens while stopping changes the cause, except that a run that ends well ends with ``unsaved_status`` if its snapshot
fails.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

GRACE_SECONDS: Final = 5.0
#: Workers end in agreement, after the pushes that are under way: they are given longer.
STOP_TIMEOUT_SECONDS: Final = 30.0
NEVER_CONNECTED_STATUS: Final = 65
INFRASTRUCTURE_STATUS: Final = 70
#: A server or scheduler that ends so many times in a row, each within QUICK_SECONDS of its start, is given up.
QUICK_DEATHS_MAX: Final = 5
QUICK_SECONDS: Final = 10.0
USAGE_STATUS: Final = 2
UNAVAILABLE_STATUS: Final = 69
_SIGNAL_BASE: Final = 128
_SNAPSHOT: Final = "snapshot"
_ORDER: Final = ("worker", _SNAPSHOT, "server", "scheduler")
#: Nobody sends these to itself: they do not predict how soon the process ends after its next start.
_FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


class ProcessKey(NamedTuple):
    """A process of a run: ``worker`` and its rank, ``server`` and its number, ``scheduler`` or ``snapshot`` and 0."""

    role: str
    number: int

    def __str__(self) -> str:
        return self.role if self.role in ("scheduler", _SNAPSHOT) else f"{self.role} {self.number}"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exited:
    """A process ended. ``returncode`` is -n for signal n; ``connected`` says whether a worker had ever registered."""

    key: ProcessKey
    returncode: int
    connected: bool = False


@dataclass(frozen=True, slots=True)
class Connected:
    """A worker registered at the scheduler."""

    key: ProcessKey


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user or the system asks the run to end by a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class RunFailed:
    """The run cannot go on for a reason that is no exit, such as a scheduler that does not come up."""

    message: str
    status: int
    key: ProcessKey | None = None


@dataclass(frozen=True, slots=True)
class ServersWanted:
    """The scheduler wants so many servers besides those it is ``draining``, and that those in ``stop`` are stopped."""

    servers: int
    draining: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time passed."""


Event = Exited | Connected | Interrupted | RunFailed | ServersWanted | TimePassed


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process, perhaps again; ``attempt`` counts from 0."""

    key: ProcessKey
    attempt: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Send a signal to a process and its descendants."""

    key: ProcessKey
    signum: int


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """All processes ended. Exit with ``status``; show the last lines of ``culprit``, then ``message``."""

    status: int
    message: str = ""
    culprit: ProcessKey | None = None


Effect = Start | Kill | Say | Finish


# --- the machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Process:
    started: float
    attempt: int = 0
    connected: bool = False
    #: Lives before this one that ended soon, in a row.
    quick_deaths: int = 0


@dataclass(slots=True)
class Supervisor:
    """The state of one run. All of ``workers``, ``servers`` and ``schedulers`` are taken as started at ``now``.

    grace_seconds, stop_timeout_seconds: what servers and scheduler, and what workers, are given to end.
    durable: whether what a server holds outlives it, so that the run goes on without it.
    saves: whether a snapshot is taken at the end.
    unsaved_status: what a run ends with that ended well, but for that snapshot.
    """

    workers: Iterable[int]
    servers: int = 0
    schedulers: int = 0
    restarts_max: int = 3
    grace_seconds: float = GRACE_SECONDS
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS
    durable: bool = False
    saves: bool = False
    unsaved_status: int = 0
    now: float = 0.0
    _alive: dict[ProcessKey, _Process] = field(default_factory=dict, init=False)
    #: Servers that were told to stop, and when they are killed.
    _retired: dict[ProcessKey, float] = field(default_factory=dict, init=False)
    _deserters: list[ProcessKey] = field(default_factory=list, init=False)
    _ever_connected: bool = field(default=False, init=False)
    _interrupted_before: bool = field(default=False, init=False)
    _stage: int | None = field(default=None, init=False)
    _deadline: float = field(default=math.inf, init=False)
    _patience: float = field(default=0.0, init=False)
    #: When the user is told who is waited for.
    _told_at: float = field(default=math.inf, init=False)
    _end: Finish = field(default=Finish(0), init=False)

    def __post_init__(self) -> None:
        keys = [ProcessKey("worker", rank) for rank in self.workers]
        keys += [ProcessKey("server", number) for number in range(self.servers)]
        keys += [ProcessKey("scheduler", number) for number in range(self.schedulers)]
        self._alive = {key: _Process(self.now) for key in keys}

    @property
    def stopping(self) -> bool:
        """Whether the run is coming to its end."""
        return self._stage is not None

    def waiting_to_connect(self) -> list[tuple[ProcessKey, int]]:
        """Workers that run and have not connected, with their attempt."""
        return [(k, w.attempt) for k, w in self._alive.items() if k.role == "worker" and not w.connected]

    def attempt(self, key: ProcessKey) -> int:
        """Which start of this process runs, from 0."""
        return self._alive[key].attempt if key in self._alive else 0

    def on(self, event: Event, now: float) -> list[Effect]:
        """Takes an event and returns what must be done, in this order."""
        if isinstance(event, Exited):
            return self._exited(event, now)
        if isinstance(event, Connected):
            return self._connected(event, now)
        if isinstance(event, Interrupted):
            return self._interrupted(event, now)
        if isinstance(event, RunFailed):
            return [] if self.stopping else self._give_up(Finish(event.status, event.message, event.key), now)
        if isinstance(event, ServersWanted):
            return [] if self.stopping else self._scaled(event, now)
        return self._tick(now)

    def _exited(self, event: Exited, now: float) -> list[Effect]:
        process = self._alive.pop(event.key)
        if event.connected:
            self._ever_connected = True
        if self.stopping:
            return [*self._saved(event), *self._advance(now)]
        if event.key in self._retired:
            del self._retired[event.key]
            return []
        if event.key.role != "worker":
            return self._service_died(event, process, now)
        if event.returncode != 0:
            return self._worker_failed(event, process, now)
        if not (process.connected or event.connected):
            self._deserters.append(event.key)
        return self._check_deserters(now) or self._check_done(now)

    def _service_died(self, event: Exited, process: _Process, now: float) -> list[Effect]:
        key = event.key
        how = f"{key} {'died' if event.returncode else 'ended'}: {describe(event.returncode)}"
        if key.role == "server" and not self.durable and event.returncode != 0:
            remedy = "start the run again (--replicas 2, or snapshots, survive this)"
            lost = f"{how}; the only copy of what it held is lost: {remedy}"
            return self._give_up(Finish(INFRASTRUCTURE_STATUS, lost, key), now)
        if key.role == "scheduler" and _cannot_begin(event.returncode, process.attempt):
            return self._give_up(Finish(event.returncode, "the scheduler cannot begin", key), now)
        quick = event.returncode not in _FROM_OUTSIDE and now - process.started < QUICK_SECONDS
        deaths = process.quick_deaths + 1 if quick else 0
        if deaths == QUICK_DEATHS_MAX:
            given_up = f"{how}; the last of {deaths} times in a row within {QUICK_SECONDS:g} s of its start"
            return self._give_up(Finish(INFRASTRUCTURE_STATUS, given_up, key), now)
        self._alive[key] = _Process(now, process.attempt + 1, quick_deaths=deaths)
        return [Say(f"{how}; the run goes on, and it is started again"), Start(key, process.attempt + 1)]

    def _scaled(self, event: ServersWanted, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for key in (ProcessKey("server", number) for number in event.stop):
            if key in self._alive and key not in self._retired:
                self._retired[key] = now + self.grace_seconds
                effects += [Say(f"{key} holds nothing any more: stopped"), Kill(key, signal.SIGTERM)]
        leaving = {*self._retired, *(ProcessKey("server", number) for number in event.draining)}
        active = sum(key.role == "server" and key not in leaving for key in self._alive)
        for _ in range(event.servers - active):
            key = ProcessKey("server", self.servers)
            self.servers += 1
            self._alive[key] = _Process(now)
            effects += [Say(f"{key} is started: {event.servers} servers are wanted"), Start(key, 0)]
        return effects

    def _worker_failed(self, event: Exited, process: _Process, now: float) -> list[Effect]:
        how = describe(event.returncode)
        if process.attempt < self.restarts_max:
            attempt = process.attempt + 1
            self._alive[event.key] = _Process(now, attempt)
            return [
                Say(f"{event.key} failed: {how}; restart {attempt} of {self.restarts_max}"),
                Start(event.key, attempt),
            ]
        tried = f" (--max-restarts {self.restarts_max} used up)" if self.restarts_max else ""
        return self._stop(Finish(status_of(event.returncode), f"{event.key} failed: {how}{tried}", event.key), now)

    def _connected(self, event: Connected, now: float) -> list[Effect]:
        self._ever_connected = True
        if event.key in self._alive:
            self._alive[event.key] = replace(self._alive[event.key], connected=True)
        return [] if self.stopping else self._check_deserters(now)

    def _interrupted(self, event: Interrupted, now: float) -> list[Effect]:
        if self._interrupted_before:
            self.saves = False
            return [Kill(key, signal.SIGKILL) for key in self._alive]
        self._interrupted_before = True
        name = signal.Signals(event.signum).name
        if self.stopping:
            return [Say(f"{name}: the run is ending already; once more kills its processes")]
        said = Say(f"{name}: stopping all processes; once more kills them")
        return [said, *self._stop(Finish(_SIGNAL_BASE + event.signum), now)]

    def _check_deserters(self, now: float) -> list[Effect]:
        waiting = [key for key, worker in self._alive.items() if worker.connected]
        if not self._deserters or not waiting:
            return []
        culprit = self._deserters[0]
        message = (
            f"{culprit} ended without having connected to psdist, while {_enumerate(waiting)} waits for it: every "
            "worker's script must call psdist.init() or psdist.Client()"
        )
        return self._stop(Finish(NEVER_CONNECTED_STATUS, message, culprit), now)

    def _check_done(self, now: float) -> list[Effect]:
        if any(key.role == "worker" for key in self._alive):
            return []
        said: list[Effect] = []
        if not self._ever_connected:
            said.append(Say("warning: the script never used psdist: no worker called psdist.init() or psdist.Client()"))
        return said + self._stop(Finish(0), now)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _give_up(self, end: Finish, now: float) -> list[Effect]:
        """Stops because servers or scheduler do not work: nothing is saved."""
        self.saves = False
        return self._stop(end, now)

    def _stop(self, end: Finish, now: float) -> list[Effect]:
        self._end = end
        self._stage = -1
        return self._advance(now)

    def _advance(self, now: float) -> list[Effect]:
        assert self._stage is not None
        effects: list[Effect] = []
        while not self._members(self._stage):
            self._stage += 1
            if self._stage == len(_ORDER):
                return [*effects, self._end]
            if _ORDER[self._stage] == _SNAPSHOT:
                effects += self._save(now)
                continue
            effects += [Kill(key, signal.SIGTERM) for key in self._members(self._stage)]
            self._patience = self.stop_timeout_seconds if _ORDER[self._stage] == "worker" else self.grace_seconds
            self._deadline, self._told_at = now + self._patience, now + self.grace_seconds
        return effects

    def _save(self, now: float) -> list[Effect]:
        if not self.saves or not self._ever_connected or not self._members(_ORDER.index("scheduler")):
            return []
        key = ProcessKey(_SNAPSHOT, 0)
        self._alive[key] = _Process(now)
        self._deadline = math.inf
        return [Start(key, 0)]

    def _saved(self, event: Exited) -> list[Effect]:
        if event.key.role != _SNAPSHOT or event.returncode == 0:
            return []
        if self._end.status == 0:
            self._end = replace(self._end, status=self.unsaved_status)
        return [Say(f"what was trained since the last snapshot is not saved: {describe(event.returncode)}")]

    def _members(self, stage: int) -> list[ProcessKey]:
        return [key for key in self._alive if 0 <= stage < len(_ORDER) and key.role == _ORDER[stage]]

    def _tick(self, now: float) -> list[Effect]:
        if self._stage is None:
            return self._tick_retired(now)
        late = self._members(self._stage)
        if now < self._deadline:
            if now < self._told_at:
                return []
            self._told_at = math.inf
            left = max(0.0, self._deadline - now)
            return [Say(f"waiting for {_enumerate(late)} to end; killed in {left:.0f} s")] if left < math.inf else []
        self._deadline = self._told_at = math.inf
        said = Say(f"{_enumerate(late)} did not end within {self._patience:g} s of SIGTERM: killed")
        return [said, *(Kill(key, signal.SIGKILL) for key in late)]

    def _tick_retired(self, now: float) -> list[Effect]:
        late = [key for key, deadline in self._retired.items() if now >= deadline]
        self._retired |= dict.fromkeys(late, math.inf)
        return [Kill(key, signal.SIGKILL) for key in late]


def _cannot_begin(returncode: int, attempt: int) -> bool:
    """Whether a scheduler would end in the same way each time. One that is started again may find its port taken, or
    its storage away, for a while."""
    return returncode == USAGE_STATUS or (returncode == UNAVAILABLE_STATUS and attempt == 0)


def _enumerate(keys: Iterable[ProcessKey]) -> str:
    return ", ".join(str(key) for key in keys)


def describe(returncode: int) -> str:
    """How a process ended, in words: an exit code, or the name of a signal."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def status_of(returncode: int) -> int:
    """The status a shell shows for ``returncode``: 128 + n for signal n."""
    return returncode if returncode >= 0 else _SIGNAL_BASE - returncode
