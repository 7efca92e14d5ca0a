"""A whole run on this machine: scheduler, servers and workers, on free ports, in a private directory.

The directory (mode 0700, removed at the end) holds the token, the scheduler's address and its store. All processes are
started at once and find each other by the address file. The run is noted for ``psdist status`` while it lives.
Snapshots lie elsewhere, and stay: a later run of the same id goes on from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError
from psdist.launch.output import STDOUT, Output, Routing
from psdist.launch.plan import (
    SchedulerAddress,
    ServicesPlan,
    SnapshotPlan,
    WorkersPlan,
    program,
    python_command,
    server_number,
)
from psdist.launch.process import Child, ProcessSpec, free_port
from psdist.launch.run_record import DIRECTORY_PREFIX, RunRecord, RunRegistry, notes_directory
from psdist.launch.runner import Crew, Runner
from psdist.launch.scale_watch import ScaleRequest
from psdist.launch.script import check_script
from psdist.launch.supervisor import (
    INFRASTRUCTURE_STATUS,
    STOP_TIMEOUT_SECONDS,
    Event,
    ProcessKey,
    RunFailed,
    ServersWanted,
)
from psdist.settings.config import (
    FAILURE_TIMEOUT_SECONDS,
    START_TIMEOUT_SECONDS,
    WORKER_TIMEOUT_SECONDS,
    find_token,
    parse_address,
    read_address,
)
from psdist.snapshots.policy import DEFAULT_POLICY, SavePolicy
from psdist.wire import fd_passing

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: Where snapshots lie by default, below the working directory; in it, a directory for each run.
STORAGE_DIRECTORY: Final = "psdist-runs"
#: Of a run whose scripts ended well, but whose snapshot at the end could not be taken.
UNSAVED_STATUS: Final = 74
#: The start of workers and servers comes first: one more program would only delay the first step.
_LISTEN_DELAY_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What ``psdist run`` was told. ``script`` is the script or module or program, then its arguments.

    storage: an absolute path or a URL for snapshots; empty for none, None for a directory of the run in
        ``STORAGE_DIRECTORY``, or for none where that cannot be written. policy: when they are taken. fresh: there must
        be none yet.
    """

    script: tuple[str, ...]
    servers: int = 2
    replicas: int = 1
    processes: int = 1
    restarts_max: int = 3
    run_id: str = ""
    routing: Routing = field(default_factory=Routing)
    failure_timeout_seconds: float = FAILURE_TIMEOUT_SECONDS
    worker_timeout_seconds: float = WORKER_TIMEOUT_SECONDS
    kernel_threads: int | None = None
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
    interval_seconds: float = 0.1
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS
    module: bool = False
    no_python: bool = False
    role: str = "worker"
    signals: tuple[int, ...] = SIGNALS
    log_level: str = "warning"
    storage: str | None = ""
    policy: SavePolicy = DEFAULT_POLICY
    fresh: bool = False

    def snapshots(self, run_id: str) -> SnapshotPlan | None:
        """Where and when snapshots are taken; None where they are not."""
        storage = str(Path(STORAGE_DIRECTORY, run_id).absolute()) if self.storage is None else self.storage
        return SnapshotPlan(storage, self.policy, self.fresh, self.storage is None) if storage else None


def run_local(options: LocalOptions, environ: Mapping[str, str] | None = None) -> int:
    """Runs a script to its end and returns the status for the shell (see ``psdist.settings.exit_codes``).

    Raises ConfigurationError, before anything was started, if it cannot be run.
    """
    environ = dict(os.environ if environ is None else environ)
    check_script(list(options.script), module=options.module, no_python=options.no_python)
    token = find_token(environ) or secrets.token_urlsafe(32)
    run_id = options.run_id or make_run_id()
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
    try:
        link = make_link(directory, token, run_id)
        registration = RunClaim(RunRegistry(notes_directory(environ)), link, directory)
        try:
            return asyncio.run(_run(options, environ, link, directory, registration))
        finally:
            registration.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        fd_passing.sweep()  # what workers that were killed left behind


def make_run_id() -> str:
    """A name for a run that was given none; names sort by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def make_link(directory: Path, token: str, run_id: str) -> SchedulerAddress:
    """Fills a run's private directory, and says how its processes find each other there."""
    (directory / "connected").mkdir(mode=0o700)
    token_file = directory / "token"
    descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return SchedulerAddress(file=directory / "scheduler", token_file=token_file, run_id=run_id)


class RunClaim:
    """The note of this run. A state directory that cannot be written only costs ``psdist status`` its shortcut."""

    def __init__(self, registry: RunRegistry, link: SchedulerAddress, directory: Path) -> None:
        assert link.token_file is not None
        self._registry = registry
        self._note: RunRecord | None = None
        try:
            self._note = registry.claim(link.run_id, link.token_file, directory)
        except OSError:
            self._note = None

    def listening(self, address: str) -> None:
        """Notes the scheduler's address."""
        if self._note is not None:
            self._note = self._registry.listening(self._note, address)

    def close(self) -> None:
        """Takes the note away."""
        if self._note is not None:
            self._registry.remove(self._note.run_id)


async def _run(
    options: LocalOptions, environ: Mapping[str, str], link: SchedulerAddress, directory: Path, registration: RunClaim
) -> int:
    workers = WorkersPlan(
        command=python_command(list(options.script), module=options.module, no_python=options.no_python),
        processes=options.processes,
        link=link,
        connected_directory=directory / "connected",
        # For torch.distributed in a user's script; nothing of psdist listens there.
        master=("127.0.0.1", free_port("127.0.0.1")),
        start_timeout_seconds=options.start_timeout_seconds,
        restarts_max=options.restarts_max,
        world_size=options.processes,
        role=options.role,
    )
    lifeline, lifeline_end = os.pipe()
    services = ServicesPlan(
        directory=directory,
        link=link,
        servers=options.servers,
        workers=options.processes,
        lifeline=lifeline,
        failure_timeout_seconds=options.failure_timeout_seconds,
        worker_timeout_seconds=options.worker_timeout_seconds,
        start_timeout_seconds=options.start_timeout_seconds,
        kernel_threads=options.kernel_threads or default_kernel_threads(options.servers),
        log_level=options.log_level,
        replicas=options.replicas,
        snapshots=options.snapshots(link.run_id),
    )
    try:
        return await _supervise(options, environ, workers, services, registration)
    finally:
        os.close(lifeline)
        os.close(lifeline_end)


async def _supervise(
    options: LocalOptions,
    environ: Mapping[str, str],
    workers: WorkersPlan,
    services: ServicesPlan,
    registration: RunClaim,
) -> int:
    routing, run_id = options.routing, workers.link.run_id
    if routing.directory is not None:
        routing = replace(routing, directory=routing.directory / run_id)
    mute = options.log_level in ("warning", "error")
    output = open_output(routing, workers, lambda: runner.interrupt(signal.SIGPIPE), mute)
    watch = _AddressWatch(services, registration)

    def spec(key: ProcessKey, attempt: int) -> ProcessSpec:
        if key.role == "worker":
            return workers.spec(key.number, attempt, environ)
        if key.role == "server":
            return services.server(key.number, environ)
        if key.role == "snapshot":
            return services.snapshot(environ)
        return services.scheduler(environ, watch.port)

    runner = Runner(
        Crew(
            ranks=workers.ranks,
            spec=spec,
            connected=lambda rank, attempt: workers.connected_file(rank, attempt).exists(),
            servers=services.servers,
            schedulers=1,
            durable=services.replicas > 1 or services.snapshots is not None,
            saves=services.snapshots is not None and options.policy.at_end,
            # Who did not ask for snapshots is only told.
            unsaved_status=UNSAVED_STATUS if options.storage else 0,
            lifeline=services.lifeline,
            stop_timeout_seconds=options.stop_timeout_seconds,
        ),
        output,
        restarts_max=options.restarts_max,
        interval_seconds=options.interval_seconds,
        signals=options.signals,
        on_tick=watch.tick,
    )
    wishes = _Wishes(services, environ, lambda event: runner.happened(event))
    watch.on_found = wishes.start
    try:
        copies = f", {options.replicas} copies of each shard" if options.replicas > 1 else ""
        output.say(
            f"run {run_id}: {plural(options.servers, 'server')}, {plural(options.processes, 'worker')}{copies}; "
            f"to look at it: psdist status --run-id {run_id}"
        )
        if services.snapshots is not None:
            _tell_storage(output, services.snapshots, asked=bool(options.storage))
        announce(output, routing, workers, environ)
        return (await runner.run()).status
    finally:
        await wishes.close()
        output.close()


def _tell_storage(output: Output, snapshots: SnapshotPlan, asked: bool) -> None:
    """Where snapshots lie, if somebody ``asked`` for it, or if there are some. Only a directory is looked at."""
    there = False
    with contextlib.suppress(OSError):
        there = "://" not in snapshots.storage and any(Path(snapshots.storage, "commits").iterdir())
    if asked or there:
        goes_on = ", from the newest of which this run goes on" if there and not snapshots.fresh else ""
        output.say(f"snapshots {snapshots.policy.text}, in {snapshots.storage}{goes_on}")


class _Wishes:
    """Hears what the scheduler wants of this launcher: servers started or stopped, or the end."""

    def __init__(self, services: ServicesPlan, environ: Mapping[str, str], happened: Callable[[Event], None]) -> None:
        self._link = services.link
        self._servers = services.servers
        self._environ = environ
        self._happened = happened
        self._child: Child | None = None
        self._ended = asyncio.Event()
        self._closed = False

    def start(self, address: str) -> None:
        """Listens, from soon on and until ``close``."""
        asyncio.get_running_loop().call_later(_LISTEN_DELAY_SECONDS, self._start, address)

    async def close(self) -> None:
        """Listens no more."""
        self._closed = True
        if self._child is not None:
            self._child.kill(signal.SIGKILL)
            await self._ended.wait()

    def _start(self, address: str) -> None:
        if self._closed:
            return
        spec = ProcessSpec(
            ProcessKey("watch", 0),
            (*program("psdist.launch.scale_watch"), address, self._link.run_id),
            self._link.environment(self._environ),
        )
        self._ended.clear()
        self._child = Child(spec, self._heard, lambda returncode: self._exited(address))

    def _exited(self, address: str) -> None:
        self._child = None
        self._ended.set()
        if not self._closed:
            self.start(address)

    def _heard(self, stream: int, lines: list[str]) -> None:
        for wish in (ScaleRequest.from_line(line) for line in lines if stream == STDOUT):
            if wish is None:
                continue
            if wish.lost:
                self._happened(RunFailed(wish.lost, INFRASTRUCTURE_STATUS))
            else:
                # Where nobody said a number, it is the one that the run began with.
                self._happened(
                    ServersWanted(wish.servers or self._servers, _numbers(wish.draining), _numbers(wish.stop))
                )


def _numbers(server_ids: list[str]) -> tuple[int, ...]:
    return tuple(number for server_id in server_ids if (number := server_number(server_id)) is not None)


class _AddressWatch:
    """Waits for the scheduler's address, and notes it."""

    def __init__(self, services: ServicesPlan, registration: RunClaim) -> None:
        self._services = services
        self._registration = registration
        self._deadline: float | None = None
        self._found = False
        #: Of the scheduler; 0 until it is known.
        self.port = 0
        self.on_found: Callable[[str], None] = lambda address: None

    def tick(self, now: float) -> RunFailed | None:
        if self._found:
            return None
        if self._deadline is None:
            self._deadline = now + self._services.start_timeout_seconds
        assert self._services.link.file is not None
        address = read_address(self._services.link.file)
        if address:
            self._found = True
            self.port = parse_address(address)[1]
            self._registration.listening(address)
            self.on_found(address)
        elif now >= self._deadline:
            self._found = True
            waited = f"{self._services.start_timeout_seconds:g} s"
            message = f"the scheduler did not come up within {waited} (--start-timeout)"
            return RunFailed(message, INFRASTRUCTURE_STATUS, ProcessKey("scheduler", 0))
        return None


# --- shared with the agent --------------------------------------------------------------------------------------------


def open_output(routing: Routing, workers: WorkersPlan, on_broken: Callable[[], None], mute: bool = True) -> Output:
    """Console and files of this node. Raises ConfigurationError if the log directory cannot be made."""
    try:
        return Output(routing, lambda rank: rank - workers.first_rank, workers.role, on_broken, mute)
    except OSError as error:
        raise ConfigurationError(f"--log-dir {routing.directory} cannot be used: {error.strerror}") from None


def announce(output: Output, routing: Routing, workers: WorkersPlan, environ: Mapping[str, str]) -> None:
    """Tells where the logs are, and what was set that the user did not ask for."""
    if routing.directory is not None:
        output.say(f"logs in {routing.directory}")
    if workers.limits_threads(environ):
        output.say("OMP_NUM_THREADS=1 for each worker, as several share the cores; set it to choose another number")


def plural(count: int, noun: str) -> str:
    """``2 workers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def default_kernel_threads(servers: int) -> int:
    """Threads of each server's kernels, so that together they have a thread for each core."""
    return max(1, len(os.sched_getaffinity(0)) // servers)
