"""Checks the user's script before anything is started, so that a typing error costs no start-up."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
from pathlib import Path

from psdist.errors import ConfigurationError


def check_script(command: list[str], *, module: bool, no_python: bool) -> None:
    """Raises ConfigurationError, naming what is wrong, if ``command`` cannot be run."""
    if module and no_python:
        raise ConfigurationError("--module and --no-python exclude each other: a module needs Python")
    if not command:
        raise ConfigurationError("no script given: name one after the flags, such as train.py")
    if no_python:
        _check_program(command[0])
    elif module:
        _check_module(command[0])
    else:
        _check_file(command[0])


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigurationError(f"the program {name} does not exist or may not be executed")


def _check_module(name: str) -> None:
    # Only the first part is looked for: to look further would run the package's own code in the launcher.
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
