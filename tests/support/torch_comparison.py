"""Script for ``psdist run``: trains small models through psdist, and again with torch alone.

Arguments: the folder of the tests' package, number of steps, models; ``beside`` compares with one process that trains
on the whole batch, and with torch's DDP over gloo. Rank 0 prints one line per model.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

sys.path.insert(0, sys.argv[1])

from psdist.torch import DistributedDataParallel, DistributedOptimizer  # the path is an argument
from tests.support.torch_models import MODELS, loss_of, part  # as above


def main() -> None:
    """Compare the models named on the command line."""
    steps, names, beside = int(sys.argv[2]), sys.argv[3].split(","), "beside" in sys.argv[4:]
    torch.set_num_threads(1)
    for name in names:
        make, batch_of, optimizer_of = MODELS[name]
        torch.manual_seed(int(os.environ["RANK"]))
        model = make()
        at_first = copy.deepcopy(model)
        optimizer = DistributedOptimizer(model, optimizer_of(model), name=name, bucket_cap_mb=0.002)
        rank, world = optimizer.context.rank, optimizer.context.world_size
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, part(batch_of(step), rank, world)).backward()
            optimizer.step()
        assert optimizer.handle.step == steps
        digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
        line = f"{name} digest {digest[:16]}"
        if beside:
            averaged = by_ddp(name, at_first, steps, rank, world, DistributedDataParallel)
            line += f" averaged {difference(averaged, by_ddp(name, at_first, steps, rank, world)):.1e}"
            line += f" ddp {difference(model, by_ddp(name, at_first, steps, rank, world)):.1e}"
            line += f" alone {difference(model, alone(name, at_first, steps)) if rank == 0 else 0:.1e}"
        if rank == 0:
            print(line, flush=True)


def alone(name: str, at_first: nn.Module, steps: int) -> nn.Module:
    """Return the model after training in one process on all workers' batches."""
    model = copy.deepcopy(at_first)
    _, batch_of, optimizer_of = MODELS[name]
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(step)).backward()
        optimizer.step()
    return model


def by_ddp(
    name: str, at_first: nn.Module, steps: int, rank: int, world: int, wrap: Any = nn.parallel.DistributedDataParallel
) -> nn.Module:
    """Return the model after training with torch's DDP, or with another wrapper used like it."""
    if not distributed.is_initialized():
        rendezvous = Path(tempfile.gettempdir()) / "gloo"
        distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    model = copy.deepcopy(at_first)
    _, batch_of, optimizer_of = MODELS[name]
    named = {"name": f"{name}/gradients"} if wrap is DistributedDataParallel else {}
    optimizer, wrapped = optimizer_of(model), wrap(model, **named)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(wrapped, part(batch_of(step), rank, world)).backward()
        optimizer.step()
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest relative difference of a parameter, by L2 norms."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(((a - b).double().norm() / b.double().norm()).item() for a, b in pairs)


if __name__ == "__main__":
    main()
