"""``psdist bench``: the cost of a training step on the user's own cluster.

If a scheduler is named (a flag, or the environment of a launcher), it joins that run as a worker; otherwise it starts a
cluster on this machine. Several workers: ``psdist run --nproc-per-node 4 --no-python psdist bench`` (the worker of rank
0 reports). The keys of the JSON form are stable.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, get_args

from psdist.cli.commands import show
from psdist.cli.step_bench import BenchSettings, StepBench
from psdist.interpreter import python
from psdist.launcher.output import stamped
from psdist.settings.config import INSECURE_VARIABLE, TransportName, find_scheduler, given_credentials
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, flags_of, integer, one_of, read, seconds
from psdist.settings.other_launchers import check_alone
from psdist.settings.preflight import require_working_directory
from psdist.settings.programs import CREDENTIAL_FLAGS, FORMAT_FLAG, SCHEDULER_FLAG, run_id_flag

#: Loading kernels from the cache takes less than this.
_QUIET_SECONDS: Final = 3.0

if TYPE_CHECKING:
    from psdist.client.sync_client import Client


def command_line() -> CommandLine:
    """Return the command line of ``psdist bench``."""
    return CommandLine(
        "psdist bench",
        "Measures training steps: as a worker of the cluster that the environment or --scheduler names, which must be "
        "idle; without one, on a separate cluster on this machine.",
        (
            *flags_of(BenchSettings),
            Flag("--steps", "steps to measure", integer(1, 1_000_000), 20, "N"),
            Flag("--transport", "auto, shm, tcp or grpc", one_of(*get_args(TransportName)), "auto", "NAME"),
            Flag("--nservers", "servers, if it starts a cluster", integer(1, 1024), 2, "N"),
            SCHEDULER_FLAG,
            run_id_flag(),
            *CREDENTIAL_FLAGS,
            Flag("--timeout", "longest wait for the scheduler, and for one step", seconds(0.01), 60.0, "SECONDS"),
            FORMAT_FLAG,
        ),
        epilog="Several workers: psdist run --nproc-per-node 4 --no-python psdist bench --params 1000000",
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Measure, and print the result at rank 0; returns the exit status."""
    with ExitStack() as stack:
        bench = StepBench(stack.enter_context(_client(given, environ, stack)), read(BenchSettings, given))
        result = bench.measure(given.steps)
    if environ.get("RANK", "0") == "0":
        show(given.format, result.as_json(), lambda report: print(table(report)))
    return OK


def _client(given: Namespace, environ: Mapping[str, str], stack: ExitStack) -> Client:
    from psdist.client.sync_client import Client

    times = {"connect_timeout": given.timeout, "request_timeout": given.timeout}
    if given.scheduler or find_scheduler(environ) or environ.get("PSDIST_SCHEDULER_FILE"):
        shown = given_credentials(given, environ)
        if shown.insecure:
            os.environ[INSECURE_VARIABLE] = "1"  # ``Client`` reads it.
        return Client(
            given.scheduler or None, shown.token or None, tls=shown.tls or False,
            run_id=given.run_id or None, transport=given.transport, **times,
        )  # fmt: skip
    require_working_directory()
    check_alone(environ, "pass --scheduler HOST:PORT")
    from psdist.launcher.embedded import EmbeddedCluster

    _compile_kernels()
    cluster = EmbeddedCluster(given.nservers, environ)
    stack.callback(cluster.close)
    return Client(cluster.address, cluster.token, tls=False, run_id=cluster.run_id, transport=given.transport, **times)


def _compile_kernels() -> None:
    """Compile kernels that are not in the cache. Otherwise servers would do so during the first, measured steps."""
    command = [python(), "-m", "psdist_server.kernels"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as compiler:
        try:
            compiler.wait(_QUIET_SECONDS)
        except subprocess.TimeoutExpired:
            text = "compiling kernels, once on this machine; this may take half a minute"
            print(stamped(text), file=sys.stderr, flush=True)
        if compiler.wait():
            raise subprocess.CalledProcessError(compiler.returncode, command)


def table(report: Mapping[str, Any]) -> str:
    """Format the report for people."""
    own = f"{report['step_ms']:.2f} ms (fastest {report['fastest_ms']:.2f}, slowest {report['slowest_ms']:.2f})"
    moved = f"{report['bytes_per_step'] / 1e6:,.1f} MB a step, {report['gigabytes_per_second']:.2f} GB/s"
    what = f"{report['params']:,} parameters, {report['optimizer']}, {report['consistency']}, {report['wire_dtype']}"
    rows = [("model", what), ("step", own), ("steps", str(report["steps"])), ("traffic", moved)]
    rows += [(server, transport) for server, transport in sorted(report["transports"].items())]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{value}" for name, value in rows)
