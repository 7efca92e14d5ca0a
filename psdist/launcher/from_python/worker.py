"""The program of a worker that runs a function: ``python -m psdist.launcher.from_python.worker DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path

from psdist.launcher.from_python.call import run_call

if __name__ == "__main__":
    run_call(Path(sys.argv[1]))
