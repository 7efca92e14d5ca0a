"""Writes to weights and gradients that autograd does not see, such as through ``.data``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from psdist import optim
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedDataParallel, DistributedOptimizer, writes
from psdist.torch.writes import FIRST, Detection
from tests.support.torch_models import BATCHES, distance, loss_of, mlp, same_bytes, train


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def write_by_numpy(model: nn.Module) -> None:
    next(model.parameters()).detach().numpy()[0, 0] += 1


def prune(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight *= (torch.arange(model[0].weight.numel()).view_as(model[0].weight) % 2).float()


def restore(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.load_state_dict(mlp().state_dict())


#: The last two are seen by autograd, too.
WRITES: list[Callable[[nn.Module], object]] = [
    clip,
    write_by_numpy,
    lambda model: model[2].bias.data.mul_(2),
    prune,
    restore,
]


@pytest.mark.parametrize("overlap", ["auto", True, False])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("steps", [0, FIRST + 2])
def test_writes_to_weights_count_in_the_next_step(
    alone: Context, name: str, write: Callable[[nn.Module], object], overlap: bool, steps: int
) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = DistributedOptimizer(model, torch.optim.Adam(model.parameters(), lr=0.01), name=name, overlap=overlap)
    for one, way in ((model, optimizer), (other, torch.optim.Adam(other.parameters(), lr=0.01))):
        train(one, way, steps=steps)
        for number in range(2):
            write(one)
            train(one, way, steps=1, first=number)
    assert distance(model, other) < 1e-5


@pytest.mark.parametrize("write", [clip, lambda model: nn.init.zeros_(model[0].weight)])
def test_a_write_between_backward_and_step_is_refused(
    alone: Context, name: str, write: Callable[[nn.Module], object]
) -> None:
    """Its gradients are under way, so zero_grad makes the step with them."""
    model = mlp()
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, overlap=True)
    loss_of(model, BATCHES(0)).backward()
    write(model)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="was written to after"):
            optimizer.step()
    optimizer.zero_grad()
    assert optimizer.handle.step == 1
    train(model, optimizer, steps=1)
    assert optimizer.handle.step == 2


def test_the_averaging_wrapper_lets_a_script_write_to_its_weights(alone: Context, name: str) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    for one in (DistributedDataParallel(model, name=name), other):
        optimizer = torch.optim.RMSprop(one.parameters(), lr=0.01)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(one, BATCHES(number)).backward()
            for parameter in one.parameters():
                parameter.grad.data.clamp_(-0.001, 0.001)
            optimizer.step()
            clip(one)
    assert same_bytes(model, other) and all(one.abs().max() <= 0.01 for one in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda gradient: gradient.data.clamp_(-1e-4, 1e-4),
        lambda gradient: gradient.detach().numpy().fill(0),
    ],
)
@pytest.mark.parametrize("steps", [0, FIRST + 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hidden_changes_of_pushed_gradients_are_refused(
    alone: Context, name: str, change: Callable[[torch.Tensor], object], steps: int, dtype: torch.dtype
) -> None:
    model = nn.Linear(4, 2).to(dtype)
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, overlap=True)
    inputs = torch.ones(3, 4, dtype=dtype)
    for _ in range(steps):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(inputs).sum().backward()
    change(model.bias.grad)
    with pytest.raises(InvalidArgumentError, match=r"the gradient of 'bias' was changed.*overlap=False"):
        optimizer.step()
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    assert optimizer.handle.step == steps + 2


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make samples so small that they miss single elements."""
    monkeypatch.setattr(writes, "LATER_ELEMENTS", 16)


def write_row(table: nn.Embedding) -> None:
    table.weight.data[150] = 1.0


def write_element(table: nn.Embedding) -> None:
    table.weight.detach().numpy()[150, 3] = 1.0


@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("write", [write_row, write_element])
@pytest.mark.parametrize("detects", ["sampled", "all"])
def test_a_row_that_is_written_once_stays_if_all_writes_are_detected(
    alone: Context, name: str, write: Callable[[nn.Embedding], None], overlap: bool, detects: Detection
) -> None:
    table = nn.Embedding(200, 4)
    inner = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(table, inner, name=name, overlap=overlap, detect_writes=detects)
    for number in range(FIRST + 4):
        optimizer.zero_grad()
        table(torch.arange(10)).square().sum().backward()
        optimizer.step()
        if number == FIRST + 1:
            write(table)
    assert (table.weight[150, 3].item() == 1.0) == (detects == "all")


@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize("change", [lambda gradient: gradient.data[150:160].zero_(), write_row])
def test_each_write_after_the_push_is_refused_if_all_writes_are_detected(
    alone: Context, name: str, change: Callable[[object], object]
) -> None:
    table = nn.Embedding(200, 4)
    inner = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(table, inner, name=name, overlap=True, detect_writes="all")
    for number in range(FIRST + 2):
        optimizer.zero_grad()
        table(torch.arange(200)).square().sum().backward()
        if number <= FIRST:
            optimizer.step()
    change(table if change is write_row else table.weight.grad)
    with pytest.raises(InvalidArgumentError, match=r"was (changed|written to).* after the backward pass"):
        optimizer.step()


def test_rows_of_gradients_that_were_not_pushed_count(alone: Context, name: str) -> None:
    tables = [nn.Embedding(20, 4) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [torch.optim.SGD(table.parameters(), lr=0.1) for table in tables]
    optimizers[0] = DistributedOptimizer(tables[0], optimizers[0], name=name, overlap=False)
    for table, optimizer in zip(tables, optimizers, strict=True):
        for _ in range(FIRST + 2):
            optimizer.zero_grad()
            table(torch.arange(20)).square().sum().backward()
            table.weight.grad.data[[1, 3]] = 0
            optimizer.step()
    assert distance(*tables) < 1e-5


def test_buffers_and_frozen_parameters_keep_what_the_script_writes(alone: Context, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.0), nn.Linear(3, 1).requires_grad_(False))
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = DistributedOptimizer(model, torch.optim.SGD(trained, lr=0.1), name=name)
    for number in range(FIRST + 3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        if number == FIRST:
            model[1].running_mean.data[1] = 7.0
            model[2].weight.data[0, 2] = 5.0
    assert model[1].running_mean[1].item() == 7.0 and model[2].weight[0, 2].item() == 5.0


@pytest.mark.parametrize("key", ["sum", "momentum_buffer"])
def test_state_that_the_servers_hold_may_not_be_written(alone: Context, name: str, key: str) -> None:
    model = mlp()
    inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(model, inner, name=name)
    optimizer.state[model[0].weight]["mine"] = 3  # The script's own.
    train(model, optimizer, steps=1)
    if key == "sum":
        inner.state[model[0].weight][key].zero_()
    else:
        optimizer.state[model[0].weight][key] = torch.zeros(3)
    with pytest.raises(InvalidArgumentError, match=f"wrote to the optimizer's state '{key}'.*DistributedDataParallel"):
        train(model, optimizer, steps=1)


@pytest.mark.parametrize("value", ["none", True, None])
def test_other_values_of_detect_writes_are_refused(alone: Context, name: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="use 'sampled' or 'all'"):
        DistributedOptimizer(mlp(), optim.SGD(lr=0.1), name=name, detect_writes=value)
