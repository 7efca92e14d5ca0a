"""The console commands. Each imports only what it needs, when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from psdist.settings import exit_codes

_COMMANDS = "run, status, snapshot, scale, drain, bench, chaos and version"
_HELP = """usage: psdist COMMAND [flags]

Trains models through sharded parameter servers.

commands:
  run      scheduler, servers and workers on this machine: psdist run --nproc-per-node 2 train.py
  status   what a run is doing
  snapshot save, list, show, verify, export or delete snapshots of a run
  scale    more or fewer servers while a run trains: psdist scale servers 3
  drain    move everything away from a server: psdist drain server-1
  bench    what a training step costs, on a cluster or on this machine
  chaos    injects faults into a run of its own and counts what was lost
  version  the version of psdist

On several machines: psdist-scheduler, psdist-server and psdist-worker. Each command has --help.
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """``psdist``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    word = arguments[0] if arguments else ""
    if word in ("", "-h", "--help", "help"):
        print(_HELP, end="", file=sys.stdout if word else sys.stderr)
        raise SystemExit(exit_codes.OK if word else exit_codes.USAGE)
    if word in ("version", "--version", "-V"):
        _end(lambda: _version(arguments[1:]))
    if word == "run":
        _end(lambda: _run(arguments[1:]))
    if word == "status":
        _end(lambda: _status(arguments[1:]))
    if word == "snapshot":
        _end(lambda: _snapshot(arguments[1:]))
    if word == "scale":
        _end(lambda: _scale(arguments[1:]))
    if word == "drain":
        _end(lambda: _drain(arguments[1:]))
    if word == "bench":
        _end(lambda: _bench(arguments[1:]))
    if word == "chaos":
        _end(lambda: _chaos(arguments[1:]))
    from psdist.settings.flags import fail

    fail("psdist", f"there is no command {word!r}: the commands are {_COMMANDS}")


def scheduler() -> NoReturn:
    """``psdist-scheduler``."""
    _become("psdist_scheduler")


def server() -> NoReturn:
    """``psdist-server``."""
    _become("psdist_server")


def worker(argv: Sequence[str] | None = None) -> NoReturn:
    """``psdist-worker``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _end(lambda: _worker(arguments))


def _become(module: str) -> NoReturn:
    # The programs live behind the wire and are never imported here; -P keeps the user's directory off their path.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *sys.argv[1:]])


def _end(command: Callable[[], int]) -> NoReturn:
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = exit_codes.SIGNAL_BASE + 2
    except BrokenPipeError:
        # The reader is gone; without this Python complains once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = exit_codes.SIGNAL_BASE + 13
    raise SystemExit(status)


def _run(arguments: list[str]) -> int:
    from psdist.cli import run

    return run.main(arguments)


def _status(arguments: list[str]) -> int:
    from psdist.cli import status

    return status.main(arguments)


def _snapshot(arguments: list[str]) -> int:
    from psdist.cli import snapshot

    return snapshot.main(arguments)


def _scale(arguments: list[str]) -> int:
    from psdist.cli import scale

    return scale.main(arguments)


def _drain(arguments: list[str]) -> int:
    from psdist.cli import drain

    return drain.main(arguments)


def _bench(arguments: list[str]) -> int:
    from psdist.cli import bench

    return bench.main(arguments)


def _chaos(arguments: list[str]) -> int:
    from psdist.cli import chaos

    return chaos.main(arguments)


def _worker(arguments: list[str]) -> int:
    from psdist.cli import worker as command

    return command.main(arguments)


def _version(arguments: list[str]) -> int:
    from importlib import metadata

    from psdist.settings.flags import CommandLine

    CommandLine("psdist version", "Prints the version.", ()).parse(arguments, {})
    try:
        print(f"psdist {metadata.version('psdist')}")
    except metadata.PackageNotFoundError:
        print("psdist, not installed as a package")
    return exit_codes.OK


if __name__ == "__main__":
    main()
