"""A cluster for one script: a scheduler and servers as children of this process, which end with it.

``psdist.init()`` starts it if there is no launcher. ``close`` ends the children in order; otherwise the lifeline does:
a pipe whose other end only the parent holds, and no process that it forks. There are no worker processes and no
restarts; those are in ``local``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from psdist import addresses
from psdist.errors import ConfigurationError, SchedulerUnreachableError
from psdist.launcher.plan import SchedulerAddress, ServicesPlan, ServicesSettings
from psdist.launcher.process import Lifeline, ProcessSpec
from psdist.launcher.run_record import DIRECTORY_PREFIX
from psdist.machine import python
from psdist.security.tls import TlsFiles
from psdist.settings import own_process
from psdist.settings.config import INSECURE_VARIABLE, START_TIMEOUT_SECONDS, await_address, check_run_id, storage_text
from psdist.settings.flags import is_switched_on
from psdist.snapshots.policy import DEFAULT_POLICY, SavePolicy

_STOP_SECONDS: Final = 5.0
#: Time without workers after which the scheduler of several workers ends.
_IDLE_SECONDS: Final = 0.1
#: Longest wait for the other workers to end.
_OTHERS_SECONDS: Final = 60.0


class EmbeddedCluster:
    """A running scheduler with ``servers`` servers on free loopback ports. A second ``close`` has no effect.

    replicas: copies of each shard, on different servers; with 2 nothing is lost when one server dies.
    failure_timeout, worker_timeout: seconds of silence after which a server, and a worker, counts as lost. The death of
        a process is noticed immediately, because its connections break.
    storage: directory or URL for snapshots; None for none. A run of the same ``run_id`` resumes from the newest there.
    policy: when snapshots are taken; ``close`` never takes one.
    fresh: True to refuse a storage that has snapshots.
    run_id: name of the run; None generates one.
    workers: workers that the scheduler waits for.
    host: address on which scheduler and servers listen; None is this machine's loopback address. Another one sends the
        token and all data over the network, without encryption unless there is ``tls``.
    tls: TLS identity of scheduler and servers; None for plaintext.
    ends_when_idle: True if the cluster also ends once all workers have left, for ``await_end``.

    Raises SchedulerUnreachableError if the scheduler does not come up, ConfigurationError for values out of range.
    """

    def __init__(
        self,
        servers: int = 1,
        environ: Mapping[str, str] | None = None,
        failure_timeout: float = 10.0,
        replicas: int = 1,
        storage: str | os.PathLike[str] | None = None,
        policy: SavePolicy | None = None,
        fresh: bool = False,
        run_id: str | None = None,
        worker_timeout: float = ServicesSettings.worker_timeout_seconds,
        workers: int = 1,
        host: str | None = None,
        tls: TlsFiles | None = None,
        ends_when_idle: bool = False,
    ) -> None:
        if not 1 <= replicas <= servers:
            raise ConfigurationError(
                f"servers={servers}, replicas={replicas} are out of range: use 1 or more, and as many servers"
            )
        python()  # Raises before anything is made.
        self.token = secrets.token_urlsafe(32)
        self.run_id = f"local-{secrets.token_hex(4)}" if run_id is None else check_run_id(run_id)
        place, policy = "" if storage is None else storage_text(os.fspath(storage)), policy or DEFAULT_POLICY
        settings = ServicesSettings(
            servers=servers,
            replicas=replicas,
            failure_timeout_seconds=failure_timeout,
            worker_timeout_seconds=worker_timeout,
            log_level="error",  # the end of a server is logged as a warning, but is expected here
            storage_path=place,
            save_interval=(policy.steps, policy.seconds) if place else None,
            keep_last=policy.keep_last,
            keep_every=policy.keep_every,
            no_save_at_end=place != "",  # at the end of this process the servers are already gone
            fresh=fresh and place != "",
        )
        self._directory = own_process.make_private_directory(DIRECTORY_PREFIX)
        self._lifeline = Lifeline()
        self._ends_when_idle = ends_when_idle
        self.processes: list[subprocess.Popen[bytes]] = []  # the scheduler, then the servers
        host = addresses.loopback() if host is None else host
        given = os.environ if environ is None else environ
        # Whoever chose the host has allowed it.
        insecure = not addresses.is_loopback(host) or is_switched_on(given, INSECURE_VARIABLE)
        plan = ServicesPlan(
            settings=settings,
            directory=self._directory,
            link=SchedulerAddress(file=self._directory / "scheduler", tls=tls, insecure=insecure, run_id=self.run_id),
            lifeline=self._lifeline.end_of_children,
            workers=workers,
            drain_timeout_seconds=0.0,  # all servers end together
            host=host,
            # The given port is the script's.
            metrics_port=0 if given.get("PSDIST_METRICS_PORT") else None,
            idle_timeout_seconds=_IDLE_SECONDS if ends_when_idle else 0.0,
        )
        try:
            self._start(plan, dict(given) | {"PSDIST_TOKEN": self.token})
            self.address = self._await_scheduler()
        except BaseException:
            self.close()
            raise
        finally:
            self._lifeline.started()

    def _start(self, plan: ServicesPlan, environ: Mapping[str, str]) -> None:
        for spec in (
            plan.scheduler(environ),
            *(plan.server(number, environ) for number in range(plan.settings.servers)),
        ):
            self.processes.append(_spawn(spec, plan.lifeline))

    def _await_scheduler(self) -> str:
        """Return the scheduler's address. Raises an error as soon as it has died."""
        path = self._directory / "scheduler"
        for _ in range(int(START_TIMEOUT_SECONDS * 10)):
            with suppress(SchedulerUnreachableError):
                return await_address(path, 0.1)
            if (status := self.processes[0].poll()) is not None:
                raise SchedulerUnreachableError(
                    f"the scheduler of this script's own cluster ended with status {status}"
                )
        return await_address(path, 0.0)

    def await_end(self) -> None:
        """Wait until all workers have left, up to a limit, if the cluster ends then. Waits once."""
        if self._ends_when_idle and self.processes:
            self._ends_when_idle = False
            with suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(_OTHERS_SECONDS)

    def close(self) -> None:
        """End the children and remove their directory."""
        processes, self.processes = self.processes, []
        _stop(processes[1:])  # servers first: without a scheduler they would try to reach it
        _stop(processes[:1])
        self._lifeline.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _stop(children: list[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all children, and SIGKILL to those that do not end."""
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _spawn(spec: ProcessSpec, lifeline: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec.argv,
        env=dict(spec.environment),
        stdin=subprocess.DEVNULL,
        stdout=_inherited(1),
        stderr=_inherited(2),
        pass_fds=(lifeline,),
        # Ctrl-C must reach only the script, which then closes the cluster.
        start_new_session=True,
    )


def _inherited(descriptor: int) -> int | None:
    """Return the standard stream for a child: this process's own, or /dev/null if that is closed."""
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    return None
