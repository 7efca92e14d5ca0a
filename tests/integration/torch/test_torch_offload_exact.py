"""An offloaded model has the exact bytes of one that ``DistributedOptimizer`` trains.

Two workers in processes of their own, on any number of servers, over each transport.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import Run

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests/support/torch_offload_comparison.py"
MODELS = "mlp,cnn,transformer,stack"


def compare(path: Path, servers: int, transport: str, models: str = MODELS) -> None:
    flags = ("--nservers", str(servers))
    status, output = Run.ended(path, SCRIPT.read_text(), str(ROOT), "6", models, transport=transport, flags=flags)
    assert status == 0, output
    lines = re.findall(r"^\[worker 0\] (\w+) digest (\w+) (\w+) (\w+)$", output, re.M)
    assert [model for model, *_ in lines] == models.split(",")
    for model, mine, theirs, used in lines:
        assert (mine, used) == (theirs, transport), model


def test_it_has_the_bytes_of_a_whole_model(tmp_path: Path) -> None:
    """Check layers of many sizes, and of one; ``make long`` checks the other models."""
    compare(tmp_path, 2, "shm", "transformer,stack")


@pytest.mark.long  # The same on other numbers of servers, and over other transports.
@pytest.mark.parametrize(
    ("servers", "transport"), [(1, "grpc"), (1, "shm"), (2, "shm"), (2, "tcp"), (3, "shm"), (3, "grpc")]
)
def test_it_does_so_everywhere(tmp_path: Path, servers: int, transport: str) -> None:
    compare(tmp_path, servers, transport)
