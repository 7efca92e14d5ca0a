"""The backend ``psdist`` of torch.distributed: scripts under ``psdist run`` with torch's collectives and DDP."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from psdist import torch_backend
from psdist.errors import InvalidArgumentError, ShapeMismatchError
from psdist.process_group.link_group import LinkGroup, make_group
from psdist.process_group.work import all_reduce_sparse
from tests.support.launched import Run

_HEAD = """
from datetime import timedelta

import torch
import torch.distributed as dist

import psdist.torch_backend

psdist.torch_backend.register()  # As torch does for an installed package.
dist.init_process_group("psdist", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()
"""
_END = """
dist.destroy_process_group()
print("done", rank)
"""


def launched(tmp_path: Path, script: str, workers: int) -> str:
    """Return the output of a run."""
    path = tmp_path / "script.py"
    path.write_text(_HEAD + script + _END)
    command = [sys.executable, "-W", "ignore", "-m", "psdist", "run", "--max-restarts", "0"]
    command += ["--nservers", "1"]  # No server takes part.
    command += ["--nproc-per-node", str(workers), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


_CALLS = """
for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64):
    given = torch.full((2, 3), rank + 1).to(kind)
    dist.all_reduce(given)
    assert torch.equal(given, torch.full((2, 3), size * (size + 1) // 2).to(kind)), kind
moved = torch.full((5,), rank).to(torch.float8_e4m3fn)
dist.broadcast(moved, 1)
assert moved.float().tolist() == [1.0] * 5
complex_sum = torch.full((3,), 1j * rank)
dist.all_reduce(complex_sum)
assert complex_sum[0] == 1j * sum(range(size))
strided = torch.full((4, 6), float(rank)).t()
dist.all_reduce(strided, dist.ReduceOp.MAX)
assert bool((strided == size - 1).all())
found = [torch.zeros(2) for _ in range(size)]
dist.all_gather(found, torch.full((2,), float(rank)))
assert [one[0] for one in found] == list(range(size))
whole = torch.zeros(2 * size)
dist.all_gather_single(whole, torch.full((2,), float(rank)))
assert whole[::2].tolist() == list(range(size))
part = torch.zeros(2)
dist.reduce_scatter_single(part, torch.arange(2.0 * size))
assert part.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
dist.reduce_scatter(part, [torch.full((2,), float(other)) for other in range(size)], dist.ReduceOp.AVG)
assert part.tolist() == [float(rank)] * 2
taken = torch.zeros(size)
dist.all_to_all_single(taken, torch.full((size,), float(rank)))
assert taken.tolist() == list(range(size))
uneven = [torch.zeros(other + 1) for other in range(size)]
dist.all_to_all(uneven, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
assert [one[0] for one in uneven] == list(range(size))
gathered = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
dist.gather(torch.full((1,), float(rank)), gathered)
assert rank or [one.item() for one in gathered] == list(range(size))
scattered = torch.zeros(1)
dist.scatter(scattered, [torch.full((1,), float(other)) for other in range(size)] if rank == 0 else None)
assert scattered.item() == rank
reduced = torch.ones(3)
dist.reduce(reduced, 1)
assert rank != 1 or reduced.tolist() == [size] * 3
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert [one["rank"] for one in objects] == list(range(size))
received = torch.zeros(4)
works = dist.batch_isend_irecv([
    dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % size),
    dist.P2POp(dist.irecv, received, (rank - 1) % size),
])
for work in works:
    work.wait()
assert received[0] == (rank - 1) % size
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(scattered, group=pair)
    assert scattered.item() == 1
dist.barrier()
pending = [dist.all_reduce(torch.full((300_000,), 1.0), async_op=True) for _ in range(5)]
assert all(work.wait() and work.is_success() for work in pending)
for used in (given, moved, complex_sum, strided, *found, whole, part, taken, *uneven, scattered, reduced, received):
    used.untyped_storage().resize_(0)  # FSDP does so between uses.
scattered = torch.ones(1)
"""

_SHARED = """
def floats(*values):
    return torch.tensor([float(value) for value in values])


def waited(*works):
    for work in works:
        work.wait()


views = floats(1 + rank, 2 + rank, 3 + rank)
dist.all_reduce_coalesced([views[:2], views[1:]])
assert views.tolist() == [3, 5, 7], views
for summed in (floats(1 + rank), torch.full((300_000,), 1.0 + rank), torch.full((4, 4), 1.0 + rank)[:, 1]):
    waited(*(dist.all_reduce(summed, async_op=True) for _ in range(3)))
    assert (summed == 12).all(), summed
found, given = [floats(0, 0) for _ in range(2)], floats(rank, rank + 1)
waited(dist.all_gather(found, given, async_op=True), dist.all_reduce(found[1], async_op=True),
       dist.broadcast(given, 0, async_op=True))
assert [one.tolist() for one in found] == [[0, 1], [2, 4]] and given.tolist() == [0, 1]
swapped = floats(rank)
waited(dist.isend(swapped, 1 - rank), dist.irecv(swapped, 1 - rank))
assert swapped.item() == 1 - rank
sent, received = floats(rank + 1), floats(0)
reduced = dist.all_reduce(sent, async_op=True)
waited(dist.isend(sent, 1) if rank == 0 else dist.irecv(received, 0), reduced)
assert received.item() == 3 * rank, "the message is the result"
"""
_FORMS = """
from torch.distributed import distributed_c10d as c10d

world, total = dist.group.WORLD, size * (size + 1) / 2
mine = lambda *shape, **kind: torch.full(shape or (2,), rank + 1.0, **kind)
places = lambda: [torch.zeros(2) for _ in range(size)]
pair = [mine(), mine()]
assert world.allreduce(pair).get_future().wait()[1][0] == 2 * total == pair[0][0]
assert world.allreduce(mine(), op=dist.ReduceOp.MAX).get_future().wait()[0].tolist() == [size] * 2
assert world.allgather([places()], [mine()]).get_future().wait()[1].tolist() == [2.0] * 2
several = [[torch.zeros(2) for _ in range(2 * size)] for _ in range(2)]
assert world.allgather(several, [mine(), -mine()]).get_future().wait()[1][3].tolist() == [-2.0] * 2
at_root = world.gather(places() if rank == 1 else [], mine(), root=1).get_future().wait()
assert rank != 1 or [one[0] for one in at_root] == [1.0, 2.0, 3.0]
assert world.broadcast(mine(), root=1).get_future().wait()[0][0] == 2
assert world.reduce([mine()], 1).get_future().wait()[0][0] == (total if rank == 1 else rank + 1)
assert world.allreduce(mine(dtype=torch.float16)).get_future().wait()[0][0] == total
sparse = [torch.sparse_coo_tensor([[rank]], mine(1), (size,)) for _ in range(2)]
world.allreduce(sparse).wait()
assert sparse[1].to_dense().tolist() == [2.0, 4.0, 6.0]
twice = mine()
c10d.all_reduce_coalesced([twice, twice])
assert twice[0] == total
count = world._get_sequence_number_for_group()
world.barrier(timeout=timedelta(seconds=60)).wait()
assert world._get_sequence_number_for_group() == count + 1
assert world.options._timeout == timedelta(seconds=120)
assert world._device_types == [torch.device("cpu")] and world._get_backend(torch.device("cpu")) is world
assert c10d._get_pg_default_device(world) == torch.device("cpu")
if rank == 0:  # What is refused is no call: the group stays in step.
    for refused in (
        lambda: world.broadcast(mine(), root=9), lambda: dist.all_gather_single(torch.ones(1), mine()),
        lambda: dist.all_to_all_single(torch.ones(size, 2), torch.ones(2, size).t()),
        lambda: world.allreduce([mine(), mine(3)]), lambda: world.gather([places()[1:]], mine()),
    ):
        try:
            refused()
        except ValueError as error:
            assert "psdist::" in str(error), error
        else:
            raise AssertionError
dist.barrier()
"""

_GROUPS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from psdist.errors import ClosedError, DTypeMismatchError, InvalidArgumentError, WaitTimeoutError

if rank == 0:
    found = torch.zeros(4)
    sources = [dist.recv(found) for _ in range(2 * (size - 1))]
    assert sorted(sources) == sorted(list(range(1, size)) * 2), sources
else:
    for _ in range(2):
        dist.send(torch.full((4,), float(rank)), 0)
turned = dist.new_group([2, 0, 1], sort_ranks=False)
found = [torch.zeros(1) for _ in range(size)]
dist.all_gather(found, torch.full((1,), float(rank)), group=turned)
assert [one.item() for one in found] == [2, 0, 1]
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
total = torch.ones(1)
dist.all_reduce(total, group=mesh.get_group("data"))
assert total.item() == size
for device in (None, torch.device("cpu")):
    tensors = [torch.full((3,), float(rank)), torch.full((5,), 1.0)]
    with _coalescing_manager(device=device, async_ops=True) as calls:
        for tensor in tensors:
            dist.all_reduce(tensor)
    calls.wait()
    assert tensors[0][0] == sum(range(size)) and tensors[1][0] == size
with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as calls:
    dist.broadcast(total, 0)
    dist.barrier(async_op=True)
calls.wait()
# The calls of a sparse all-reduce are not mixed with those of the next ones.
sparse = [torch.sparse_coo_tensor([[rank, 0]], torch.ones(2, 3), (size, 3)).coalesce() for _ in range(2)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in (sparse[0], total, sparse[1])]
for work in reversed(works):
    work.wait()
assert sparse[1].to_dense()[:, 0].tolist() == [size + 1] + [1] * (size - 1)
for tensor, error in (
    (torch.ones(2).to(torch.float8_e4m3fn), DTypeMismatchError), (torch.eye(2).to_sparse_csr(), InvalidArgumentError),
):
    try:
        dist.all_reduce(tensor)
    except error as refused:
        print("refused", refused)
some = dist.new_group()
some.monitored_barrier(timedelta(seconds=60))
dist.barrier()
if rank == 0:
    try:
        some.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
    except WaitTimeoutError as error:
        assert isinstance(error, RuntimeError)
        print("monitored", error)
dist.barrier()
world = dist.group.WORLD
dist.destroy_process_group()
try:
    world.allreduce([torch.ones(1)]).wait()
except ClosedError:
    print("closed")
dist.init_process_group("cpu:psdist", store=dist.HashStore(), rank=rank, world_size=size)
dist.all_reduce(total)
"""


_DDP = """
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
alone = torch.nn.Linear(300, 300)
alone.load_state_dict(model.module.state_dict())
for net in (model, alone):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        ranks = [rank] if net is model else range(size)
        batch = torch.cat([torch.full((4, 300), (1.0 + other + step) / 300) for other in ranks])
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
assert torch.allclose(model.module.weight, alone.weight, atol=1e-6)


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 8), (1.0 + rank + step) / 8)).square().mean().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])


from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

weights = []
for kind in ("plain", "fp16", "compiled", "sharded"):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    if kind == "sharded":
        net = FullyShardedDataParallel(net, device_id=torch.device('cpu'))
    else:
        net = DistributedDataParallel(net)
    if kind == "fp16":
        net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    weights.append(train(torch.compile(net, backend="eager") if kind == "compiled" else net))
    assert torch.allclose(weights[-1], weights[0], atol=1e-3 if kind == "fp16" else 1e-6), kind
place = Path(__file__).with_name("saved")
dcp.async_save({"weights": weights[0]}, checkpoint_id=place).result()
found = {"weights": torch.zeros_like(weights[0])}
dcp.load(found, checkpoint_id=place)
assert torch.equal(found["weights"], weights[0])
given = {"weight": torch.ones(2, 2), "bias": torch.ones(2)} if rank == 0 else {}
net = torch.nn.Linear(2, 2)
set_model_state_dict(net, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
assert bool((net.weight == 1).all())
try:
    dist.all_reduce(torch.ones(2 + (rank == 1)))
except psdist.errors.CollectiveMismatchError as error:
    assert "shape=(2,)" in str(error) and "shape=(3,)" in str(error)
    print("differs", rank)
"""


def test_all_calls_groups_and_ddp(tmp_path: Path) -> None:
    output = launched(tmp_path, _CALLS + _FORMS + _GROUPS + _DDP, 3)
    assert output.count("done") == output.count("closed") == output.count("differs") == 3
    assert "monitored Ranks 1, 2 failed to pass monitoredBarrier in 200 ms" in output
    assert output.count("torch.float8_e4m3fn can be moved, but not reduced") == 3
    assert output.count("only supports dense tensors, and got layout torch.sparse_csr") == 3


_CROSSED = """
groups = [dist.new_group() for _ in range(2)]
given = torch.ones(3)
for group in groups:
    dist.all_reduce(given, group=group)
later = dist.all_reduce(given.clone(), async_op=True)
waits = dist.all_reduce(given, group=groups[rank], async_op=True)
try:
    waits.wait()
    print("ended")
except RuntimeError as error:
    print(f"rank {rank}: {error}")
later.wait()
dist.barrier()  # A rank that ends before the other has heard of the deadlock ends its call by another error.
"""


def test_ranks_that_wait_for_each_other_get_an_error(tmp_path: Path) -> None:
    output = launched(tmp_path, _CROSSED, 2)
    assert output.count("which waits in all_reduce(") >= 2 and "ended" not in output, output
    assert all(f"rank {rank}: worker-" in output for rank in range(2)), output


def test_calls_that_share_memory(tmp_path: Path) -> None:
    assert launched(tmp_path, _SHARED, 2).count("done") == 2


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"has no .*PREMUL_SUM.*: use one of SUM, AVG"):
        LinkGroup._op(SimpleNamespace(reduceOp=dist.ReduceOp.PREMUL_SUM))
    options = SimpleNamespace(global_ranks_in_group=[], group_size=2, group_rank=1, store=dist.HashStore())
    with pytest.raises(InvalidArgumentError, match=r"rank 1 of \[0, 1\] is rank 0 of the run: start .* RANK"):
        make_group(options, None, lambda: SimpleNamespace(rank=0))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("count", [-1, 5])
async def test_a_rank_cannot_announce_more_sparse_values_than_a_tensor_has_places(count: int) -> None:
    async def all_gather(given: np.ndarray, timeout: float | None) -> np.ndarray:
        return np.stack([given, [count, *given[1:]]])

    group: Any = SimpleNamespace(all_gather=all_gather, size=2)
    tensor = torch.sparse_coo_tensor([[0], [1]], torch.ones(1), (2, 2), check_invariants=True)
    with pytest.raises(ShapeMismatchError, match=rf"announce \[1, {count}\] values .* 4 places"):
        await all_reduce_sparse(group, [tensor], "sum", None)


def test_torch_finds_the_backend_of_an_installed_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch.backends"] == {"psdist": "psdist.torch_backend:register"}
    torch_backend.register()
    assert "PSDIST" in dist.Backend._plugins


_ENDLESS = """
context = psdist.init()
while True:
    dist.all_reduce(torch.ones(10))
    print("reduced", flush=True)
"""


def test_a_script_that_waits_in_a_collective_ends_in_order(tmp_path: Path) -> None:
    with Run(tmp_path, _HEAD + _ENDLESS, flags=("--nservers", "1")) as run:
        run.until("reduced", 200)
        run.process.send_signal(signal.SIGTERM)
        status, text = run.end()
    assert status == 128 + signal.SIGTERM, text
    assert "Traceback" not in text and "never awaited" not in text, text
