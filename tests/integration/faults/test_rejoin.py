"""A worker that is frozen past its lease, with real processes: the others continue without it. When it thaws it rejoins
by itself, and nothing that it pushed is counted twice."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from tests.support.launched import Run

_SCRIPT = """
import itertools, os, pathlib, signal, sys, time
import numpy as np
import psdist
from psdist.client.transport import transport
from psdist.client.transport.shm import ShmConnection

rank, consistency, count = int(os.environ["RANK"]), sys.argv[1], 200_000
stops_at, sent = (40 if rank == 1 else 10**9), 0
payload, send = transport.PushRequest._encode, ShmConnection.send
enough = pathlib.Path("enough")

def stop_in_time():
    global sent
    sent += 1
    if sent == stops_at:
        print("rank 1 stops at", weights.step, "as", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

def payload_or_stop(job, index, memory):
    stop_in_time()
    return payload(job, index, memory)

def send_or_stop(connection, message):
    send(connection, message)
    stop_in_time()

transport.PushRequest._encode = payload_or_stop
ShmConnection.send = send_or_stop
client = psdist.init().client
weights = client.parameters(
    "model", {"w": np.zeros(count, np.float32)}, psdist.optim.SGD(lr=1.0),
    {"bsp": psdist.BSP(), "ssp": psdist.SSP(3), "asp": psdist.ASP()}[consistency], slice_elements=1 << 13)
# BSP: each update adds 1 everywhere. Else each push adds 1 to the elements of its rank.
mine = np.ones(count, bool) if consistency == "bsp" else np.arange(count) % 2 == rank
gradient = {"w": np.where(mine, -1.0, 0.0).astype(np.float32)}
after = 0
for step in itertools.count():
    time.sleep(0.005)  # as with a model: who waits for no others would take the processors for as long as it can
    values = weights.push_pull(gradient)["w"]
    statistics = weights.statistics()
    if consistency == "bsp":
        assert (values == weights.version).all(), (np.unique(values), weights.version)
    else:
        low, high = statistics.pushes, statistics.pushes + statistics.dropped
        assert low <= values[mine].min() <= values[mine].max() <= high, (low, np.unique(values[mine]), high)
    if step % 20 == 0:
        print("rank", rank, "has made step", step, "version", weights.version, flush=True)
    if rank == 1 and client.incarnation > 1:
        after += 1
        if after == 30:
            print("rank 1 dropped", statistics.dropped, "resumed", statistics.resumed, statistics.transport, flush=True)
            enough.touch()
    if enough.exists():
        break
print("rank", rank, "ends well after", step, flush=True)
"""


#: Long enough for a worker that a busy machine holds up.
_LEASE = ("--worker-timeout", "6")


@pytest.mark.parametrize(
    ("consistency", "transport"),
    [
        ("bsp", "shm"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in itertools.product(("bsp", "asp"), ("grpc", "shm", "tcp"))
            if case != ("bsp", "shm")
        ),
        pytest.param("ssp", "shm", marks=pytest.mark.long),
    ],
)
def test_a_frozen_worker_takes_part_again(tmp_path: Path, runs: list[Run], consistency: str, transport: str) -> None:
    runs.append(Run(tmp_path, _SCRIPT, consistency, transport=transport, flags=_LEASE))
    frozen = int(runs[0].until(r"rank 1 stops at \d+ as (\d+)")[1])
    # The others continue: in BSP and SSP only because they no longer wait for it.
    runs[0].until(r"worker-1 .*is lost: ")
    runs[0].until(r"rank 0 has made step", 3)
    os.kill(frozen, signal.SIGCONT)
    # Its step was closed without it. In a mode without steps nothing is closed, so that push continues.
    dropped = consistency == "bsp"
    runs[0].until(rf"rank 1 dropped {dropped:d} resumed {not dropped:d} {transport}")
    status, text = runs[0].end()
    everything = "".join(runs[0].seen) + text
    assert status == 0, everything
    assert all(f"rank {rank} ends well" in everything for rank in (0, 1)), everything
    assert ("was dropped: " in everything) == dropped, everything
    assert "no sign of life for up to" in everything or not dropped, everything
    assert "Traceback" not in everything, everything


_WRITER = """
import itertools, os, pathlib, signal, sys, time
import numpy as np
import psdist

rank, consistency = int(os.environ["RANK"]), sys.argv[1]
enough = pathlib.Path("enough")
client = psdist.init().client
start = {"w": np.zeros(1000, np.float32), "flag": np.zeros(1, np.float32)}
weights = client.parameters(
    "model", start, psdist.optim.SGD(lr=1.0), {"bsp": psdist.BSP(), "asp": psdist.ASP()}[consistency])
gradient = {"w": np.full(1000, -1.0, np.float32), "flag": np.zeros(1, np.float32)}
after = 0
for step in itertools.count():
    time.sleep(0.005)
    if rank == 1 and step == 10:
        weights.assign({"flag": np.full(1, 7.0, np.float32)})
        print("rank 1 stops as", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        weights.pull()
    weights.push(gradient)
    if step % 20 == 0:
        print("rank", rank, "has made step", step, flush=True)
    after += rank == 1 and client.incarnation > 1
    if after == 10:
        flag = float(weights.pull()["flag"][0])
        print("rank 1 dropped", weights._async._order.drops.writes, "writes, the flag is", flag, flush=True)
        enough.touch()
    if enough.exists():
        break
"""


@pytest.mark.parametrize(
    ("consistency", "dropped", "flag"), [("bsp", 1, 0.0), pytest.param("asp", 0, 7.0, marks=pytest.mark.long)]
)
def test_a_frozen_worker_keeps_what_it_wrote_if_its_push_continues(
    tmp_path: Path, runs: list[Run], consistency: str, dropped: int, flag: float
) -> None:
    """It is frozen between the write and the push. In BSP the others make the step without it."""
    runs.append(Run(tmp_path, _WRITER, consistency, flags=_LEASE))
    frozen = int(runs[0].until(r"rank 1 stops as (\d+)")[1])
    runs[0].until(r"worker-1 .*is lost: ")
    runs[0].until(r"rank 0 has made step", 3)
    os.kill(frozen, signal.SIGCONT)
    runs[0].until(rf"rank 1 dropped {dropped} writes, the flag is {flag}")
    status, text = runs[0].end()
    everything = "".join(runs[0].seen) + text
    assert status == 0, everything
    assert ("weights that the script wrote before push 10 of 'model' were dropped" in everything) == bool(dropped)
