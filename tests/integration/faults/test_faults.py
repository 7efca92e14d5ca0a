"""Faults in the middle of training, with the real launcher and real processes: workers, servers, scheduler, launcher.

Each contribution adds 1 to every weight. A script kills its own process at a known place: inside a push, with some
slices sent and others not.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.launched import Run

_SCRIPT = """
import asyncio, os, signal, sys
import numpy as np
import psdist
from psdist.client.transport import transport
from psdist.client.transport.shm import ShmConnection

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dying, how, first = sys.argv[1].split(","), sys.argv[2], sys.argv[3]
sent, send = 0, ShmConnection.send
payloads = {name: getattr(transport.PushRequest, name) for name in ("payload", "lasting_payload")}  # gRPC, tcp

def die_in_time(slices):
    global sent
    sent += slices
    if f"{rank}.{attempt}" in dying and sent >= 40 + 7 * rank:
        os.kill(os.getpid(), signal.SIGKILL)

def or_die(payload):
    def encode(job, index):
        die_in_time(1)
        return payload(job, index)

    return encode

def send_or_die(connection, message):
    send(connection, message)
    slices = len(message.push.slices)
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, die_in_time, slices)  # uvloop writes at the end of a turn

for name, payload in payloads.items():
    setattr(transport.PushRequest, name, or_die(payload))
ShmConnection.send = send_or_die
client = psdist.init().client
clip = 1e9 if how == "clip" else 0.0
sgd = psdist.optim.SGD(lr=1.0, max_grad_norm=clip)
weights = client.parameters("model", {"w": np.zeros(1_000_000, np.float32)}, sgd, slice_elements=1 << 16)
print("rank", rank, "attempt", attempt, "begins at", weights.first_step, flush=True)
gradient = {"w": np.full(1_000_000, -1.0, np.float32)}
if first == "pull":
    weights.pull()
for step in range(12):
    weights.push(gradient) if how == "push" else weights.push_pull(gradient)
    if "hold" in sys.argv:
        print("rank", rank, "has made step", step, flush=True)
        while "forever" in sys.argv and step == 3:
            weights.push_pull(gradient)
values = weights.pull()["w"]
# Steps that nobody could contribute to any more add nothing: at most two for each join.
assert weights.version - 12 <= values.min() <= values.max() <= weights.version, (weights.version, values)
print("rank", rank, "attempt", attempt, "ends well")
"""


#: Which workers die, and in which push; and the transport that ``make test`` uses, "" for none.
_KILLED = {
    ("1.0", "push_pull", "pull"): "",
    ("0.0,1.0", "push", "push"): "",
    ("0.0,1.0", "push_pull", "pull"): "",
    ("0.0,1.0,1.1", "clip", "push"): "tcp",
}


@pytest.mark.parametrize(
    ("dying", "how", "first", "transport"),
    [
        pytest.param(*case, transport, marks=[] if transport == brief else [pytest.mark.long])
        for case, brief in _KILLED.items()
        for transport in ("shm", "tcp", "grpc")
    ],
)
def test_killed_inside_a_push(
    tmp_path: Path, runs: list[Run], dying: str, how: str, first: str, transport: str
) -> None:
    runs.append(Run(tmp_path, _SCRIPT, dying, how, first, transport=transport))
    status, text = runs[0].end()
    assert status == 0, text
    assert text.count("killed by SIGKILL") == dying.count(".")
    assert all(
        f"rank {rank} attempt {sum(f'{rank}.' in life for life in dying.split(','))} ends well" in text
        for rank in (0, 1)
    ), text
    assert "Traceback" not in text, text


def test_a_server_that_had_the_only_copy_ends_the_run(tmp_path: Path, runs: list[Run]) -> None:
    runs.append(Run(tmp_path, _SCRIPT, "none", "push_pull", "push", "hold", "forever"))
    runs[0].until("has made step 3", 2)
    runs[0].child("psdist_server", "--server-id", "server-1").kill()
    status, text = runs[0].end()
    assert status == 70, text
    last = text.splitlines()[-1]  # by the first to notice: the launcher from its process, or the scheduler
    assert re.search(" psdist: (server 1 died: killed by SIGKILL; the only copy|lost: server-1)", last), text
    assert list(tmp_path.glob("psdist-*")) == []


@pytest.mark.parametrize(
    ("signum", "expected"),
    # Other tests cover the launcher's reaction to each signal without training; this one covers the path through a
    # step.
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
)
def test_a_signal_in_the_middle_of_steps(tmp_path: Path, runs: list[Run], signum: int, expected: int) -> None:
    runs.append(Run(tmp_path, _SCRIPT, "none", "push_pull", "push", "hold", "forever"))
    runs[0].until("has made step 3", 2)
    children = runs[0].family.children(recursive=True)
    runs[0].process.send_signal(signum)
    status, text = runs[0].end()
    assert status == expected, text
    assert "Traceback" not in text or signum == signal.SIGINT, text
    assert not [child for child in children if child.is_running()]
    assert list(tmp_path.glob("psdist-*")) == []


def test_a_killed_launcher_takes_all_with_it(tmp_path: Path, runs: list[Run]) -> None:
    runs.append(Run(tmp_path, _SCRIPT, "none", "push_pull", "push", "hold", "forever"))
    runs[0].until("has made step 3", 2)
    children = runs[0].family.children(recursive=True)
    assert len(children) >= 5
    runs[0].process.kill()
    _, alive = psutil.wait_procs(children, timeout=240)
    assert not alive
