"""``psdist-worker``: the agent of one node, with torchrun's flags. Flags in, ``AgentOptions`` out."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from psdist.cli.run import EPILOG, SCRIPT_USAGE, hint_misplaced, routing_of, script_flags, start
from psdist.errors import ConfigurationError, InvalidArgumentError, PsdistError, SchedulerUnreachableError
from psdist.launch.agent import AgentOptions, run_agent
from psdist.launch.local import LocalOptions
from psdist.settings.config import address_text, check_run_id, find_scheduler
from psdist.settings.exit_codes import FAILURE, UNAVAILABLE, USAGE
from psdist.settings.flags import CommandLine, Flag, fail, integer, one_of, text, torchrun


def nodes(value: str) -> tuple[int, int]:
    """torchrun's --nnodes: ``N`` or ``MIN:MAX``."""
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", value)
    if match is None:
        raise ValueError(f"{value!r} is not understood: write N or MIN:MAX")
    least = int(match[1])
    most = int(match[2] or least)
    if not 1 <= least <= most:
        raise ValueError(f"{value} is not possible: 1 <= MIN <= MAX must hold")
    return least, most


def command_line() -> CommandLine:
    """The flags of ``psdist-worker``."""
    return CommandLine(
        "psdist-worker",
        "Runs this node's workers. Scheduler and servers run elsewhere.",
        (
            Flag("--scheduler", "the scheduler", address_text, "", "HOST:PORT"),
            Flag("--scheduler-file", "file in which the scheduler leaves its address", Path, None, "FILE"),
            Flag("--rdzv-endpoint", "as --scheduler", address_text, "", "HOST:PORT",
                 variables=torchrun("rdzv-endpoint")),
            Flag("--master-addr", "as --scheduler, without the port", text, "", "HOST",
                 variables=torchrun("master-addr")),
            Flag("--master-port", "its port", integer(1, 65535), None, "PORT", variables=torchrun("master-port")),
            Flag("--token-file", "file with the run's token (or set PSDIST_TOKEN)", Path, None, "FILE", twin=False),
            Flag("--run-id", "name of the run; refused if the scheduler serves another", check_run_id, "", "NAME"),
            Flag("--rdzv-id", "as --run-id", check_run_id, "", "NAME", variables=torchrun("rdzv-id")),
            # PET_RDZV_BACKEND is not read: what runs torch scripts in a cluster sets it to torch's own.
            Flag("--rdzv-backend", "psdist is the only one", one_of("psdist"), "psdist", "NAME"),
            Flag("--nnodes", "nodes that take part: N or MIN:MAX", nodes, (1, 1), "N", variables=torchrun("nnodes")),
            Flag("--node-rank", "number of this node; without it the scheduler gives one", integer(0), None, "N",
                 variables=torchrun("node-rank")),
            Flag("--local-addr", "name of this node for the others", text, "", "HOST",
                 variables=torchrun("local-addr")),
            Flag("--standalone", "everything on this machine, as psdist run, without snapshots",
                 variables=torchrun("standalone")),
            *script_flags(),
        ),
        SCRIPT_USAGE,
        EPILOG,
    )  # fmt: skip


def scheduler_of(given: Namespace, environ: Mapping[str, str]) -> tuple[str, Path | None]:
    """Address or address file of the scheduler; what the command line says counts more than any variable.

    Raises ConfigurationError if none is named, or half of one.
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
    if not address:
        raise ConfigurationError("no scheduler: pass --scheduler HOST:PORT, or set PSDIST_SCHEDULER")
    return address, None


def agent_options(given: Namespace, environ: Mapping[str, str]) -> AgentOptions:
    """The parsed flags as options. Raises ConfigurationError."""
    least, most = given.nnodes
    if given.node_rank is not None and least != most:
        raise ConfigurationError(f"--node-rank needs a fixed number of nodes, not --nnodes {least}:{most}")
    if given.node_rank is not None and given.node_rank >= most:
        raise ConfigurationError(f"--node-rank {given.node_rank} is not below --nnodes {most}: nodes count from 0")
    address, file = scheduler_of(given, environ)
    return AgentOptions(
        script=tuple(given.command),
        scheduler=address,
        scheduler_file=file,
        token_file=given.token_file,
        processes=given.nproc_per_node,
        nodes_min=least,
        nodes_max=most,
        node_rank=given.node_rank,
        run_id=given.run_id or given.rdzv_id,
        local_address=given.local_addr,
        restarts_max=given.max_restarts,
        routing=routing_of(given),
        start_timeout_seconds=given.start_timeout,
        interval_seconds=given.monitor_interval,
        stop_timeout_seconds=given.stop_timeout,
        module=given.module,
        no_python=given.no_python,
        role=given.role,
        signals=given.signals_to_handle,
    )


def standalone_options(given: Namespace) -> LocalOptions:
    """The parsed flags as options of a run on this machine; the flags that name a scheduler do not count."""
    return LocalOptions(
        script=tuple(given.command),
        processes=given.nproc_per_node,
        restarts_max=given.max_restarts,
        run_id=given.run_id or given.rdzv_id,
        routing=routing_of(given),
        start_timeout_seconds=given.start_timeout,
        interval_seconds=given.monitor_interval,
        stop_timeout_seconds=given.stop_timeout,
        module=given.module,
        no_python=given.no_python,
        role=given.role,
        signals=given.signals_to_handle,
    )


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    environ = os.environ if environ is None else environ
    line = command_line()
    given = line.parse(argv, environ)
    try:
        if given.standalone:
            return start(line, standalone_options(given), given.command, environ)
        options = agent_options(given, environ)
        hint = hint_misplaced(line, given.command)
        if hint:
            print(hint, file=sys.stderr, flush=True)
        return run_agent(options, environ)
    except SchedulerUnreachableError as error:
        fail(line.program, str(error), UNAVAILABLE)
    except InvalidArgumentError as error:
        fail(line.program, str(error), USAGE)
    except PsdistError as error:
        fail(line.program, str(error), FAILURE)
