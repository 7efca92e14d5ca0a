"""PyTorch's parallelism on four ranks: FSDP2, DTensor, tensor and pipeline parallelism, ZeRO and hooks of DDP.

Arguments: backend, and the file for all results, which rank 0 writes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=200))
rank, size = dist.get_rank(), dist.get_world_size()
results: dict[str, Tensor] = {}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def record(name: str, value: Tensor) -> None:
    results[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def train(
    name: str, model: nn.Module, steps: int = 4, part: int = rank, **made: Callable[..., optim.Optimizer]
) -> None:
    optimizer = made["optimizer"]() if made else optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        mse_loss(model(normal(100 * step + part, 8, 16)), normal(7 * step + part, 8, 8)).backward()
        optimizer.step()
    for key, weights in model.named_parameters():
        record(f"{name} {key}", weights)


def shard(name: str, shape: tuple[int, ...], **options: MixedPrecisionPolicy) -> nn.Module:
    model = net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **options)
    train(name, model)
    return model


def save_and_load(model: nn.Module) -> None:
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    dcp.save({"model": model.state_dict()}, checkpoint_id=place[0])
    found = {"model": net().state_dict()}
    dcp.load(found, checkpoint_id=place[0])
    record("checkpoint", found["model"]["0.weight"])


def redistribute() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole, kinds = normal(1, 7, 5), (Shard(0), Shard(1), Replicate())
    for before in product(kinds, kinds):
        tensor = distribute_tensor(whole, mesh, before)
        for after in product(kinds, kinds):
            assert torch.equal(tensor.redistribute(mesh, after).full_tensor(), whole), (before, after)
    total = DTensor.from_local(torch.full((4, 4), rank + 0.5), mesh, [Partial(), Partial()])
    record("partial", total.redistribute(mesh, [Shard(0), Replicate()]))
    left = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    record("product", left @ distribute_tensor(normal(2, 5, 9), mesh, [Replicate(), Shard(0)]))
    record("softmax", torch.softmax(left, -1))


def split_tensors() -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    train("tensor", parallelize_module(net(), init_device_mesh("cpu", (size,)), plan), part=0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(net(), mesh["tensor"], plan)
    train("data and tensor", fully_shard(model, mesh=mesh["data"]), part=rank // 2)


def pipeline(name: str, schedule: type, stages: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(8)]
    mine = [nn.Sequential(*layers[n * 8 // stages : (n + 1) * 8 // stages]) for n in range(rank, stages, size)]
    made = [PipelineStage(part, rank + size * n, stages, torch.device("cpu")) for n, part in enumerate(mine)]
    steps = schedule(made if stages > size else made[0], 4, loss_fn=mse_loss)
    optimizer = optim.SGD([weights for part in mine for weights in part.parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        given = (normal(step, 16, 16),) if rank == 0 else ()
        steps.step(*given, **({"target": normal(step + 9, 16, 16)} if rank == size - 1 else {}))
        optimizer.step()
    for number, part in enumerate(mine):
        for key, weights in part.named_parameters():
            record(f"{name} rank {rank} part {number} {key}", weights)


def data_parallel() -> None:
    train("ddp", DDP(net()))
    model = DDP(net())
    train("zero", model, optimizer=lambda: ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1))
    model = DDP(net())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # Its callbacks wait for other calls.
    train("power", model)
    model = DDP(net())
    with Join([model]):
        train("join", model, steps=2 + rank)
    averager, model = PeriodicModelAverager(period=2), net()
    train("local", model)
    averager.average_parameters(model.parameters())
    record("averaged", model[0].weight)


save_and_load(shard("fsdp", (4,)))
shard("hybrid", (2, 2))
shard("bf16", (4,), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
redistribute()
split_tensors()
pipeline("gpipe", ScheduleGPipe, 4)
pipeline("1f1b", Schedule1F1B, 4)
pipeline("interleaved", ScheduleInterleaved1F1B, 8)
pipeline("zero bubble", ScheduleInterleavedZeroBubble, 8)
data_parallel()
found: list[dict[str, Tensor] | None] = [None] * size
dist.all_gather_object(found, results)
if rank == 0:
    torch.save(found, sys.argv[2])
dist.destroy_process_group()
