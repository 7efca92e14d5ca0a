"""Carries out what the supervisor decides: starts and signals processes, watches files and the clock, ends the program.

One asyncio loop, no threads, and no waiting anywhere else. Whatever happens, ``Runner.run`` returns only when every
process that it started is gone.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from psdist.launch.output import Output
from psdist.launch.process import Child, ProcessSpec, ReaperProcess
from psdist.launch.supervisor import (
    STOP_TIMEOUT_SECONDS,
    Connected,
    Event,
    Exited,
    Finish,
    Interrupted,
    Kill,
    ProcessKey,
    RunFailed,
    Say,
    Start,
    Supervisor,
    TimePassed,
)


@dataclass(frozen=True, slots=True)
class Crew:
    """The processes of a run.

    spec: the command of a process's attempt. connected: whether a rank's attempt has registered. durable, saves,
    unsaved_status, stop_timeout_seconds: see ``Supervisor``.
    """

    ranks: range
    spec: Callable[[ProcessKey, int], ProcessSpec]
    connected: Callable[[int, int], bool]
    servers: int = 0
    schedulers: int = 0
    durable: bool = False
    saves: bool = False
    unsaved_status: int = 0
    lifeline: int | None = None
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS

    @property
    def keys(self) -> list[ProcessKey]:
        """All, in the order of their start."""
        groups = (("scheduler", range(self.schedulers)), ("server", range(self.servers)), ("worker", self.ranks))
        return [ProcessKey(role, number) for role, numbers in groups for number in numbers]


class Runner:
    """One run. ``on_tick`` is called every ``interval_seconds``; it may return a failure."""

    def __init__(
        self,
        crew: Crew,
        output: Output,
        *,
        restarts_max: int,
        interval_seconds: float,
        signals: Iterable[int],
        on_tick: Callable[[float], RunFailed | None] = lambda now: None,
    ) -> None:
        self._crew = crew
        self._output = output
        self._interval = interval_seconds
        self._signals = tuple(signals)
        self._on_tick = on_tick
        self._restarts_max = restarts_max
        self._children: dict[ProcessKey, Child] = {}
        self._events: deque[Event] = deque()
        self._handling = False

    async def run(self) -> Finish:
        """Runs everything to its end and says how it ended. The report is printed, the status is the caller's."""
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Finish] = self._loop.create_future()
        for signum in self._signals:
            self._loop.add_signal_handler(signum, self.happened, Interrupted(signum))
        crew = self._crew
        self._supervisor = Supervisor(
            crew.ranks,
            crew.servers,
            crew.schedulers,
            self._restarts_max,
            stop_timeout_seconds=crew.stop_timeout_seconds,
            durable=crew.durable,
            saves=crew.saves,
            unsaved_status=crew.unsaved_status,
            now=self._loop.time(),
        )
        self._guard = ReaperProcess()
        try:
            for key in crew.keys:
                self._start(crew.spec(key, 0))
            self._tick()
            finish = await self._finished
        finally:
            self._kill_all()
            self._guard.close()
        if finish.culprit is not None:
            self._output.report(finish.culprit)
        if finish.message:
            self._output.say(finish.message)
        return finish

    def interrupt(self, signum: int) -> None:
        """As if the signal had come."""
        self._loop.call_soon(self.happened, Interrupted(signum))

    def happened(self, event: Event) -> None:
        """Takes an event while the run lasts."""
        # An effect may cause an event at once (a process that cannot be started); it waits its turn.
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                effects = self._supervisor.on(self._events.popleft(), self._loop.time())
                self._output.stopping = self._supervisor.stopping
                for effect in effects:
                    self._carry_out(effect)
        finally:
            self._handling = False

    def _carry_out(self, effect: Start | Kill | Say | Finish) -> None:
        match effect:
            case Say(message):
                self._output.say(message)
            case Start(key, attempt):
                self._start(self._crew.spec(key, attempt))
            case Kill(key, signum):
                # A process whose exit is known and not yet reported ignores it.
                if key in self._children:
                    self._children[key].kill(signum)
            case Finish():
                if not self._finished.done():
                    self._finished.set_result(effect)

    def _start(self, spec: ProcessSpec) -> None:
        key = spec.key
        self._output.begin(key)
        lifeline = self._crew.lifeline if key.role in ("server", "scheduler") else None
        try:
            child = Child(
                spec,
                lambda stream, lines: self._output.lines(key, stream, lines),
                lambda returncode: self._exited(key, returncode),
                lifeline,
            )
        except OSError as error:
            self._output.say(f"{key} cannot be started: {spec.argv[0]}: {error.strerror}")
            # 126 and 127 are what a shell says of a program that cannot be run.
            self._loop.call_soon(self.happened, Exited(key, 127 if isinstance(error, FileNotFoundError) else 126))
            return
        self._children[key] = child
        self._guard.add(child.pid)

    def _exited(self, key: ProcessKey, returncode: int) -> None:
        child = self._children.pop(key)
        self._guard.remove(child.pid)
        connected = key.role == "worker" and self._crew.connected(key.number, self._supervisor.attempt(key))
        self.happened(Exited(key, returncode, connected))

    def _tick(self) -> None:
        if self._finished.done():
            return
        self._loop.call_later(self._interval, self._tick)
        for key, attempt in self._supervisor.waiting_to_connect():
            if self._crew.connected(key.number, attempt):
                self.happened(Connected(key))
        failure = self._on_tick(self._loop.time())
        self.happened(failure if failure is not None else TimePassed())

    def _kill_all(self) -> None:
        # Only after a defect of the launcher itself is anybody left.
        for child in self._children.values():
            child.kill(signal.SIGKILL)
