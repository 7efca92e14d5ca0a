"""An offloaded model has the exact bytes of one that ``DistributedOptimizer`` trains.

Two workers in processes of their own, on any number of servers, over each transport, and when a server is killed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import Run

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests/support/torch_offload_comparison.py"
MODELS = "mlp,cnn,transformer,stack"


def check(seen: str, transport: str, models: str) -> None:
    lines = re.findall(r"^\[worker 0\] (\w+) digest (\w+) (\w+) (\w+)$", seen, re.M)
    assert [model for model, *_ in lines] == models.split(",")
    for model, mine, theirs, used in lines:
        assert (mine, used) == (theirs, transport), model


def compare(path: Path, servers: int, transport: str, models: str = MODELS) -> None:
    flags = ("--nservers", str(servers))
    run = Run(path, SCRIPT.read_text(), str(ROOT), "6", models, transport=transport, flags=flags)
    try:
        status, output = run.end()
    finally:
        run.stop()
    assert status == 0, output
    check(output, transport, models)


def test_it_has_the_bytes_of_a_whole_model(tmp_path: Path) -> None:
    """Check layers of many sizes, and of one; ``make long`` checks the other models."""
    compare(tmp_path, 2, "shm", "transformer,stack")


@pytest.mark.long  # The same on other numbers of servers, and over other transports.
@pytest.mark.parametrize(
    ("servers", "transport"), [(1, "grpc"), (1, "shm"), (2, "shm"), (2, "tcp"), (3, "shm"), (3, "grpc")]
)
def test_it_does_so_everywhere(tmp_path: Path, servers: int, transport: str) -> None:
    compare(tmp_path, servers, transport)


@pytest.mark.long  # The failover of servers has tests of its own.
def test_a_server_that_is_killed_changes_no_byte(tmp_path: Path) -> None:
    flags = ("--nservers", "3", "--replicas", "2")
    run = Run(tmp_path, SCRIPT.read_text(), str(ROOT), "40", MODELS, flags=flags)
    try:
        run.until("mlp is under way")
        run.child("psdist_server").kill()
        status, output = run.end()
    finally:
        run.stop()
    assert status == 0, output
    seen = "".join(run.seen) + output
    lines = re.findall(r"^\[worker 0\] (\w+) digest (\w+) (\w+) ", seen, re.M)
    assert [model for model, *_ in lines] == MODELS.split(",")
    assert all(mine == theirs for _, mine, theirs in lines), lines
