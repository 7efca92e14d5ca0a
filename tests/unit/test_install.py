"""Output of ``make`` for pip, with lines that pip printed, and with programs in pip's place."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[2] / ".ci" / "install.py"

#: Lines of pip 23 and later, printed to a pipe.
_PRINTED = """\
Looking in indexes: https://pypi.org/simple
Obtaining file:///src
  Installing build dependencies: started
  Installing build dependencies: finished with status 'done'
Collecting numba>=0.63 (from psdist==0.1.0)
  Downloading numba-0.66.0-cp311-cp311-manylinux_2_17_x86_64.whl.metadata (2.8 kB)
Collecting llvmlite (from numba>=0.63->psdist==0.1.0)
  Downloading llvmlite-0.48.0-cp311-cp311-manylinux_2_17_x86_64.whl (56.3 MB)
Collecting numpy>=2.0 (from psdist==0.1.0)
  Using cached numpy-2.4.0-cp311-cp311-manylinux_2_28_x86_64.whl (16.6 MB)
Downloading numba-0.66.0-cp311-cp311-manylinux_2_17_x86_64.whl (3.8 MB)
Installing collected packages: numpy, llvmlite, numba, psdist
Successfully installed llvmlite-0.48.0 numba-0.66.0 numpy-2.4.0 psdist-0.1.0
"""


@pytest.fixture(scope="module")
def install() -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("install", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def played(install: Any, script: str, dot_seconds: float = 60.0) -> tuple[int, str]:
    """Return exit status and text of a program in pip's place."""
    out = io.StringIO()
    status: int = install.run([sys.executable, "-c", script], install.Display(out), dot_seconds)
    return status, out.getvalue()


def test_large_packages_are_named_with_their_sizes(install: Any) -> None:
    status, shown = played(install, f"print({_PRINTED!r}, end='')")
    assert status == 0
    assert shown == "  llvmlite (56.3 MB)\n  numba (3.8 MB)\n  unpacking 4 packages\n  done\n"


def test_silence_has_dots_behind_the_current_line(install: Any) -> None:
    # It continues once its reader has waited long enough to show dots.
    script = "import threading; print('Downloading a-1.whl (1 MB)', flush=True); threading.Event().wait(0.5)"
    status, shown = played(install, script, dot_seconds=0.02)
    # Python's own start may take longer than the first dot.
    assert status == 0 and re.fullmatch(r"\.*\n?  a \(1 MB\)\.+\n  done\n", shown), shown


def test_a_failure_shows_everything_and_has_pips_status(install: Any) -> None:
    script = "import sys; print('Collecting x'); print('ERROR: no matching distribution', file=sys.stderr); sys.exit(3)"
    status, shown = played(install, script)
    assert status == 3 and "pip failed:\n" in shown and "ERROR: no matching distribution" in shown
