"""Script for ``psdist run``: trains small models by ``psdist.torch.offload``, and again by DistributedOptimizer.

Arguments: the folder of the tests' package, number of steps, models. Rank 0 prints whether the bytes are equal.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

sys.path.insert(0, sys.argv[1])

from psdist.torch import DistributedOptimizer, offload  # the path is an argument
from tests.support import torch_models  # as above
from tests.support.torch_models import loss_of, part  # as above


def stack() -> nn.Module:
    """Return layers of one size, and others. Inputs float[batch, 12], 4 classes."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(7)), nn.Linear(12, 4))


_, _BATCH, _OPTIMIZER = torch_models.MODELS["mlp"]
MODELS = torch_models.MODELS | {"stack": (stack, _BATCH, _OPTIMIZER)}


def main() -> None:
    """Compare the models named on the command line."""
    steps, names = int(sys.argv[2]), sys.argv[3].split(",")
    torch.set_num_threads(1)
    for name in names:
        make, batch_of, optimizer_of = MODELS[name]
        torch.manual_seed(int(os.environ["RANK"]))
        model = make()
        whole = copy.deepcopy(model)
        layered = offload(model, optimizer_of(model), name=f"{name}/layered")
        optimizer = DistributedOptimizer(whole, optimizer_of(whole), name=name)
        rank, world = optimizer.context.rank, optimizer.context.world_size
        for step in range(steps):
            for one, its in ((model, layered), (whole, optimizer)):
                its.zero_grad()
                loss_of(one, part(batch_of(step), rank, world)).backward()
                its.step()
        assert layered.handle.step == optimizer.handle.step == steps
        mine, theirs = digest(array for _, array in layered.weights()), digest(arrays(whole))
        if rank == 0:
            print(f"{name} digest {mine} {theirs} {layered.handle.statistics().transport}", flush=True)


def arrays(model: torch.nn.Module) -> Iterable[Any]:
    """Return the values of the parameters."""
    return (one.detach().numpy() for one in model.parameters())


def digest(values: Iterable[Any]) -> str:
    """Return a digest of all bytes, in order."""
    return hashlib.sha256(b"".join(one.tobytes() for one in values)).hexdigest()[:16]


if __name__ == "__main__":
    main()
