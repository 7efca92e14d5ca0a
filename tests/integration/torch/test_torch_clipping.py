"""torch's clipping functions on the gradients of a ``DistributedOptimizer``: two workers equal one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
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
from tests.support.torch_models import BATCHES, distance, loss_of, mlp, part, same_bytes

STEPS = 5
NORM = 0.05
Both = Callable[[Callable[[Context], Any]], list[Any]]
Loop = Callable[[nn.Module, torch.optim.Optimizer, int, int], list[float]]


def backward(model: nn.Module, step: int, rank: int, world: int) -> None:
    loss_of(model, part(BATCHES(step), rank, world)).backward()


def clip_by_total_norm(model: nn.Module, limit: float) -> float:
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return float(norm)


def clipping(clip: Callable[[Any], list[float]], passes: int = 1) -> Loop:
    """Return a loop that clips after each backward pass of a step."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[float]:
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(passes):
                backward(model, passes * step + number, rank, world)
                norms += clip(model)
            optimizer.step()
        return norms

    return loop


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


LOOPS: dict[str, Loop] = {
    "norm": clipping(lambda model: [float(clip_grad_norm_(max_norm=NORM, parameters=model.parameters()))]),
    "value": clipping(lambda model: clip_grad_value_(model.parameters(), 1e-3) or []),
    "total norm": clipping(lambda model: [clip_by_total_norm(model, NORM)]),
    "layers": clipping(lambda model: [float(clip_grad_norm_(model[at].parameters(), NORM / 4)) for at in (0, 2)]),
    "each pass": clipping(lambda model: [float(clip_grad_norm_(model.parameters(), NORM))], passes=2),
    "scaled": scaled,
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("overlap", ["auto", False])
def test_two_workers_clip_as_one_process(
    both: Both, name: str, loop: Loop, overlap: Any, caplog: pytest.LogCaptureFixture
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
        (one, norms), (other, same) = both(work)
    expected = copy.deepcopy(start)
    expected_norms = loop(expected, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), 0, 1)
    assert norms == same == pytest.approx(expected_norms, rel=1e-5)
    assert same_bytes(one, other) and distance(one, expected) < 1e-5
    assert not caplog.records


def test_one_call_for_two_models(both: Both, name: str) -> None:
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

    found = both(work)
    expected = [copy.deepcopy(model) for model in starts]
    train(expected, [torch.optim.SGD(model.parameters(), lr=0.1) for model in expected], 0, 1)
    for models in found:
        for model, other in zip(models, expected, strict=True):
            assert distance(model, other) < 1e-5


@pytest.mark.parametrize("total", [False, True])
def test_a_layer_that_one_worker_does_not_reach_counts(both: Both, name: str, total: bool) -> None:
    start = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    inputs = torch.ones(3, 4)

    def loss(model: nn.ModuleList, rank: int) -> torch.Tensor:
        first = model[0](inputs).square().sum()
        return first + model[1](inputs).square().sum() if rank else first

    def clip(model: nn.ModuleList) -> float:
        if not total:
            return float(clip_grad_norm_(model.parameters(), 0.5))
        return clip_by_total_norm(model, 0.5)

    def work(context: Context) -> tuple[nn.Module, float]:
        model = copy.deepcopy(start)
        optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, context=context)
        loss(model, context.rank).backward()
        norm = clip(model)
        optimizer.step()
        return model, norm

    (one, norm), (other, same) = both(work)
    expected = copy.deepcopy(start)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    ((loss(expected, 0) + loss(expected, 1)) / 2).backward()
    assert norm == same == pytest.approx(clip(expected), rel=1e-5)
    plain.step()
    assert same_bytes(one, other) and distance(one, expected) < 1e-5


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [({"overlap": True}, "use overlap=False"), ({"consistency": BSP(reduction="sum")}, "use max_grad_norm=")],
)
def test_a_mean_that_is_impossible_is_refused_and_nothing_is_clipped(
    both: Both, name: str, settings: dict[str, Any], remedy: str
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

    both(work)


def test_gradients_that_psdist_does_not_push_are_left_alone(both: Both, name: str) -> None:
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

    assert both(work) == [1, 1]
