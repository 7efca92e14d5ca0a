"""Several models, or several optimizers, in one script: combinations that train, and those that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from psdist import optim
from psdist.errors import InvalidArgumentError, PsdistError
from psdist.torch import DistributedOptimizer
from tests.support.torch_models import MODELS, loss_of, mlp

BATCHES = MODELS["mlp"][1]

pytestmark = pytest.mark.usefixtures("alone")


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Check equality up to the rounding of sums."""
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_model_of_another_layout_needs_another_name(name: str) -> None:
    DistributedOptimizer(mlp(), optim.SGD(lr=0.1), name=name)
    with pytest.raises(PsdistError, match=r"with another layout: .*Another model.*another name="):
        DistributedOptimizer(nn.Linear(3, 1), optim.Adam(lr=0.1), name=name)
    with pytest.raises(PsdistError, match=r"holds the weights of another model.*another name="):
        DistributedOptimizer(mlp(), optim.Adam(lr=0.1), name=name)


def test_parts_of_a_model_have_optimizers_of_their_own(name: str) -> None:
    model = mlp()
    other = copy.deepcopy(model)

    def optimizers(one: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return torch.optim.SGD(one[0].parameters(), lr=0.1), torch.optim.AdamW(one[2].parameters(), lr=1e-3, eps=1e-4)

    first, second = optimizers(model)
    whole = DistributedOptimizer(model, first, name=f"{name}-whole")
    with pytest.raises(InvalidArgumentError, match=f"'0.weight' is trained through the parameter set '{name}-whole'"):
        DistributedOptimizer(model, second, name=f"{name}-second")
    whole.close()
    first, second = optimizers(model)
    mine = DistributedOptimizer(model[0], first, name=f"{name}-0"), DistributedOptimizer(model[2], second, name=name)
    for one, by in ((model, mine), (other, optimizers(other))):
        for step in range(3):
            for optimizer in by:
                optimizer.zero_grad()
            loss_of(one, BATCHES(step)).backward()
            for optimizer in by:
                optimizer.step()
    assert_equal(model, other)


def test_a_generator_and_its_discriminator_train_as_with_torch(name: str) -> None:
    models = nn.Linear(2, 3), nn.Linear(3, 1)
    others = copy.deepcopy(models)

    def train_both(networks: Any, optimizers: Any, without_push: Callable[[], Any]) -> None:
        random = torch.Generator().manual_seed(1)
        (generator, discriminator), (generates, judges) = networks, optimizers
        for _ in range(3):
            judges.zero_grad()
            made = generator(torch.randn(4, 2, generator=random))
            real = discriminator(torch.randn(4, 3, generator=random)).mean()
            (real - discriminator(made.detach()).square().mean()).backward()
            judges.step()
            generates.zero_grad()
            with without_push():
                discriminator(made).square().mean().backward()
            generates.step()

    sgd = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    mine = [
        DistributedOptimizer(one, by, name=f"{name}-{at}") for at, (one, by) in enumerate(zip(models, sgd, strict=True))
    ]
    train_both(models, mine, mine[1].no_sync)
    train_both(others, [torch.optim.SGD(one.parameters(), lr=0.1) for one in others], nullcontext)
    for one, other in zip(models, others, strict=True):
        assert_equal(one, other)
