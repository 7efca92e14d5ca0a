"""``offload`` in a world of one: training after a failed backward pass, and errors in place of silent failures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import psdist
from psdist.errors import InvalidArgumentError, NonFiniteGradientError
from psdist.torch import DistributedOptimizer, OffloadedOptimizer, offload

pytestmark = pytest.mark.usefixtures("alone")


def batch(step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def three() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(batch(step)).square().mean()
    return loss


def train(model: nn.Module, optimizer: Any, steps: int, loss: Callable[[nn.Module, int], Tensor] = loss_of) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def assert_as_whole(name: str, optimizer: OffloadedOptimizer, whole: nn.Module, steps: int,
                    loss: Callable[[nn.Module, int], Tensor] = loss_of) -> None:  # fmt: skip
    """Check that the weights are those of ``whole`` after ``steps`` steps."""
    train(whole, DistributedOptimizer(whole, sgd(whole), name=f"{name}-whole"), steps, loss)
    weights = dict(optimizer.weights())
    for key, one in whole.named_parameters():
        if one.requires_grad:
            assert np.array_equal(weights[key], one.detach().numpy()), key


# --- backward passes that fail ----------------------------------------------------------------------------------------


class Breaks(torch.autograd.Function):
    """Function that fails in the backward pass, or makes gradients that are not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_quiet: bool) -> Tensor:
        """Return the same values."""
        ctx.is_quiet = is_quiet
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return something that is not a gradient."""
        if not ctx.is_quiet:
            raise RuntimeError("no memory")
        return gradient * float("nan"), None


def broken_loss(model: nn.Module, after: int, *, is_quiet: bool) -> Tensor:
    """Return a loss whose backward pass fails below the last ``after`` layers."""
    x = batch(0)
    for number, layer in enumerate(model.children()):
        x = Breaks.apply(x, is_quiet) if number == 3 - after else x
        x = layer(x)
    loss: Tensor = (x if after else Breaks.apply(x, is_quiet)).mean()
    return loss


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("is_quiet", [True, False])
def test_training_goes_on_where_nothing_was_sent(name: str, is_quiet: bool, clears: bool) -> None:
    model = three()
    whole = copy.deepcopy(model)
    optimizer = offload(model, sgd(model), name=name)
    message = "zero_grad\\(\\) or the next batch" if is_quiet else "no memory"
    with pytest.raises((NonFiniteGradientError, RuntimeError), match=message):
        broken_loss(model, 0, is_quiet=is_quiet).backward()
    if clears:
        optimizer.zero_grad()
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
    assert optimizer.handle.step == 2
    assert_as_whole(name, optimizer, whole, 2)


@pytest.mark.parametrize("is_quiet", [True, False])
def test_zero_grad_makes_the_step_of_a_pass_that_had_sent_something(name: str, is_quiet: bool) -> None:
    model = three()
    optimizer = offload(model, sgd(model), name=name)
    before = dict(optimizer.weights())
    message = "Call zero_grad\\(\\) of the optimizer" if is_quiet else "no memory"
    with pytest.raises((NonFiniteGradientError, RuntimeError), match=message):
        broken_loss(model, 1, is_quiet=is_quiet).backward()
    with pytest.raises(InvalidArgumentError, match="Call zero_grad\\(\\) of the optimizer"):
        model(batch(0))
    optimizer.zero_grad()
    after = dict(optimizer.weights())
    assert optimizer.handle.step == 1 and not np.array_equal(before["2.0.weight"], after["2.0.weight"])
    assert all(np.array_equal(before[key], after[key]) for key in before if not key.startswith("2."))
    train(model, optimizer, 2)
    assert optimizer.handle.step == 3


def test_step_still_makes_the_step_of_a_pass_that_raised(name: str) -> None:
    model = three()
    optimizer = offload(model, sgd(model), name=name)
    with pytest.raises(RuntimeError, match="no memory"):
        broken_loss(model, 1, is_quiet=False).backward()
    optimizer.step()
    train(model, optimizer, 1)
    assert optimizer.handle.step == 2


# --- gradients that are gone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: model.zero_grad(),
        lambda model: [one.grad for one in model.parameters()],
        lambda model: setattr(model[0][0].weight, "grad", None),
    ],
)
def test_gradients_that_were_sent_cannot_be_clipped(name: str, use: Callable[[nn.Module], Any]) -> None:
    model = three()
    whole = copy.deepcopy(model)
    optimizer = offload(model, sgd(model), name=name)
    loss_of(model, 0).backward()
    with pytest.raises(InvalidArgumentError, match=r"gradient of parameter '0\.0\.weight' was sent .* max_grad_norm"):
        use(model)
    optimizer.step()
    model.zero_grad()
    assert all(one.grad is None for one in model.parameters())
    assert_as_whole(name, optimizer, whole, 1)


# --- a model that was changed -----------------------------------------------------------------------------------------


def unfreeze(model: nn.Sequential) -> None:
    """Unfreeze the first layer."""
    model[0].requires_grad_(True)


def replace(model: nn.Sequential) -> None:
    """Replace the second layer by a new one."""
    model[1] = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unfreeze, r"'0\.0\.weight' was unfrozen"),
        (replace, "added, replaced or removed"),
        (lambda model: model.append(nn.Linear(4, 4)), "added, replaced or removed"),
    ],
)
def test_a_model_that_is_changed_later_is_told(name: str, change: Callable[[nn.Sequential], object], said: str) -> None:
    model = three()
    model[0].requires_grad_(False)
    optimizer = offload(model, psdist.optim.SGD(lr=0.1), name=name)
    change(model)
    with pytest.raises(InvalidArgumentError, match=said):
        loss_of(model, 0).backward()
    assert optimizer.handle.step == 0
