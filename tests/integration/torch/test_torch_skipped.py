"""Parameters that get no gradient in some steps, or are frozen for a while: the training is that of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psdist import optim
from psdist.client.context import Context
from psdist.consistency import ASP
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedOptimizer
from tests.support.torch_skipped import OPTIMIZERS, Parts, batch_of, difference, made, train

STEPS = range(50)


def trained(case: str, model: Parts, optimizer: torch.optim.Optimizer, steps: range = STEPS) -> Parts:
    """Train alone."""
    for _ in train(case, model, optimizer, steps, [0]):
        pass
    return model


@pytest.mark.parametrize("overlap", ["auto", False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("case", ["freeze", "unused", "alternate"])
def test_tensors_without_a_gradient_are_skipped_as_by_torch(
    alone: Context, name: str, case: str, kind: str, overlap: bool
) -> None:
    model, other = made(case), made(case)
    inner = OPTIMIZERS[kind](model.parameters())
    optimizer = DistributedOptimizer(model, inner, name=name, overlap=overlap, bucket_cap_mb=0.0005)
    trained(case, model, optimizer)
    trained(case, other, OPTIMIZERS[kind](other.parameters()))
    assert difference(model, other) < 1e-6
    assert torch.equal(model.unused.weight, made(case).unused.weight), "it is not decayed either"


def test_a_schedule_counts_all_steps(alone: Context, name: str) -> None:
    models = made("alternate"), made("alternate")
    inner = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    schedules = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.1, 30) for one in inner]
    optimizer = DistributedOptimizer(models[0], inner[0], schedules[0], name=name)
    for model, one, schedule in zip(models, (optimizer, inner[1]), schedules, strict=True):
        for _ in train("alternate", model, one, STEPS, [0]):
            schedule.step()
    assert difference(*models) < 1e-6


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_asynchronous_pushes_skip_alone(alone: Context, name: str, kind: str) -> None:
    model, other = made("alternate"), made("alternate")
    trained(
        "alternate",
        model,
        DistributedOptimizer(model, OPTIMIZERS[kind](model.parameters()), name=name, consistency=ASP()),
    )
    trained("alternate", other, OPTIMIZERS[kind](other.parameters()))
    assert difference(model, other) < 1e-6


def test_float64_models_skip_too(alone: Context, name: str) -> None:
    model, other = made("alternate").double(), made("alternate").double()
    for one in (model, other):
        one.forward = lambda inputs, uses, one=one: Parts.forward(one, inputs.double(), uses).float()
    trained("alternate", model, DistributedOptimizer(model, OPTIMIZERS["adam"](model.parameters()), name=name))
    trained("alternate", other, OPTIMIZERS["adam"](other.parameters()))
    assert difference(model, other) < 1e-12


def test_clipping_leaves_skipped_tensors_alone(alone: Context, name: str) -> None:
    model, other = made("alternate"), made("alternate")
    inner = OPTIMIZERS["adam"](model.parameters())
    trained("alternate", model, DistributedOptimizer(model, inner, name=name, max_grad_norm=0.1))
    plain = OPTIMIZERS["adam"](other.parameters())
    plain.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(other.parameters(), 0.1) and None)
    trained("alternate", other, plain)
    assert difference(model, other) < 1e-6


def test_gradients_of_zeros_are_not_skipped(alone: Context, name: str) -> None:
    model, other = made("alternate"), made("alternate")
    optimizer = DistributedOptimizer(model, OPTIMIZERS["adam"](model.parameters()), name=name)
    plain = OPTIMIZERS["adam"](other.parameters())
    for one, its in ((model, optimizer), (other, plain)):
        for step in range(10):
            inputs, targets = batch_of(step, 0)
            its.zero_grad(set_to_none=False)
            nn.functional.mse_loss(one(inputs, step % 2 == 0), targets).backward()
            its.step()
    assert difference(model, other) < 1e-6


def test_layers_of_a_specification_stay_frozen(alone: Context, name: str) -> None:
    model = made("freeze")
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)
    trained("freeze", model, optimizer, range(2))
    with pytest.raises(InvalidArgumentError, match="pass it to the optimizer of torch from the start, frozen"):
        trained("freeze", model, optimizer, range(7, 8))


def test_groups_cannot_be_added(alone: Context, name: str) -> None:
    model = made("freeze")
    some = [one for one in model.parameters() if one.requires_grad]
    optimizer = DistributedOptimizer(model, torch.optim.SGD(some, lr=0.1), name=name)
    with pytest.raises(InvalidArgumentError, match="pass them to the optimizer from the start, frozen"):
        optimizer.add_param_group({"params": model.first.parameters(), "lr": 0.01})
