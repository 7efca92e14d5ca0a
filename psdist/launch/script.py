"""The user's script: how it is run, and the check before anything is started, so that a typing error costs no start."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import signal
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError
from psdist.launch.output import Routing
from psdist.launch.shutdown import STOP_TIMEOUT_SECONDS
from psdist.settings.config import START_TIMEOUT_SECONDS

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ScriptKind(Enum):
    """What the first word of the command names."""

    FILE = "file"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """The script that the workers of this machine run, and how they are watched.

    command: a file, module or program (``kind``), then its arguments. restarts_max: of each worker. signals: those that
    end the run in order. interval_seconds: between two checks of the workers.
    """

    command: tuple[str, ...]
    kind: ScriptKind = ScriptKind.FILE
    processes: int = 1
    restarts_max: int = 3
    role: str = "worker"
    routing: Routing = field(default_factory=Routing)
    signals: tuple[int, ...] = SIGNALS
    interval_seconds: float = 0.1
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of a worker: by this Python without output buffering, or as a program of its own."""
        if self.kind is ScriptKind.PROGRAM:
            return self.command
        return (sys.executable, "-u", *(("-m",) if self.kind is ScriptKind.MODULE else ()), *self.command)

    def check(self) -> None:
        """Raises ConfigurationError, which says what is wrong, if the script cannot be run."""
        if not self.command:
            raise ConfigurationError("no script given: name one after the flags, such as train.py")
        checks = {ScriptKind.FILE: _check_file, ScriptKind.MODULE: _check_module, ScriptKind.PROGRAM: _check_program}
        checks[self.kind](self.command[0])


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigurationError(f"the program {name} does not exist or may not be executed")


def _check_module(name: str) -> None:
    # Only the first part is looked up: a search for the rest would run the package's own code in the launcher.
    top = name.partition(".")[0]
    if top in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise ConfigurationError(f"there is no module named {top} (--module {name})")


def _check_file(name: str) -> None:
    path = Path(name)
    if not path.exists():
        raise ConfigurationError(f"the script {path.absolute()} does not exist")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigurationError(f"the script {path.absolute()} is a directory without a __main__.py")
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"the script {path.absolute()} may not be read")
