"""Tensors that autograd saves in an offloaded layer's forward pass.

Weights that a backward pass reads are reloaded, by whichever path it reaches the layer, or an error explains why they
cannot be. Otherwise the process would end with a fault.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist import optim
from psdist.errors import InvalidArgumentError
from psdist.torch import offload, offloaded_memory

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(params=["moved pages", "resized storage"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a parameter set for this test, with either memory of layers."""
    if request.param == "resized storage":
        monkeypatch.setattr(offloaded_memory, "is_supported", lambda: False)
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name)


X = torch.arange(6.0).reshape(2, 3)


class WithLoss(nn.Module):
    """Module with a loss of its own in an attribute, as in mixtures of experts."""

    extra: Tensor

    def __init__(self, of: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        weight = self.linear.weight
        self.extra = weight.square().sum() if self.of == "weights" else y.tanh().mm(weight).square().mean()
        return y


@pytest.mark.parametrize("of", ["weights", "results"])
@pytest.mark.parametrize("alone_too", [False, True])
def test_a_loss_that_a_layer_keeps_in_an_attribute_counts(name: str, of: str, alone_too: bool) -> None:
    """Check a loss even if only the attribute leads to the layer."""
    model = nn.Sequential(*(WithLoss(of) for _ in range(3)))
    other = copy.deepcopy(model)

    def losses(one: nn.Sequential) -> Tensor:
        y = one(X)
        extra: Tensor = torch.stack([layer.extra for layer in one]).sum()
        return extra if alone_too else y.sum() + extra

    optimizer, plain = offload(model, optim.SGD(lr=0.01), name=name), torch.optim.SGD(other.parameters(), lr=0.01)
    for _ in range(3):
        plain.zero_grad()
        losses(other).backward()
        plain.step()
        losses(model).backward()
        optimizer.step()
    weights = dict(optimizer.weights())
    for key, expected in other.named_parameters():
        torch.testing.assert_close(torch.from_numpy(weights[key].copy()), expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_gradient_of_gradients_is_refused_and_training_goes_on(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = offload(model, optim.SGD(lr=0.1), name=name)
    x = X.clone().requires_grad_()
    with pytest.raises(InvalidArgumentError, match="create_graph=True reached the layer '2'"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.abs().sum() > 0
    model(X).sum().backward()
    optimizer.step()
    assert optimizer.handle.step == 1


class Changed(nn.Module):
    """Module that writes to a tensor that autograd saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        z = y.exp()
        y.detach()[...] = 0.0
        z.detach().add_(1.0)
        return z


def test_a_result_that_was_written_to_is_refused_as_by_torch(name: str) -> None:
    model = nn.Sequential(Changed(), nn.Linear(3, 1))
    offload(model, optim.SGD(lr=0.1), name=name)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(X).sum().backward()


class Given(nn.Module):
    """Module that returns its weight beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        """Return a pair."""
        return self.linear(x), self.linear.weight.t()


def test_a_weight_among_the_results_of_a_layer_is_refused(name: str) -> None:
    model = nn.ModuleList([Given(), Given()])
    offload(model, optim.SGD(lr=0.1), name=name)
    with pytest.raises(InvalidArgumentError, match=r"the layer '0' returned a weight of '0'.*by clone\(\)"):
        model[0](X)


def test_a_kept_weight_is_not_read_outside_of_a_backward_pass(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    offload(model, optim.SGD(lr=0.1), name=name)
    y: Any = model(X)
    with pytest.raises(InvalidArgumentError, match="read outside of a backward pass"):
        _ = y.grad_fn._saved_mat2
