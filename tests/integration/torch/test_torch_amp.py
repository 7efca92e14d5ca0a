"""Mixed precision with torch's GradScaler: all workers skip a step in which one overflows.

Two workers in threads of this process, with real servers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ExponentialLR

import psdist
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedDataParallel, DistributedOptimizer
from tests.support.torch_models import BATCHES, distance, loss_of, mlp, part, same_bytes

STEPS = 6
#: Rank 1 overflows in this step.
BAD = 3
Work = Callable[[Context], Any]


def loss_at(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of a worker's part of a batch, which overflows in the chosen step."""
    loss = loss_of(model, part(BATCHES(step), rank, 2))
    return loss * 1e38 * 1e3 if step == BAD and rank == 1 else loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, rank: int, unscales: bool) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_at(model, step, rank)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()


def expected_of(model: nn.Module) -> nn.Module:
    """Return the result of one process with both parts, which omits the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step != BAD:
            optimizer.zero_grad()
            for rank in range(2):
                (loss_at(model, step, rank) / 2).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("wrapper", ["optimizer", "unscaled", "data parallel", "views"])
def test_all_workers_skip_the_step(both: Callable[[Work], list[Any]], name: str, wrapper: str) -> None:
    """Check this also for scripts with an optimizer and a scaler of their own, as with torch's DDP."""
    at_first, is_averaged = mlp(), wrapper in ("data parallel", "views")

    def worker(context: Context) -> tuple[nn.Module, float]:
        model = copy.deepcopy(at_first)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        network: Any = model
        handled: Any
        if is_averaged:
            network = handled = DistributedDataParallel(
                model, name=name, context=context, gradient_as_bucket_view=wrapper == "views"
            )
        else:
            optimizer = handled = DistributedOptimizer(model, optimizer, name=name, context=context, overlap=False)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        train(network, optimizer, scaler, context.rank, wrapper == "unscaled")
        assert handled.handle.step == STEPS - (not is_averaged)
        return model, scaler.get_scale()

    (one, scale), (other, same) = both(worker)
    assert same == 2.0**9 and (scale == same or not is_averaged), "the worker that had none halved its scale"
    assert same_bytes(one, other) and distance(one, expected_of(copy.deepcopy(at_first))) < 1e-5


def test_a_weight_is_that_of_the_step_that_was_skipped_and_a_scheduler_follows(
    both: Callable[[Work], list[Any]], name: str
) -> None:
    def worker(context: Context) -> tuple[int, int]:
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = ExponentialLR(inner, 0.9)
        optimizer = DistributedOptimizer(model, inner, scheduler, name=name, context=context, overlap=False)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.set_weight(1.0 + step)
            scaler.scale(loss_at(model, step, context.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.set_weight(1.0)
        optimizer.zero_grad()
        scaler.scale(loss_at(model, 0, context.rank)).backward()
        scaler.step(optimizer)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** (STEPS - 1))
        return optimizer.handle.step, scheduler.last_epoch

    assert both(worker) == [(STEPS, STEPS - 1)] * 2


def test_without_a_barrier_a_worker_skips_alone(alone: Context, name: str) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(
        model, psdist.optim.SGD(lr=0.1), consistency=psdist.ASP(), name=name, context=alone, overlap=False
    )
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for step, factor in enumerate((1.0, torch.inf)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, BATCHES(step)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (optimizer.handle.version, scaler.get_scale()) == (1, 2.0**9)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_scaler_and_an_overlapping_optimizer_do_not_go_together(alone: Context, name: str) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(
        model, psdist.optim.SGD(lr=0.1), consistency=psdist.ASP(), name=name, context=alone, overlap=True
    )
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model, BATCHES(0))).backward()
    with pytest.raises(InvalidArgumentError, match="use overlap=False, or bfloat16"):
        scaler.step(optimizer)
