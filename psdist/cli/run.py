"""``psdist run``: scheduler, servers and workers on this machine. Flags in, ``LocalOptions`` out."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from psdist.errors import ConfigurationError, InvalidArgumentError
from psdist.launch.local import SIGNALS, LocalOptions, run_local
from psdist.launch.output import Routing, parse_ranks, parse_streams
from psdist.launch.supervisor import STOP_TIMEOUT_SECONDS
from psdist.settings.config import START_TIMEOUT_SECONDS, check_run_id, save_policy, storage_flags, timeout_flags
from psdist.settings.exit_codes import USAGE
from psdist.settings.flags import CommandLine, Flag, fail, integer, one_of, seconds, text, torchrun

SCRIPT_USAGE = "script.py [script arguments]"

EPILOG = (
    "Flags come before the script; what follows it is the script's. --some-flag can also be set by PSDIST_SOME_FLAG. "
    "Exit status: the script's; 128+n for signal n; 2 wrong use; 65 a script never connected; 69 no scheduler, or "
    "a storage that cannot be read or written; 70 what a dead server held is lost; 74 the scripts ended well, but the "
    "snapshot at the end failed (only where --storage-path is given). The same command with the same --run-id goes on "
    "from the newest snapshot."
)


def processes(value: str) -> int:
    """torchrun's --nproc-per-node: a number, or ``auto`` or ``cpu`` for the cores this process may use."""
    if value in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if value == "gpu":
        raise ValueError("gpu is not supported: give a number, or auto for one process per core")
    return integer(1, 4096)(value)


def signal_numbers(value: str) -> tuple[int, ...]:
    """Signals by name, separated by commas."""
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
    """Flags that ``psdist run`` and ``psdist-worker`` share, spelled as torchrun spells them."""
    return (
        Flag("--nproc-per-node", "workers on this machine: a number, auto or cpu", processes, 1, "N",
             variables=torchrun("nproc-per-node")),
        Flag("--max-restarts", "restarts of a worker whose script fails", integer(0), 3, "N",
             variables=torchrun("max-restarts")),
        Flag("--monitor-interval", "time between two looks at the workers", seconds(0.001), 0.1, "SECONDS",
             variables=torchrun("monitor-interval")),
        Flag("--stop-timeout", "longest wait for workers that were asked to end", seconds(), STOP_TIMEOUT_SECONDS,
             "SECONDS"),
        Flag("--start-timeout", "longest wait for the scheduler", seconds(), START_TIMEOUT_SECONDS, "SECONDS"),
        Flag("--role", "name of the workers in the prefix of their lines", text, "worker", "NAME",
             variables=torchrun("role")),
        Flag("--log-dir", "write every process's lines to DIR/RUN_ID/worker-0.log and so on, too", Path, None, "DIR",
             variables=torchrun("log-dir")),
        Flag("--redirects", "streams that go to --log-dir only: 1, 2 or 3 (both), or LOCAL_RANK:N,...", parse_streams,
             {}, "N", "-r", torchrun("redirects")),
        Flag("--tee", "streams that go to --log-dir and the console, as above", parse_streams, {}, "N", "-t",
             torchrun("tee")),
        Flag("--local-ranks-filter", "show only these local ranks' lines on the console", parse_ranks, None, "RANKS",
             variables=torchrun("local-ranks-filter")),
        Flag("--signals-to-handle", "signals that end the run cleanly", signal_numbers, SIGNALS, "NAMES",
             variables=torchrun("signals-to-handle")),
        Flag("--start-method", "spawn is the only one", one_of("spawn"), "spawn", "METHOD",
             variables=torchrun("start-method")),
        Flag("--module", "the script is a module, as for python -m", short="-m", variables=torchrun("module")),
        Flag("--no-python", "the script is a program of its own", variables=torchrun("no-python")),
    )  # fmt: skip


def local_flags() -> tuple[Flag, ...]:
    """Flags for what ``psdist run`` starts besides the workers."""
    return (
        Flag("--nservers", "servers that share the parameters", integer(1, 1024), 2, "N"),
        Flag("--replicas", "copies of each shard, on different servers: with 2 nothing is lost when a server dies",
             integer(1, 2), 1, "N"),
        Flag("--run-id", "name of the run", check_run_id, "", "NAME"),
        *timeout_flags(),
        Flag("--kernel-threads", "threads of each server (default: cores / servers)", integer(1, 1024), None, "N"),
        Flag("--log-level", "least level shown of servers and scheduler",
             one_of("debug", "info", "warning", "error"), "warning", "LEVEL"),
        *storage_flags("./psdist-runs/RUN_ID"),
    )  # fmt: skip


def command_line() -> CommandLine:
    """The flags of ``psdist run``."""
    return CommandLine(
        "psdist run",
        "Trains on this machine: starts a scheduler, servers, and workers that run the script.",
        (*local_flags(), *script_flags()),
        SCRIPT_USAGE,
        EPILOG,
    )


def routing_of(given: Namespace) -> Routing:
    """Where output goes. Raises ConfigurationError for a combination without meaning."""
    if given.log_dir is None and any((given.redirects | given.tee).values()):
        raise ConfigurationError("-r/--redirects and -t/--tee write files: say where with --log-dir DIR")
    return Routing(given.log_dir, given.redirects, given.tee, given.local_ranks_filter)


def hint_misplaced(line: CommandLine, command: Sequence[str]) -> str:
    """One line about launcher flags that stand after the script, or nothing."""
    found = line.misplaced(command)
    if not found:
        return ""
    return f"{line.program}: hint: {', '.join(found)} after {command[0]} went to the script; flags come before it"


def local_options(given: Namespace) -> LocalOptions:
    """The parsed flags of ``psdist run`` as its options. Raises ConfigurationError."""
    if given.nservers < given.replicas:
        raise ConfigurationError(
            f"--replicas {given.replicas} needs at least as many servers, not --nservers {given.nservers}: copies of a "
            "shard lie on different servers"
        )
    return LocalOptions(
        script=tuple(given.command),
        servers=given.nservers,
        replicas=given.replicas,
        processes=given.nproc_per_node,
        restarts_max=given.max_restarts,
        run_id=given.run_id,
        routing=routing_of(given),
        failure_timeout_seconds=given.failure_timeout,
        worker_timeout_seconds=given.worker_timeout,
        kernel_threads=given.kernel_threads,
        start_timeout_seconds=given.start_timeout,
        interval_seconds=given.monitor_interval,
        stop_timeout_seconds=given.stop_timeout,
        module=given.module,
        no_python=given.no_python,
        role=given.role,
        signals=given.signals_to_handle,
        log_level=given.log_level,
        storage=given.storage_path,
        policy=save_policy(given, given.storage_path != ""),
        fresh=given.fresh,
    )


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    environ = os.environ if environ is None else environ
    line = command_line()
    given = line.parse(argv, environ)
    return start(line, local_options_or_fail(line, given), given.command, environ)


def local_options_or_fail(line: CommandLine, given: Namespace) -> LocalOptions:
    """``local_options``; wrong use ends the program."""
    try:
        return local_options(given)
    except ConfigurationError as error:
        fail(line.program, str(error), USAGE)


def start(line: CommandLine, options: LocalOptions, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs ``options``; what cannot be run ends the program with status 2."""
    hint = hint_misplaced(line, command)
    if hint:
        print(hint, file=sys.stderr, flush=True)
    try:
        return run_local(options, environ)
    except InvalidArgumentError as error:
        fail(line.program, str(error), USAGE)
