"""Learning rates of torch's schedulers, and of the script, with ``DistributedOptimizer`` in a world of one.

Some become a schedule of the servers; the others are sent to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import psdist
from psdist import optim
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedOptimizer
from tests.support.torch_models import STEPS, distance, mlp, train


def test_schedules_and_clipping_are_those_of_torch(alone: Context, name: str) -> None:
    def prepared(model: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2:].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
        return optimizer, lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])

    model = mlp()
    other = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:  # torch's SequentialLR warns of its own call
        patch.setattr(lr_scheduler.warnings, "warn", lambda *_, **__: None)
        optimizer, scheduler = prepared(model)
        train(model, DistributedOptimizer(model, optimizer, scheduler, max_grad_norm=0.5, name=name), scheduler)
        optimizer, scheduler = prepared(other)
        train(other, optimizer, scheduler, clip=0.5)
    assert distance(model, other) < 1e-5


def test_a_cosine_with_a_least_rate_is_torchs_in_each_group(alone: Context, name: str) -> None:
    def prepared(model: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        optimizer = in_groups(model)
        return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=0.005)

    model = mlp()
    other = copy.deepcopy(model)
    inner, scheduler = prepared(model)
    optimizer = DistributedOptimizer(model, inner, scheduler, name=name)
    train(model, optimizer, scheduler)
    train(other, *prepared(other))
    assert distance(model, other) < 1e-5
    assert optimizer.handle.settings == {}, "the servers run the schedule"


SENT: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 4) * 0.9**step),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [3, 7], 0.3),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.02], total_steps=STEPS + 1, cycle_momentum=False),
}


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters(), "lr": 0.01}]  # type: ignore[index]
    return torch.optim.SGD(groups, momentum=0.9)


@pytest.mark.parametrize("make", SENT.values(), ids=SENT)
def test_rates_of_other_schedulers_are_sent(
    alone: Context, name: str, make: Callable[[torch.optim.Optimizer], Any]
) -> None:
    model = mlp()
    other, unlike = copy.deepcopy(model), copy.deepcopy(model)
    inner = in_groups(model)
    scheduler = make(inner)
    train(model, DistributedOptimizer(model, inner, scheduler, name=name), scheduler)
    plain = in_groups(other)
    train(other, plain, make(plain))
    assert distance(model, other) < 1e-5
    train(unlike, in_groups(unlike))
    assert distance(unlike, other) > 1e-3


@pytest.mark.parametrize("consistency", [psdist.BSP(), psdist.SSP(1), psdist.ASP()])
def test_a_plateau_sets_the_rates(alone: Context, name: str, consistency: psdist.consistency.Consistency) -> None:
    """Check a scheduler that steps once for each data epoch, by a number."""

    def train_epochs(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        for loss in (2.0, 3.0, 1.0, 1.0):
            train(model, optimizer)
            scheduler.step(loss)

    model = mlp()
    other = copy.deepcopy(model)
    inner, plain = in_groups(model), in_groups(other)
    optimizer = DistributedOptimizer(model, inner, consistency=consistency, name=name)
    train_epochs(model, optimizer, lr_scheduler.ReduceLROnPlateau(inner, patience=0))
    train_epochs(other, plain, lr_scheduler.ReduceLROnPlateau(plain, patience=0))
    assert distance(model, other) < 1e-5
    sent = [values["lr"] for values in (optimizer.handle.settings or {}).values()]
    assert sorted(set(sent)) == pytest.approx([0.001, 0.01]), "after the second data epoch; not yet after the last"


def test_a_scheduler_that_is_stepped_once_for_a_data_epoch_is_refused(alone: Context, name: str) -> None:
    model = mlp()
    torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(torch_optimizer, T_max=10)
    optimizer = DistributedOptimizer(model, torch_optimizer, scheduler, name=name)
    with pytest.raises(InvalidArgumentError, match=r"call scheduler\.step\(\) after each step"):
        train(model, optimizer)
    assert optimizer.handle.step == 1


@pytest.mark.parametrize("consistency", [psdist.SSP(1), psdist.ASP()])
def test_schedulers_are_for_common_steps(alone: Context, consistency: psdist.consistency.Consistency) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(InvalidArgumentError, match="the servers count the pushes of all workers"):
        DistributedOptimizer(model, optimizer, scheduler, consistency=consistency)


@pytest.mark.parametrize(
    ("settings", "override", "first", "last"),
    [
        ({"lr": 0.5, "schedule": optim.Step(2, 0.1)}, {"lr": 0.1}, [0.5, 0.1], [0.5e-6, 0.1e-6]),
        ({"lr": 0.1, "schedule": optim.Linear(STEPS)}, {"end_factor": 0.5}, [0.1, 0.1], [0.0, 0.05]),
    ],
)
def test_the_rates_of_a_specification_are_shown(
    alone: Context, name: str, settings: Any, override: dict[str, float], first: list[float], last: list[float]
) -> None:
    model = mlp()
    spec = optim.SGD(**settings, overrides=(optim.override("*.bias", **override),))
    optimizer = DistributedOptimizer(model, spec, name=name)
    assert [group["lr"] for group in optimizer.param_groups] == first
    train(model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(last)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, change: Any = None) -> nn.Module:
    """Train for 200 steps, each followed by the scheduler."""
    random = torch.Generator().manual_seed(5)
    for step in range(200):
        if change is not None:
            change(step, optimizer)
        inputs = torch.randn(8, 6, generator=random)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :3].sin()).backward()
        optimizer.step()
        scheduler.step()
    return model


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
def test_a_cycle_of_rate_and_momentum_is_torchs(alone: Context, name: str, kind: str, is_given: bool) -> None:
    """The scheduler is made after wrapping, or given to the wrapper."""
    settings = {} if kind == "AdamW" else {"momentum": 0.9}
    kinds: Any = getattr(torch.optim, kind)

    def cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=201)

    model = in_layers()
    other = copy.deepcopy(model)
    inner = kinds(model.parameters(), lr=0.01, eps=1e-4, **settings) if kind != "SGD" else sgd(model)
    scheduler = cycle(inner) if is_given else None
    optimizer = DistributedOptimizer(model, inner, scheduler, name=name)
    steps_of(model, optimizer, scheduler or cycle(optimizer))
    plain = kinds(other.parameters(), lr=0.01, eps=1e-4, **settings) if kind != "SGD" else sgd(other)
    steps_of(other, plain, cycle(plain))
    assert distance(model, other) < 1e-6
    values = optimizer.handle.settings
    assert values is not None and {"momentum", "beta1"} & values[0].keys()


def in_layers() -> nn.Sequential:
    """Return a model of two layers."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer with a group for each layer, which begin equal."""
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]  # type: ignore[index]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("kind", ["SGD", "ASGD", "Adadelta"])
def test_groups_with_rates_and_settings_of_their_own_are_torchs(alone: Context, name: str, kind: str) -> None:
    def change(step: int, optimizer: torch.optim.Optimizer) -> None:
        first, second = optimizer.param_groups
        first["weight_decay"] = 1e-3 * step / 200
        second |= {"rho": 0.8 + 0.001 * step} if kind == "Adadelta" else {}
        second |= {"lambd": 1e-3 * step, "alpha": 0.75 + 0.001 * step, "t0": 300 - step} if kind == "ASGD" else {}

    def prepared(model: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]  # type: ignore[index]
        optimizer = getattr(torch.optim, kind)(groups, lr=0.05)
        return optimizer, lr_scheduler.LambdaLR(optimizer, [lambda step: 0.99**step, lambda step: 1 / (1 + step)])

    model = in_layers()
    other = copy.deepcopy(model)
    inner, scheduler = prepared(model)
    steps_of(model, DistributedOptimizer(model, inner, name=name), scheduler, change)
    steps_of(other, *prepared(other), change)
    assert distance(model, other) < 1e-6


def test_the_groups_of_the_wrapped_optimizer_get_no_other_keys(alone: Context, name: str) -> None:
    """Check that it can be wrapped again."""
    model = mlp()
    inner = torch.optim.AdamW(model.parameters())
    keys = list(inner.param_groups[0])
    DistributedOptimizer(model, inner, name=name).close()
    assert list(inner.param_groups[0]) == keys
    DistributedOptimizer(model, inner, name=name).close()
