"""``ReconfigurableGroup`` under ``psdist run``: the calls that torchft's Manager makes, and the Manager itself."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from psdist.errors import ClosedError, InvalidArgumentError, InvalidNameError, PeerUnreachableError
from psdist.process_group import ReconfigurableGroup, reconfigurable
from psdist.process_group.link_group import LinkGroup

_CALLS = """
import os
import sys
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

import psdist
from psdist.errors import ClosedError, WaitTimeoutError, WorkerLostError
from psdist.process_group import ReconfigurableGroup

# torchft's tests of a group's calls are functions, which its test cases call with each kind of group.
sys.modules["parameterized"] = SimpleNamespace(parameterized=SimpleNamespace(expand=lambda _: lambda test: test))
from torchft import process_group_test as torchft_tests

context = psdist.init()
rank = context.rank
group = ReconfigurableGroup(timedelta(seconds=120))
other = context.new_group()
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
port = int(other.broadcast([store.port])[0])


def total():
    given = torch.full((5,), 1.0 + rank)
    group.allreduce([given], dist.AllreduceOptions()).wait()
    return given[0].item()


group.configure(f"localhost:{port}/first", "replica", 2 - rank, 3, 1, 0, 1, [0, 1, 2])
assert (group.rank(), group.size(), total()) == (2 - rank, 3, 6), group.rank()
assert group.errored() is None and group.get_error().name == "SUCCESS"
for test in torchft_tests._COLLECTIVE_TO_FUNC.values():
    test(group, group.rank(), torch.tensor([group.rank() + 1]))
work = group.allreduce([torch.ones(2)], dist.AllreduceOptions())
work.wait()
if rank == 2:
    os._exit(0)  # As a killed worker, but without an end of the run.
try:
    total()
except WorkerLostError as error:
    print("lost", error)
assert isinstance(group.errored(), WorkerLostError) and group.get_error().name == "COMM_ERROR"
group.configure(f"localhost:{port}/second", "replica", rank, 2)
assert group.errored() is None and total() == 3
shared = dist.TCPStore("localhost", port, wait_for_workers=False)
shared.set(f"handle/{rank}", group.get_reconfigure_handle())
handles = [shared.get(f"handle/{one}").decode() for one in (1, 0)]
group.reconfigure(SimpleNamespace(handles=handles)).wait()
assert (group.rank(), total()) == (1 - rank, 3)
group.set_timeout(timedelta(seconds=0.2))
if rank == 0:
    try:
        total()
    except WaitTimeoutError as error:
        print("late", error)
    group.abort()
    assert isinstance(group.errored(), WaitTimeoutError)
    try:
        group.configure(f"localhost:{port}/third", "replica", 0, 2)
    except WaitTimeoutError as error:
        print("absent", error)
    shared.set("late", "")
shared.wait(["late"])
group.shutdown()
try:
    group.barrier(dist.BarrierOptions())
except ClosedError as error:
    print("closed", error)
shared.set(f"end/{rank}", "")
shared.wait(["end/0", "end/1"])
print("done", rank)
"""

_TORCHFT = """
import hashlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchft
from torchft._torchft import LighthouseServer

import psdist
from psdist.process_group import ReconfigurableGroup

context = psdist.init()
rank, address, killed = context.rank, Path("lighthouse"), Path("killed")
if rank == 0:
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000, quorum_tick_ms=20
    )
    Path("new").write_text(lighthouse.address())
    os.replace("new", address)
while not address.exists():
    time.sleep(0.01)
torch.manual_seed(rank)
model = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters(), 0.1)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
limit = timedelta(seconds=60)
manager = torchft.Manager(
    pg=ReconfigurableGroup(limit), min_replica_size=1, rank=0, world_size=1, store_addr="localhost",
    store_port=store.port, lighthouse_addr=address.read_text(), replica_id=f"replica_{rank}", timeout=limit,
    load_state_dict=lambda state: (model.load_state_dict(state["model"]), sgd.load_state_dict(state["sgd"])),
    state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
)
ddp, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, sgd)
was_alone, together = killed.exists(), 0
while together < 20:
    optimizer.zero_grad()
    ddp(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
    optimizer.step()
    members = manager.num_participants()
    if rank == 0 and together and members == 1 and not was_alone:
        was_alone = True
        print("alone", flush=True)
    together = together + (members == 2) if members == 2 or not was_alone else 0
    if not was_alone:
        together = min(together, 10)
    if rank == 1 and together == 10 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
print("weights", manager.current_step(), hashlib.sha256(weights).hexdigest(), flush=True)
manager.shutdown(wait=False)
"""


def launched(path: Path, script: str, workers: int, restarts: int) -> tuple[int, str]:
    """Return the exit status and output of a run."""
    (path / "script.py").write_text(script)
    command = [sys.executable, "-W", "ignore", "-m", "psdist", "run", "--max-restarts", str(restarts)]
    command += ["--nservers", "1", "--nproc-per-node", str(workers), "script.py"]
    ended = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=300, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_members_are_replaced_after_a_loss(tmp_path: Path) -> None:
    status, output = launched(tmp_path, _CALLS, 3, 0)
    assert status == 0 and output.count("lost rank 0 is gone") == output.count("done") == 2, output
    assert "late rank 1 reached the timeout of 0.2 s" in output
    assert "absent the 2 members of process group 'torchft' did not all call configure() within 0.2 s" in output
    assert output.count("closed process group 'torchft' has no members: call configure() first") == 2


@pytest.mark.long
def test_the_manager_of_torchft(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    status, output = launched(tmp_path, _TORCHFT, 2, 1)
    ends = re.findall(r"weights (\d+) (\w+)", output)
    assert status == 0 and len(ends) == 2 and ends[0] == ends[1] and int(ends[0][0]) > 30, output
    assert output.count("alone") == 1


class _Context:
    """Context of a worker that makes no calls."""

    def __init__(self) -> None:
        #: How often an error was held back in case all workers stop.
        self.outlasted = 0

    def async_collectives(self) -> Any:
        return SimpleNamespace(identity=("worker-0", 1), outlast_stop=self._outlast_stop)

    async def _outlast_stop(self) -> None:
        self.outlasted += 1


@pytest.fixture
def group() -> ReconfigurableGroup:
    return ReconfigurableGroup(context=_Context())


def test_a_group_without_members(group: ReconfigurableGroup) -> None:
    assert group.errored() is None
    group.abort()
    for call in (group.rank, group.size, lambda: group.allreduce([torch.ones(1)])):
        with pytest.raises(ClosedError, match=r"'torchft' has no members: call configure\(\) first"):
            call()


@pytest.mark.parametrize("address", ["", "localhost/a", "localhost:0/a", "localhost:a/b", ":80/a", "localhost:99999/a"])
def test_an_address_that_is_none(group: ReconfigurableGroup, address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"store_addr=.*: give host:port/prefix of a store of torch"):
        group.configure(address, "replica", 0, 1)


def test_a_store_that_cannot_be_reached(group: ReconfigurableGroup) -> None:
    group.set_timeout(timedelta(seconds=0.2))
    with socket.socket() as listener:
        listener.bind(("localhost", 0))  # Refuses connections, since it does not listen.
        address = f"localhost:{listener.getsockname()[1]}/a"
        with pytest.raises(PeerUnreachableError, match=f"'torchft' cannot reach the store '{address}': .*timed out"):
            group.configure(address, "replica", 0, 1)
    assert group._context.outlasted == 1  # type: ignore[attr-defined]  # the store's worker may have left first


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (-1, 2), (2, 2), (0, 5000), (True, 2), ("0", 2)])
def test_a_place_that_is_none(group: ReconfigurableGroup, rank: Any, size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="out of range: use a whole number from"):
        group.configure("localhost:1/a", "replica", rank, size)


@pytest.mark.parametrize(
    "handle",
    [7, "", "{", "[]", "null", "7", '["worker-0", 1]', '["a b", 1, 0]', '["worker-0", 0, 0]', '["worker-0", 1, -1]',
     '["worker-0", 1.5, 0]', '["worker-0", 1, 0, 0]', '{"a": 1, "b": 2, "c": 3}', "[" * 400, '["w", 1, 0]' + " " * 600],
)  # fmt: skip
def test_a_handle_that_is_none(group: ReconfigurableGroup, handle: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has the handle .*, which is not one of psdist: all members use"):
        group.reconfigure(SimpleNamespace(handles=[handle]))


@pytest.mark.parametrize("handles", [[], None, {"a"}, ["a"] * 5000])
def test_handles_in_no_order(group: ReconfigurableGroup, handles: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="give a list of 1 to 4096 handles"):
        group.reconfigure(SimpleNamespace(handles=handles))


def test_every_call_of_a_group_is_passed_on() -> None:
    known = set(dir(torch.distributed.ProcessGroup)) - set(dir(object))
    own = {name for base in LinkGroup.__mro__[:2] for name, found in vars(base).items() if callable(found)} & known
    passed = set(reconfigurable._CALLS)
    assert own - passed == {"_get_backend", "abort", "set_timeout", "shutdown"}
    assert passed <= own


def test_names_are_checked() -> None:
    with pytest.raises(InvalidNameError, match="group name 'a b'"):
        ReconfigurableGroup(name="a b", context=_Context())
