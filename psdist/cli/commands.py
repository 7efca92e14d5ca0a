"""Commands by name: a group's help, the choice of a command, and how a command is run.

A command is a module, or a ``Leaf`` within one, with the same two functions: ``command_line()``, its flags, and
``run(given, environ)``, which returns the exit status. A module is imported only when its command is called, and
``run`` imports grpc, numpy and rich only if it needs them, so that ``psdist run`` starts fast.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from psdist.errors import (
    ConfigurationError,
    InvalidArgumentError,
    PermissionDeniedError,
    PsdistError,
    RunLostError,
    RunNotStartedError,
    SchedulerUnreachableError,
    ServerLostError,
    TlsHandshakeError,
    UnauthenticatedError,
)
from psdist.importing import quickly
from psdist.settings import exit_codes
from psdist.settings.flags import CommandLine
from psdist.settings.flags import fail as end_with

T = TypeVar("T")


class Leaf(NamedTuple):
    """A command without a module of its own."""

    command_line: Callable[[], CommandLine]
    run: Callable[[Namespace, Mapping[str, str]], int]


class Command(NamedTuple):
    """A row of a group: usage, one line of help, and a function that returns the command's module, Leaf or Group."""

    usage: str
    help: str
    load: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Group:
    """Commands that are called by ``program`` and a word. aliases: alternative words for some of them."""

    program: str
    description: str
    commands: tuple[Command, ...]
    epilog: str
    aliases: Mapping[str, str] = field(default_factory=dict)

    def run(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the command that ``argv`` names, and return its exit status. A wrong name ends the program."""
        word = argv[0] if argv else ""
        if word in ("", "-h", "--help", "help"):
            print(self._help(), file=sys.stdout if word else sys.stderr)
            return exit_codes.OK if word else exit_codes.USAGE
        by_name = {command.usage.split()[0]: command for command in self.commands}
        command = by_name.get(self.aliases.get(word, word))
        if command is None:
            end_with(self.program, f"there is no command {word!r}: {self._instead(word, list(by_name))}")
        with quickly():
            chosen = command.load()
        return chosen.run(argv[1:], environ) if isinstance(chosen, Group) else call(chosen, argv[1:], environ)

    def _instead(self, word: str, names: list[str]) -> str:
        """Return the rest of the error about an unknown command."""
        import difflib  # For errors alone.

        if Path(word).suffix == ".py" and "run" in names:
            return f"to run a script, {self.program} run {word}"
        if near := difflib.get_close_matches(word, names, 1):
            return f"did you mean {self.program} {near[0]}?"
        *others, last = names
        programs = ", ".join(f"{self.program}-{role}" for role in ("scheduler", "server", "worker"))
        also = f"; further programs are {programs}" if "run" in names else ""
        return f"the commands are {', '.join(others)} and {last}{also}"

    def _help(self) -> str:
        width = max(len(command.usage) for command in self.commands) + 1
        rows = "\n".join(f"  {command.usage:{width}}{command.help}" for command in self.commands)
        return f"usage: {self.program} COMMAND [flags]\n\n{self.description}\n\ncommands:\n{rows}\n\n{self.epilog}"


def call(command: Any, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command's module or Leaf. Wrong input, and every error of psdist, ends the program with a message and the
    matching exit status."""
    line: CommandLine = command.command_line()
    given = line.parse(argv, environ)
    fail = partial(end_with, as_json=getattr(given, "log_format", "") == "json")
    try:
        status: int = command.run(given, environ)
    except SchedulerUnreachableError as error:
        fail(line.program, str(error), exit_codes.UNAVAILABLE)
    except (UnauthenticatedError, PermissionDeniedError, TlsHandshakeError) as error:
        fail(line.program, str(error), exit_codes.CONFIGURATION)
    except InvalidArgumentError as error:
        fail(line.program, str(error), exit_codes.USAGE)
    except (RunLostError, ServerLostError, RunNotStartedError) as error:
        fail(line.program, str(error), exit_codes.status_of_ended_run(error))
    except PsdistError as error:
        fail(line.program, str(error), exit_codes.FAILURE)
    return status


def show(form: str, result: T, table: Callable[[T], None]) -> None:
    """Print a result: as JSON if ``form`` is "json", else by ``table``."""
    if form == "json":
        print(json.dumps(result, indent=2))
    else:
        table(result)


@contextmanager
def written_whole(path: Path, remedy: str = "") -> Iterator[IO[str]]:
    """Yield a new file, which replaces ``path`` after the block.

    Raises ConfigurationError if that is impossible, and leaves the old file as it was.

    The file has the mode of the one that it replaces, or the mode that the user's umask leaves.

    remedy: another choice besides the name of a file, for the error.
    """
    if path.exists() and not path.is_file():  # The file would take the place of a device, such as /dev/stdout.
        raise ConfigurationError(f"--out {path} exists and is no file: give the name of a file{remedy}")
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            if path.exists():
                os.fchmod(descriptor, path.stat().st_mode & 0o777)
            yield file
        os.replace(draft, path)
    except PsdistError:  # Some are OSErrors, too.
        raise
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with suppress(OSError):
            os.unlink(draft)


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"--out {path} cannot be written: {error.strerror or error}. Give the name of another file"
    )
