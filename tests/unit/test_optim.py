"""Specifications of optimizers and schedules: accepted values, texts, and their way over the wire and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist import optim
from psdist.errors import InvalidArgumentError

OPTIMIZERS = list(optim.OPTIMIZERS.values())


BAD_VALUES = [
    (lambda: optim.SGD(lr=-1.0), "sgd lr=-1.0"),
    (lambda: optim.SGD(lr=math.nan), "sgd lr=nan"),
    (lambda: optim.Adam(lr=math.inf), "adam lr=inf"),
    (lambda: optim.Adam(lr=1e39), "adam lr=1e+39"),
    (lambda: optim.Adam(lr=10**400), "adam lr=1000"),
    (lambda: optim.Adam(lr="0.1"), "adam lr='0.1'"),
    (lambda: optim.Adam(lr=True), "adam lr=True"),
    (lambda: optim.Adam(betas=(1.0, 0.9)), "adam beta1=1.0"),
    (lambda: optim.Adam(betas=(0.9, 1.5)), "adam beta2=1.5"),
    (lambda: optim.Adam(betas=(0.9,)), "adam betas=(0.9,)"),
    (lambda: optim.Adam(betas=0.9), "adam betas=0.9"),
    (lambda: optim.AdamW(eps=0.0), "adamw eps=0.0"),
    (lambda: optim.Adagrad(eps=1e-50), "adagrad eps=1e-50"),
    (lambda: optim.Adagrad(initial_accumulator_value=-0.1), "initial_accumulator_value=-0.1"),
    (lambda: optim.RMSprop(alpha=1.0), "rmsprop alpha=1.0"),
    (lambda: optim.RMSprop(centered="yes"), "rmsprop centered='yes'"),
    (lambda: optim.SGD(nesterov=2, momentum=0.9), "sgd nesterov=2"),
    (lambda: optim.Lion(betas=(-0.1, 0.9)), "betas[0]=-0.1"),
    (lambda: optim.FTRL(lr=0.0), "ftrl lr=0.0"),
    (lambda: optim.FTRL(l1=-1.0), "ftrl l1=-1.0"),
    (lambda: optim.SGD(nesterov=True), "nesterov=True needs momentum"),
    (lambda: optim.SGD(nesterov=True, momentum=0.9, dampening=0.1), "dampening=0"),
    (lambda: optim.SGD(max_grad_norm=-1.0), "max_grad_norm=-1.0"),
    (lambda: optim.SGD(schedule="cosine"), "'cosine' is not a psdist.optim schedule"),
    (lambda: optim.SGD(schedule=optim.Schedule()), "is not a psdist.optim schedule"),
    (lambda: optim.SGD(overrides=(optim.override("*", beta1=0.5),)), "SGD has no hyperparameter 'beta1'"),
    (lambda: optim.SGD(overrides=(optim.override("*", nesterov=True),)), "nesterov=True needs momentum"),
    (
        lambda: optim.SGD(overrides=(optim.override("*", maximize=0.5),)),
        "sgd maximize=0.5 is out of range: use True",
    ),
    (lambda: optim.override("*", lr=True), "lr=True"),
    (
        lambda: optim.SGD(overrides=(optim.override("*", end_factor=0.1),)),
        "end_factor needs a schedule that has one",
    ),
    (lambda: optim.Adam(amsgrad="yes"), "adam amsgrad='yes'"),
    (lambda: optim.ASGD(alpha=-1.0), "asgd alpha=-1.0"),
    (lambda: optim.ASGD(t0=math.inf), "asgd t0=inf"),
    (lambda: optim.Rprop(lr=0.0), "rprop lr=0.0"),
    (lambda: optim.Rprop(etas=(0.0, 1.2)), "rprop etaminus=0.0"),
    (lambda: optim.Rprop(etas=(1.0, 1.2)), "rprop etaminus=1.0"),
    (lambda: optim.Rprop(etas=(0.5, 1.0)), "rprop etaplus=1.0 is out of range: use more than 1"),
    (lambda: optim.Rprop(step_sizes=(0.0, 50)), "rprop step_size_min=0.0"),
    (lambda: optim.Rprop(step_sizes=(1e-6, 1e-40)), "rprop step_size_max=1e-40"),
    (lambda: optim.Adamax(eps=0.0), "adamax eps=0.0"),
    (lambda: optim.NAdam(momentum_decay=-1.0), "nadam momentum_decay=-1.0"),
    (lambda: optim.NAdam(betas=(1.0, 0.9)), "nadam beta1=1.0"),
    (lambda: optim.RAdam(betas=(0.9, 1.0)), "radam beta2=1.0"),
    (lambda: optim.Adadelta(rho=1.5), "adadelta rho=1.5 is out of range: use 0 to 1"),
    (lambda: optim.Adadelta(eps=0.0), "adadelta eps=0.0"),
    (lambda: optim.Adam(overrides=(optim.override("*", beta1=1.0),)), "adam beta1=1.0"),
    (lambda: optim.SGD(overrides=("*",)), "make it with psdist.optim.override"),
    (lambda: optim.SGD(overrides=optim.override("*", lr=1.0)), "a tuple of override"),
    (lambda: optim.SGD(overrides=(optim.override("*", lr=1.0),) * 257), "overrides=257"),
    (lambda: optim.override("", lr=1.0), "override pattern ''"),
    (lambda: optim.override("a" * 257, lr=1.0), "1 to 256 characters"),
    (lambda: optim.override("*.bias"), "changes nothing"),
    (lambda: optim.override("*.bias", lr="x"), "lr='x'"),
    (lambda: optim.Constant(warmup_steps=-1), "warmup_steps=-1"),
    (lambda: optim.Constant(warmup_steps=2.5), "warmup_steps=2.5"),
    (lambda: optim.Constant(warmup_start=1.5), "warmup_start=1.5"),
    (lambda: optim.Linear(0), "total_steps=0"),
    (lambda: optim.Cosine(10, end_factor=math.nan), "end_factor=nan"),
    (lambda: optim.Step(0), "every=0"),
    (lambda: optim.Polynomial(0), "total_steps=0"),
]


def test_bad_value_is_named() -> None:
    for make, words in BAD_VALUES:
        with pytest.raises(InvalidArgumentError) as caught:
            make()
        assert words in caught.value.message


def test_numbers_are_normalized() -> None:
    spec = optim.Adam(lr=np.float32(0.5), betas=[0.5, 0], eps=np.float64(1))
    assert spec == optim.Adam(lr=0.5, betas=(0.5, 0.0), eps=1.0)
    assert repr(spec) == repr(optim.Adam(lr=0.5, betas=(0.5, 0.0), eps=1.0))
    assert hash(optim.SGD(overrides=[optim.override("*", lr=1)])) == hash(
        optim.SGD(overrides=(optim.override("*", lr=1.0),))
    )


def test_groups() -> None:
    overrides = (optim.override("*.bias", weight_decay=0.0), optim.override("head.*", lr=0.5))
    spec = optim.AdamW(lr=0.1, overrides=overrides)
    assert [optim.group_of(name, overrides) for name in ("head.bias", "head.weight", "w", "Head.x")] == [1, 2, 0, 0]
    assert spec.group_values(0) == spec.values()
    assert spec.group_values(1) == spec.values() | {"weight_decay": 0.0}
    assert spec.group_values(2) == spec.values() | {"lr": 0.5}


def test_groups_may_differ_in_everything() -> None:
    spec = optim.RMSprop(
        schedule=optim.Cosine(10, 0.5),
        overrides=(
            optim.override("a", centered=True, end_factor=0.1),
            optim.override("b", momentum=0.9),
        ),
    )
    assert spec.state_names == ("square_avg", "grad_avg", "momentum_buffer")
    assert [spec.group_state_names(group) for group in spec.groups] == [
        ("square_avg",),
        ("square_avg", "grad_avg"),
        ("square_avg", "momentum_buffer"),
    ]
    assert [spec.group_schedule(group).factor(10) for group in spec.groups] == [0.5, 0.1, 0.5]
    assert spec.group_values(1) == spec.values() | {"centered": 1.0}


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 10), st.integers(1, 400))
def test_the_product_of_nadams_momentums(beta1: float, momentum_decay: float, updates: int) -> None:
    factors = [optim.nadam_momentum(beta1, momentum_decay, update) for update in range(1, updates + 1)]
    product = math.exp(optim.nadam_log_product(beta1, momentum_decay, updates))
    assert product == pytest.approx(math.prod(factors), rel=1e-9, abs=1e-14)


def test_the_product_of_nadams_momentums_at_its_limits() -> None:
    assert optim.nadam_log_product(0.0, 0.1, 5) == -math.inf
    assert optim.nadam_log_product(0.9, 3e38, 2) == pytest.approx(2 * math.log(0.9))
    assert optim.nadam_log_product(0.9, 0.0, 2**53) < -1e15
    assert optim.nadam_log_product(0.9, 1e-300, 3) == pytest.approx(3 * math.log(0.45))


def test_a_step_size_of_asgd_beyond_float64_is_zero() -> None:
    assert optim.asgd_step_size({"lambd": 1e38, "alpha": 1e38}, 1.0, 9) == 0.0


# --- the wire ---------------------------------------------------------------------------------------------------------

small = st.floats(0, 1000, allow_nan=False)
unit = st.floats(0, 1, exclude_max=True)
positive = st.floats(1e-30, 1000)
warm = {"warmup_steps": st.integers(0, 1000), "warmup_start": st.floats(0, 1)}
steps = st.integers(1, 10**6)
schedules = st.one_of(
    st.builds(optim.Constant, **warm),
    st.builds(optim.Linear, steps, small, **warm),
    st.builds(optim.Cosine, steps, small, **warm),
    st.builds(optim.Step, steps, small, **warm),
    st.builds(optim.Polynomial, steps, small, small, **warm),
)
overrides = st.lists(st.builds(optim.override, st.just("*.bias"), lr=positive), max_size=3).map(tuple)
common = {"schedule": schedules, "max_grad_norm": small, "overrides": overrides, "lr": positive}
betas = st.tuples(unit, unit)
decoupled = {"betas": betas, "decoupled_weight_decay": st.booleans(), "weight_decay": small, **common}
positive_unit = st.floats(1e-30, 1, exclude_max=True)
pair = st.tuples(positive, positive)
specs = st.one_of(
    st.builds(optim.SGD, momentum=small, dampening=small, weight_decay=small, **common),
    st.builds(optim.SGD, momentum=positive, nesterov=st.just(True), **common),
    st.builds(optim.Adam, betas=betas, eps=positive, weight_decay=small, **common),
    st.builds(optim.AdamW, betas=betas, eps=positive, weight_decay=small, **common),
    st.builds(optim.Adagrad, lr_decay=small, initial_accumulator_value=small, eps=positive, **common),
    st.builds(optim.Adam, amsgrad=st.booleans(), maximize=st.booleans(), **decoupled),
    st.builds(optim.Adamax, betas=betas, eps=positive, maximize=st.booleans(), **common),
    st.builds(optim.NAdam, momentum_decay=small, **decoupled),
    st.builds(optim.RAdam, maximize=st.booleans(), **decoupled),
    st.builds(optim.Rprop, etas=st.tuples(positive_unit, st.floats(1.5, 9)), step_sizes=pair, **common),
    st.builds(optim.ASGD, lambd=small, alpha=small, t0=small, weight_decay=small, **common),
    st.builds(optim.Adadelta, rho=st.floats(0, 1), eps=positive, maximize=st.booleans(), **common),
    st.builds(optim.RMSprop, alpha=unit, momentum=small, centered=st.booleans(), **common),
    st.builds(optim.Lion, betas=betas, weight_decay=small, **common),
    st.builds(optim.FTRL, beta=small, l1=small, l2=small, **common),
    st.builds(optim.Mean, **common),
)


def as_numbers(schedule: optim.Schedule) -> dict[str, float]:
    return {name: float(value) for name, value in vars(schedule).items()}


@given(specs)
def test_round_trip(spec: optim.Optimizer) -> None:
    schedule = optim.schedule_from_values(spec.schedule.kind, as_numbers(spec.schedule))
    for values in (spec.values(), spec.stated_values()):
        again = optim.optimizer_from_values(spec.kind, values, schedule, spec.max_grad_norm, spec.overrides)
        assert again == spec
        assert repr(again) == repr(spec)


def test_values_are_stated_as_releases_before_the_switches_state_them() -> None:
    """Snapshots and servers of these releases know no others."""
    assert list(optim.Adam().stated_values()) == ["lr", "beta1", "beta2", "eps", "weight_decay"]
    assert list(optim.SGD().stated_values()) == ["lr", "momentum", "dampening", "weight_decay", "nesterov"]
    assert optim.Adam(amsgrad=True).stated_values()["amsgrad"] == 1.0


SGD_VALUES = optim.SGD().values()
LINEAR_VALUES = as_numbers(optim.Linear(3))


def test_bad_words_from_the_wire() -> None:
    for make, words in [
        (lambda: optim.schedule_from_values("x" * 99, {}), "schedule kind 'xxx"),
        (lambda: optim.schedule_from_values("linear", {}), "Linear needs warmup_steps, warmup_start, total_steps"),
        (lambda: optim.schedule_from_values("linear", LINEAR_VALUES | {"total_steps": 2.5}), "total_steps=2.5"),
        (lambda: optim.schedule_from_values("constant", {"total_steps": 2}), "Constant has no 'total_steps'"),
        (lambda: optim.optimizer_from_values("lbfgs", {}, optim.Constant(), 0, ()), "kind 'lbfgs' is unknown"),
        (lambda: optim.optimizer_from_values("sgd", {"beta1": 0.1}, optim.Constant(), 0, ()), "SGD has no 'beta1'"),
        (lambda: optim.optimizer_from_values("sgd", {"schedule": 1}, optim.Constant(), 0, ()), "SGD has no 'schedule'"),
        (lambda: optim.optimizer_from_values("adam", {"betas": 1}, optim.Constant(), 0, ()), "Adam has no 'betas'"),
        (
            lambda: optim.optimizer_from_values("sgd", SGD_VALUES | {"nesterov": math.nan}, optim.Constant(), 0, ()),
            "nesterov=nan",
        ),
        (
            lambda: optim.optimizer_from_values("sgd", SGD_VALUES, optim.Constant(), math.nan, ()),
            "max_grad_norm=nan",
        ),
        (lambda: optim.optimizer_from_values("sgd", {}, optim.Constant(), 0, ()), "SGD needs lr, momentum, dampening,"),
        (
            lambda: optim.optimizer_from_values("adam", {"beta1": 0.5}, optim.Constant(), 0, ()),
            "Adam needs lr, beta2, eps, weight_decay, which are missing: give all of lr, beta1, beta2, eps",
        ),
        (
            lambda: optim.schedule_from_values("constant", {"warmup_steps": 0}),
            "Constant needs warmup_start, which is missing: give all of warmup_steps, warmup_start",
        ),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            make()
        assert words in caught.value.message


# --- schedules --------------------------------------------------------------------------------------------------------


def test_a_step_that_grows_without_limit_is_infinite() -> None:
    assert optim.Step(1, 1e30).factor(100) == math.inf


@pytest.mark.parametrize("schedule", [optim.Linear(10, 0.2), optim.Cosine(10, 0.2), optim.Polynomial(10, 3, 0.2)])
def test_schedule_stays_at_its_end(schedule: optim.Schedule) -> None:
    assert [schedule.factor(step) for step in (10, 11, 10**9)] == pytest.approx([0.2] * 3)


# --- scale_lr ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_scale_lr(mode: Any, factor: float) -> None:
    spec = optim.SGD(lr=0.1, overrides=(optim.override("head.*", lr=0.01, weight_decay=0.5),))
    scaled = optim.scale_lr(spec, 4, mode, warmup_steps=10)
    assert scaled.lr == 0.1 * factor
    assert scaled.group_values(1) == scaled.values() | {"lr": 0.01 * factor, "weight_decay": 0.5}
    assert scaled.lr * scaled.schedule.factor(0) == pytest.approx(0.1)
    assert scaled.schedule.factor(10) == 1.0
    assert optim.scale_lr(spec, 4, mode).schedule == spec.schedule


def test_scale_lr_keeps_the_schedule() -> None:
    scaled = optim.scale_lr(optim.SGD(schedule=optim.Cosine(50)), 8, warmup_steps=5)
    assert scaled.schedule == optim.Cosine(50, warmup_steps=5, warmup_start=1 / 8)


def test_scale_lr_refuses() -> None:
    bad: Any
    for bad in [{"world_size": 0}, {"world_size": 1.5}, {"mode": "log"}, {"warmup_steps": -1}]:
        with pytest.raises(InvalidArgumentError, match=re_value(bad)):
            optim.scale_lr(optim.SGD(), **{"world_size": 2} | bad)


def re_value(bad: dict[str, Any]) -> str:
    ((name, value),) = bad.items()
    return f"{name}={value!r}"
