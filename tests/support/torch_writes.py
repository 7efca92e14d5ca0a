"""Script for ``psdist run``: clamps and restores weights while two workers train, and compares with torch alone.

Argument: the folder of the tests' package. Rank 0 prints the largest difference of a parameter.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

sys.path.insert(0, sys.argv[1])

from psdist.torch import DistributedOptimizer  # the path is an argument
from tests.support.torch_models import MODELS, loss_of, part  # as above

MAKE, BATCH_OF, _ = MODELS["mlp"]


def write(model: nn.Module, step: int, at_first: nn.Module) -> None:
    """Clamp after each step, and restore the first weights once."""
    if step == 7:
        model.load_state_dict(at_first.state_dict())
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def main() -> None:
    """Train both ways."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MAKE()
    at_first, other = copy.deepcopy(model), copy.deepcopy(model)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(model, inner, name="written", bucket_cap_mb=0.002)
    alone = torch.optim.Adam(other.parameters(), lr=0.01)
    rank, world = optimizer.context.rank, optimizer.context.world_size
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, part(BATCH_OF(step), rank, world)).backward()
        optimizer.step()
        alone.zero_grad()
        loss_of(other, BATCH_OF(step)).backward()
        alone.step()
        write(model, step, at_first)
        write(other, step, at_first)
        if rank == 0 and step == 5:
            print("under way", flush=True)
    most = max((a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters(), strict=True))
    if rank == 0:
        print(f"difference {most:.1e}", flush=True)


if __name__ == "__main__":
    main()
