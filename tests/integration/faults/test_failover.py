"""Servers and the scheduler are killed under load, with two copies of each shard. Nothing that was acknowledged is
lost, nothing counts twice, and a synchronous run gives the exact bytes of a run without a fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import Run

_TRAIN = """
import hashlib, os, sys
import numpy as np
import psdist

rank, steps, clip, count = int(os.environ["RANK"]), int(sys.argv[1]), float(sys.argv[2]), 100_000
client = psdist.init().client
weights = client.parameters(
    "model", {"w": np.linspace(-1, 1, count, dtype=np.float32)}, psdist.optim.Adam(lr=0.01, max_grad_norm=clip),
    slice_elements=1 << 13)
values = weights.pull()
while weights.step < steps:
    rng = np.random.default_rng([rank, weights.step])
    gradient = {"w": values["w"] * 0.1 + rng.standard_normal(count, dtype=np.float32)}
    values = weights.push_pull(gradient, copy=weights.step % 2 == 0)
    assert weights.version == weights.step
    if rank == 0:
        print("made step", weights.step, flush=True)
values = weights.pull()
assert weights.version == steps
print("rank", rank, "has", hashlib.sha256(values["w"].tobytes()).hexdigest(), "resent", weights.statistics().resent)
"""

_COUNT = """
import os, sys
import numpy as np
import psdist

rank, pushes, consistency, count = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2], 100_000
client = psdist.init().client
weights = client.parameters(
    "model", {"w": np.zeros(count, np.float32)}, psdist.optim.SGD(lr=1.0),
    {"ssp": psdist.SSP(4), "asp": psdist.ASP()}[consistency], slice_elements=1 << 13)
mine = np.arange(count) % 2 == rank
gradient = {"w": np.where(mine, -1.0, 0.0).astype(np.float32)}
for push in range(pushes):
    if push % 3:
        weights.push(gradient)
    else:
        values = weights.push_pull(gradient)["w"][mine]
        assert (values == push + 1).all(), (push, np.unique(values))
    if rank == 0:
        print("made step", push, flush=True)
client.barrier("all-pushed")
values = weights.pull()["w"]
assert (values == pushes).all(), np.unique(values)
print("rank", rank, "counts", np.unique(values), "resent", weights.statistics().resent)
"""
#: A killed member is missed immediately. On a busy machine no other member may be, since that would change the result.
_FLAGS = ("--nservers", "3", "--replicas", "2", "--failure-timeout", "15")


def _digests(text: str) -> set[str]:
    found = re.findall(r"rank \d has (\w{64})", text)
    assert len(found) == 2, text
    return set(found)


@pytest.mark.parametrize(
    ("clip", "transport"),
    [
        (0.0, "shm"),
        *(pytest.param(0.0, transport, marks=pytest.mark.long) for transport in ("grpc", "tcp")),
        *(pytest.param(1.0, transport, marks=pytest.mark.long) for transport in ("grpc", "tcp")),
    ],
)
def test_a_killed_server_changes_not_a_bit(tmp_path: Path, runs: list[Run], clip: float, transport: str) -> None:
    arguments = ("60", str(clip))
    (tmp_path / "plain").mkdir()
    runs.append(Run(tmp_path / "plain", _TRAIN, *arguments, transport=transport, flags=("--nservers", "1")))
    status, text = runs[0].end()
    assert status == 0, text
    expected = _digests(text)
    assert len(expected) == 1
    runs.append(Run(tmp_path, _TRAIN, *arguments, transport=transport, flags=_FLAGS))
    run = runs[1]
    run.until("made step 9$")
    run.child("psdist_server", "--server-id", "server-1").kill()
    run.until("made step 40$")
    status, text = run.end()
    everything = "".join(run.seen) + text
    assert status == 0, everything
    assert _digests(everything) == expected, everything
    assert "Traceback" not in everything, everything


@pytest.mark.parametrize(
    ("consistency", "transport"),
    [
        pytest.param("asp", "grpc", marks=pytest.mark.long),
        pytest.param("asp", "shm", marks=pytest.mark.long),
        pytest.param("asp", "tcp", marks=pytest.mark.long),
        pytest.param("ssp", "grpc", marks=pytest.mark.long),
    ],
)
def test_a_killed_server_loses_and_repeats_no_push(
    tmp_path: Path, runs: list[Run], consistency: str, transport: str
) -> None:
    runs.append(Run(tmp_path, _COUNT, "90", consistency, transport=transport, flags=_FLAGS))
    runs[0].until("made step 9$")
    runs[0].child("psdist_server", "--server-id", "server-1").kill()
    status, text = runs[0].end()
    everything = "".join(runs[0].seen) + text
    assert status == 0, everything
    assert everything.count("counts [90.]") == 2, everything
    assert "Traceback" not in everything, everything


def test_a_killed_scheduler_stops_nobody(tmp_path: Path, runs: list[Run]) -> None:
    runs.append(Run(tmp_path, _TRAIN, "60", "0", flags=_FLAGS))
    runs[0].until("made step 5$")
    scheduler = runs[0].child("psdist_scheduler")
    scheduler.kill()
    scheduler.wait(240)
    runs[0].until("made step 30$")
    status, text = runs[0].end()
    everything = "".join(runs[0].seen) + text
    assert status == 0, everything
    assert len(_digests(everything)) == 1, everything
    assert "was dropped" not in everything and "Traceback" not in everything, everything
