"""The Python that runs psdist's own programs: schedulers, servers, workers, compilers of kernels.

It is ``sys.executable``, unless ``PSDIST_PYTHON`` names another. In a frozen application (PyInstaller, Nuitka,
cx_Freeze) and in a program that embeds Python ``sys.executable`` is the application, which would start itself.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

from psdist.errors import ConfigurationError

VARIABLE: Final = "PSDIST_PYTHON"
_REMEDY: Final = (
    f"set {VARIABLE} to a Python in which psdist is installed, or start scheduler and servers beside it "
    "(psdist-scheduler, psdist-server) and set PSDIST_SCHEDULER=HOST:PORT"
)


def python() -> str:
    """Return the Python that runs psdist's programs. Raises ConfigurationError if there is none."""
    if chosen := os.environ.get(VARIABLE, ""):
        if (found := shutil.which(chosen)) is None:
            raise ConfigurationError(f"{VARIABLE}={chosen!r:.200} is no program that can be run: {_REMEDY}")
        return found
    if reason := _unusable(sys.executable):
        raise ConfigurationError(f"psdist cannot start its programs: {reason}; {_REMEDY}")
    return sys.executable


def _unusable(executable: str | None) -> str:
    """Return why ``sys.executable`` is no Python; empty if it is one."""
    if not executable:
        return "this program embeds Python, and sys.executable is not set"
    if getattr(sys, "frozen", False) or hasattr(sys.modules.get("__main__"), "__compiled__"):
        return f"this is a frozen application, and sys.executable is the application itself ({executable:.200})"
    names = (os.path.basename(executable), os.path.basename(os.path.realpath(executable)))
    if not any("py" in name.lower() for name in names):
        return f"this program embeds Python, and sys.executable is the program itself ({executable:.200})"
    return ""
