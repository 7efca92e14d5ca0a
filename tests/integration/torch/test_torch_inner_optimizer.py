"""The inner optimizer after it was given to psdist: its hooks run, and changes of its groups are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedOptimizer, offload
from tests.support.torch_models import BATCHES, loss_of, mlp

Wrap = Callable[..., torch.optim.Optimizer]
WRAPS: list[Wrap] = [DistributedOptimizer, offload]

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("wrap", WRAPS)
def test_hooks_of_the_inner_optimizer_run_around_each_step(name: str, wrap: Wrap) -> None:
    """Those that were registered before wrapping, and after it."""
    model, called = mlp(), list[Any]()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.register_step_pre_hook(lambda one, *_: called.append(("before", one, step)))
    outer: Any = wrap(model, inner, name=name)
    inner.register_step_post_hook(lambda one, *_: called.append(("after", one, step)))
    for step in range(2):
        loss_of(model, BATCHES(step)).backward()
        outer.step()
        outer.zero_grad()
    assert called == [(when, inner, step) for step in range(2) for when in ("before", "after")]


def test_an_average_of_weights_in_a_hook_follows_the_steps(alone: Context, name: str) -> None:
    models, averages = (mlp(), mlp()), []
    models[1].load_state_dict(models[0].state_dict())
    for model, is_wrapped in zip(models, (True, False), strict=True):
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = [one.detach().clone() for one in model.parameters()]

        def update(one: torch.optim.Optimizer, *_: Any, into: list[torch.Tensor] = average) -> None:
            for mean, parameter in zip(into, one.param_groups[0]["params"], strict=True):
                mean.lerp_(parameter.detach(), 0.5)

        inner.register_step_post_hook(update)
        optimizer = DistributedOptimizer(model, inner, name=name) if is_wrapped else inner
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, BATCHES(step)).backward()
            optimizer.step()
        averages.append(average)
    for mine, theirs in zip(*averages, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_hook_before_the_step_may_change_gradients_without_overlap(name: str) -> None:
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0))
    optimizer = DistributedOptimizer(model, inner, name=name, overlap=False)
    before = [one.detach().clone() for one in model.parameters()]
    loss_of(model, BATCHES(0)).backward()
    optimizer.step()
    assert all(torch.equal(one, then) for one, then in zip(model.parameters(), before, strict=True))


def test_hooks_replace_the_arguments_of_a_step(name: str) -> None:
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(model, inner, name=name)
    hook = inner.register_step_pre_hook(lambda one, arguments, keywords: ((one, lambda: 7.0), keywords))
    assert optimizer.step() == 7.0
    hook.remove()
    inner.register_step_pre_hook(lambda *_: 5)
    with pytest.raises(InvalidArgumentError, match="a step pre-hook returned 5: return None"):
        optimizer.step()


def test_global_hooks_run(name: str) -> None:
    model, called = mlp(), list[Any]()
    optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
    hooks = [
        register_optimizer_step_pre_hook(lambda one, *_: called.append(one)),
        register_optimizer_step_post_hook(lambda one, *_: called.append(one)),
    ]
    try:
        optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert called == [optimizer, optimizer]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    "change",
    [
        lambda inner: inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        lambda inner: inner.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2))),
        lambda inner: inner.param_groups.clear(),
    ],
)
def test_changes_of_the_groups_are_refused(
    name: str, wrap: Wrap, change: Callable[[torch.optim.Optimizer], object]
) -> None:
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"overlap": True} if wrap is DistributedOptimizer else {}
    outer: Any = wrap(model, inner, name=name, **options)
    change(inner)
    for act in (lambda: loss_of(model, BATCHES(0)).backward(), outer.step):
        with pytest.raises(InvalidArgumentError, match=r"the optimizer has .* parameter groups.*before wrapping"):
            act()
