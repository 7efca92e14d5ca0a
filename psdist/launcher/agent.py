"""The agent of one node (``psdist-worker``): determines its ranks, then runs and restarts the node's workers.

Scheduler and servers run elsewhere; the agent neither starts nor stops them. Ranks come from the user (``node_rank``)
or from the scheduler (rendezvous), and are kept over restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from psdist import addresses
from psdist.addresses import parse_address
from psdist.errors import BY_CODE, ConfigurationError, InternalError
from psdist.launcher.events import Finish, Place, RankRequest, plural
from psdist.launcher.output import stamped
from psdist.launcher.plan import SchedulerAddress, ScriptSettings, WorkersPlan, program
from psdist.launcher.process import spawn
from psdist.launcher.run_metrics import RunMetrics
from psdist.launcher.run_record import DIRECTORY_PREFIX
from psdist.launcher.runner import ProcessPlan, open_metrics, open_runner
from psdist.launcher.shutdown import RunPolicy
from psdist.security.tls import Credentials
from psdist.settings import exit_codes, own_process
from psdist.settings.config import await_address, find_token, make_tls
from psdist.settings.flags import integer, text, torchrun_setting
from psdist.settings.other_launchers import LauncherTask, first_node
from psdist.settings.programs import (
    TlsSettings,
    run_id_setting,
    scheduler_file_setting,
    scheduler_setting,
    token_file_setting,
)

#: Heading of the flags about this node and the scheduler.
NODE_TITLE: Final = "node and scheduler"

#: Longest wait for the scheduler to acknowledge that this agent gave up.
_GIVE_UP_SECONDS: Final = 5.0
_REASON_CHARACTERS: Final = 200
#: Ports for torch.distributed in Slurm, where jobs may share a node: torchrun's, and the following ones by the job's
#: number.
_MASTER_PORT: Final = 29500
_MASTER_PORTS: Final = 1000
#: A wait that continues is printed again after this time.
_REPEAT_SECONDS: Final = 60.0


def nodes_text(value: str) -> tuple[int, int]:
    """Convert torchrun's --nnodes: ``N`` or ``MIN:MAX``."""
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", value)
    if match is None:
        raise ValueError(f"{value!r} is not understood: write N or MIN:MAX")
    least = int(match[1])
    most = int(match[2] or least)
    if not 1 <= least <= most:
        raise ValueError(f"{value} is not possible: 1 <= MIN <= MAX must hold")
    return least, most


@dataclass(frozen=True, kw_only=True)
class AgentSettings(ScriptSettings, TlsSettings):
    """Settings of ``psdist-worker``. Raises ConfigurationError for values that exclude each other.

    nodes: fewest and most nodes; None for one.
    node_rank: None to ask the scheduler.
    task: this agent's place among those that srun or mpirun started; None if it is alone.
    """

    scheduler: str = scheduler_setting()
    nodes: tuple[int, int] | None = torchrun_setting(
        "--nnodes",
        "nodes that take part: N or MIN:MAX (default: 1; any number with a --run-id of this machine)",
        nodes_text, None, "N",
    )  # fmt: skip
    run_id: str = run_id_setting(
        "name of the run, which the scheduler must serve; without a scheduler, a run on this machine"
    )
    token_file: Path | None = token_file_setting()
    scheduler_file: Path | None = scheduler_file_setting(group=NODE_TITLE)
    node_rank: int | None = torchrun_setting(
        "--node-rank", "number of this node (default: the scheduler assigns one)", integer(0), None, "N",
        group=NODE_TITLE,
    )  # fmt: skip
    local_address: str = torchrun_setting(
        "--local-addr",
        "name or address of this node for the other nodes, and in the certificates of its workers",
        text,
        "",
        "HOST",
        group=NODE_TITLE,
    )

    task: LauncherTask | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most = self.nodes_min, self.nodes_max
        if self.node_rank is not None and least != most:
            raise ConfigurationError(f"--node-rank needs a fixed number of nodes, not --nnodes {least}:{most}")
        if self.node_rank is not None and self.node_rank >= most:
            raise ConfigurationError(f"--node-rank {self.node_rank} is not below --nnodes {most}: nodes count from 0")

    @property
    def nodes_min(self) -> int:
        """Fewest nodes that take part."""
        return 1 if self.nodes is None else self.nodes[0]

    @property
    def nodes_max(self) -> int:
        """Most nodes that take part."""
        return 1 if self.nodes is None else self.nodes[1]

    @property
    def first_local_rank(self) -> int:
        """Local rank of this agent's first worker: agents of one machine count on."""
        return 0 if self.task is None else self.task.local_rank * self.processes

    @property
    def local_world_size(self) -> int:
        """Workers of all agents on this machine."""
        return self.processes * (1 if self.task is None else self.task.local_count)


def run_agent(settings: AgentSettings, environ: Mapping[str, str] | None = None) -> int:
    """Run this node's workers to their end and return the status for the shell.

    Raises ConfigurationError, before anything was started, if the script cannot be run. Raises
    SchedulerUnreachableError, or the scheduler's error, if it assigns no ranks.
    """
    environ = dict(os.environ if environ is None else environ)
    own_process.require_working_directory()
    settings.check()
    own_process.require_for_launcher(settings.processes)
    own_process.exit_on(settings.signals)
    link = _link(settings, environ)
    place = _place(settings, link, environ)
    link = replace(link, run_id=settings.run_id or place.run_id)
    first, node, name = place.first_rank, f"node-{place.node_rank}", link.run_id or _unknown_run()
    metrics = open_metrics(settings, name, range(first, first + settings.processes), node)
    directory = own_process.make_private_directory(DIRECTORY_PREFIX)
    try:
        workers = WorkersPlan(
            script=settings,
            link=link,
            connected_directory=directory,
            master=parse_address(_master(place, link.address, environ)),
            first_rank=place.first_rank,
            world_size=place.world_size,
            node_rank=place.node_rank,
            first_local_rank=settings.first_local_rank,
            local_world_size=settings.local_world_size,
            host=settings.local_address,
            metrics=metrics.environment,
        )
        finish, has_connected = asyncio.run(_run_workers(settings, environ, workers, place, metrics, name))
    finally:
        metrics.close()
        shutil.rmtree(directory, ignore_errors=True)
    if reason := why_given_up(finish, has_connected):
        _tell_scheduler(reason, settings, link, environ)
    return finish.status


def _link(settings: AgentSettings, environ: Mapping[str, str]) -> SchedulerAddress:
    """Return the scheduler, once its address is known. Raises ConfigurationError."""
    tls = make_tls(settings.tls_ca, settings.tls_cert, settings.tls_key)
    address = settings.scheduler
    if not address and settings.scheduler_file is not None:
        address = await_address(settings.scheduler_file, settings.start_timeout_seconds)
    token = find_token(environ, token_file=settings.token_file)
    Credentials(token, tls, settings.insecure).require_private_route(address)
    return SchedulerAddress(
        address=address, token_file=settings.token_file, tls=tls, insecure=settings.insecure, run_id=settings.run_id
    )


def why_given_up(finish: Finish, has_connected: bool) -> str:
    """Return why other nodes need not wait for this one's workers; empty if the scheduler knows, or nobody has to.

    has_connected: True if a worker of this node ever registered.
    """
    if finish.status == exit_codes.OK:
        return "" if has_connected else "its scripts ended without having called psdist.init()"
    is_known = finish.status in (exit_codes.INFRASTRUCTURE, exit_codes.UNAVAILABLE, exit_codes.LATE)
    return "" if finish.culprit is None or is_known else finish.message


def _tell_scheduler(reason: str, settings: AgentSettings, link: SchedulerAddress, environ: Mapping[str, str]) -> None:
    request = replace(_request(settings, link), gave_up=reason[:_REASON_CHARACTERS], timeout_seconds=_GIVE_UP_SECONDS)
    process = spawn(_rendezvous(request), link.environment(environ))
    try:
        process.communicate(timeout=2 * _GIVE_UP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _rendezvous(request: RankRequest) -> tuple[str, ...]:
    """Return the command that makes the request."""
    return (*program("psdist.launcher.scheduler_calls"), "rendezvous", json.dumps(asdict(request)))


def _place(settings: AgentSettings, link: SchedulerAddress, environ: Mapping[str, str]) -> Place:
    if settings.node_rank is not None:
        rank, nodes, processes = settings.node_rank, settings.nodes_max, settings.processes
        return Place(rank, nodes, rank * processes, nodes * processes)
    return ask_for_place(_request(settings, link), link.environment(environ))


def _request(settings: AgentSettings, link: SchedulerAddress) -> RankRequest:
    host = settings.local_address or socket.gethostname()
    return RankRequest(
        scheduler=link.address,
        run_id=settings.run_id,
        agent_id=f"{host}-{os.getpid()}-{secrets.token_hex(4)}",
        processes=settings.processes,
        nodes_min=settings.nodes_min,
        nodes_max=settings.nodes_max,
        host=host,
        local_address=settings.local_address,
        timeout_seconds=settings.start_timeout_seconds,
    )


def _unknown_run() -> str:
    """Return a name for a run's files if no rendezvous names the run. It is unique per start, so that no two runs
    mix."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _master(place: Place, scheduler: str, environ: Mapping[str, str]) -> str:
    """Return the address for torch.distributed, on which the script of rank 0 can listen.

    Without a rendezvous the nodes cannot agree on one, so it is taken from the user's environment, or from Slurm's.
    """
    if place.master_address:
        return place.master_address
    if place.nodes == 1:
        return addresses.free_address(())
    first = addresses.split_addresses(scheduler)[0]
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host and (host := first_node(environ)):
        job = environ.get("SLURM_JOB_ID", "")
        port = str(_MASTER_PORT + int(job if job.isdigit() else 0) % _MASTER_PORTS)
    return addresses.format_address(host, int(port)) if host and port.isdigit() else first


class WaitReport:
    """Filter for the scheduler's wait reasons, which it repeats every two seconds as a sign of life."""

    def __init__(self) -> None:
        self._text = ""
        self._printed = -math.inf

    def is_due(self, text: str, now: float) -> bool:
        """Return True for a new reason, and for the same one once a minute."""
        if text == self._text and now < self._printed + _REPEAT_SECONDS:
            return False
        self._text, self._printed = text, now
        return True


def ask_for_place(request: RankRequest, environment: Mapping[str, str]) -> Place:
    """Ask the scheduler in a separate process, and print the reasons of a wait. Raises the scheduler's error."""
    process = spawn(_rendezvous(request), environment, stderr=None)
    assert process.stdout is not None
    report = WaitReport()
    try:
        for line in process.stdout:
            values = json.loads(line)
            if "waiting_for" in values and not report.is_due(values["waiting_for"], time.monotonic()):
                continue
            if "waiting_for" in values:
                # Training does not depend on whether this notice can be printed.
                with contextlib.suppress(OSError):
                    print(stamped(f"waiting {values['waiting_for']}"), file=sys.stderr, flush=True)
            elif "error" in values:
                raise BY_CODE.get(values["code"], InternalError)(values["error"])
            else:
                return Place(**values)
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    raise InternalError(f"the rendezvous at {request.scheduler} ended without an answer")


async def _run_workers(
    settings: AgentSettings,
    environ: Mapping[str, str],
    workers: WorkersPlan,
    place: Place,
    metrics: RunMetrics,
    name: str,
) -> tuple[Finish, bool]:
    """Run the workers. Returns how they ended, and True if any of them ever registered."""
    policy = RunPolicy(
        settings.restarts_max,
        stop_timeout_seconds=settings.stop_timeout_seconds,
        elastic=settings.nodes_min < settings.nodes_max,
    )
    # Nodes may share the file system, so file names contain the ranks.
    with open_runner(ProcessPlan(workers, environ, policy), name, metrics) as runner:
        last = workers.ranks[-1]
        ranks = f"rank {last}" if settings.processes == 1 else f"ranks {workers.first_rank} to {last}"
        runner.output.say(
            f"node {place.node_rank} of {place.nodes}: {plural(settings.processes, 'worker')}, {ranks} of "
            f"{place.world_size}; scheduler {workers.link.address}"
        )
        return await runner.run(), runner.has_connected
