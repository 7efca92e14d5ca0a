"""A whole run on this machine: scheduler, servers and workers, on free ports, in a private directory.

The directory (mode 0700, removed at the end) holds the token, the scheduler's address and its store. All processes are
started together and find each other by the address file. While the run is alive, ``psdist status`` finds it by its
record. Snapshots are stored elsewhere, and stay: a later run of the same id resumes from them.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from psdist import addresses
from psdist.addresses import free_port, parse_address
from psdist.errors import ConfigurationError, InsecureBindError, StorageError
from psdist.launcher.events import (
    Event,
    Finish,
    ProcessKey,
    RunFailed,
    ScaleRequest,
    ServersWanted,
    WorkersWanted,
    plural,
)
from psdist.launcher.output import STDOUT, Output
from psdist.launcher.plan import (
    WORKERS,
    SchedulerAddress,
    ScriptSettings,
    ServicesPlan,
    ServicesSettings,
    WorkersPlan,
    program,
    server_number,
)
from psdist.launcher.process import Child, ProcessSpec
from psdist.launcher.run_record import ADDRESS_FILE, DIRECTORY_PREFIX, RunRegistry, records_directory
from psdist.launcher.run_storage import (
    check_loopback,
    check_shared_memory,
    check_storage,
    has_commits,
    holds_weights,
    how_to_resume,
    why_unservable,
)
from psdist.launcher.runner import ProcessPlan, Runner, open_metrics, open_runner
from psdist.launcher.script_checks import ScriptKind
from psdist.launcher.shutdown import RunPolicy
from psdist.link import processes
from psdist.monitoring.dashboard import KEY_FILE
from psdist.security.tokens import require_root
from psdist.settings import exit_codes, own_process
from psdist.settings.config import find_token, read_address
from psdist.settings.flags import fail, integer, setting
from psdist.settings.launcher_reports import RunReport
from psdist.settings.other_launchers import check_one_run
from psdist.settings.programs import MONITORING_TITLE, OUTPUT_TITLE, DashboardSettings, storage_path_setting

#: The program, in messages.
PROGRAM: Final = "psdist run"
#: Default location of snapshots, below the working directory; it contains a directory for each run.
STORAGE_DIRECTORY: Final = "psdist-runs"
#: Let workers and servers start first: one more program would only delay the first step.
_LISTEN_DELAY_SECONDS: Final = 2.0
#: Times the limit of a silent server for which the scheduler awaits the last copy of a shard.
_LAST_COPY_LEASES: Final = 30
#: Time limits of servers for which a stopped worker may stay so after --worker-timeout.
_REJOIN_LEASES: Final = 5


@dataclass(frozen=True, kw_only=True)
class LocalSettings(DashboardSettings, ServicesSettings, ScriptSettings):
    """Settings of ``psdist run``.

    storage_path: None means a directory of the run in ``STORAGE_DIRECTORY``, or no snapshots if that cannot be written.
    Raises ConfigurationError for values that exclude each other.
    """

    storage_path: str | None = storage_path_setting(f"./{STORAGE_DIRECTORY}/RUN_ID", has_default=True)
    dashboard: bool = setting("serve the dashboard on a free port and print its link", group=MONITORING_TITLE)
    debug_worker: int | None = setting(
        "rank of the worker that gets the terminal, for breakpoint() and pdb; time limits of the run are suspended",
        integer(0), None, "RANK", twin=False, group=WORKERS,
    )  # fmt: skip
    insecure: bool = setting(
        "serve metrics and the dashboard beyond this machine without encryption (private networks)",
        group=MONITORING_TITLE,
    )
    lifeline_fd: int | None = setting(
        "inherited pipe; the run ends when it does, as after SIGTERM", integer(0), None, "N", twin=False
    )
    report_file: Path | None = setting(
        "file to write how the run ended into, as JSON", Path, None, "FILE", twin=False, group=OUTPUT_TITLE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers < self.replicas:
            raise ConfigurationError(
                f"--replicas {self.replicas} needs at least as many servers, not --nservers {self.servers}: copies of "
                "a shard are on different servers"
            )
        if self.debug_worker is not None and self.debug_worker >= self.processes:
            raise ConfigurationError(
                f"--debug-worker {self.debug_worker} is not among the {plural(self.processes, 'worker')} of "
                "--nproc-per-node: ranks count from 0"
            )
        for flag, host in (
            ("--metrics-host", self.metrics_host if self.metrics_port is not None else ""),
            ("--dashboard-host", self.dashboard_host if self.has_dashboard else ""),
        ):
            if host and not self.insecure and not addresses.is_loopback(host):
                raise InsecureBindError(
                    f"{flag} {host} is beyond this machine, and psdist run encrypts nothing: pass --insecure on a "
                    "private network, or leave it on this machine (ssh -L), or start psdist-scheduler with TLS (see "
                    "docs/secure.md)",
                    host=host,
                )
        _ = self.policy  # Raises if it is wrong.

    @property
    def has_storage(self) -> bool:
        """True if there is a storage for snapshots."""
        return self.storage_path != ""

    @property
    def suspend_time_limits(self) -> bool:
        """True if everybody waits for a worker in its debugger: a setting of the scheduler."""
        return self.debug_worker is not None

    @property
    def has_dashboard(self) -> bool:
        """True if the scheduler serves the dashboard."""
        return self.dashboard or self.dashboard_port is not None

    @property
    def run_policy(self) -> RunPolicy:
        """Reactions to the end of processes."""
        return RunPolicy(
            restarts_max=self.restarts_max,
            stop_timeout_seconds=self.stop_timeout_seconds,
            service_suspended_seconds=_LAST_COPY_LEASES * self.failure_timeout_seconds,
            # Longer than until it is expelled: it may be continued, and rejoin.
            worker_suspended_seconds=self.worker_timeout_seconds + _REJOIN_LEASES * self.failure_timeout_seconds,
            copies=self.replicas > 1,
            durable=self.replicas > 1 or self.has_storage,
            saves=self.has_storage and not self.no_save_at_end,
            debugged=None if self.debug_worker is None else ProcessKey("worker", self.debug_worker),
        )

    def resolved(self, run_id: str) -> LocalSettings:
        """Return these settings with a run id and the location of its snapshots."""
        default = str(Path(STORAGE_DIRECTORY, run_id).absolute())
        return replace(self, run_id=run_id, storage_path=default if self.storage_path is None else self.storage_path)


def run_local(settings: LocalSettings, environ: Mapping[str, str] | None = None) -> int:
    """Run a script to its end and return the status for the shell (see ``psdist.settings.exit_codes``).

    Raises ConfigurationError, before anything was started, if it cannot be run.
    """
    environ = dict(os.environ if environ is None else environ)
    own_process.require_working_directory()
    check_one_run(environ)
    settings.check()
    check_shared_memory(environ.get("PSDIST_TRANSPORT", ""))
    own_process.exit_on(settings.signals)
    if settings.log_format == "auto":
        settings = replace(settings, log_format="console" if sys.stderr.isatty() else "json")
    environ["PSDIST_LOG_FORMAT"] = settings.log_format  # for the library in scripts
    token = find_token(environ) or secrets.token_urlsafe(32)
    require_root(token)
    # Generated names sort by time.
    run_id = settings.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    _check_machine(settings, run_id)
    own_process.require_for_launcher(settings.processes + settings.servers + 2)  # the scheduler, and what watches it
    directory = own_process.make_private_directory(DIRECTORY_PREFIX)
    try:
        link = replace(_make_link(directory, token, run_id), insecure=settings.insecure)
        if settings.dashboard_key_file is not None:
            (directory / KEY_FILE).symlink_to(settings.dashboard_key_file.absolute())
        registry = RunRegistry(records_directory(environ))
        record = registry.claim(run_id, directory / "token", directory)
        try:
            on_address = partial(registry.listening, record)
            return asyncio.run(_run(settings, environ, link, token, on_address))
        finally:
            registry.remove(run_id)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        processes.sweep()  # sockets that killed workers left behind


def _check_machine(settings: LocalSettings, run_id: str) -> None:
    """End the program, or raise ConfigurationError, if the scheduler could not start: it would only say so later."""
    check_loopback()
    storage = settings.resolved(run_id).storage_path or ""
    try:
        check_storage(storage, run_id, must_be_empty=settings.fresh, optional=settings.storage_path is None)
    except StorageError as error:
        _unavailable(settings, str(error))
    if settings.metrics_port is not None:
        host = settings.metrics_host or addresses.loopback()
        if reason := why_unservable(host, settings.metrics_port):
            _unavailable(settings, reason)


def _unavailable(settings: LocalSettings, reason: str) -> NoReturn:
    fail(PROGRAM, reason, exit_codes.UNAVAILABLE, as_json=settings.log_format == "json")


def _make_link(directory: Path, token: str, run_id: str) -> SchedulerAddress:
    """Fill a run's private directory. Returns the scheduler's address file and token file there."""
    (directory / "connected").mkdir(mode=0o700)
    token_file = directory / "token"
    descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return SchedulerAddress(file=directory / ADDRESS_FILE, token_file=token_file, run_id=run_id)


async def _run(
    settings: LocalSettings,
    environ: Mapping[str, str],
    link: SchedulerAddress,
    token: str,
    on_address: Callable[[str], object],
) -> int:
    assert link.file is not None
    run_id, directory, host = link.run_id, link.file.parent, addresses.loopback()
    with ExitStack() as opened:
        metrics = opened.enter_context(closing(open_metrics(settings, run_id, range(settings.processes))))
        dashboard, dashboard_link = _open_dashboard(settings, host, token, run_id)
        if dashboard is not None:
            opened.enter_context(dashboard)
        workers = WorkersPlan(
            script=settings if settings.metrics_port is None else replace(settings, metrics_port=0),
            link=link,
            connected_directory=directory / "connected",
            # For torch.distributed in a user's script; nothing of psdist listens there.
            master=(host, free_port(host)),
            world_size=settings.processes,
            metrics=metrics.environment,
            debugged=settings.debug_worker,
        )
        lifeline = _make_lifeline(opened)
        services = ServicesPlan(
            settings=settings.resolved(run_id),
            directory=directory,
            link=link,
            lifeline=lifeline,
            workers=settings.processes,
            start_timeout_seconds=settings.start_timeout_seconds,
            storage_optional=settings.storage_path is None,
            host=host,
            metrics_port=settings.metrics_port,
            metrics_host=settings.metrics_host,
            dashboard=dashboard.fileno() if dashboard is not None else None,
            dashboard_host=settings.dashboard_host,
            dashboard_logs=settings.log_dir and (settings.log_dir / run_id).absolute(),
        )
        watch = _SchedulerWatch(services, environ, on_address, lambda event: runner.handle(event))

        def service(key: ProcessKey) -> ProcessSpec:
            if key.role == "server":
                return services.server(key.number, environ)
            return services.snapshot(environ) if key.role == "snapshot" else services.scheduler(environ, watch.port)

        plan = ProcessPlan(workers, environ, settings.run_policy, settings.servers, 1, service, lifeline)
        shown = {"mute": settings.log_level in ("warning", "error"), "as_json": settings.log_format == "json"}
        runner = opened.enter_context(open_runner(plan, run_id, metrics, on_tick=watch.tick, **shown))
        storage = services.settings.storage_path or ""
        runner.output.say(_headline(run_id, settings, environ))
        is_shown = _report_storage(runner.output, services.settings, storage, asked=bool(settings.storage_path))
        if dashboard_link:
            runner.output.say(f"dashboard: {dashboard_link}")
        runner.output.say(_how_to_join(run_id, settings, environ))
        try:
            with _ending_with(settings.lifeline_fd, runner):
                finish = await runner.run()
        finally:
            await watch.close()
        if settings.report_file is not None:
            _report(finish, run_id, runner.output).write(settings.report_file)
        if has_commits(storage):
            if finish.status > exit_codes.SIGNAL_BASE:
                runner.output.say(how_to_resume(storage, run_id))
            elif not is_shown:
                runner.output.say(f"snapshots are in {storage}")
        return finish.status


def _make_lifeline(opened: ExitStack) -> int:
    """Return an end of a pipe. The other end is closed with ``opened``, or with this process."""
    lifeline, held = os.pipe()
    opened.callback(os.close, lifeline)
    opened.callback(os.close, held)
    return lifeline


def _open_dashboard(settings: LocalSettings, host: str, token: str, run_id: str) -> tuple[socket.socket | None, str]:
    """Return the socket on which the scheduler serves the dashboard, and the link to it; None and an empty text without
    a dashboard. Raises ConfigurationError."""
    if not settings.has_dashboard:
        return None, ""
    from psdist.monitoring.dashboard import dashboard_link, listen, make_key, require_dashboard, view_key

    require_dashboard()
    chosen = settings.dashboard_host or host
    listening = listen(chosen, settings.dashboard_port or 0)
    shown = addresses.own_address() if addresses.is_wildcard(chosen) else chosen
    place = addresses.format_address(shown, listening.getsockname()[1])
    file = settings.dashboard_key_file
    return listening, dashboard_link(place, view_key(token, run_id) if file is None else make_key(file))


@contextmanager
def _ending_with(lifeline: int | None, runner: Runner) -> Iterator[None]:
    """End the run in order when the other end of ``lifeline`` is closed."""
    if lifeline is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def closed() -> None:
        loop.remove_reader(lifeline)
        runner.interrupt(signal.SIGTERM)

    loop.add_reader(lifeline, closed)
    try:
        yield
    finally:
        loop.remove_reader(lifeline)


def _report(finish: Finish, run_id: str, output: Output) -> RunReport:
    culprit = finish.culprit
    if culprit is None:
        return RunReport(run_id, finish.status, finish.message)
    rank = culprit.number if culprit.role == "worker" else None
    return RunReport(run_id, finish.status, finish.message, str(culprit), rank, tuple(output.last_words(culprit)))


def _is_found(run_id: str, environ: Mapping[str, str]) -> bool:
    """True if commands find the run by its id."""
    return any(record.run_id == run_id for record in RunRegistry(records_directory(environ)).live())


def _headline(run_id: str, settings: LocalSettings, environ: Mapping[str, str]) -> str:
    copies = f", {settings.replicas} copies of each shard" if settings.replicas > 1 else ""
    members = f"{plural(settings.servers, 'server')}, {plural(settings.processes, 'worker')}{copies}"
    return f"run {run_id}: {members}" + (
        f"; to watch it: psdist status --run-id {run_id}" if _is_found(run_id, environ) else ""
    )


def _how_to_join(run_id: str, script: ScriptSettings, environ: Mapping[str, str]) -> str:
    """Return the command by which another terminal adds workers to the run, or why there is none."""
    if not _is_found(run_id, environ):
        directory = records_directory(environ)
        return f"the run is not found by its id: {directory} cannot be written, or is not this user's alone (mode 0700)"
    name, *arguments = script.command
    kinds = {ScriptKind.FILE: (), ScriptKind.MODULE: ("--module",), ScriptKind.PROGRAM: ("--no-python",)}
    shown = str(Path(name).absolute()) if script.kind is ScriptKind.FILE else name
    command = ("psdist-worker", "--run-id", run_id, *kinds[script.kind], shown, *arguments)
    return f"to add a worker from another terminal: {shlex.join(command)}"


def _report_storage(output: Output, settings: ServicesSettings, storage: str, asked: bool) -> bool:
    """Print the location of snapshots if the user ``asked`` for them, or if a directory has some. Returns True if
    printed. storage: empty for none."""
    if not storage:
        return False
    has_any = has_commits(storage)
    if asked or has_any:
        resumes = ""
        if has_any and not settings.fresh:
            from_newest = holds_weights(storage)
            resumes = "; this run resumes from the newest" if from_newest else "; the newest has no weights"
        output.say(f"snapshots {settings.policy.text}, in {storage}{resumes}")
    return asked or has_any


class _SchedulerWatch:
    """Watch for the scheduler's address, which is recorded once it is known, and from then on for its requests: to
    start or stop servers and workers, or to end the run.

    port: the scheduler's; 0 until it is known.
    """

    def __init__(
        self,
        services: ServicesPlan,
        environ: Mapping[str, str],
        on_address: Callable[[str], object],
        on_event: Callable[[Event], None],
    ) -> None:
        self._services = services
        self._environ = environ
        self._on_address = on_address
        self._on_event = on_event
        self.port = 0
        #: When the wait for the address ends; infinite once it has ended.
        self._deadline: float | None = None
        self._child: Child | None = None
        self._ended = asyncio.Event()
        self._closed = False

    def tick(self, now: float) -> RunFailed | None:
        """Look for the address. Returns the run's failure once that has taken too long."""
        if self._deadline is None:
            self._deadline = now + self._services.start_timeout_seconds
        if self._deadline == math.inf:
            return None
        assert self._services.link.file is not None
        if address := read_address(self._services.link.file):
            self._deadline = math.inf
            self.port = parse_address(address)[1]
            self._on_address(address)
            self._start_later(address)
        elif now >= self._deadline:
            self._deadline = math.inf
            waited = f"{self._services.start_timeout_seconds:g} s"
            message = f"the scheduler did not come up within {waited} (--start-timeout)"
            return RunFailed(message, exit_codes.INFRASTRUCTURE, ProcessKey("scheduler", 0))
        return None

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        if self._child is not None:
            self._child.kill(signal.SIGKILL)
            await self._ended.wait()

    def _start_later(self, address: str) -> None:
        asyncio.get_running_loop().call_later(_LISTEN_DELAY_SECONDS, self._start, address)

    def _start(self, address: str) -> None:
        if self._closed:
            return
        link = self._services.link
        argv = (*program("psdist.launcher.scheduler_calls"), "watch", address, link.run_id)
        spec = ProcessSpec(ProcessKey("watch", 0), argv, link.environment(self._environ))
        self._ended.clear()
        self._child = Child(spec, self._on_lines, lambda returncode: self._exited(address))

    def _exited(self, address: str) -> None:
        self._child = None
        self._ended.set()
        if not self._closed:
            self._start_later(address)

    def _on_lines(self, stream: int, lines: list[str]) -> None:
        for wanted in (ScaleRequest.from_line(line) for line in lines if stream == STDOUT):
            if wanted is None:
                continue
            if wanted.lost:
                self._on_event(RunFailed(wanted.lost, exit_codes.INFRASTRUCTURE))
            else:
                # 0: no number was set, so the initial one holds.
                servers = wanted.servers or self._services.settings.servers
                self._on_event(ServersWanted(servers, _numbers(wanted.draining), _numbers(wanted.stop)))
                if wanted.workers:
                    self._on_event(WorkersWanted(wanted.workers, wanted.next_rank))


def _numbers(server_ids: list[str]) -> tuple[int, ...]:
    return tuple(number for server_id in server_ids if (number := server_number(server_id)) is not None)
