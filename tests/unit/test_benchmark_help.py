"""``python -m benchmarks.NAME --help`` prints a help, also without the libraries that the benchmark measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Programs of the folder, as modules.
NAMES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "__main__" in path.read_text()
)
#: One with arguments by position, one whose library is missing, one with argparse.
FEW = ("benchmarks.padding", "benchmarks.peers.flight", "benchmarks.memory")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_each_program_has_a_help(name: str) -> None:  # Long: forty interpreters, and the imports of some.
    command = [sys.executable, "-m", name, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and len(done.stdout) > 60 and not done.stderr, done.stderr
