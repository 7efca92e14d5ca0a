"""A worker whose interpreter is held for longer than its lease, with real processes: it counts as alive. A stopped
process is expelled, and its push counts once or is reported as dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import Run

#: Rank 1 holds its interpreter twice: between two pushes, like a long call of C code in the script, and in the middle
#: of a push, like a garbage collection. "stop" stops its process instead.
#:
#: In mode "trains" its gradients follow from the weights, so any step that is made twice, or without a worker, changes
#: everything after it. "counts" counts its pushes; "goes-on" counts, too, and rank 0 does not end before rank 1.
_SCRIPT = """
import ctypes, os, pathlib, signal, subprocess, sys
import numpy as np
import psdist
from psdist.client.transport import transport
from psdist.client.transport.shm import ShmConnection

rank, mode, what, seconds = int(os.environ["RANK"]), sys.argv[1], sys.argv[2], float(sys.argv[3])
stops = sys.argv[4:] == ["stop"]
pushes, between, middle, count = 30, 6, 15, 100_000
made, sent, held, payload, send = 0, 0, set(), transport.PushRequest._encode, ShmConnection.send

def hold(where):
    if rank == 1 and where not in held:
        held.add(where)
        print("rank 1 is busy before push", made, flush=True)
        if stops:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            signal.raise_signal(signal.SIGSTOP)
        else:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))

def hold_in_the_middle():
    global sent
    sent = sent + 1 if made == middle else 0
    if sent == 2:
        hold(middle)

def payload_or_hold(job, index, memory):
    hold_in_the_middle()
    return payload(job, index, memory)

def send_or_hold(connection, message):
    send(connection, message)
    hold_in_the_middle()

transport.PushRequest._encode, ShmConnection.send = payload_or_hold, send_or_hold
client = psdist.init().client
optimizer = psdist.optim.Adam(lr=0.1) if what == "trains" else psdist.optim.SGD(lr=1.0)
weights = client.parameters(
    "model", {"w": np.zeros(count, np.float32)}, optimizer,
    {"bsp": psdist.BSP(), "ssp": psdist.SSP(3), "asp": psdist.ASP()}[mode], slice_elements=1 << 13)
values, enough = weights.pull()["w"], pathlib.Path("enough")
# Counting, each step adds 1 everywhere, or, where there are none, each push to the elements of its rank.
mine = np.ones(count, bool) if mode == "bsp" else np.arange(count) % 2 == rank

while not enough.exists() if what == "goes-on" and rank == 0 else made < pushes:
    if made == between:
        hold(between)
    if what == "trains":
        gradient = values + np.random.default_rng((weights.step, rank)).standard_normal(count, np.float32)
    else:
        gradient = np.where(mine, -1.0, 0.0).astype(np.float32)
    values = weights.push_pull({"w": gradient})["w"]
    made += 1
    if what == "goes-on":
        assert (values == weights.version).all(), (np.unique(values), weights.version)
if what == "goes-on":
    enough.touch()
else:
    client.barrier("end")
values, statistics = weights.pull()["w"] if what != "goes-on" else values, weights.statistics()
if what == "counts":
    assert (values[mine] == statistics.pushes).all(), (np.unique(values[mine]), statistics)
print("rank", rank, "life", client.incarnation, "pushes", statistics.pushes, "dropped", statistics.dropped, "resumed",
      statistics.resumed, statistics.transport, "sum", np.float64(values).sum().hex(), flush=True)
if what != "goes-on":
    client.barrier("seen")
"""
_RESULT = re.compile(
    r"rank (?P<rank>\d) life (?P<life>\d+) pushes (?P<pushes>\d+) dropped (?P<dropped>\d+) resumed (?P<resumed>\d+)"
    r" (?P<transport>\w+) sum (?P<sum>\S+)"
)
#: Longer than both leases, and than two pings of a connection. A server's lease is not over while it has the only
#: copies.
_BUSY_SECONDS, _SHORT_LEASE = "4", ("--failure-timeout", "2", "--worker-timeout", "1")
#: Until the connection of a stopped process has broken, and its lease is over.
_STOPPED_SECONDS = "6"
_CASES = (
    ("bsp", "shm"), ("asp", "grpc"), ("bsp", "grpc"), ("asp", "shm"), ("ssp", "shm"), ("bsp", "tcp"), ("asp", "tcp"),
)  # fmt: skip


def _cases(brief: tuple[str, str]) -> list[Any]:
    """Return all cases; ``make test`` runs ``brief``, the others are long."""
    return [pytest.param(*case, marks=[] if case == brief else [pytest.mark.long]) for case in _CASES]


class Result:
    """Final output of a run's workers."""

    def __init__(self, run: Run) -> None:
        status, self.text = run.end()
        assert status == 0, self.text
        self.of = {int(found["rank"]): found.groupdict() for found in _RESULT.finditer(self.text)}
        assert self.of.keys() == {0, 1}, self.text
        assert "Traceback" not in self.text, self.text

    def of_both(self, what: str) -> list[str]:
        return [self.of[rank][what] for rank in (0, 1)]

    @property
    def busy(self) -> int:
        """Return how often a worker was busy."""
        return self.text.count("is busy before push")


Starts = Callable[..., Result]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starts]:
    """Run the script to its end, with these arguments and flags."""
    made: list[Run] = []

    def start(*arguments: str, transport: str, flags: tuple[str, ...] = ()) -> Result:
        made.append(Run(tmp_path, _SCRIPT, *arguments, transport=transport, flags=("--max-restarts", "0", *flags)))
        return Result(made[-1])

    yield start
    for run in made:
        run.stop()


@pytest.mark.parametrize(("mode", "transport"), _cases(("bsp", "shm")))
def test_a_busy_worker_is_not_gone(start: Starts, mode: str, transport: str) -> None:
    what = "trains" if mode == "bsp" else "counts"
    result = start(mode, what, _BUSY_SECONDS, transport=transport, flags=_SHORT_LEASE)
    assert result.busy == 2, result.text
    assert result.of_both("life") == ["1", "1"], result.text
    assert (result.of_both("pushes"), result.of_both("dropped")) == (["30", "30"], ["0", "0"]), result.text
    assert result.of_both("transport") == [transport] * 2, result.text
    assert "is lost" not in result.text, result.text
    if mode == "bsp":
        undisturbed = start(mode, what, "0", transport=transport)
        assert result.of_both("sum") == undisturbed.of_both("sum"), result.text
    else:
        assert result.of_both("sum") == [float(100_000 * 30).hex()] * 2, result.text


@pytest.mark.parametrize(("mode", "transport"), _cases(("asp", "grpc")))
def test_what_an_expelled_worker_pushes_counts_once_or_is_told(start: Starts, mode: str, transport: str) -> None:
    """Check that the other workers continue. In BSP they have closed its step by then; in other modes its push
    continues."""
    what = "goes-on" if mode == "bsp" else "counts"
    result = start(mode, what, _STOPPED_SECONDS, "stop", transport=transport, flags=_SHORT_LEASE)
    assert result.busy == 2 and int(result.of[1]["life"]) >= 3, result.text
    told = re.findall(r"(?:step|push) \d+ of 'model' was dropped: .*", result.text)
    assert len(told) == sum(map(int, result.of_both("dropped"))), result.text
    assert all("--worker-timeout is 1 s" in text and "no sign of life for up to" in text for text in told), told
    mine = result.of[1]
    assert int(mine["pushes"]) + int(mine["dropped"]) == 30, result.text
    if mode == "bsp":
        assert int(mine["dropped"]) >= 1, result.text
    else:
        assert not told and int(mine["resumed"]) >= 2, result.text


#: Rank 1 holds its interpreter before a small and a large call, and while a large one is under way.
_GROUP_SCRIPT = """
import ctypes, os
import numpy as np
import psdist

rank = int(os.environ["RANK"])
with psdist.init() as context:
    group = context.collectives
    for count in (3, 3_000_000, 3_000_000):
        if rank == 1:
            ctypes.PyDLL(None).usleep(4_000_000)
        given = np.full(count, rank + 1.0, np.float32)
        assert (group.all_reduce(given) == 3.0).all()
    print("rank", rank, "life", context.client.incarnation, flush=True)
"""


def test_a_busy_rank_keeps_its_group(tmp_path: Path) -> None:
    status, text = Run.ended(tmp_path, _GROUP_SCRIPT, transport="tcp", flags=("--max-restarts", "0", *_SHORT_LEASE))
    assert status == 0 and "rank 0 life 1" in text and "rank 1 life 1" in text, text
    assert re.search(r"worker-1 .*is not expelled yet .*its process answers pings", text), text


#: Rank 1 stops its own process in its first life, and is not continued.
_STOPPED_SCRIPT = """
import os, pathlib, signal
import numpy as np
import psdist

with psdist.init() as context:
    context.client.barrier("begun")
    if context.rank == 1 and not pathlib.Path("stopped").exists():
        pathlib.Path("stopped").touch()
        signal.raise_signal(signal.SIGSTOP)
    context.client.barrier("end")
"""


def test_the_launcher_ends_and_restarts_a_stopped_worker(tmp_path: Path) -> None:
    status, text = Run.ended(tmp_path, _STOPPED_SCRIPT, flags=("--max-restarts", "1", *_SHORT_LEASE))
    assert status == 0, text
    assert "worker 1 has been stopped for 11 s, as by SIGSTOP: its process is killed" in text, text
    assert "worker 1 failed: killed by SIGKILL; restart 1 of 1" in text, text
