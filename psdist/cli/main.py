"""The console programs, and the table of the commands of ``psdist``."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final, NoReturn

from psdist.cli.commands import Command, Group, Leaf, call
from psdist.cli.terminal import UnwritableError, open_closed_streams, tell_errors_apart
from psdist.settings import exit_codes
from psdist.settings.flags import CommandLine
from psdist.version import __version__


def _version(given: Namespace, environ: Mapping[str, str]) -> int:
    print(f"psdist {__version__}")
    return exit_codes.OK


def _warm_up(given: Namespace, environ: Mapping[str, str]) -> int:
    from psdist.settings.own_process import require_working_directory

    require_working_directory()
    _become("psdist_server.kernels", ())


PSDIST: Final = Group(
    "psdist",
    "Trains models through sharded parameter servers.",
    (
        Command("run", "scheduler, servers and workers on this machine: psdist run --nproc-per-node 2 train.py",
                lambda: import_module("psdist.cli.run")),
        Command("config", "print a configuration file for psdist run, and where settings come from",
                lambda: import_module("psdist.cli.config").CONFIG),
        Command("status", "show the state of a run, once or live in panels: psdist status --watch",
                lambda: import_module("psdist.cli.status")),
        Command("events", "print the history of a run: psdist events --follow",
                lambda: import_module("psdist.cli.events")),
        Command("trace", "record some steps for Perfetto: psdist trace --steps 20 --out trace.json",
                lambda: import_module("psdist.cli.trace")),
        Command("stacks", "show where the code of all members stands, to find what hangs",
                lambda: import_module("psdist.cli.stacks")),
        Command("explain", "find the bottleneck of a run, and the setting that would change it",
                lambda: import_module("psdist.cli.explain")),
        Command("report", "write an HTML file about a run, live or finished: psdist report --out run.html",
                lambda: import_module("psdist.cli.report")),
        Command("snapshot", "save, list, show, verify, export or delete snapshots of a run",
                lambda: import_module("psdist.cli.snapshot").SNAPSHOT),
        Command("scale", "add or remove servers or workers while a run trains: psdist scale servers 3",
                lambda: import_module("psdist.cli.servers").SCALE),
        Command("drain", "move everything away from a server: psdist drain server-1",
                lambda: import_module("psdist.cli.servers").DRAIN),
        Command("doctor", "check this machine, and the way to a cluster: psdist doctor --connect HOST:PORT",
                lambda: import_module("psdist.cli.doctor")),
        Command("token", "make a token of a role, such as reader: psdist token create --role reader",
                lambda: import_module("psdist.cli.token").TOKEN),
        Command("generate", "write files for an engine: psdist generate slurm --nodes 4 train.py",
                lambda: import_module("psdist.cli.generated").GENERATE),
        Command("certs", "make, issue and show certificates for mutual TLS: psdist certs init DIR --host HOST",
                lambda: import_module("psdist.cli.certs").CERTS),
        Command("warmup", "compile the kernels ahead of the first run on this machine",
                lambda: Leaf(lambda: CommandLine("psdist warmup", "Compiles all kernels, once on a machine. "
                             "Servers and workers compile those that are missing.", ()), _warm_up)),
        Command("completion", "print a script that completes commands and flags: psdist completion bash",
                lambda: import_module("psdist.cli.completion").COMPLETION),
        Command("version", "print the version of psdist",
                lambda: Leaf(lambda: CommandLine("psdist version", "Prints the version.", ()), _version)),
    ),
    "On several machines: psdist-scheduler, psdist-server and psdist-worker. Each command has --help.",
    {"--version": "version", "-V": "version"},
)  # fmt: skip


def main() -> NoReturn:
    """``psdist``."""
    open_closed_streams()
    _end(lambda: PSDIST.run(sys.argv[1:], os.environ))


def scheduler() -> NoReturn:
    """``psdist-scheduler``."""
    open_closed_streams()
    _become("psdist_scheduler", sys.argv[1:])


def server() -> NoReturn:
    """``psdist-server``."""
    open_closed_streams()
    _become("psdist_server", sys.argv[1:])


def worker() -> NoReturn:
    """``psdist-worker``."""
    open_closed_streams()
    _end(lambda: call(import_module("psdist.cli.worker"), sys.argv[1:], os.environ))


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    # psdist never imports the programs' packages.
    from psdist.launcher.plan import program

    command = program(module)
    os.execv(command[0], [*command, *arguments])


def _end(command: Callable[[], int]) -> NoReturn:
    tell_errors_apart()
    try:
        try:
            status = command()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = exit_codes.SIGNAL_BASE + 2
    except BrokenPipeError:
        status = exit_codes.SIGNAL_BASE + 13
    except UnwritableError as error:
        status = os.EX_IOERR
        with suppress(OSError):
            print(f"psdist: {error.filename} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            from psdist.launcher.output import discard

            # Otherwise Python reports the error again when it closes the stream, and changes the status.
            discard(stream)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
