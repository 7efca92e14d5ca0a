"""Carries out the supervisor's decisions: starts and signals processes, watches files and the clock, ends the program.

It runs in one asyncio loop without threads and never blocks. Whatever happens, ``Runner.run`` returns only when every
process that it started is gone. The program ends soon after it: from then on it ignores the signals, which come too
late to change how the run ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from psdist.launcher.connect_notice import ConnectNotice
from psdist.launcher.events import (
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
    TimePassed,
)
from psdist.launcher.output import Output
from psdist.launcher.process import Child, ProcessSpec, ReaperProcess
from psdist.launcher.shutdown import RunPolicy
from psdist.launcher.supervisor import Supervisor
from psdist.link import processes
from psdist.settings import signals


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The processes that a run starts with.

    spec: the command of a process's attempt.
    connected: returns True if a rank's attempt has registered.
    script_error: returns the report of a rank's attempt that failed; empty if there is none.
    group_age: returns the seconds since a rank's attempt made its newest group of all workers; None if it made none.
    lifeline: a pipe that servers and the scheduler inherit, and end with.
    metrics: a pipe that workers inherit, and report on.
    """

    ranks: range
    spec: Callable[[ProcessKey, int], ProcessSpec]
    connected: Callable[[int, int], bool]
    policy: RunPolicy
    servers: int = 0
    schedulers: int = 0
    lifeline: int | None = None
    metrics: int | None = None
    script_error: Callable[[int, int], str] = lambda rank, attempt: ""
    group_age: Callable[[int, int], float | None] = lambda rank, attempt: None

    @property
    def keys(self) -> list[ProcessKey]:
        """All processes, in the order of their start."""
        return [
            *(ProcessKey("scheduler", number) for number in range(self.schedulers)),
            *(ProcessKey("server", number) for number in range(self.servers)),
            *(ProcessKey("worker", rank) for rank in self.ranks),
        ]


class Runner:
    """One run.

    on_tick: called every ``interval_seconds``; it may return a failure.
    signals: those that end the run. SIGHUP is excluded if this process was started to ignore it, as by ``nohup``.
    """

    def __init__(
        self,
        plan: ProcessPlan,
        output: Output,
        *,
        interval_seconds: float,
        signals: Iterable[int],
        on_tick: Callable[[float], RunFailed | None] = lambda now: None,
    ) -> None:
        self._plan = plan
        self._output = output
        self._interval = interval_seconds
        # Ignore only SIGHUP: shells start the background jobs of a script with SIGINT ignored, too.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._signals = tuple(signum for signum in signals if signum not in ignored)
        self._on_tick = on_tick
        self._children: dict[ProcessKey, Child] = {}
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._notice = ConnectNotice()

    async def run(self) -> Finish:
        """Run everything to its end and return how it ended. Prints the cause of a failure."""
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Finish] = self._loop.create_future()
        for signum in self._signals:
            self._loop.add_signal_handler(signum, self.handle, Interrupted(signum))
        self._supervisor = Supervisor(self._plan.keys, self._plan.policy, self._loop.time())
        self._reaper = ReaperProcess()
        try:
            for key in self._plan.keys:
                self._start(self._plan.spec(key, 0))
            self._tick()
            finish = await self._finished
            signals.ignore(self._signals)  # Otherwise one would end the program with a status other than the run's.
        finally:
            self._kill_all()
            self._reaper.close()
        if finish.culprit is not None:
            self._output.report(finish.culprit)
        if finish.message:
            self._output.say(finish.message)
        return finish

    @property
    def has_connected(self) -> bool:
        """True if a worker ever registered at the scheduler."""
        return self._supervisor.table.ever_connected

    def interrupt(self, signum: int) -> None:
        """Act as if the signal had arrived."""
        self._loop.call_soon(self.handle, Interrupted(signum))

    def handle(self, event: Event) -> None:
        """Handle an event while the run lasts."""
        # An effect may cause an event (a process that cannot be started), which is handled after those in the queue.
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                effects = self._supervisor.on(self._events.popleft(), self._loop.time())
                self._output.stopping = self._supervisor.stopping
                for effect in effects:
                    self._try(effect)
        finally:
            self._is_handling = False

    def _try(self, effect: Start | Kill | Say | Finish) -> None:
        try:
            self._carry_out(effect)
        except Exception as error:
            # A defect of the launcher. Without the effects after this one the run might never end.
            self._loop.call_exception_handler({"message": f"{effect} failed", "exception": error})

    def _carry_out(self, effect: Start | Kill | Say | Finish) -> None:
        match effect:
            case Say(message):
                self._output.say(message)
            case Start(key, attempt):
                self._start(self._plan.spec(key, attempt))
            case Kill(key, signum):
                # A process whose exit is known and not yet reported ignores it.
                if key in self._children:
                    self._children[key].kill(signum)
            case Finish():
                if not self._finished.done():
                    self._finished.set_result(effect)

    def _start(self, spec: ProcessSpec) -> None:
        key = spec.key
        self._output.clear_lines(key)
        pipes = {"server": self._plan.lifeline, "scheduler": self._plan.lifeline, "worker": self._plan.metrics}
        try:
            child = Child(
                spec,
                lambda stream, lines: self._output.show_lines(key, stream, lines),
                lambda returncode: self._exited(key, returncode),
                pipes.get(key.role),
            )
        except OSError as error:
            self._output.say(f"{key} cannot be started: {spec.argv[0]}: {error.strerror}")
            # A shell gives 126 and 127 for a program that cannot be run.
            self._loop.call_soon(self.handle, Exited(key, 127 if isinstance(error, FileNotFoundError) else 126))
            return
        self._children[key] = child
        self._reaper.add(child.pid)

    def _exited(self, key: ProcessKey, returncode: int) -> None:
        child = self._children.pop(key)
        self._reaper.remove(child.pid)
        if key.role != "worker":
            self.handle(Exited(key, returncode))
            return
        attempt = self._supervisor.table.attempt(key)
        error = self._plan.script_error(key.number, attempt) if returncode else ""
        connected, age = self._plan.connected(key.number, attempt), self._plan.group_age(key.number, attempt)
        self.handle(Exited(key, returncode, connected, error, age))

    def _tick(self) -> None:
        if self._finished.done():
            return
        self._loop.call_later(self._interval, self._tick)
        for key, attempt in self._supervisor.waiting_to_connect():
            if self._plan.connected(key.number, attempt):
                self.handle(Connected(key))
        self._say_who_is_missing()
        failure = self._on_tick(self._loop.time())
        suspended = frozenset(key for key, child in self._children.items() if processes.is_suspended(child.pid))
        self.handle(failure if failure is not None else TimePassed(suspended))

    def _say_who_is_missing(self) -> None:
        missing = [key.number for key, _ in self._supervisor.waiting_to_connect()]
        if text := self._notice.text([] if self._supervisor.stopping else missing, self._loop.time()):
            self._output.say(text)

    def _kill_all(self) -> None:
        # Children are left only after a defect of the launcher itself.
        for child in self._children.values():
            child.kill(signal.SIGKILL)
