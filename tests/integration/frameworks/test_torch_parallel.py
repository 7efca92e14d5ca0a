"""PyTorch's own parallelism with the backend ``psdist`` gives what it gives with gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.tree import ROOT

SCRIPT = ROOT / "tests/support/scripts/parallel.py"


def trained(backend: str, path: Path) -> list[dict[str, Tensor]]:
    """Return the results of all ranks."""
    command = [sys.executable, "-W", "ignore", "-m", "psdist", "run", "--max-restarts", "0", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [*command, str(SCRIPT), backend, str(path)], capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: list[dict[str, Tensor]] = torch.load(path, weights_only=True)
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_kinds_equal_gloo(tmp_path: Path) -> None:
    gloo, mine = (trained(backend, tmp_path / backend) for backend in ("gloo", "psdist"))
    assert len(mine) == 4 and len(mine[0]) > 80
    for one, other in zip(mine, gloo, strict=True):
        assert list(one) == list(other)
        # gloo's order of additions is another one.
        differ = {key: float((one[key] - other[key]).norm() / other[key].norm()) for key in one}
        assert {key: value for key, value in differ.items() if value > 1e-6} == {}
