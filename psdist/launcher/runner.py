"""Carries out the supervisor's decisions: starts and signals processes, watches files and the clock, ends the program.

It runs in one asyncio loop without threads and never blocks. Whatever happens, ``Runner.run`` returns only when every
process that it started is gone. The program ends soon after it: from then on it ignores the signals, which come too
late to change how the run ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError
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
from psdist.launcher.plan import ScriptSettings, WorkersPlan
from psdist.launcher.process import Child, ProcessSpec, ReaperProcess
from psdist.launcher.run_metrics import RunMetrics
from psdist.launcher.run_storage import check_shared_memory
from psdist.launcher.script_checks import remedy_for
from psdist.launcher.shutdown import RunPolicy
from psdist.launcher.supervisor import Supervisor
from psdist.machine import make_directory
from psdist.settings import exit_codes, launcher_reports, own_process

#: First notice about workers that have not called ``psdist.init()``, and the longest pause between two.
FIRST_SECONDS: Final = 5.0
LONGEST_PAUSE_SECONDS: Final = 60.0
_NAMES_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The processes that a run starts with.

    environ: the environment that workers extend.
    service: returns the command of a server, the scheduler or the last snapshot; None if there are none.
    lifeline: a pipe that servers and the scheduler inherit, and end with.
    """

    workers: WorkersPlan
    environ: Mapping[str, str]
    policy: RunPolicy
    servers: int = 0
    schedulers: int = 0
    service: Callable[[ProcessKey], ProcessSpec] | None = None
    lifeline: int | None = None

    @property
    def keys(self) -> list[ProcessKey]:
        """All processes, in the order of their start."""
        return [
            *(ProcessKey("scheduler", number) for number in range(self.schedulers)),
            *(ProcessKey("server", number) for number in range(self.servers)),
            *(ProcessKey("worker", rank) for rank in self.workers.ranks),
        ]

    def spec(self, key: ProcessKey, attempt: int) -> ProcessSpec:
        """Return the command of a process's attempt."""
        if key.role == "worker":
            return self.workers.spec(key.number, attempt, self.environ)
        assert self.service is not None
        return self.service(key)


class Runner:
    """One run.

    metrics: those of the workers, received and shown while they run.
    on_tick: called every ``interval_seconds`` of the script's settings; it may return a failure.
    """

    def __init__(
        self,
        plan: ProcessPlan,
        output: Output,
        metrics: RunMetrics,
        on_tick: Callable[[float], RunFailed | None] = lambda now: None,
    ) -> None:
        self._plan = plan
        self.output = output
        self._metrics = metrics
        self._script = plan.workers.script
        # A line in place would overwrite a debugger's prompt.
        output.is_plain = plan.workers.debugged is not None or self._script.progress == "plain"
        output.on_broken = lambda: self.interrupt(signal.SIGPIPE)
        # Ignore only SIGHUP, as after nohup: shells start the background jobs of a script with SIGINT ignored, too.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._signals = tuple(signum for signum in self._script.signals if signum not in ignored)
        self._on_tick = on_tick
        self._children: dict[ProcessKey, Child] = {}
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._notice = ConnectNotice()

    async def run(self) -> Finish:
        """Run everything to its end and return how it ended. Prints the cause of a failure."""
        self._announce()
        self._metrics.start(self.output)
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
            own_process.ignore(self._signals)  # Otherwise one would end the program with a status other than the run's.
        finally:
            self._kill_all()
            self._reaper.close()
        if finish.culprit is not None:
            self.output.report(finish.culprit)
        if finish.message:
            self.output.say(finish.message, is_error=finish.status != exit_codes.OK)
        if finish.culprit is not None and finish.culprit.role == "worker":
            lines = self.output.last_words(finish.culprit)
            if remedy := remedy_for(self._script.kind, self._script.command[0], lines, finish.status):
                self.output.say(remedy)
        self._metrics.close()
        return finish

    def _announce(self) -> None:
        """Print the location of the logs, missing shared memory, and settings that the user did not ask for."""
        if self.output.directory is not None:
            self.output.say(f"logs in {self.output.directory}")
        if warning := check_shared_memory(self._plan.environ.get("PSDIST_TRANSPORT", "")):
            self.output.say(warning)
        if self._plan.workers.limits_threads(self._plan.environ):
            self.output.say(
                "OMP_NUM_THREADS=1 for each worker, as several share the cores; set it to choose another number"
            )

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
                self.output.stopping = self._supervisor.stopping
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
                self.output.say(message)
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
        self.output.clear_lines(key)
        pipes = {"server": self._plan.lifeline, "scheduler": self._plan.lifeline, "worker": self._metrics.descriptor}
        try:
            child = Child(
                spec,
                lambda stream, lines: self.output.show_lines(key, stream, lines),
                lambda returncode: self._exited(key, returncode),
                pipes.get(key.role),
                lambda bar: self.output.show_bar(key, bar),
            )
        except OSError as error:
            self.output.say(f"{key} cannot be started: {spec.argv[0]}: {error.strerror}")
            # A shell gives 126 and 127 for a program that cannot be run.
            self._loop.call_soon(self.handle, Exited(key, 127 if isinstance(error, FileNotFoundError) else 126))
            return
        self._children[key] = child
        self._reaper.add(child.pid)

    def _exited(self, key: ProcessKey, returncode: int) -> None:
        child = self._children.pop(key)
        self._reaper.remove(child.pid)
        if returncode:  # Supervisor and Finish name it; the other processes need not repeat that.
            self.output.note_loss(f"{key.role}-{key.number}")
        if key.role != "worker":
            self.handle(Exited(key, returncode))
            return
        mark = self._plan.workers.connected_file(key.number, self._supervisor.table.attempt(key))
        error = launcher_reports.read_error(mark) if returncode else ""
        steps = None if returncode else launcher_reports.read_steps(mark)
        self.handle(Exited(key, returncode, mark.exists(), error, launcher_reports.group_age(mark), steps))

    def _tick(self) -> None:
        if self._finished.done():
            return
        self._loop.call_later(self._script.interval_seconds, self._tick)
        for key, attempt in self._supervisor.waiting_to_connect():
            if self._plan.workers.connected_file(key.number, attempt).exists():
                self.handle(Connected(key))
        self._say_who_is_missing()
        failure = self._on_tick(self._loop.time())
        suspended = frozenset(key for key, child in self._children.items() if child.is_suspended)
        self.handle(failure if failure is not None else TimePassed(suspended))

    def _say_who_is_missing(self) -> None:
        missing = [key.number for key, _ in self._supervisor.waiting_to_connect()]
        if text := self._notice.text([] if self._supervisor.stopping else missing, self._loop.time()):
            self.output.say(text)

    def _kill_all(self) -> None:
        # Children are left only after a defect of the launcher itself.
        for child in self._children.values():
            child.kill(signal.SIGKILL)


# --- notices of missing workers: a script that imports large packages first seems to hang -----------------------------


class ConnectNotice:
    """The notices of one run. The pauses between them double."""

    def __init__(self) -> None:
        self._pause = FIRST_SECONDS
        #: When the next notice is due, and since when workers are missing; None if none is.
        self._due: float | None = None
        self._since = 0.0

    def text(self, ranks: Sequence[int], now: float) -> str:
        """Return the notice that is due now; empty if there is none. ranks: workers that have not registered yet."""
        if not ranks:
            self._due, self._pause = None, FIRST_SECONDS
        elif self._due is None:
            self._due, self._since = now + self._pause, now
        elif now >= self._due:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._due = now + self._pause
            return f"{_names(ranks)}: importing, {now - self._since:.0f} s (psdist.init() is not called yet)"
        return ""


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    if len(ranks) > _NAMES_SHOWN:
        return f"workers {', '.join(map(str, ranks[:_NAMES_SHOWN]))} and {len(ranks) - _NAMES_SHOWN} others"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


# --- output and metrics of this node ----------------------------------------------------------------------------------


@contextmanager
def open_runner(
    plan: ProcessPlan,
    name: str,
    metrics: RunMetrics,
    *,
    mute: bool = True,
    as_json: bool = False,
    on_tick: Callable[[float], RunFailed | None] = lambda now: None,
) -> Iterator[Runner]:
    """Open console and files of this node, and yield the runner of its processes. Raises ConfigurationError if the log
    directory cannot be made.

    name: name of the directory for the log files.
    mute: True to drop what servers and the scheduler write while the run ends.
    as_json: True to print each line as a JSON object.
    """
    workers, script = plan.workers, plan.workers.script
    routing = script if script.log_dir is None else replace(script, log_dir=script.log_dir / name)
    try:
        output = Output(routing, lambda rank: rank - workers.first_rank, script.role, mute, as_json)
    except OSError as error:
        raise _unusable(routing.log_dir, error) from None
    with closing(output):
        yield Runner(plan, output, metrics, on_tick)


def open_metrics(script: ScriptSettings, name: str, ranks: Iterable[int], part: str = "") -> RunMetrics:
    """Open the destinations of the metrics of this node's workers. Raises ConfigurationError if a directory cannot be
    used."""
    directory = script.log_dir
    if directory is not None:
        directory = directory / name
        try:
            make_directory(directory)
        except OSError as error:
            raise _unusable(directory, error) from None
    return RunMetrics(script, name, directory, ranks, part)


def _unusable(directory: Path | None, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"--log-dir {directory} cannot be used: {error.strerror}")
