"""Three runs on one machine at the same time do not disturb each other: each has the output of a run alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = ["-m", "psdist.cli.main", "run", "--nservers", "2", "--nproc-per-node", "2", "examples/digits.py"]


def start(directory: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *COMMAND, "--epochs", "1", "--seed", str(seed)],
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(directory)},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def losses(process: subprocess.Popen[str]) -> list[str]:
    """Return the run's printed losses and accuracies, which do not depend on time: BSP is exact."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    found = re.findall(r"loss [0-9.]+ +test accuracy +[0-9.]+%", output)
    assert found, output
    return found


@pytest.mark.long
def test_three_runs_side_by_side_print_what_each_prints_alone(tmp_path: Path) -> None:
    alone = [losses(start(tmp_path, seed)) for seed in (1, 2)]
    assert alone[0] != alone[1]
    together = [start(tmp_path, seed) for seed in (1, 2, 1)]
    assert [losses(process) for process in together] == [alone[0], alone[1], alone[0]]
