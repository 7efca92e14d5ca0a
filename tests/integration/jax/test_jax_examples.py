"""The JAX examples as a user runs them: through psdist, and with optax in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.launched import Run

ROOT = Path(__file__).resolve().parents[3]


def plain(path: Path, name: str, steps: int) -> Path:
    """Train an example without psdist. Returns the file with its weights."""
    command = [
        sys.executable,
        f"examples/{name}.py",
        "--plain",
        "--steps",
        str(steps),
        "--save",
        str(path / "plain.npz"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    return path / "plain.npz"


def difference(one: Path, other: Path) -> float:
    """Return the largest difference between the weights in two files."""
    with np.load(one) as mine, np.load(other) as theirs:
        assert mine.files == theirs.files and len(mine.files) > 1
        return max(float(np.abs(mine[key] - theirs[key]).max()) for key in mine.files)


def train(path: Path, name: str, *arguments: str, kills: bool = False) -> str:
    """Train an example on two workers and two copies of each shard. Returns the output, from step 20 if a server is
    killed there."""
    flags = ("--replicas", "2", "--run-id", name, "--storage-path", str(path / "runs"))
    with Run(path, (ROOT / f"examples/{name}.py").read_text(), *arguments, flags=flags) as run:
        if kills:
            run.until(r"\[worker 0\] step 20 ")
            run.child("psdist_server", "server-1").kill()
        status, output = run.end()
    assert status == 0, output
    return output


def test_flax_equals_one_process_over_a_killed_server(tmp_path: Path) -> None:
    saved = tmp_path / "saved.npz"
    train(tmp_path, "jax_flax", "--steps", "40", "--save", str(saved), kills=True)
    assert difference(plain(tmp_path, "jax_flax", 40), saved) < 1e-5


@pytest.mark.long  # The same as with Flax, but for the framework.
def test_equinox_equals_one_process_over_a_killed_server(tmp_path: Path) -> None:
    saved = tmp_path / "saved.npz"
    train(tmp_path, "jax_equinox", "--steps", "200", "--save", str(saved), kills=True)
    assert difference(plain(tmp_path, "jax_equinox", 200), saved) < 1e-5


def test_a_few_lines_differ() -> None:
    marked = re.findall(r"^.*\S  # psdist$", (ROOT / "examples/jax_flax.py").read_text(), re.M)
    assert len(marked) == 4
