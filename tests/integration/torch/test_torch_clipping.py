"""torch's clipping functions on the gradients of a ``DistributedOptimizer``: two workers equal one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import psdist
from psdist import BSP, optim
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedOptimizer
from tests.support.torch_models import MODELS, loss_of, mlp, part

BATCHES = MODELS["mlp"][1]
STEPS = 5
NORM = 0.05
Loop = Callable[[nn.Module, torch.optim.Optimizer, int, int], list[float]]


def on_both(contexts: list[Context], work: Callable[[Context], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, contexts))


def backward(model: nn.Module, step: int, rank: int, world: int, factor: float = 1.0) -> None:
    (loss_of(model, part(BATCHES(step), rank, world)) * factor).backward()


def by_norm(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, rank, world)
        norms.append(float(clip_grad_norm_(max_norm=NORM, parameters=model.parameters())))
        optimizer.step()
    return norms


def by_value(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[float]:
    for step in range(STEPS):
        backward(model, step, rank, world)
        clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return []


def by_total_norm(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, rank, world)
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), NORM, norm)
        norms.append(float(norm))
        optimizer.step()
    return norms


def layer_by_layer(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, rank, world)
        norms += [float(clip_grad_norm_(layer.parameters(), NORM / 4)) for layer in (model[0], model[2])]
        optimizer.step()
    return norms


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            backward(model, 3 * step + micro, rank, world, 1 / 3)
        norms.append(float(clip_grad_norm_(model.parameters(), NORM)))
        optimizer.step()
    return norms


def clipped_between_passes(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            backward(model, 2 * step + micro, rank, world)
            norms.append(float(clip_grad_norm_(model.parameters(), NORM)))
        optimizer.step()
    return norms


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[float]:
    scaler, norms = GradScaler("cpu", init_scale=2.0**10), []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, part(BATCHES(step), rank, world))).backward()
        scaler.unscale_(optimizer)
        norms.append(float(clip_grad_norm_(model.parameters(), NORM)))
        scaler.step(optimizer)
        scaler.update()
    return norms


LOOPS = [by_norm, by_value, by_total_norm, layer_by_layer, accumulated, clipped_between_passes, scaled]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("overlap", ["auto", False])
def test_two_workers_clip_as_one_process(
    contexts: list[Context], name: str, loop: Loop, overlap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    start = mlp()

    def work(context: Context) -> tuple[nn.Module, list[float]]:
        model = copy.deepcopy(start)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(model, inner, name=name, context=context, overlap=overlap)
        norms = loop(model, optimizer, context.rank, 2)
        optimizer.close()
        return model, norms

    with caplog.at_level(logging.WARNING, logger="psdist"):
        (one, norms), (other, same) = on_both(contexts, work)
    expected = copy.deepcopy(start)
    expected_norms = loop(expected, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), 0, 1)
    assert norms == same == pytest.approx(expected_norms, rel=1e-5)
    for mine, theirs, parameter in zip(one.parameters(), other.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, parameter, rtol=1e-5, atol=1e-7)
    assert not caplog.records


def test_one_call_for_two_models(contexts: list[Context], name: str) -> None:
    starts = mlp(), mlp()

    def train(models: list[nn.Module], optimizers: list[Any], rank: int, world: int) -> list[nn.Module]:
        for step in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                backward(model, step, rank, world)
            clip_grad_norm_(chain(*(model.parameters() for model in models)), NORM)
            for optimizer in optimizers:
                optimizer.step()
        return models

    def work(context: Context) -> list[nn.Module]:
        models = [copy.deepcopy(model) for model in starts]
        optimizers = [
            DistributedOptimizer(model, optim.SGD(lr=0.1), name=f"{name}-{number}", context=context)
            for number, model in enumerate(models)
        ]
        # The order of the registry is that of addresses, which differs between workers.
        return train(models, optimizers, context.rank, 2)

    found = on_both(contexts, work)
    expected = [copy.deepcopy(model) for model in starts]
    train(expected, [torch.optim.SGD(model.parameters(), lr=0.1) for model in expected], 0, 1)
    for models in found:
        for model, other in zip(models, expected, strict=True):
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("total", [False, True])
def test_a_layer_that_one_worker_does_not_reach_counts(contexts: list[Context], name: str, total: bool) -> None:
    start = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    inputs = torch.ones(3, 4)

    def loss(model: nn.ModuleList, rank: int) -> torch.Tensor:
        first = model[0](inputs).square().sum()
        return first + model[1](inputs).square().sum() if rank else first

    def clip(model: nn.ModuleList) -> float:
        if not total:
            return float(clip_grad_norm_(model.parameters(), 0.5))
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        return float(norm)

    def work(context: Context) -> tuple[nn.Module, float]:
        model = copy.deepcopy(start)
        optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, context=context)
        loss(model, context.rank).backward()
        norm = clip(model)
        optimizer.step()
        return model, norm

    (one, norm), (other, same) = on_both(contexts, work)
    expected = copy.deepcopy(start)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    ((loss(expected, 0) + loss(expected, 1)) / 2).backward()
    assert norm == same == pytest.approx(clip(expected), rel=1e-5)
    plain.step()
    for mine, theirs, parameter in zip(one.parameters(), other.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, parameter, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [({"overlap": True}, "use overlap=False"), ({"consistency": BSP(reduction="sum")}, "use max_grad_norm=")],
)
def test_a_mean_that_is_impossible_is_refused_and_nothing_is_clipped(
    contexts: list[Context], name: str, settings: dict[str, Any], remedy: str
) -> None:
    def work(context: Context) -> None:
        model = mlp()
        optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, context=context, **settings)
        backward(model, 0, context.rank, 2)
        before = [one.grad.clone() for one in model.parameters()]
        with pytest.raises(InvalidArgumentError, match=rf"clip_grad_norm_ would see this worker's own.*{remedy}"):
            clip_grad_norm_(model.parameters(), NORM)
        assert all(torch.equal(one.grad, kept) for one, kept in zip(model.parameters(), before, strict=True))
        optimizer.step()
        assert optimizer.handle.step == 1
        optimizer.close()

    on_both(contexts, work)


def test_gradients_that_psdist_does_not_push_are_left_alone(contexts: list[Context], name: str) -> None:
    """Check models of the script's own, and SSP, where each worker's gradient makes a step by itself."""

    def work(context: Context) -> int:
        own, model = mlp(), mlp()
        consistency = psdist.SSP(staleness=2)
        optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, context=context, consistency=consistency)
        for one in (own, model):
            backward(one, 0, context.rank, 2)
            assert float(clip_grad_norm_(one.parameters(), 1.0)) > 0
        closed = DistributedOptimizer(mlp(), optim.SGD(lr=0.1), name=f"{name}-closed", context=context)
        closed.close()
        optimizer.step()
        return optimizer.handle.step

    assert on_both(contexts, work) == [1, 1]
