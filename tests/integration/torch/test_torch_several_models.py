"""Several models, or several optimizers, in one script: combinations that train, and those that are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from psdist import optim
from psdist.errors import InvalidArgumentError, PsdistError
from psdist.torch import DistributedOptimizer
from tests.support.torch_models import BATCHES, distance, loss_of, mlp

pytestmark = pytest.mark.usefixtures("alone")


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
    assert distance(model, other) < 1e-5
