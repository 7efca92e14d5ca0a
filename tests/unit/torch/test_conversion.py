"""Optimizers, parameter groups and schedulers of torch as specifications; and those that are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from psdist import optim
from psdist.errors import InvalidArgumentError
from psdist.optim import group_of
from psdist.torch import convert_optimizer, convert_scheduler
from psdist.torch.conversion import _SPECIFICATIONS, schedule_or_none


def model() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "odd[0]*": nn.Linear(4, 2)})


def names(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def test_settings_are_kept() -> None:
    for make, expected in [
        (lambda p: torch.optim.SGD(p, lr=0.1), optim.SGD(lr=0.1)),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
            optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
        (lambda p: torch.optim.Adam(p, betas=(0.8, 0.9), eps=1e-6), optim.Adam(betas=(0.8, 0.9), eps=1e-6)),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True), optim.AdamW(weight_decay=0.1)),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5)), optim.AdamW(lr=0.5)),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), optim.Adagrad(lr_decay=0.1)),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True), optim.RMSprop(momentum=0.5, centered=True)),
        (lambda p: torch.optim.SGD(p, maximize=True), optim.SGD(maximize=True)),
        (lambda p: torch.optim.Adam(p, amsgrad=True), optim.Adam(amsgrad=True)),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True), optim.AdamW(amsgrad=True, maximize=True)),
        (lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.8), optim.Adadelta(lr=0.5, rho=0.8)),
        (lambda p: torch.optim.Adamax(p, betas=(0.8, 0.9)), optim.Adamax(betas=(0.8, 0.9))),
        (
            lambda p: torch.optim.NAdam(p, momentum_decay=0.1, decoupled_weight_decay=True, weight_decay=0.1),
            optim.NAdam(momentum_decay=0.1, decoupled_weight_decay=True, weight_decay=0.1),
        ),
        (lambda p: torch.optim.RAdam(p, decoupled_weight_decay=True), optim.RAdam(decoupled_weight_decay=True)),
        (
            lambda p: torch.optim.Rprop(p, etas=(0.4, 1.5), step_sizes=(1e-5, 1)),
            optim.Rprop(etas=(0.4, 1.5), step_sizes=(1e-5, 1.0)),
        ),
        (lambda p: torch.optim.ASGD(p, lambd=0.1, t0=100), optim.ASGD(lambd=0.1, t0=100.0)),
    ]:
        module = model()
        assert convert_optimizer(make(module.parameters()), names(module)) == expected


class Own(torch.optim.SGD):
    """A subclass, which may do anything."""


def test_what_has_no_counterpart_is_named() -> None:
    for make, said in [
        (lambda p: torch.optim.LBFGS(p), r"torch\.optim\.lbfgs\.LBFGS has no counterpart"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam has no counterpart"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor has no counterpart"),
        (lambda p: torch.optim.Muon([one for one in p if one.ndim == 2]), "Muon has no counterpart"),
        (lambda p: torch.optim.Rprop(p, step_sizes=(0, 50)), "rprop step_size_min=0"),
        (lambda p: torch.optim.Rprop(p, lr=0.0), "rprop lr=0"),
        (lambda p: Own(p), "Own has no counterpart"),
        (lambda p: torch.optim.RMSprop(p, differentiable=True), "differentiable=True"),
    ]:
        module = model()
        with pytest.raises(InvalidArgumentError, match=said):
            convert_optimizer(make(list(module.parameters())), names(module))


def test_an_optimizer_that_has_made_steps_is_refused() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    sum(one.sum() for one in module.parameters()).backward()
    optimizer.step()
    with pytest.raises(InvalidArgumentError, match="already made steps"):
        convert_optimizer(optimizer, names(module))


def test_keys_of_the_script_in_groups_are_left_alone() -> None:
    module = model()
    groups = [
        {"params": module.parameters(), "name": "head", "lr_scale": 0.5, "is_frozen": False, "mask": torch.ones(2)}
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    assert convert_optimizer(optimizer, names(module)) == optim.AdamW(lr=0.1)
    assert optimizer.param_groups[0]["name"] == "head"


def test_decoupled_weight_decay_counts_in_each_group() -> None:
    module = model()
    coupled = torch.optim.AdamW([{"params": module.parameters(), "decoupled_weight_decay": False}], lr=0.1)
    assert convert_optimizer(coupled, names(module)) == optim.Adam(lr=0.1, weight_decay=0.01)
    named = dict(module.named_parameters())
    weights = [one for name, one in named.items() if not name.endswith("bias")]
    biases = [one for name, one in named.items() if name.endswith("bias")]
    for kind, first, others in ((torch.optim.AdamW, False, True), (torch.optim.Adam, True, False)):
        groups = [{"params": biases, "decoupled_weight_decay": first}, {"params": weights}]
        spec = convert_optimizer(kind(groups, lr=0.1), names(module))
        assert type(spec) is optim.Adam
        found = {name: bool(values["decoupled_weight_decay"]) for name, values in settings(spec, module).items()}
        assert found == {name: first if name.endswith("bias") else others for name in named}


def test_a_setting_of_later_torch_is_named() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.param_groups[0]["cautious"] = optimizer.defaults["cautious"] = True
    with pytest.raises(InvalidArgumentError, match="cautious=True"):
        convert_optimizer(optimizer, names(module))


def settings(spec: optim.Optimizer, module: nn.Module) -> dict[str, dict[str, float]]:
    return {name: spec.group_values(group_of(name, spec.overrides)) for name, _ in module.named_parameters()}


def test_groups_become_overrides() -> None:
    module = model()
    named = dict(module.named_parameters())
    groups = [
        {"params": [named["first.bias"], named["norm.bias"], named["odd[0]*.bias"]], "weight_decay": 0.0},
        {"params": [named["first.weight"], named["norm.weight"]]},
        {"params": [named["odd[0]*.weight"]], "lr": 0.5, "betas": (0.5, 0.6)},
    ]
    spec = convert_optimizer(torch.optim.AdamW(groups, lr=0.1), names(module))
    for group in groups:
        for parameter in group["params"]:
            values = settings(spec, module)[names(module)[parameter]]
            assert values["lr"] == group["lr"] and values["weight_decay"] == group["weight_decay"]
            assert (values["beta1"], values["beta2"]) == group["betas"]


def test_many_parameters_of_one_group_need_few_overrides() -> None:
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(400))
    groups = [
        {"params": [layer.weight for layer in module]},
        {"params": [layer.bias for layer in module], "weight_decay": 0.0},
    ]
    spec = convert_optimizer(torch.optim.AdamW(groups), names(module))
    assert [item.pattern for item in spec.overrides] == ["*.bias"]
    mixed = [{"params": list(module[:200].parameters())}, {"params": list(module[200:].parameters()), "lr": 0.1}]
    with pytest.raises(InvalidArgumentError, match="need 400 overrides, more than 256"):
        convert_optimizer(torch.optim.AdamW(mixed), names(module))


def test_equal_groups_stay_apart_because_they_may_differ_later() -> None:
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(300))
    groups = [{"params": [layer.weight for layer in module]}, {"params": [layer.bias for layer in module]}]
    spec = convert_optimizer(torch.optim.AdamW(groups, lr=0.5), names(module))
    assert spec.overrides == (optim.override("*.bias", lr=0.5),)
    halves = [{"params": list(module[:150].parameters())}, {"params": list(module[150:].parameters())}]
    assert convert_optimizer(torch.optim.AdamW(halves, lr=0.5), names(module)) == optim.AdamW(lr=0.5)


def test_every_optimizer_of_torch_is_converted_or_refused() -> None:
    """A new one in torch must be decided here."""
    refused = {"Optimizer", "LBFGS", "SparseAdam", "Adafactor", "Muon"}
    known = {name for name, one in vars(torch.optim).items() if isinstance(one, type)} - refused
    assert known == {one.__name__ for one in _SPECIFICATIONS}


def test_defaults_are_torchs() -> None:
    for make in _SPECIFICATIONS:
        module = model()
        optimizer = make(module.parameters())  # type: ignore[call-arg]
        assert convert_optimizer(optimizer, names(module)) == _SPECIFICATIONS[make]()


def test_groups_may_differ_in_every_setting() -> None:
    for kind, one, others in [
        (torch.optim.SGD, {"momentum": 0.5}, {}),
        (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True}, {"momentum": 0.9}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, {}),
        (torch.optim.AdamW, {"amsgrad": True}, {"maximize": True}),
        (torch.optim.Rprop, {"etas": (0.4, 1.5)}, {"step_sizes": (1e-4, 2.0)}),
    ]:
        module = model()
        first, *rest = module.parameters()
        optimizer = kind([{"params": [first], **one}, {"params": rest, **others}], lr=0.1)
        spec = convert_optimizer(optimizer, names(module))
        expected = [_SPECIFICATIONS[kind](lr=0.1, **given).values() for given in (one, others)]
        found = settings(spec, module)
        assert found["first.weight"] == expected[0]
        assert all(values == expected[1] for name, values in found.items() if name != "first.weight")


SCHEDULERS: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "linear": lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=20),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=7),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=30, eta_min=0.01),
    "step": lambda o: lr_scheduler.StepLR(o, 6, gamma=0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=25, power=2.0),
    "constant": lambda o: lr_scheduler.ConstantLR(o, factor=1.0),
    "warm cosine": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(o, T_max=25)],
        milestones=[5],
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
def test_schedulers_give_the_same_rates() -> None:
    for make in SCHEDULERS.values():
        optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
        scheduler = make(optimizer)
        schedule = convert_scheduler(scheduler)
        for step in range(30):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * schedule.factor(step), rel=1e-6, abs=1e-9), (
                step
            )
            scheduler.step()


def test_other_schedulers_are_named() -> None:
    for make, said in [
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), "LambdaLR cannot be converted"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10), "OneCycleLR cannot be converted"),
        (lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 3)]), "ChainedScheduler cannot be converted"),
        (lambda o: lr_scheduler.ConstantLR(o, factor=0.5), "factor=0.5 is not 1"),
        (lambda o: lr_scheduler.LinearLR(o, total_iters=0), "total_iters=0 leaves the rate at start_factor"),
        (lambda o: lr_scheduler.LinearLR(o, 0.5, 0.8), "start_factor=0.5 is not 1"),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.StepLR(o, 3), lr_scheduler.StepLR(o, 2)], milestones=[5]
            ),
            "it is not LinearLR up to end_factor=1",
        ),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.StepLR(o, 2)], milestones=[5]
            ),
            "its milestone 5 is not the warm-up's total_iters=4",
        ),
    ]:
        remedy = "pass it as scheduler= to psdist.torch.DistributedOptimizer, which sends its rates"
        with pytest.raises(InvalidArgumentError, match=f"{re.escape(said)}.*{remedy}"):
            convert_scheduler(make(torch.optim.SGD(model().parameters(), lr=0.1)))


def test_a_scheduler_is_named_before_the_settings_that_it_writes() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    with pytest.raises(InvalidArgumentError, match="OneCycleLR cannot be converted"):
        convert_optimizer(optimizer, {parameter: name for name, parameter in module.named_parameters()}, scheduler)


def test_a_cosine_of_a_group_without_a_rate() -> None:
    first, second = (nn.Parameter(torch.zeros(2)) for _ in "ab")
    optimizer = torch.optim.SGD([{"params": [first], "lr": torch.tensor(0.1)}, {"params": [second], "lr": 0.0}], lr=0.1)
    assert convert_scheduler(lr_scheduler.CosineAnnealingLR(optimizer, 10)) == optim.Cosine(10)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01)
    with pytest.raises(InvalidArgumentError, match=r"eta_min=0\.01 with a parameter group of lr=0.* pass it as sched"):
        convert_scheduler(scheduler)
    assert schedule_or_none(scheduler) is None, "the rates are sent"


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
def test_groups_of_a_cosine_end_at_the_same_rate(warmup: int) -> None:
    module = model()
    first, *rest = module.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.4}, {"params": rest}], lr=0.1)
    scheduler: lr_scheduler.LRScheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=25, eta_min=0.02)
    if warmup:
        first_part = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup)
        scheduler = lr_scheduler.SequentialLR(optimizer, [first_part, scheduler], milestones=[warmup])
    with pytest.raises(InvalidArgumentError, match="different fraction of the rate in each group"):
        convert_scheduler(scheduler)
    spec = convert_optimizer(optimizer, names(module), scheduler)
    groups = [group_of(name, spec.overrides) for name in ("first.weight", "first.bias")]
    for step in range(25 + warmup):
        shown = [group["lr"] for group in optimizer.param_groups]
        ours = [spec.group_values(group)["lr"] * spec.group_schedule(group).factor(step) for group in groups]
        assert shown == pytest.approx(ours, rel=1e-6), step
        scheduler.step()


def test_a_scheduler_must_be_given() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 5)
    with pytest.raises(InvalidArgumentError, match="pass it as scheduler="):
        convert_optimizer(optimizer, names(module))
    assert convert_optimizer(optimizer, names(module), scheduler).schedule == optim.Step(5)
