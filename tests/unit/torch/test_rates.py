"""A torch scheduler beside the servers' steps: it follows them if they made others than the script's loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from psdist import optim
from psdist.client.sync_client import Parameters
from psdist.consistency import BSP
from psdist.errors import InvalidArgumentError
from psdist.torch.optimizer import groups_of as torch_groups
from psdist.torch.optimizer import specification_of
from psdist.torch.rates import LearningRates, ServerGroups, check_scheduler

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
#: Schedulers without a schedule of the servers.
SENT: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 8) * 0.99**step),
    "multiplied": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9 + 0.01 * (step % 3)),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 7, 20], 0.3),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, 2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.5, 0.05], total_steps=60, cycle_momentum=False
    ),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=6),
    "two": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.StepLR(optimizer, 3), lr_scheduler.ExponentialLR(optimizer, 0.8)], [10]
    ),
}
ALL = SCHEDULERS | SENT


class Loop:
    """Training loop whose servers are a number."""

    def __init__(
        self, make: Callable[[Any], lr_scheduler.LRScheduler], lr: Any = 0.1, step: int = 0,
        kind: Any = torch.optim.SGD, **settings: Any,
    ) -> None:  # fmt: skip
        names = {nn.Parameter(torch.zeros(2)): "w", nn.Parameter(torch.zeros(2)): "b"}
        weight, bias = names
        groups = [{"params": [weight]}, {"params": [bias], "lr": 0.01}]
        self.optimizer = kind(groups, lr=lr, **settings)
        self.scheduler = make(self.optimizer)
        self.make, self.kind, self.settings = make, kind, settings
        trained = {name: parameter for parameter, name in names.items()}
        self.spec = specification_of(self.optimizer, trained, self.scheduler)
        self.handle = SimpleNamespace(step=step)
        self.rates = LearningRates(self.spec, self.optimizer, self.scheduler, cast(Parameters, self.handle))
        self.rates.attach(self.groups)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def steps(self, count: int, jump: int = 0) -> None:
        """Make steps. jump: difference of the servers' step after the last of them."""
        for number in range(count):
            self.rates.check(self.groups)
            self.handle.step += 1
            if number == count - 1:
                self.handle.step += jump
            self.rates.on_step(self.groups)
            self.scheduler.step()

    def alone(self) -> list[dict[str, Any]]:
        """Return torch's own groups at the servers' step."""
        groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (0.1, 0.01)]
        optimizer = self.kind(groups, **self.settings)
        scheduler = self.make(optimizer)
        for _ in range(self.handle.step):
            optimizer.step()
            scheduler.step()
        return list(optimizer.param_groups)

    def assert_following(self) -> None:
        """Check that the servers use the rates that the script shows, which are torch's."""
        sent = self.rates.check(self.groups)
        factor = self.spec.schedule.factor(self.handle.step)
        shown = [float(group["lr"]) for group in self.groups]
        base = [self.spec.group_values(group)["lr"] for group in range(2)]
        assert shown == pytest.approx([values.get("lr", base[number]) * factor for number, values in enumerate(sent)])
        assert shown == pytest.approx([float(group["lr"]) for group in self.alone()])
        assert self.scheduler.last_epoch == self.handle.step


def test_a_scheduler_follows_the_servers() -> None:
    """The servers' step differs after this worker had been expelled, or the run rolled back to a snapshot."""
    for make in ALL.values():
        for jump in [5, -4, -10, 0]:
            loop = Loop(make)
            loop.steps(10, jump)
            loop.assert_following()
            loop.steps(7, max(jump, -7))
            loop.steps(3)
            loop.assert_following()


def test_a_run_that_goes_on_begins_where_it_was() -> None:
    for make in ALL.values():
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


def rates_of(optimizer: torch.optim.Optimizer, spec: optim.Optimizer | None = None, step: int = 0) -> LearningRates:
    """Return the rates of an optimizer whose scheduler, if it has one, was not passed."""
    parameters = {f"{number}.w": one["params"][0] for number, one in enumerate(optimizer.param_groups)}
    spec = specification_of(optimizer, parameters, None) if spec is None else spec
    rates = LearningRates(spec, optimizer, None, cast(Parameters, SimpleNamespace(step=step)))
    rates.attach(optimizer.param_groups)
    return rates


def sent_rates(rates: LearningRates, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the rate of each group that the next push carries."""
    return [values["lr"] for values in rates.check(optimizer.param_groups)]


@pytest.mark.parametrize("is_tensor", [False, True])
def test_rates_that_the_script_sets_are_sent(is_tensor: bool) -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=rate if is_tensor else 0.5)
    rates = rates_of(optimizer)
    assert sent_rates(rates, optimizer) == [0.5]
    if is_tensor:
        rate.fill_(0.25)
    else:
        optimizer.param_groups[0]["lr"] = 0.25
    rates.on_irregular_step(optimizer.param_groups)
    assert sent_rates(rates, optimizer) == [0.25]
    rates.on_step(optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_scheduler_that_is_not_given_may_be_stepped_at_will() -> None:
    """Its rate before the first step is not the one that it multiplies."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda data_epoch: data_epoch / 4)
    rates = rates_of(optimizer)
    for data_epoch in range(4):
        for _ in range(3):
            assert sent_rates(rates, optimizer) == [data_epoch / 8]
            optimizer.step()
            rates.on_step(optimizer.param_groups)
        scheduler.step()


def test_rates_beside_a_schedule_of_the_servers_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    rates = rates_of(optimizer, optim.SGD(lr=0.5, schedule=optim.Step(10)))
    assert rates.check(optimizer.param_groups)[0].keys().isdisjoint(["lr"])
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(InvalidArgumentError, match=r"was changed from 0\.5 to 0\.25, .* leave schedule= out"):
        rates.check(optimizer.param_groups)


def groups_of(optimizer: torch.optim.Optimizer, spec: optim.Optimizer | None = None) -> ServerGroups:
    """Return the servers' groups of an optimizer whose parameters are named by their numbers in it."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    trained = {f"{number}.w": one for number, one in enumerate(parameters)}
    return ServerGroups(spec or specification_of(optimizer, trained, None), trained, optimizer.param_groups)


def in_groups(*rates: float, **settings: Any) -> torch.optim.SGD:
    """Return an optimizer with one parameter in each group."""
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in rates], **settings)


def test_every_number_of_a_group_is_sent_by_its_name_on_the_servers() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5))
    rates, groups = rates_of(optimizer), groups_of(optimizer)
    assert groups.settings(rates.check(optimizer.param_groups)) == {}
    optimizer.param_groups[0] |= {"lr": 0.25, "betas": (0.8, torch.tensor(0.5)), "weight_decay": 0}
    expected = {"lr": 0.25, "beta1": 0.8, "beta2": 0.5, "weight_decay": 0.0}
    assert groups.settings(rates.check(optimizer.param_groups)) == {0: expected}


def test_groups_change_independently() -> None:
    """Check it for groups that began equal, and for one that began without a rate."""
    optimizer = in_groups(0.1, 0.1, 0.0, momentum=0.9)
    rates, groups = rates_of(optimizer), groups_of(optimizer)
    assert groups.settings(rates.check(optimizer.param_groups)) == {}
    for group, lr in zip(optimizer.param_groups, (0.1, 0.02, 0.5), strict=True):
        group["lr"] = lr
    optimizer.param_groups[1]["momentum"] = 0.5
    changed = groups.settings(rates.check(optimizer.param_groups)).values()
    assert sorted(changed, key=len) == [{"lr": 0.5}, {"lr": 0.02, "momentum": 0.5}]


def test_settings_that_the_servers_cannot_change_are_refused() -> None:
    for key, value, said in [
        ("momentum", 0.0, r"parameter group 1: momentum cannot change from 0\.9 to 0 .* use a value above 0"),
        ("nesterov", True, "parameter group 1: nesterov cannot change from 0 to 1"),
        ("weight_decay", -0.1, r"parameter group 1: sgd weight_decay=-0\.1 is out of range"),
        ("lr", -0.1, r"parameter group 1: sgd lr=-0\.1 is out of range: use a number from 0"),
    ]:
        optimizer = in_groups(0.1, 0.2, momentum=0.9)
        rates, groups = rates_of(optimizer), groups_of(optimizer)
        optimizer.param_groups[1][key] = value
        with pytest.raises(InvalidArgumentError, match=f"{said}.*DistributedDataParallel keeps the optimizer"):
            groups.settings(rates.check(optimizer.param_groups))


def test_equal_groups_of_too_many_patterns_change_equally() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(300)], lr=0.1)
    rates, groups = rates_of(optimizer), groups_of(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    assert groups.settings(rates.check(optimizer.param_groups)) == {0: {"lr": 0.05}}
    optimizer.param_groups[7]["lr"] = 0.01
    with pytest.raises(InvalidArgumentError, match=r"parameter groups 0 and 7 were equal .* change both equally"):
        groups.settings(rates.check(optimizer.param_groups))


def test_a_rate_that_rounds_below_zero_is_zero() -> None:
    optimizer = in_groups(0.1, 0.2)
    rates = rates_of(optimizer)
    optimizer.param_groups[0]["lr"] = -1e-17
    assert sent_rates(rates, optimizer) == [0.0, 0.2]


def test_settings_of_a_specification_may_change() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    spec = optim.AdamW(lr=0.5, betas=(0.9, 0.99))
    shown = torch_groups(spec, {"w": parameter})
    rates = LearningRates(spec, None, None, cast(Parameters, SimpleNamespace(step=0)))
    rates.attach(shown)
    groups = ServerGroups(spec, {"w": parameter}, shown)
    assert groups.settings(rates.check(shown)) == {}
    shown[0] |= {"beta1": 0.8, "lr": 0.25}
    assert groups.settings(rates.check(shown)) == {0: {"beta1": 0.8, "lr": 0.25}}


def test_a_rate_may_not_change_between_the_pushes_of_a_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    rates = rates_of(optimizer)
    rates.check_unchanged(optimizer.param_groups)
    assert sent_rates(rates, optimizer) == [0.5]
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(InvalidArgumentError, match=r"lr of parameter group 0 .* from 0\.5 to 0\.25 .* before backward"):
        rates.check_unchanged(optimizer.param_groups)
    rates.on_step(optimizer.param_groups)
    rates.check_unchanged(optimizer.param_groups)
    assert sent_rates(rates, optimizer) == [0.25]


@pytest.mark.parametrize("kind", [lr_scheduler.ExponentialLR, lr_scheduler.MultiplicativeLR])
def test_rates_that_are_tensors_are_multiplied_in_float32(kind: type[lr_scheduler.LRScheduler]) -> None:
    def make(optimizer: Any) -> lr_scheduler.LRScheduler:
        if kind is lr_scheduler.ExponentialLR:
            return lr_scheduler.ExponentialLR(optimizer, 0.9973)
        return lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9973)

    Loop(make, lr=torch.tensor(0.1)).steps(1000)


def test_a_scheduler_that_is_sent_is_stepped_with_the_optimizer() -> None:
    loop = Loop(SENT["milestones"])
    loop.steps(3)
    loop.handle.step += 1
    loop.rates.on_step(loop.groups)
    with pytest.raises(InvalidArgumentError, match=r"has made 3 steps at step 4: call scheduler\.step\(\) after each"):
        loop.rates.check(loop.groups)


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_worker_that_starts_later_is_warned_of_its_rates_once(
    caplog: pytest.LogCaptureFixture, has_scheduler: bool
) -> None:
    """A constant rate is as good then as at the beginning."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    if has_scheduler:
        lr_scheduler.StepLR(optimizer, 5)
    rates = rates_of(optimizer, step=12)
    rates.check(optimizer.param_groups)
    assert bool(caplog.messages) == has_scheduler
    optimizer.param_groups[0]["lr"] = 0.25
    for _ in range(2):
        rates.check(optimizer.param_groups)
    (said,) = caplog.messages
    assert "started at step 12" in said and f"lr={0.5 if has_scheduler else 0.25}" in said and "scheduler=" in said


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lr_scheduler.ReduceLROnPlateau, "leave it out of scheduler=, and step it in the loop"),
        (lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 3)]), "leave it out of scheduler="),
    ],
)
def test_schedulers_that_cannot_be_given(make: Callable[[Any], Any], said: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    with pytest.raises(InvalidArgumentError, match=said):
        check_scheduler(optimizer, make(optimizer), BSP())


@pytest.mark.parametrize(("name", "last"), [("cosine", 50), ("warm-up, cosine", 38)])
def test_a_loop_past_the_end_of_a_cosine_is_told_what_ended(name: str, last: int) -> None:
    loop = Loop(SCHEDULERS[name])
    loop.steps(last + 1)
    with pytest.raises(InvalidArgumentError, match=r"is past T_max=\d+ of the cosine scheduler.* set T_max to"):
        loop.steps(1)


ASGD_NAMES = ("lr", "alpha", "t0", "lambd", "lambd_before")


def test_asgd_has_the_step_size_of_the_step_before() -> None:
    """As in torch, which computes it at the end of a step. A saved state has the numbers of the last step, too."""
    optimizer = torch.optim.ASGD([nn.Parameter(torch.zeros(2))], lr=1.0, lambd=0.5)
    rates, groups = rates_of(optimizer), optimizer.param_groups
    sent = []
    for step in range(3):
        groups[0] |= {"lr": 1.0 + step, "lambd": 0.5 + step, "alpha": 2.0 + step, "t0": 3.0 + step}
        sent.append([rates.check(groups)[0][name] for name in ASGD_NAMES])
        rates.on_step(groups)
    assert sent == [[1.0, 2.0, 3.0, 0.5, 0.5], [1.0, 2.0, 3.0, 1.5, 0.5], [2.0, 3.0, 4.0, 2.5, 1.5]]
    other = torch.optim.ASGD([nn.Parameter(torch.zeros(2))], lr=1.0, lambd=0.5)
    resumed = rates_of(other)
    saved = {"param_groups": optimizer.state_dict()["param_groups"], "psdist": rates.state()}
    resumed.load(other.param_groups, json.loads(json.dumps(saved)))
    assert [resumed.check(other.param_groups)[0][name] for name in ASGD_NAMES] == [3.0, 4.0, 5.0, 2.5, 2.5]


def test_asgd_of_a_given_scheduler_resumes_with_the_rate_of_the_step_before() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.ASGD([parameter], lr=1.0)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [5], 0.5)
    handle = SimpleNamespace(step=5)
    spec = specification_of(optimizer, {"w": parameter}, scheduler)
    rates = LearningRates(spec, optimizer, scheduler, cast(Parameters, handle))
    rates.attach(optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert sent_rates(rates, optimizer) == [1.0]
    handle.step = 0
    assert sent_rates(rates, optimizer) == [1.0] and optimizer.param_groups[0]["lr"] == 1.0


def test_a_rate_of_zero_is_one_that_rprop_takes() -> None:
    optimizer = torch.optim.Rprop([nn.Parameter(torch.zeros(2))], lr=0.1)
    rates, groups = rates_of(optimizer), groups_of(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    assert 0.0 < groups.settings(rates.check(optimizer.param_groups))[0]["lr"] < 1e-37


@pytest.mark.parametrize(("kind", "settings"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})])
@pytest.mark.parametrize("jump", [5, -4, -10])
def test_a_scheduler_that_cycles_the_momentum_follows_the_servers(kind: Any, settings: Any, jump: int) -> None:
    loop = Loop(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=60), kind=kind, **settings)
    loop.steps(10)
    loop.handle.step += jump
    sent, group = loop.rates.check(loop.groups)[0], loop.alone()[0]
    name, momentum = ("momentum", group["momentum"]) if settings else ("beta1", group["betas"][0])
    assert sent["lr"] == pytest.approx(group["lr"]) and sent[name] == pytest.approx(momentum)
