"""Checks of a script before anything is started, and the remedy for the error that ended it.

A script that cannot be run is refused here, with the cause and the remedy. The script itself is not imported or
compiled: that would run the user's code in the launcher.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError
from psdist.machine import python
from psdist.settings import exit_codes

_SHEBANG: Final = b"#!"
_ELF: Final = b"\x7fELF"
#: Longest first line that Linux reads for the interpreter.
_LINE_BYTES: Final = 256
#: Beside the script, this file would be imported instead of psdist.
_OWN_FILE: Final = "psdist.py"
_PYTHON_SUFFIXES: Final = (".py", ".pyw", ".pyz", ".pyc")


class ScriptKind(Enum):
    """Meaning of the first word of the command."""

    FILE = "file"
    MODULE = "module"
    PROGRAM = "program"


def check_script(kind: ScriptKind, name: str) -> None:
    """Raise ConfigurationError, with the reason, if the script cannot be run."""
    folder = Path(name).parent if kind is ScriptKind.FILE else Path()
    if kind is not ScriptKind.PROGRAM and (folder / _OWN_FILE).is_file():
        raise ConfigurationError(
            f"{(folder / _OWN_FILE).absolute()} hides the package psdist from the script: rename it"
        )
    {ScriptKind.FILE: _check_file, ScriptKind.MODULE: _check_module, ScriptKind.PROGRAM: _check_program}[kind](name)


def _check_program(name: str) -> None:
    found = shutil.which(name)
    if found is None:
        path = Path(name)
        if path.is_dir():
            raise ConfigurationError(f"the program {name} is a directory: name a file in it")
        if not path.exists():
            raise ConfigurationError(f"the program {name} does not exist, or not in a directory of PATH")
        if os.access(path, os.X_OK):  # In the working directory, which is not in PATH.
            raise ConfigurationError(f"the program {name} is not in a directory of PATH: write ./{name}")
        raise ConfigurationError(f"the program {name} may not be executed: chmod +x {name}")
    line = _first_line(Path(found))
    if not line.startswith(_SHEBANG):
        if line.isascii() and line.decode().isprintable() and line:
            raise ConfigurationError(f"the first line of {name} names no interpreter: write one, such as #!/bin/sh")
        return
    if line.endswith(b"\r"):
        raise ConfigurationError(
            f"the lines of {name} end as in files of Windows (CR LF), so that no interpreter is found: convert it by "
            f"sed -i 's/\\r$//' {name}"
        )
    interpreter = os.fsdecode(line.removeprefix(_SHEBANG)).split(maxsplit=1)[:1]
    if interpreter and not os.access(interpreter[0], os.X_OK):
        raise ConfigurationError(
            f"{interpreter[0]}, which the first line of {name} names, does not exist or may not be executed: correct "
            "that line"
        )


def _check_module(name: str) -> None:
    if "/" in name or (name.endswith(".py") and Path(name).is_file()):
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigurationError(
            f"--module {name} is a file: write --module {module} for the module, or leave --module out"
        )
    # Look up the first part only: a search for the rest would run the package's own code in the launcher.
    top = name.partition(".")[0]
    if top in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise ConfigurationError(
            f"there is no module named {top} (--module {name}), neither here nor in {python()}: start psdist in the "
            "folder that contains it, or install it"
        )


def _check_file(name: str) -> None:
    path = Path(name)
    if not path.exists():
        raise ConfigurationError(f"the script {path.absolute()} does not exist{_instead_of(path)}")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigurationError(
            f"the script {path.absolute()} is a directory without a __main__.py: name a file in it"
        )
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"the script {path.absolute()} may not be read: chmod +r {name}")
    if path.suffix == ".ipynb":
        raise ConfigurationError(
            f"the script {name} is a notebook: write its code into a file (jupyter nbconvert --to script {name}), or "
            "call psdist.launch() in it"
        )
    line = _first_line(path)
    is_foreign = line.startswith(_SHEBANG) and b"python" not in line and b"pypy" not in line
    if line.startswith(_ELF) or (is_foreign and path.suffix not in _PYTHON_SUFFIXES):
        what = "a program" if line.startswith(_ELF) else f"a script of {os.fsdecode(line[2:]).strip()}"
        raise ConfigurationError(f"{name} is no Python script, but {what}: pass --no-python before it")


def _instead_of(path: Path) -> str:
    """Return a suggestion for a missing script, as the end of a sentence."""
    if path.name in ("python", "python3"):
        return ": leave python out, since the workers run the script with the Python of psdist"
    if path.with_name(path.name + ".py").is_file():
        return f": did you mean {path}.py?"
    if path.parent == Path() and path.name.replace(".", "/") != path.name:
        module = Path(path.name.replace(".", "/"))
        if module.with_suffix(".py").is_file() or (module / "__init__.py").is_file():
            return f": for the module write --module {path.name}"
    import difflib  # For errors alone.

    scripts = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, scripts, 1)
    return f": did you mean {path.with_name(near[0])}?" if near else ""


def _first_line(path: Path) -> bytes:
    """Return the beginning of a file, up to the end of its first line; empty if it cannot be read."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.readline(_LINE_BYTES).removesuffix(b"\n")
    return b""


# --- after the end ----------------------------------------------------------------------------------------------------

_RELATIVE: Final = "ImportError: attempted relative import with no known parent package"
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '([^']+)'(?P<hidden>; '[^']+' is not a package)?")
_PARTIAL: Final = re.compile(r"\w+Error: .*partially initialized module '([^']+)'")


#: For signals by which a script was killed, and statuses of a shell that reports them.
_OF_SIGNALS: Final = {
    signal.SIGKILL: (
        "the kernel kills by SIGKILL when memory is full (dmesg | grep -i oom): if it did, use smaller batches or "
        "fewer workers"
    ),
    signal.SIGSEGV: "with PYTHONFAULTHANDLER=1 a script that crashes prints where",
}


def remedy_for(kind: ScriptKind, name: str, lines: Iterable[str], status: int = 1) -> str:
    """Return a remedy for the error of a script; empty if its own message says enough.

    lines: its last ones.
    status: its exit status.
    """
    if (number := status - exit_codes.SIGNAL_BASE) in _OF_SIGNALS:
        return _OF_SIGNALS[signal.Signals(number)]
    for line in lines:
        if line.startswith(_RELATIVE) and kind is ScriptKind.FILE:
            folder, module = _module_of(Path(name))
            return f"a file of a package is run as a module: in {folder}, psdist run --module {module}"
        found = _MISSING.match(line)
        hidden = found if found and found["hidden"] else _PARTIAL.match(line)
        if hidden:
            folder = Path(name).parent if kind is ScriptKind.FILE else Path()
            file = folder.absolute() / (hidden[1].partition(".")[0] + ".py")
            return f"{file} hides the package of that name: rename it" if file.is_file() else ""
        is_part = found and "." in found[1] and importlib.util.find_spec(found[1].partition(".")[0])
        if found and not is_part and kind is not ScriptKind.PROGRAM:
            return f"workers run {python()}: install {found[1]!r} there, or start the psdist of the Python that has it"
    return ""


def _module_of(path: Path) -> tuple[Path, str]:
    """Return the folder above the package of a file, and the file's name as a module there."""
    path = path.absolute()
    folder, parts = path.parent.parent, [path.parent.name, path.stem]
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder, parts = folder.parent, [folder.name, *parts]
    return folder, ".".join(parts)
