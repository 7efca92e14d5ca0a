"""Runs of the programs in examples."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.tree import ROOT


def run(*words: str, workers: int = 2, servers: int = 2, with_errors: bool = False) -> str:
    """Return the output of ``psdist run`` with an example and its arguments. with_errors: standard error, too."""
    launcher = [
        sys.executable,
        "-m",
        "psdist.cli.main",
        "run",
        "--nservers",
        str(servers),
        "--nproc-per-node",
        str(workers),
    ]
    environment = os.environ | {"NO_COLOR": "1"}
    done = subprocess.run(
        [*launcher, *words], capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr if with_errors else done.stdout
