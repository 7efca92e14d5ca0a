"""Two workers whose scripts change settings of their parameter groups: those of one process on both batches, over each
transport and through the loss of a server. The workers are threads of this process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import psdist
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from psdist.torch import DistributedOptimizer
from tests.support.torch_models import distance

STEPS = 200
Make = Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]]


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": layer.parameters()} for layer in (model[0], model[2])]  # type: ignore[index]


def cycle(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, eps=1e-4)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.002], total_steps=STEPS + 1)


def by_group(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(groups(model), lr=0.02, momentum=0.9, dampening=0.1)
    return optimizer, lr_scheduler.LambdaLR(optimizer, [lambda step: 0.99**step, lambda step: 1 / (1 + step / 50)])


def averaged(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.ASGD(groups(model), lr=0.05, lambd=0.01)
    return optimizer, lr_scheduler.CyclicLR(optimizer, 0.01, 0.05, step_size_up=20, cycle_momentum=False)


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


def in_two_workers(
    cluster: EmbeddedCluster, work: Callable[[Context], Any], transport: TransportName = "auto"
) -> list[Any]:
    """Run the same code in two workers and return their results."""
    clients = [psdist.Client(cluster.address, cluster.token, rank=rank, transport=transport) for rank in range(2)]
    contexts = [Context(client.rank, 2, client.rank, client) for client in clients]
    with ThreadPoolExecutor(2) as threads:
        try:
            return list(threads.map(work, contexts))
        finally:
            list(threads.map(lambda client: client.close(), clients))


def trained(context: Context, make: Make, model: nn.Module, steps: int = STEPS, **settings: Any) -> nn.Module:
    model = copy.deepcopy(model)
    inner, scheduler = make(model)
    return loop(
        model, DistributedOptimizer(model, inner, context=context, **settings), scheduler, steps, context.rank, 2
    )


@pytest.mark.parametrize(
    ("make", "transport"),
    [
        (cycle, "auto"),
        # The cycle changes more of them; schedules of groups are compared with torch's in test_torch_schedulers.
        *(pytest.param(make, "auto", marks=pytest.mark.long) for make in (by_group, averaged)),
        # Settings travel over each transport in the tests of the client.
        *(pytest.param(cycle, transport, marks=pytest.mark.long) for transport in ("tcp", "grpc")),
    ],
)
def test_settings_that_change_are_those_of_one_process(make: Make, transport: TransportName) -> None:
    model = layers()
    cluster = EmbeddedCluster(servers=2)
    try:
        one, other = in_two_workers(cluster, lambda context: trained(context, make, model), transport)
    finally:
        cluster.close()
    alone = copy.deepcopy(model)
    loop(alone, *make(alone), STEPS)
    assert distance(one, alone) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.long  # Settings outlive a server in the tests of the client; here they come from torch.
def test_a_killed_server_changes_not_a_bit() -> None:
    def run(kills: bool) -> list[Tensor]:
        cluster = EmbeddedCluster(servers=3, replicas=2)

        def work(context: Context) -> nn.Module:
            copied = copy.deepcopy(model)
            inner, scheduler = cycle(copied)
            optimizer = DistributedOptimizer(copied, inner, context=context)
            if kills and context.rank == 0:
                inner.register_step_post_hook(
                    lambda *_: cluster.processes[2].kill() if optimizer.handle.step == 7 else 0
                )
            return loop(copied, optimizer, scheduler, 15, context.rank, 2)

        try:
            one, _ = in_two_workers(cluster, work)
        finally:
            cluster.close()
        return list(one.parameters())

    model = layers()
    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_workers_with_different_settings_are_told() -> None:
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

    model = layers()
    cluster = EmbeddedCluster(servers=1)
    try:
        first, second = in_two_workers(cluster, work)
    finally:
        cluster.close()
    assert first == "" and "weight_decay=0.1 of group 1 in step 0" in second and "all workers must set" in second
