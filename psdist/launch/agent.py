"""The agent of one node (``psdist-worker``): finds its ranks, then runs and restarts the node's workers.

Scheduler and servers run elsewhere; the agent neither starts nor ends them. Ranks are the user's (``node_rank``) or the
scheduler's (rendezvous), and are kept over restarts.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType

from psdist.errors import BY_CODE, InternalError
from psdist.launch.local import SIGNALS, announce, open_output, plural
from psdist.launch.output import Routing
from psdist.launch.plan import SchedulerAddress, WorkersPlan, python_command
from psdist.launch.process import spawn
from psdist.launch.rendezvous import Place, RankRequest
from psdist.launch.run_record import DIRECTORY_PREFIX
from psdist.launch.runner import Crew, Runner
from psdist.launch.script import check_script
from psdist.launch.supervisor import STOP_TIMEOUT_SECONDS
from psdist.settings.config import START_TIMEOUT_SECONDS, await_address, parse_address


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What ``psdist-worker`` was told. ``node_rank`` None asks the scheduler; else ``nodes_min == nodes_max``."""

    script: tuple[str, ...]
    scheduler: str = ""
    scheduler_file: Path | None = None
    token_file: Path | None = None
    processes: int = 1
    nodes_min: int = 1
    nodes_max: int = 1
    node_rank: int | None = None
    run_id: str = ""
    local_address: str = ""
    restarts_max: int = 3
    routing: Routing = field(default_factory=Routing)
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
    interval_seconds: float = 0.1
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS
    module: bool = False
    no_python: bool = False
    role: str = "worker"
    signals: tuple[int, ...] = SIGNALS


def run_agent(options: AgentOptions, environ: Mapping[str, str] | None = None) -> int:
    """Runs this node's workers to their end and returns the status for the shell.

    Raises ConfigurationError, before anything was started, if the script cannot be run; SchedulerUnreachableError or
    what else the scheduler answers if there are no ranks to be had.
    """
    environ = dict(os.environ if environ is None else environ)
    check_script(list(options.script), module=options.module, no_python=options.no_python)
    _exit_on_sigterm()
    address = options.scheduler
    if not address and options.scheduler_file is not None:
        address = await_address(options.scheduler_file, options.start_timeout_seconds)
    link = SchedulerAddress(address=address, token_file=options.token_file, run_id=options.run_id)
    place = _place(options, link, environ)
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
    try:
        workers = WorkersPlan(
            command=python_command(list(options.script), module=options.module, no_python=options.no_python),
            processes=options.processes,
            link=link,
            connected_directory=directory,
            master=parse_address(address),
            start_timeout_seconds=options.start_timeout_seconds,
            restarts_max=options.restarts_max,
            first_rank=place.first_rank,
            world_size=place.world_size,
            node_rank=place.node_rank,
            role=options.role,
        )
        return asyncio.run(_supervise(options, environ, workers, place))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _exit_on_sigterm() -> None:
    # The first process of a container ignores signals that it does not handle.
    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def _place(options: AgentOptions, link: SchedulerAddress, environ: Mapping[str, str]) -> Place:
    if options.node_rank is not None:
        world = options.nodes_max * options.processes
        return Place(options.node_rank, options.nodes_max, options.node_rank * options.processes, world)
    host = options.local_address or socket.gethostname()
    request = RankRequest(
        scheduler=link.address,
        run_id=options.run_id,
        agent_id=f"{host}-{os.getpid()}-{secrets.token_hex(4)}",
        processes=options.processes,
        nodes_min=options.nodes_min,
        nodes_max=options.nodes_max,
        host=host,
        timeout_seconds=options.start_timeout_seconds,
    )
    return ask_for_place(request, link.environment(environ))


def ask_for_place(request: RankRequest, environment: Mapping[str, str]) -> Place:
    """Has a process ask the scheduler, and tells whom it waits for. Raises the error that the scheduler answers."""
    argv = (sys.executable, "-P", "-m", "psdist.launch.rendezvous", json.dumps(asdict(request)))
    process = spawn(argv, environment, stderr=None)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            values = json.loads(line)
            if "waiting_for" in values:
                print(f"psdist: waiting {values['waiting_for']}", file=sys.stderr, flush=True)
            elif "error" in values:
                raise BY_CODE.get(values["code"], InternalError)(values["error"])
            else:
                return Place(**values)
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    raise InternalError(f"the rendezvous at {request.scheduler} ended without an answer")


async def _supervise(options: AgentOptions, environ: Mapping[str, str], workers: WorkersPlan, place: Place) -> int:
    routing = options.routing
    if routing.directory is not None:
        # Nodes may share the file system: ranks tell their files apart.
        routing = replace(routing, directory=routing.directory / (options.run_id or "run"))
    output = open_output(routing, workers, lambda: runner.interrupt(signal.SIGPIPE))
    runner = Runner(
        Crew(
            ranks=workers.ranks,
            spec=lambda key, attempt: workers.spec(key.number, attempt, environ),
            connected=lambda rank, attempt: workers.connected_file(rank, attempt).exists(),
            stop_timeout_seconds=options.stop_timeout_seconds,
        ),
        output,
        restarts_max=options.restarts_max,
        interval_seconds=options.interval_seconds,
        signals=options.signals,
    )
    try:
        last = workers.ranks[-1]
        ranks = f"rank {last}" if options.processes == 1 else f"ranks {workers.first_rank} to {last}"
        output.say(
            f"node {place.node_rank} of {place.nodes}: {plural(options.processes, 'worker')}, {ranks} of "
            f"{place.world_size}; scheduler {workers.link.address}"
        )
        announce(output, routing, workers, environ)
        return (await runner.run()).status
    finally:
        output.close()
