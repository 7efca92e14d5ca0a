"""Two workers whose scripts change settings of their parameter groups train as one process on both batches.

The workers are threads of this process.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedOptimizer
from tests.support.contexts import everywhere, workers
from tests.support.torch_models import distance, same_bytes

STEPS = 200


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": layer.parameters()} for layer in (model[0], model[2])]  # type: ignore[index]


def cycle(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, eps=1e-4)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.002], total_steps=STEPS + 1)


def batch(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def loop(model: nn.Module, optimizer: Any, scheduler: Any, steps: int, rank: int = 0, world: int = 1) -> nn.Module:
    """Train with weight decay that grows in the first group, besides the scheduler's changes."""
    for step in range(steps):
        optimizer.param_groups[0]["weight_decay"] = 1e-4 * step
        inputs = batch(step)[rank::world]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :3].sin()).backward()
        optimizer.step()
        scheduler.step()
    return model


def test_settings_that_change_are_those_of_one_process() -> None:
    """The tests of the client send settings over each transport, and through the loss of a server."""
    model, alone = layers(), layers()

    def work(context: Context) -> nn.Module:
        copied = copy.deepcopy(model)
        inner, scheduler = cycle(copied)
        return loop(copied, DistributedOptimizer(copied, inner, context=context), scheduler, STEPS, context.rank, 2)

    with workers(2, servers=2) as contexts:
        one, other = everywhere(contexts, work)
    loop(alone, *cycle(alone), STEPS)
    assert distance(one, alone) < 1e-6 and same_bytes(one, other)


def test_workers_with_different_settings_are_told() -> None:
    model = layers()

    def work(context: Context) -> str:
        copied = copy.deepcopy(model)
        optimizer = DistributedOptimizer(copied, torch.optim.SGD(groups(copied), lr=0.1), context=context)
        optimizer.param_groups[1]["weight_decay"] = 0.1 * context.rank
        copied(batch(0)).mean().backward()
        try:
            optimizer.step()
        except InvalidArgumentError as error:
            return str(error)
        return ""

    with workers(2) as contexts:
        first, second = everywhere(contexts, work)
    assert first == "" and "weight_decay=0.1 of group 1 in step 0" in second and "all workers must set" in second
