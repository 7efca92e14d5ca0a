"""Models that are wrapped one after another under one name: another model is refused, the same one continues."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import psdist
from psdist import optim
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError, LateWorkerError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.torch import DistributedDataParallel, DistributedOptimizer, offload
from tests.support.torch_models import BATCHES, distance, mlp, train

REFUSED = "holds the weights of another model, which this script wrapped before.*another name="
Wrap = Callable[..., Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("wrap", [DistributedOptimizer, offload])
def test_a_new_model_needs_a_name_of_its_own(alone: Context, name: str, wrap: Wrap) -> None:
    """As in a loop over folds, whose models would otherwise continue each other."""
    for fold in range(3):
        torch.manual_seed(fold)
        model = mlp()
        other = copy.deepcopy(model)
        if fold:
            with pytest.raises(InvalidArgumentError, match=REFUSED):
                wrap(model, sgd(model), name=f"{name}-0")
        optimizer = wrap(model, sgd(model), name=f"{name}-{fold}")
        train(model, optimizer, steps=2)
        assert optimizer.handle.step == 2
        train(other, sgd(other), steps=2)
        with torch.no_grad():
            inputs = BATCHES(5)[0]
            torch.testing.assert_close(model(inputs), other(inputs), rtol=1e-5, atol=1e-6)
        optimizer.close()


def test_a_model_that_was_dropped_without_close_leaves_its_name_in_use(alone: Context, name: str) -> None:
    model: Any = mlp()
    optimizer: Any = DistributedOptimizer(model, sgd(model), name=name)
    train(model, optimizer, steps=2)
    other = mlp()
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        DistributedOptimizer(other, sgd(other), name=name)
    del model, optimizer
    gc.collect()
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        DistributedOptimizer(other, sgd(other), name=name)


def test_the_same_model_continues(alone: Context, name: str) -> None:
    model = mlp()
    other, plain = copy.deepcopy(model), None
    for _ in range(2):
        optimizer = DistributedOptimizer(model, sgd(model), name=name)
        train(model, optimizer, steps=2)
        optimizer.close()
        plain = plain or sgd(other)
        train(other, plain, steps=2)
    assert optimizer.handle.step == 4
    assert distance(model, other) < 1e-5


def step_alone(model: nn.Module) -> None:
    train(model, sgd(model), steps=1)


def replace_memory(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros_like(model[0].weight)


@pytest.mark.parametrize(
    "change", [step_alone, lambda model: model.load_state_dict(mlp().state_dict()), replace_memory]
)
def test_the_same_model_with_other_weights_needs_another_name(
    alone: Context, name: str, change: Callable[[nn.Module], object]
) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)
    train(model, optimizer, steps=2)
    optimizer.close()
    change(model)
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight' was written to after close\(\).*another name="):
        DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)
    weights = [one.detach().clone() for one in model.parameters()]
    DistributedOptimizer(model, optim.SGD(lr=0.1), name=f"{name}-again")
    assert all(torch.equal(one, then) for one, then in zip(model.parameters(), weights, strict=True))


def test_a_model_with_a_new_layer_is_another_one(alone: Context, name: str) -> None:
    model = mlp()
    DistributedOptimizer(model, optim.SGD(lr=0.1), name=name).close()
    model[4] = nn.Linear(24, 4)
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)


def test_a_context_that_is_opened_again_does_not_continue_with_another_model() -> None:
    """Two clients of one worker, one after the other; another worker keeps the run alive."""
    cluster = EmbeddedCluster(servers=1)

    def opened(rank: int) -> Context:
        return Context(rank, 2, rank, psdist.Client(cluster.address, cluster.token, rank=rank))

    def wrap(context: Context, model: nn.Module, **options: Any) -> DistributedOptimizer:
        return DistributedOptimizer(model, sgd(model), context=context, consistency=psdist.ASP(), **options)

    def average(context: Context) -> DistributedDataParallel:
        return DistributedDataParallel(nn.Linear(1, 1), context=context, name="means")

    models = mlp(), mlp()
    try:
        with opened(1) as other, ThreadPoolExecutor(2) as threads:
            with opened(0) as first:
                optimizers = list(threads.map(wrap, (first, other), models))
                train(models[0], optimizers[0], steps=2)
                list(threads.map(average, (first, other)))
            with opened(0) as second:
                model = mlp()
                with pytest.raises(InvalidArgumentError, match=REFUSED):
                    wrap(second, model)
                with pytest.raises(LateWorkerError, match="opened its context again passes another name="):
                    average(second)
                optimizers[0].close()
                again = wrap(second, models[0])
                assert again.handle.version == 2
    finally:
        cluster.close()
