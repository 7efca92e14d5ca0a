"""A scheduler of torch beside the servers' steps: it follows them where they made others than the script's loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from psdist import optim
from psdist.client.sync_client import Parameters
from psdist.errors import InvalidArgumentError
from psdist.torch.conversion import convert_optimizer
from psdist.torch.rates import Rates

SCHEDULERS: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=50),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 40, 2.0),
    "warm-up, cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8), lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)],
        [8],
    ),
}


class Loop:
    """A training loop whose servers are a number."""

    def __init__(self, make: Callable[[Any], lr_scheduler.LRScheduler], lr: Any = 0.1, step: int = 0) -> None:
        names = {nn.Parameter(torch.zeros(2)): "w", nn.Parameter(torch.zeros(2)): "b"}
        weight, bias = names
        groups = [{"params": [weight]}, {"params": [bias], "lr": 0.01}]
        self.optimizer = torch.optim.SGD(groups, lr=lr)
        self.scheduler = make(self.optimizer)
        self.spec = convert_optimizer(self.optimizer, names, self.scheduler)
        self.handle = SimpleNamespace(step=step)
        self.rates = Rates(self.spec, self.optimizer, self.scheduler, cast(Parameters, self.handle))
        self.rates.begin(self.groups)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        return self.optimizer.param_groups

    def steps(self, count: int, jump: int = 0) -> None:
        """Makes steps. jump: by so many the servers are elsewhere after the last of them."""
        for number in range(count):
            self.rates.check(self.groups)
            self.handle.step += 1
            if number == count - 1:
                self.handle.step += jump
            self.rates.on_step(self.groups)
            self.scheduler.step()

    def assert_following(self) -> None:
        """The script shows the servers' rates."""
        self.rates.check(self.groups)
        factor = self.spec.schedule.factor(self.handle.step)
        assert [float(group["lr"]) for group in self.groups] == pytest.approx([0.1 * factor, 0.01 * factor])
        assert self.scheduler.last_epoch == self.handle.step


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("jump", [5, -4, -10, 0])
def test_a_scheduler_follows_the_servers(make: Callable[[Any], lr_scheduler.LRScheduler], jump: int) -> None:
    """They are elsewhere after this worker had been expelled, or the run went back to a snapshot."""
    loop = Loop(make)
    loop.steps(10, jump)
    loop.assert_following()
    loop.steps(7, max(jump, -7))
    loop.steps(3)
    loop.assert_following()


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_run_that_goes_on_begins_where_it_was(make: Callable[[Any], lr_scheduler.LRScheduler]) -> None:
    loop = Loop(make, step=12)
    loop.assert_following()
    loop.steps(4, jump=-9)
    loop.assert_following()


def test_a_step_that_is_skipped_or_made_elsewhere_is_counted_as_the_servers_do() -> None:
    loop = Loop(SCHEDULERS["cosine"])
    loop.steps(3)
    loop.rates.on_irregular_step(loop.groups)
    loop.scheduler.step()  # as loops do that do not ask whether their scaler skipped the step
    loop.assert_following()
    loop.rates.on_irregular_step(loop.groups)
    loop.handle.step += 1
    loop.assert_following()
    loop.steps(3)
    loop.rates.on_empty_step(loop.groups)
    loop.handle.step += 1
    loop.assert_following()


@pytest.mark.parametrize("count", [0, 2])
def test_a_loop_that_steps_it_otherwise_is_told(count: int) -> None:
    loop = Loop(SCHEDULERS["cosine"])
    loop.steps(3)
    loop.handle.step += 1
    loop.rates.on_step(loop.groups)
    for _ in range(count):
        loop.scheduler.step()
    with pytest.raises(
        InvalidArgumentError, match=r"at step 4, but the servers .* call scheduler\.step\(\) after each"
    ):
        loop.rates.check(loop.groups)


def test_a_rate_that_is_a_tensor_stays_the_script_s_tensor() -> None:
    rate = torch.tensor(0.1)
    loop = Loop(SCHEDULERS["cosine"], lr=rate)
    loop.steps(5, jump=-3)
    loop.assert_following()
    assert loop.groups[0]["lr"] is rate


def test_a_rate_that_is_a_tensor_may_not_be_written_to() -> None:
    parameter, rate = nn.Parameter(torch.zeros(2)), torch.tensor(0.5)
    optimizer = torch.optim.SGD([parameter], lr=rate)
    spec = convert_optimizer(optimizer, {parameter: "w"})
    rates = Rates(spec, optimizer, None, cast(Parameters, SimpleNamespace(step=0)))
    rates.begin(optimizer.param_groups)
    rates.check(optimizer.param_groups)
    rate.fill_(0.0)
    with pytest.raises(InvalidArgumentError, match=r"lr of parameter group 0 was changed from 0\.5 to 0\.0"):
        rates.check(optimizer.param_groups)


def test_rates_that_were_changed_are_told_also_after_a_step_that_was_skipped() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    rates = Rates(optim.SGD(lr=0.5), optimizer, None, cast(Parameters, SimpleNamespace(step=0)))
    rates.begin(optimizer.param_groups)
    optimizer.param_groups[0]["lr"] = 0.25
    rates.on_irregular_step(optimizer.param_groups)
    with pytest.raises(InvalidArgumentError, match=r"was changed from 0\.5 to 0\.25"):
        rates.check(optimizer.param_groups)


@pytest.mark.parametrize(("name", "last"), [("cosine", 50), ("warm-up, cosine", 38)])
def test_a_loop_past_the_end_of_a_cosine_is_told_what_ended(name: str, last: int) -> None:
    loop = Loop(SCHEDULERS[name])
    loop.steps(last + 1)
    with pytest.raises(InvalidArgumentError, match=r"is past T_max=\d+ of the cosine scheduler.* give T_max all steps"):
        loop.steps(1)
