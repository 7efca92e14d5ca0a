"""Gradients that a script keeps from step to step, while psdist reuses the memory that it sends them from."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from psdist import optim
from psdist.client.context import Context
from psdist.torch import DistributedDataParallel, DistributedOptimizer
from tests.support.torch_models import BATCHES, loss_of, mlp


@pytest.mark.parametrize("wrapper", ["optimizer", "data parallel", "views"])
def test_kept_gradients_keep_their_values(
    alone: Context, name: str, caplog: pytest.LogCaptureFixture, wrapper: str
) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    if wrapper == "optimizer":
        trained, optimizer = model, DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, overlap=True)
    else:
        trained = DistributedDataParallel(model, name=name, gradient_as_bucket_view=wrapper == "views")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: dict[bool, list[list[Tensor]]] = {True: [], False: []}
    for is_mine, one, by in ((True, trained, optimizer), (False, other, torch.optim.SGD(other.parameters(), lr=0.1))):
        for step in range(4):
            by.zero_grad()
            loss_of(one, BATCHES(step)).backward()
            kept[is_mine].append([parameter.grad for parameter in one.parameters()])
            by.step()
    for mine, theirs in zip(kept[True], kept[False], strict=True):
        for gradient, wanted in zip(mine, theirs, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert not caplog.records


def test_gradients_that_nobody_keeps_stay_in_the_memory_they_are_sent_from(
    alone: Context, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, overlap=True)
    places, views = set(), list(map(id, optimizer._stream._views))
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, BATCHES(step)).backward()
        places.add(tuple(parameter.grad.data_ptr() for parameter in model.parameters()))
        optimizer.step()
    assert len(places) == 1 and not caplog.records
    assert list(map(id, optimizer._stream._views)) == views


@pytest.mark.parametrize("view", [lambda gradient: gradient.data, lambda gradient: gradient.view(-1)])
def test_a_view_of_a_gradient_is_reported_once(
    alone: Context, name: str, caplog: pytest.LogCaptureFixture, view: object
) -> None:
    model, kept = mlp(), []
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, overlap=True)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, BATCHES(step)).backward()
        kept.append(view(model[0].weight.grad))
        optimizer.step()
    (record,) = caplog.records
    assert "view of a gradient" in record.getMessage() and "clone() the values to keep" in record.getMessage()
