"""``join``: workers with different numbers of batches, in two or three threads of this process with real servers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, MultiplicativeLR

import psdist
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError, UnevenInputsError
from psdist.torch import DistributedDataParallel, DistributedOptimizer
from tests.support.contexts import everywhere as in_all
from tests.support.contexts import workers
from tests.support.torch_models import BATCHES, Batch, distance, loss_of, mlp, same_bytes

WORLD = 3
#: Batches of each rank: the first worker ends in the middle, the second has none.
COUNTS = (2, 0, 4)
Work = Callable[[Context], Any]


@pytest.fixture(scope="module")
def everywhere() -> Iterator[Callable[[Work], list[Any]]]:
    """Do the same in all workers. Returns their results."""
    with workers(WORLD, servers=2) as contexts:
        yield partial(in_all, contexts)


def batches_of(rank: int) -> list[Batch]:
    return [BATCHES(10 * rank + number) for number in range(COUNTS[rank])]


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, divide: bool) -> None:
    """Train one process on the batches of all workers, step by step. divide: by the number of all workers."""
    for step in range(max(COUNTS)):
        batches = [batches_of(rank)[step] for rank in range(WORLD) if step < COUNTS[rank]]
        optimizer.zero_grad()
        for batch in batches:
            (loss_of(model, batch) / (WORLD if divide else len(batches))).backward()
        optimizer.step()


def assert_alike(models: list[nn.Module], expected: nn.Module) -> None:
    assert all(same_bytes(models[0], model) for model in models) and distance(models[0], expected) < 1e-5


def made(model: nn.Module, kind: type[LRScheduler]) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the same rates by both kinds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind is ExponentialLR:
        return optimizer, ExponentialLR(optimizer, 0.9)
    return optimizer, MultiplicativeLR(optimizer, lambda _: 0.9)


@pytest.mark.parametrize(
    ("divide", "overlap", "kind"),
    [
        (True, True, MultiplicativeLR),
        (False, False, ExponentialLR),
    ],
)
def test_with_an_optimizer_on_the_servers(
    everywhere: Callable[[Work], list[Any]], name: str, divide: bool, overlap: bool, kind: type[LRScheduler]
) -> None:
    """Check two optimizers, each with a scheduler that also follows the steps of the others.

    The servers know one of them; the rates of the other are sent.
    """
    at_first = mlp()

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        inner, scheduler = made(model, kind)
        optimizer = DistributedOptimizer(model, inner, scheduler, name=name, context=context, overlap=overlap)
        for _ in range(2):
            with optimizer.join(divide_by_initial_world_size=divide):
                for batch in batches_of(context.rank):
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
                    scheduler.step()
        assert optimizer.handle.step == 2 * max(COUNTS)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**optimizer.handle.step)
        return model

    expected = copy.deepcopy(at_first)
    optimizer, scheduler = made(expected, kind)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    for _ in range(2):
        alone(expected, optimizer, divide)
    assert_alike(everywhere(worker), expected)


def test_workers_without_batches_take_what_the_others_write(everywhere: Callable[[Work], list[Any]], name: str) -> None:
    """Check also a write after the last step."""
    at_first = mlp()

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(model, inner, name=name, context=context)
        with optimizer.join():
            for batch in batches_of(context.rank):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                clamp(model)
        optimizer.zero_grad()
        loss_of(model, BATCHES(5)).backward()
        optimizer.step()
        return model

    expected = copy.deepcopy(at_first)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    handle = optimizer.register_step_post_hook(lambda *_: clamp(expected))
    alone(expected, optimizer, divide=True)
    handle.remove()
    optimizer.zero_grad()
    loss_of(expected, BATCHES(5)).backward()
    optimizer.step()
    assert_alike(everywhere(worker), expected)


@pytest.mark.parametrize("divide", [True, False])
def test_sent_rates_are_those_of_the_workers_with_batches(
    everywhere: Callable[[Work], list[Any]], name: str, divide: bool
) -> None:
    """Check the sent rates: the scheduler of a worker without batches makes no more steps."""
    at_first = mlp()

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(model, inner, name=name, context=context)
        scheduler = MultiplicativeLR(optimizer, lambda _: 0.9)
        with optimizer.join(divide_by_initial_world_size=divide):
            for batch in batches_of(context.rank):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                scheduler.step()
        return model

    expected = copy.deepcopy(at_first)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    scheduler = MultiplicativeLR(optimizer, lambda _: 0.9)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    alone(expected, optimizer, divide)
    assert_alike(everywhere(worker), expected)


@pytest.mark.parametrize("kind", [ExponentialLR, MultiplicativeLR])
def test_a_worker_without_batches_skips_the_steps_that_overflow(
    everywhere: Callable[[Work], list[Any]], name: str, kind: type[LRScheduler]
) -> None:
    """Check that the schedulers skip them, too, even if the loop has stepped them."""
    at_first, bad = mlp(), 2

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        inner, scheduler = made(model, kind)
        optimizer = DistributedOptimizer(model, inner, scheduler, name=name, context=context, overlap=False)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        with optimizer.join():
            for step, batch in enumerate(batches_of(context.rank)):
                optimizer.zero_grad()
                factor = 1e38 * 1e3 if step == bad else 1.0
                scaler.scale(loss_of(model, batch) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        assert optimizer.handle.step == max(COUNTS) - 1
        return model

    expected = copy.deepcopy(at_first)
    optimizer, scheduler = made(expected, kind)
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        for rank in range(WORLD):
            if step < COUNTS[rank] and step != bad:
                (loss_of(expected, batches_of(rank)[step]) / WORLD).backward()
        if step != bad:
            optimizer.step()
            scheduler.step()
    assert_alike(everywhere(worker), expected)


class Normalized(nn.Module):
    """Model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@pytest.mark.parametrize("divide", [True, False])
def test_with_an_optimizer_of_the_script(everywhere: Callable[[Work], list[Any]], name: str, divide: bool) -> None:
    at_first = mlp()

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        network = DistributedDataParallel(model, name=name, context=context, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with network.join(divide_by_initial_world_size=divide):
            for batch in batches_of(context.rank):
                optimizer.zero_grad()
                loss_of(network, batch).backward()
                optimizer.step()
        return model

    expected = copy.deepcopy(at_first)
    alone(expected, torch.optim.SGD(expected.parameters(), lr=0.1), divide)
    assert_alike(everywhere(worker), expected)


def test_buffers_are_those_of_the_last_worker(everywhere: Callable[[Work], list[Any]], name: str) -> None:
    at_first = Normalized()

    def worker(context: Context) -> dict[str, Tensor]:
        model = copy.deepcopy(at_first)
        network = DistributedDataParallel(model, name=name, context=context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with network.join():
            for batch in batches_of(context.rank):
                optimizer.zero_grad()
                loss_of(network, batch).backward()
                optimizer.step()
        return model.state_dict()

    states = everywhere(worker)
    # Two steps of rank 0, whose statistics all workers continue with, and two of rank 2.
    assert int(states[0]["layers.1.num_batches_tracked"]) == 4
    for state in states[1:]:
        assert all(torch.equal(state[key], states[0][key]) for key in state)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, DistributedOptimizer])
def test_the_first_end_can_raise_everywhere(everywhere: Callable[[Work], list[Any]], name: str, wrapper: type) -> None:
    def worker(context: Context) -> int:
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        network: Any = model
        if wrapper is DistributedOptimizer:
            joins = optimizer = DistributedOptimizer(model, optimizer, name=name, context=context)
        else:
            joins = network = DistributedDataParallel(model, name=name, context=context)
        made = 0
        with (
            pytest.raises(UnevenInputsError, match="a worker has no batch left"),
            joins.join(throw_on_early_termination=True),
        ):
            for number in range(2 + (context.rank == 1)):
                optimizer.zero_grad()
                loss_of(network, BATCHES(number)).backward()
                optimizer.step()
                made += 1
        return made

    assert everywhere(worker) == [2, 2, 2]


def test_even_inputs_raise_nothing_and_may_be_left_alone(everywhere: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> int:
        model = mlp()
        optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name, context=context)
        for enable in (True, False):
            with optimizer.join(enable=enable, throw_on_early_termination=True):
                for number in range(2):
                    optimizer.zero_grad()
                    loss_of(model, BATCHES(number)).backward()
                    optimizer.step()
        return optimizer.handle.step

    assert everywhere(worker) == [4, 4, 4]


def test_what_join_refuses(everywhere: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> None:
        model = mlp()
        optimizer = DistributedOptimizer(model, psdist.optim.SGD(lr=0.1), name=name, context=context, overlap=True)
        with optimizer.join(), pytest.raises(InvalidArgumentError, match=r"divide_by_initial_world_size=False"):
            optimizer.set_weight(3.0)
        with pytest.raises(InvalidArgumentError, match=r"under way at the end of join\(\)"), optimizer.join():
            loss_of(model, BATCHES(0)).backward()
        optimizer.step()
        network = DistributedDataParallel(mlp(), name=f"{name}-parallel", context=context)
        network.eval()
        with network.join(), pytest.raises(InvalidArgumentError, match="did not start a step"):
            loss_of(network, BATCHES(0)).backward()

    everywhere(worker)


def test_join_is_for_bsp(everywhere: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> None:
        optimizer = DistributedOptimizer(
            mlp(), psdist.optim.SGD(lr=0.1), consistency=psdist.ASP(), name=name, context=context
        )
        with pytest.raises(InvalidArgumentError, match=r"join\(\) in ASP"), optimizer.join():
            pass

    everywhere(worker)
