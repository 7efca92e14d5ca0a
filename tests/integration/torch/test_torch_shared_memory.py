"""Models whose parameters share memory, trained as torch trains them, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedDataParallel, DistributedOptimizer, offload
from tests.support.torch_models import mlp, same_bytes

pytestmark = pytest.mark.usefixtures("alone")


def model_with_equal_weights() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight.data = model[0].weight.data
    return model


def copied(model: nn.Module) -> nn.Module:
    """Copy a model, with the memory that its parameters share."""
    other = copy.deepcopy(model)
    other[2].weight.data = other[0].weight.data
    return other


def train(model: nn.Module, optimizer: torch.optim.Optimizer, watched: nn.Module) -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        optimizer.zero_grad()
        inputs = torch.randn(8, 4, generator=random)
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        watched(torch.ones(1, 4))


@pytest.mark.parametrize("wrap", [DistributedOptimizer, offload])
def test_equal_parameters_train_as_with_torch(name: str, wrap: Callable[..., Any]) -> None:
    model = model_with_equal_weights()
    other = copied(model)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
    train(model, optimizer, model)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), other)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 4)), other(torch.ones(2, 4)), rtol=1e-5, atol=1e-6)
    if wrap is DistributedOptimizer:
        assert list(model.state_dict()) == list(other.state_dict())


def test_the_averaging_wrapper_leaves_shared_memory_to_torch(name: str) -> None:
    """Its gradients have memory of their own, and the script's optimizer updates as without psdist."""
    model = model_with_equal_weights()
    other = copied(model)
    wrapped = DistributedDataParallel(model, name=name)
    train(wrapped, torch.optim.Adam(model.parameters(), lr=0.1), wrapped)
    train(other, torch.optim.Adam(other.parameters(), lr=0.1), other)
    assert same_bytes(model, other)


def test_a_frozen_alias_follows_its_parameter(name: str) -> None:
    model = model_with_equal_weights()
    other = copied(model)
    for one in (model, other):
        one[2].weight.requires_grad_(False)
    train(model, DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name), model)
    train(other, torch.optim.SGD([one for one in other.parameters() if one.requires_grad], lr=0.1), other)
    assert torch.equal(model[2].weight, model[0].weight)
    torch.testing.assert_close(model[2].weight, other[2].weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [DistributedOptimizer, offload])
def test_overlaps_are_refused_before_anything_is_made(alone: Context, name: str, wrap: Callable[..., Any]) -> None:
    model = model_with_equal_weights()
    model[2].weight.data = model[0].weight.data.T
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight' of shape \(4, 4\) and '2\.weight' .*clone\(\)"):
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)


def test_memory_that_offload_frees_is_refused(name: str) -> None:
    model = mlp()
    model.register_buffer("seen", model[0].weight.data)
    with pytest.raises(InvalidArgumentError, match=r"'seen' is not trained, but is the memory of '0\.weight'"):
        offload(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
