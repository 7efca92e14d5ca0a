"""``psdist run``: scheduler, servers and workers on this machine. Flags in, ``LocalOptions`` out."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import get_args

from psdist.errors import ConfigurationError
from psdist.launch.local import LocalOptions, run_local
from psdist.launch.metrics.run_metrics import MetricsOptions
from psdist.launch.output import Routing, parse_ranks, parse_streams
from psdist.launch.plan import SIGNALS, ScriptKind, ScriptOptions
from psdist.launch.shutdown import STOP_TIMEOUT_SECONDS
from psdist.settings.config import METRICS_INTERVAL_SECONDS, START_TIMEOUT_SECONDS, ProgressName, devices_text
from psdist.settings.flags import CommandLine, Flag, grouped, integer, one_of, seconds, text, torchrun
from psdist.settings.programs import (
    TIMEOUTS_TITLE,
    log_level_flag,
    run_id_flag,
    save_policy,
    storage_flags,
    timeout_flags,
)
from psdist.wire.limits import REPLICAS_MAX

SCRIPT_USAGE = "script.py [script arguments]"

EPILOG = (
    "Flags come before the script; arguments after it are the script's. PSDIST_SOME_FLAG also sets --some-flag. "
    "Exit status: the script's; 128+n for signal n; 2 wrong use; 65 a script never connected; 69 no scheduler, or "
    "a storage that cannot be read or written; 70 the state of a dead server is lost; 74 the scripts succeeded, but "
    "the snapshot at the end failed (only with --storage-path); 78 a script passed wrong settings or arguments to "
    "psdist. The same command with the same --run-id resumes from the newest snapshot."
)


def processes(value: str) -> int:
    """Convert torchrun's --nproc-per-node: a number, or ``auto`` or ``cpu`` for the cores this process may use."""
    if value in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if value == "gpu":
        raise ValueError("gpu is not supported: give a number, or auto for one process per core")
    return integer(1, 4096)(value)


def signal_numbers(value: str) -> tuple[int, ...]:
    """Convert signal names, separated by commas."""
    numbers = []
    for name in value.split(","):
        try:
            number = signal.Signals[name.strip().upper()]
        except KeyError:
            raise ValueError(f"{name.strip()!r} is not the name of a signal, such as SIGTERM") from None
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ValueError(f"{number.name} cannot be handled")
        numbers.append(int(number))
    return tuple(dict.fromkeys(numbers))


def script_flags() -> tuple[Flag, ...]:
    """Return the flags that ``psdist run`` and ``psdist-worker`` share, spelled as torchrun spells them."""
    workers = grouped(
        "workers",
        Flag("--nproc-per-node", "workers on this machine: a number, auto or cpu", processes, 1, "N",
             variables=torchrun("nproc-per-node")),
        Flag("--max-restarts", "restarts of each worker whose script fails; none after wrong settings or arguments of "
             "psdist", integer(0), 3, "N",
             variables=torchrun("max-restarts")),
        Flag("--monitor-interval", "time between two checks of the workers", seconds(0.001), 0.1, "SECONDS",
             variables=torchrun("monitor-interval")),
        Flag("--signals-to-handle", "signals that end the run in order", signal_numbers, SIGNALS, "NAMES",
             variables=torchrun("signals-to-handle"),
             shown_default=",".join(signal.Signals(number).name for number in SIGNALS)),
        Flag("--start-method", "spawn is the only one", one_of("spawn"), "spawn", "METHOD",
             variables=torchrun("start-method")),
        Flag("--module", "the script is a module, as for python -m", short="-m", variables=torchrun("module")),
        Flag("--no-python", "the script is a program of its own", variables=torchrun("no-python")),
    )  # fmt: skip
    timeouts = grouped(
        TIMEOUTS_TITLE,
        Flag("--stop-timeout", "longest wait for workers to end after SIGTERM", seconds(), STOP_TIMEOUT_SECONDS,
             "SECONDS"),
        Flag("--start-timeout", "longest wait for the scheduler, by this program and by scripts", seconds(),
             START_TIMEOUT_SECONDS, "SECONDS"),
    )  # fmt: skip
    output = grouped(
        "output",
        Flag("--role", "name of the workers in the prefix of their lines", text, "worker", "NAME",
             variables=torchrun("role")),
        Flag("--log-dir", "also write each process's lines to DIR/RUN_ID/worker-0.log and so on, and metrics that "
             "scripts report to metrics.jsonl", Path, None, "DIR",
             variables=torchrun("log-dir")),
        Flag("--redirects", "streams that go to --log-dir only: 1, 2 or 3 (both), or LOCAL_RANK:N,...", parse_streams,
             {}, "N", "-r", torchrun("redirects")),
        Flag("--tee", "streams that go to --log-dir and the console, as above", parse_streams, {}, "N", "-t",
             torchrun("tee")),
        Flag("--tensorboard", "write TensorBoard files of reported metrics to DIR/RUN_ID (pip install "
             "tensorboardX)", Path, None, "DIR"),
        Flag("--progress", "progress line of reported metrics: auto (in place on a terminal), plain or off",
             one_of(*get_args(ProgressName)), "auto", "HOW"),
        Flag("--metrics-interval", "interval over which reported metrics are aggregated", seconds(),
             METRICS_INTERVAL_SECONDS, "SECONDS"),
        Flag("--local-ranks-filter", "show only these local ranks' lines on the console", parse_ranks, None, "RANKS",
             variables=torchrun("local-ranks-filter")),
    )  # fmt: skip
    return (*workers, *timeouts, *output)


def local_flags() -> tuple[Flag, ...]:
    """Return the flags for the processes that ``psdist run`` starts besides the workers."""
    return (
        run_id_flag("name of the run (default: the time and a random number)"),
        *grouped(
            "servers",
            Flag("--nservers", "servers that share the parameters", integer(1, 1024), 2, "N"),
            Flag("--replicas", "copies of each shard, on different servers: with 2 nothing is lost when a server dies",
                 integer(1, REPLICAS_MAX), 1, "N"),
            Flag("--kernel-threads", "threads of each server (default: the cores divided by --nservers)",
                 integer(1, 1024), None, "N"),
            Flag("--server-device", "device of weights and optimizer state: cpu, cuda or cuda:N. A comma-separated "
                 "list is assigned to servers round-robin", devices_text, ("cpu",), "NAMES",
                 shown_default="cpu"),
        ),
        *timeout_flags(),
        *grouped("output", log_level_flag("least level shown of servers and scheduler", "warning")),
        *storage_flags("./psdist-runs/RUN_ID"),
    )  # fmt: skip


def command_line() -> CommandLine:
    """Return the command line of ``psdist run``."""
    return CommandLine(
        "psdist run",
        "Trains on this machine: starts a scheduler, servers, and workers that run the script.",
        (*script_flags(), *local_flags()),
        SCRIPT_USAGE,
        EPILOG,
        first=("--nproc-per-node", "--nservers", "--replicas", "--run-id", "--storage-path"),
    )


def script_options(given: Namespace) -> ScriptOptions:
    """Return the parsed ``script_flags``. Raises ConfigurationError for flags that exclude each other."""
    if given.log_dir is None and any((given.redirects | given.tee).values()):
        raise ConfigurationError("-r/--redirects and -t/--tee write files: say where with --log-dir DIR")
    if given.module and given.no_python:
        raise ConfigurationError("--module and --no-python exclude each other: a module needs Python")
    kinds = {(True, False): ScriptKind.MODULE, (False, True): ScriptKind.PROGRAM}
    return ScriptOptions(
        command=tuple(given.command),
        kind=kinds.get((given.module, given.no_python), ScriptKind.FILE),
        processes=given.nproc_per_node,
        restarts_max=given.max_restarts,
        role=given.role,
        routing=Routing(given.log_dir, given.redirects, given.tee, given.local_ranks_filter),
        metrics=MetricsOptions(given.tensorboard, given.progress, given.metrics_interval),
        signals=given.signals_to_handle,
        interval_seconds=given.monitor_interval,
        start_timeout_seconds=given.start_timeout,
        stop_timeout_seconds=given.stop_timeout,
    )


def local_options(given: Namespace) -> LocalOptions:
    """Return the parsed flags of ``psdist run`` as its options. Raises ConfigurationError."""
    if given.nservers < given.replicas:
        raise ConfigurationError(
            f"--replicas {given.replicas} needs at least as many servers, not --nservers {given.nservers}: copies of a "
            "shard are on different servers"
        )
    return LocalOptions(
        script=script_options(given),
        servers=given.nservers,
        replicas=given.replicas,
        run_id=given.run_id,
        failure_timeout_seconds=given.failure_timeout,
        worker_timeout_seconds=given.worker_timeout,
        kernel_threads=given.kernel_threads,
        devices=given.server_device,
        log_level=given.log_level,
        storage=given.storage_path,
        policy=save_policy(given, given.storage_path != ""),
        fresh=given.fresh,
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Train on this machine; returns the exit status."""
    options = local_options(given)
    hint_misplaced(command_line(), given)
    return run_local(options, environ)


def hint_misplaced(line: CommandLine, given: Namespace) -> None:
    """Report launcher flags that stand after the script, where they have no effect."""
    if found := line.misplaced(given.command):
        hint = f"{', '.join(found)} after {given.command[0]} went to the script; flags come before it"
        with suppress(OSError):  # Train even if the hint cannot be printed.
            print(f"{line.program}: hint: {hint}", file=sys.stderr, flush=True)
