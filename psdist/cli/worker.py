"""``psdist-worker``: the agent of one node, with torchrun's flags. Flags in, ``AgentSettings`` out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from psdist.cli.run import EPILOG, SCRIPT_USAGE, hint_misplaced
from psdist.cli.target import choose_run
from psdist.errors import ConfigurationError
from psdist.launcher.agent import NODE_TITLE, AgentSettings, run_agent
from psdist.launcher.local import LocalSettings, run_local
from psdist.settings.config import check_run_id, find_scheduler, scheduler_text
from psdist.settings.flags import (
    CONFIG_FLAG,
    CommandLine,
    Flag,
    flags_of,
    grouped,
    integer,
    one_of,
    read,
    text,
    torchrun,
)
from psdist.settings.foreign_flags import OF_WORKER
from psdist.settings.other_launchers import LauncherTask, find_task
from psdist.wire.limits import WORLD_MAX


def rendezvous_backend(value: str) -> str:
    """Convert torchrun's --rdzv-backend. Backends of torch that need no other service have the same meaning here."""
    name = value.lower()
    if name.startswith("etcd"):
        raise ValueError(
            f"{value} is another service: leave --rdzv-backend out, and name psdist's scheduler by --scheduler"
        )
    return one_of("psdist", "c10d", "static")(name)


#: Flags that name a scheduler, or prove something to it.
_NAMING_A_RUN: Final = ("scheduler", "scheduler_file", "token_file", "tls_ca", "tls_cert", "tls_key")


def command_line() -> CommandLine:
    """Return the command line of ``psdist-worker``."""
    return CommandLine(
        "psdist-worker",
        "Runs this node's workers. Scheduler and servers run elsewhere.",
        (
            *flags_of(AgentSettings),
            *grouped(
                NODE_TITLE,
                Flag("--rdzv-endpoint", "as --scheduler", scheduler_text, "", "HOST:PORT",
                     variables=torchrun("rdzv-endpoint")),
                Flag("--master-addr", "as --scheduler, without the port", text, "", "HOST",
                     variables=torchrun("master-addr")),
                Flag("--master-port", "its port", integer(1, 65535), None, "PORT",
                     variables=torchrun("master-port"), needs=("--master-addr", "--standalone")),
                Flag("--rdzv-id", "as --run-id", check_run_id, "", "NAME", variables=torchrun("rdzv-id")),
                # PET_RDZV_BACKEND is not read: launchers of torch scripts set it to torch's own backend.
                Flag("--rdzv-backend", "psdist's scheduler, whichever of torch's you name: psdist, c10d or static",
                     rendezvous_backend, "psdist", "NAME"),
                Flag("--standalone", "run everything on this machine, as psdist run does, without snapshots",
                     variables=torchrun("standalone")),
            ),
            CONFIG_FLAG,
        ),
        SCRIPT_USAGE,
        EPILOG,
        first=("--scheduler", "--nnodes", "--nproc-per-node", "--run-id", "--token-file"),
        elsewhere=OF_WORKER,
    )  # fmt: skip


def scheduler_of(given: Namespace, environ: Mapping[str, str]) -> tuple[str, Path | None]:
    """Return address or address file of the scheduler; the command line takes precedence over variables. Neither, if
    only the run is named.

    Raises ConfigurationError if not even the run is named, or for a scheduler without a port.
    """
    for considered in (given.explicit, frozenset(vars(given))):
        if given.scheduler and "scheduler" in considered:
            return given.scheduler, None
        if given.scheduler_file is not None and "scheduler_file" in considered:
            return "", given.scheduler_file
        if given.rdzv_endpoint and "rdzv_endpoint" in considered:
            return given.rdzv_endpoint, None
        if given.master_addr and "master_addr" in considered:
            if given.master_port is None:
                raise ConfigurationError(f"--master-addr {given.master_addr} names no port: add --master-port")
            return f"{given.master_addr}:{given.master_port}", None
    address = find_scheduler(environ)
    if not address and not (given.run_id or given.rdzv_id):
        raise ConfigurationError(
            "no scheduler: pass --scheduler HOST:PORT, set PSDIST_SCHEDULER, or name a run on this machine by --run-id"
        )
    return address, None


def agent_settings(given: Namespace, environ: Mapping[str, str]) -> AgentSettings:
    """Return the parsed flags as settings.

    Raises ConfigurationError, and SchedulerUnreachableError if the run that was named instead of a scheduler is not on
    this machine.
    """
    run_id, token_file = given.run_id or given.rdzv_id, given.token_file
    address, file = scheduler_of(given, environ)
    found = None if address or file is not None else choose_run(run_id, environ)
    if found is not None:  # Workers of psdist run need no TLS and no nodes, so any number may join.
        file, token_file = found.address_file, token_file or Path(found.token_file)
        others = {"tls_ca": None, "tls_cert": None, "tls_key": None}
        nodes, node_rank, task = given.nnodes or (1, WORLD_MAX), given.node_rank, None
    else:
        others, task = {}, find_task(environ)
        nodes, node_rank = place_of(given, task)
    return read(
        AgentSettings, given, command=tuple(given.command), scheduler=address, scheduler_file=file,
        token_file=token_file, nodes=nodes, node_rank=node_rank, run_id=run_id, task=task, **others,
    )  # fmt: skip


def place_of(given: Namespace, task: LauncherTask | None) -> tuple[tuple[int, int], int | None]:
    """Return the number of nodes, and the rank of this one: None lets the scheduler assign it.

    Each task of srun or mpirun is one node. With --nnodes MIN:MAX the scheduler assigns the ranks, since nodes may come
    and go. Raises ConfigurationError if flags or variables contradict the launcher.
    """
    if task is None:
        return given.nnodes or (1, 1), given.node_rank
    least, most = nodes = given.nnodes or (task.count, task.count)
    if not least <= task.count <= most:
        text = str(least) if least == most else f"{least}:{most}"
        raise _contradiction(given, "nnodes", text, f"{task.count_variable} is {task.count}", task)
    if given.node_rank not in (None, task.rank):
        raise _contradiction(given, "node_rank", str(given.node_rank), f"{task.variable} is {task.rank}", task)
    return nodes, task.rank if least == most else None


def _contradiction(given: Namespace, name: str, value: str, variable: str, task: LauncherTask) -> ConfigurationError:
    flag = "--" + name.replace("_", "-")
    source = given.origins[name].source if name in given.origins else flag
    return ConfigurationError(
        f"{source} is {value}, but {variable}: {task.launcher} started {task.count} tasks, and each task is one node. "
        f"Leave {flag} out, or unset {task.count_variable} if these tasks are not one run"
    )


def _check_standalone(given: Namespace) -> None:
    """Raise ConfigurationError for flags that --standalone would ignore. torchrun ignores those of its rendezvous."""
    ignored = [name for name in _NAMING_A_RUN if name in given.explicit]
    if "nnodes" in given.explicit and given.nnodes[0] > 1:
        ignored.append("nnodes")
    if ignored:
        flag = "--" + ignored[0].replace("_", "-")
        raise ConfigurationError(
            f"{flag} has no effect with --standalone, which starts a run on this machine alone: leave one of them out"
        )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Run the workers of this node. With --standalone, run everything here and ignore torchrun's rendezvous."""
    hint_misplaced(command_line(), given)
    if given.standalone:
        _check_standalone(given)
        run_id = given.run_id or given.rdzv_id
        settings = read(LocalSettings, given, command=tuple(given.command), run_id=run_id, storage_path="")
        return run_local(settings, environ)
    return run_agent(agent_settings(given, environ), environ)
