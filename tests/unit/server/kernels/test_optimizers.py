"""Updates agree with torch.optim, and Lion and FTRL with their papers."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from psdist import optim
from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import PAIRS
from psdist_server.kernels import optimizers
from psdist_server.kernels.optimizers import Rule
from tests.support.fused_update import update

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

SIZE, STEPS = 1003, 100


def start(seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(SIZE, dtype=np.float32)


def gradient(step: int) -> Floats:
    """Gradients of very different sizes, the same in every test."""
    rng = np.random.default_rng(1000 + step)
    return rng.standard_normal(SIZE, dtype=np.float32) * np.logspace(-4, 1, SIZE, dtype=np.float32)


class Ours:
    """Weights and state that a rule of ours updates."""

    def __init__(self, spec: optim.Optimizer, weights: Floats | None = None, begins: int = 0, runs: Any = None) -> None:
        self.rule, self.runs = Rule(spec, begins), runs
        self.weights = start() if weights is None else weights
        self.states = tuple(np.empty(self.weights.size, np.float32) for _ in self.rule.state_names)
        self.rule.initialize(self.weights, self.states, runs or [(0, self.weights.size, 0)])

    def step(self, gradients: Floats, step: int, **settings: Any) -> None:
        update(self.rule, self.weights, self.states, gradients, step, runs=self.runs, **settings)

    def train(self) -> Floats:
        for step in range(STEPS):
            self.step(gradient(step), step)
        return self.weights


def distance(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Norm of the difference over the norm."""
    exact = theirs.astype(np.float64)
    return float(np.linalg.norm(ours.astype(np.float64) - exact) / np.linalg.norm(exact))


# --- torch ------------------------------------------------------------------------------------------------------------

#: Settings of optimizers whose names and defaults are torch's.
AGAINST_TORCH: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.01}),
    ("SGD", {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True}),
    ("ASGD", {}),
    ("ASGD", {"lr": 0.05, "lambd": 0.1, "t0": 20.0, "alpha": 0.5, "weight_decay": 0.01, "maximize": True}),
    ("Rprop", {}),
    ("Rprop", {"lr": 0.1, "etas": (0.3, 1.5), "step_sizes": (1e-3, 1.0), "maximize": True}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.3}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("Adamax", {}),
    ("Adamax", {"weight_decay": 0.1, "maximize": True}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.1, "momentum_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("RAdam", {}),
    ("RAdam", {"weight_decay": 0.1, "betas": (0.9, 0.99)}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.5, 0.7), "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-6}),
    ("Adagrad", {"maximize": True, "weight_decay": 0.1}),
    ("Adadelta", {}),
    ("Adadelta", {"rho": 0.5, "eps": 1e-4, "weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"lr": 1e-3, "alpha": 0.9, "weight_decay": 0.1, "momentum": 0.9}),
    ("RMSprop", {"lr": 1e-3, "centered": True}),
    ("RMSprop", {"lr": 1e-3, "centered": True, "momentum": 0.5, "weight_decay": 0.1, "maximize": True}),
]
against_torch = pytest.mark.parametrize(("kind", "given"), AGAINST_TORCH, ids=[kind for kind, _ in AGAINST_TORCH])


def both(
    kind: str, given: dict[str, Any], **shared: Any
) -> tuple[optim.Optimizer, torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.from_numpy(start()))
    theirs = getattr(torch.optim, kind)([parameter], foreach=False, **given)
    return getattr(optim, kind)(**given, **shared), parameter, theirs


@against_torch
def test_agrees_with_torch(kind: str, given: dict[str, Any]) -> None:
    """Weights and state within 1e-6 of their norms after 200 steps; measured: 0 to 2e-7, and 4e-7 for the state.

    Each weight is within 1e-6 of the largest.
    """
    spec, parameter, theirs = both(kind, given)
    ours = Ours(spec)
    for step in range(200):
        parameter.grad = torch.from_numpy(gradient(step))
        theirs.step()
        ours.step(gradient(step), step)
    expected = parameter.detach().numpy()
    assert distance(ours.weights, expected) < 1e-6
    assert np.abs(ours.weights - expected).max() < 1e-6 * np.abs(expected).max()
    for name, state in zip(ours.rule.state_names, ours.states, strict=True):
        assert distance(state, theirs.state[parameter][name].numpy()) < 1e-6, name


@against_torch
def test_infinite_weights_and_zeros_are_as_in_torch(kind: str, given: dict[str, Any]) -> None:
    """A weight decay of 0 adds nothing: 0 times infinity would be NaN."""
    without = {} if kind == "Rprop" else {"weight_decay": 0.0}
    spec, parameter, theirs = both(kind, given | without)
    weights, steps = start(), [gradient(0), gradient(1)]
    weights[:4], steps[0][:4], steps[1][2:4] = (np.inf, -np.inf, np.inf, 1.0), (1.0, 1.0, 0.0, -0.0), 0.0
    parameter.data = torch.from_numpy(weights.copy())
    ours = Ours(spec, weights)
    for step, gradients in enumerate(steps):
        parameter.grad = torch.from_numpy(gradients.copy())
        theirs.step()
        ours.step(gradients, step)
    expected = [parameter.detach(), *(theirs.state[parameter][name] for name in ours.rule.state_names)]
    for mine, exact in zip((weights, *ours.states), expected, strict=True):
        np.testing.assert_allclose(mine[:4], exact.numpy()[:4], rtol=1e-5)


def changed(spec: optim.Optimizer, step: int) -> dict[str, float]:
    """Return all hyperparameters that may change, as a script could set them at a step."""
    found: dict[str, float] = {}
    for name, value in spec.values().items():
        wave = 1.0 - math.cos(step / 9)
        new = value * (1.0 - 0.05 * wave) if value else 0.01 * wave
        with suppress(InvalidArgumentError):
            found |= spec.check_group_settings(0, {name: new})
    return found


@against_torch
def test_settings_that_change_agree_with_torch(kind: str, given: dict[str, Any]) -> None:
    """Every number that may change does so in each of 200 steps. ASGD's belong to the step before, as in torch.

    The weights are within 1e-6 of their norm; the state is within 2e-6: it is 1.4e-6 for the centered RMSprop, whose
    variance is a difference.
    """
    spec, parameter, theirs = both(kind, given)
    ours = Ours(spec)
    before: dict[str, float] = spec.values()
    for step in range(200):
        now = spec.values() | changed(spec, step)
        for name in theirs.param_groups[0]:
            if name in now:
                theirs.param_groups[0][name] = type(getattr(spec, name))(now[name])
            if name in PAIRS:
                theirs.param_groups[0][name] = tuple(now[one] for one in PAIRS[name])
        parameter.grad = torch.from_numpy(gradient(step))
        theirs.step()
        sent = dict(now)
        if kind == "ASGD":
            sent |= {name: before[name] for name in ("lr", "alpha", "t0")} | {"lambd_before": before["lambd"]}
        ours.step(gradient(step), step, settings=spec.check_settings({0: sent}))
        before = now
    expected = parameter.detach().numpy()
    assert {"lr", "weight_decay"} - changed(spec, 5).keys() <= ({"weight_decay"} if kind == "Rprop" else set())
    assert distance(ours.weights, expected) < 1e-6
    for name, state in zip(ours.rule.state_names, ours.states, strict=True):
        assert distance(state, theirs.state[parameter][name].numpy()) < 2e-6, name


def in_groups(spec: optim.Optimizer) -> Ours:
    """Return weights of two groups, one after the other."""
    return Ours(spec, np.concatenate([start(), start()]), runs=[(0, SIZE, 0), (SIZE, 2 * SIZE, 1)])


@against_torch
def test_schedules_and_groups_agree_with_torch(kind: str, given: dict[str, Any]) -> None:
    """Two groups whose rates fall to the same minimum, as by CosineAnnealingLR, over 200 steps."""
    first, second = (torch.nn.Parameter(torch.from_numpy(start())) for _ in "ab")
    lr = getattr(optim, kind)(**given).lr
    groups = [{"params": [first]}, {"params": [second], "lr": 0.5 * lr}]
    theirs = getattr(torch.optim, kind)(groups, foreach=False, **given)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 180, eta_min=0.1 * lr)
    overrides = (optim.override("b", lr=0.5 * lr, end_factor=0.2),)
    ours = in_groups(getattr(optim, kind)(**given, schedule=optim.Cosine(180, 0.1), overrides=overrides))
    for step in range(180):
        first.grad, second.grad = torch.from_numpy(gradient(step)), torch.from_numpy(gradient(step))
        theirs.step()
        scheduler.step()
        ours.step(np.tile(gradient(step), 2), step)
    assert distance(ours.weights[:SIZE], first.detach().numpy()) < 1e-6
    assert distance(ours.weights[SIZE:], second.detach().numpy()) < 1e-6


#: Groups with different state arrays.
MIXED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SGD", {"lr": 0.01}, {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.01, "momentum": 0.9}, {"momentum": 0.0}),
    ("Adam", {"amsgrad": True}, {"amsgrad": False, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.5}, {"initial_accumulator_value": 0.1}),
    ("RMSprop", {"lr": 1e-3, "centered": True}, {"centered": False, "momentum": 0.5}),
    ("NAdam", {"weight_decay": 0.1}, {"decoupled_weight_decay": True, "momentum_decay": 0.1, "maximize": True}),
    ("Rprop", {}, {"lr": 0.1, "maximize": True}),
    ("ASGD", {"t0": 3.0}, {"t0": 20.0, "alpha": 0.1, "lambd": 0.1}),
]


def test_groups_may_differ_in_every_setting() -> None:
    for kind, given, other in MIXED:
        first, second = (torch.nn.Parameter(torch.from_numpy(start())) for _ in "ab")
        if kind == "Adagrad":  # torch reads the initial value from its defaults.
            theirs = [getattr(torch.optim, kind)([one], **given | own) for one, own in ((first, {}), (second, other))]
        else:
            theirs = [getattr(torch.optim, kind)([{"params": [first]}, {"params": [second], **other}], **given)]
        ours = in_groups(getattr(optim, kind)(**given, overrides=(optim.override("b", **other),)))
        for step in range(STEPS):
            first.grad, second.grad = torch.from_numpy(gradient(step)), torch.from_numpy(gradient(step))
            for one in theirs:
                one.step()
            ours.step(np.tile(gradient(step), 2), step)
        assert distance(ours.weights[:SIZE], first.detach().numpy()) < 1e-6
        assert distance(ours.weights[SIZE:], second.detach().numpy()) < 1e-6


@against_torch
def test_a_state_that_begins_anew_is_that_of_a_new_optimizer_of_torch(kind: str, given: dict[str, Any]) -> None:
    """At step 100 the schedule continues. torch's optimizer starts at its first step, with the rate of step 100."""
    spec, parameter, theirs = both(kind, given, schedule=optim.Cosine(150, warmup_steps=20))
    ours = Ours(spec, begins=STEPS)
    for step in range(STEPS, STEPS + 30):
        theirs.param_groups[0]["lr"] = spec.values()["lr"] * spec.schedule.factor(step)
        parameter.grad = torch.from_numpy(gradient(step))
        theirs.step()
        ours.step(gradient(step), step)
    assert distance(ours.weights, parameter.detach().numpy()) < 1e-6


def test_clip_factor_is_torchs() -> None:
    for norm in (0.0, 0.5, 0.999999, 1.0, 1.000001, 7.5, 1e30):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.tensor([norm], dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        assert optimizers.clip_factor(norm, 1.0) * norm == pytest.approx(parameter.grad.item(), rel=1e-12)
    assert optimizers.clip_factor(1e9, 0.0) == 1.0
    assert optimizers.clip_factor(float("inf"), 1.0) == 0.0
    assert np.isnan(optimizers.clip_factor(float("nan"), 1.0))


# --- papers -----------------------------------------------------------------------------------------------------------


def lion_paper(w: Doubles, lr: float, beta1: float, beta2: float, decay: float) -> Doubles:
    """arXiv 2302.06675, algorithm 2, line by line, in float64."""
    m = np.zeros(SIZE)
    for step in range(STEPS):
        g = gradient(step).astype(np.float64)
        c = beta1 * m + (1 - beta1) * g
        w = w - lr * (np.sign(c) + decay * w)
        m = beta2 * m + (1 - beta2) * g
    return w


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_the_papers(decay: float) -> None:
    expected = lion_paper(start().astype(np.float64), 1e-3, 0.9, 0.99, decay)
    assert distance(Ours(optim.Lion(lr=1e-3, weight_decay=decay)).train(), expected) < 1e-6


def ftrl_paper(w: Doubles, spec: optim.FTRL) -> Doubles:
    """McMahan et al. 2013, algorithm 1, in float64: z and n per coordinate, weights made from them.

    z starts where it gives the weights given. The rate may change: sigma is the difference of the inverse rates
    (beta + sqrt(n)) / alpha before and after, which for a constant alpha is the algorithm's own.
    """
    n = np.zeros(SIZE)
    curvature = spec.beta / (spec.lr * spec.schedule.factor(0)) + spec.l2
    z = np.where(w == 0, 0.0, -w * curvature - np.sign(w) * spec.l1)
    for step in range(STEPS):
        g = gradient(step).astype(np.float64)
        n = n + g * g
        after = (spec.beta + np.sqrt(n)) / (spec.lr * spec.schedule.factor(step)) + spec.l2
        z = z + g - (after - curvature) * w
        curvature = after
        w = np.where(np.abs(z) <= spec.l1, 0.0, -(z - np.sign(z) * spec.l1) / curvature)
    return w


def test_ftrl_is_the_papers() -> None:
    for zero in [True, False]:
        for spec in [
            optim.FTRL(),
            optim.FTRL(lr=0.5, beta=0.1, l1=0.5, l2=0.3),
            optim.FTRL(lr=0.05, l1=0.1),
            optim.FTRL(lr=0.2, l1=0.1, schedule=optim.Cosine(150, warmup_steps=10)),
        ]:
            weights = np.zeros(SIZE, np.float32) if zero else start()
            expected = ftrl_paper(weights.astype(np.float64), spec)
            ours = Ours(spec, weights).train()
            assert distance(ours, expected) < 1e-6
            assert ((ours == 0) == (expected == 0)).mean() > 0.995
            if zero and spec.l1:
                assert (ours == 0).any()


def test_settings_of_ftrl_that_change_are_the_papers() -> None:
    """Its z stays: weights follow another l1 from the next update on, and do not move by themselves for the others."""
    specs = [optim.FTRL(lr=0.2, l1=0.5, l2=0.1), optim.FTRL(lr=0.1, beta=0.5, l1=0.1, l2=0.3)]
    ours, w = Ours(specs[0]), start().astype(np.float64)
    n, curvature = np.zeros(SIZE), specs[0].beta / specs[0].lr + specs[0].l2
    z = -w * curvature - np.sign(w) * specs[0].l1
    for step in range(STEPS):
        spec, g = specs[step >= STEPS // 2], gradient(step).astype(np.float64)
        ours.rule = Rule(spec)
        ours.step(gradient(step), step)
        n = n + g * g
        after = (spec.beta + np.sqrt(n)) / spec.lr + spec.l2
        z, curvature = z + g - (after - curvature) * w, after
        w = np.where(np.abs(z) <= spec.l1, 0.0, -(z - np.sign(z) * spec.l1) / curvature)
    assert distance(ours.weights, w) < 1e-6


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_ftrl_leaves_weights_that_no_gradient_reaches(beta: float) -> None:
    """For any schedule, including one that starts at a rate of zero."""
    ours = Ours(optim.FTRL(beta=beta, l1=0.5, schedule=optim.Linear(5, warmup_steps=3, warmup_start=0.0)))
    for step in range(12):
        ours.step(np.zeros(SIZE, np.float32), step)
    assert ours.weights.tobytes() == start().tobytes()


# --- state and scalars ------------------------------------------------------------------------------------------------


def test_no_more_state_than_needed() -> None:
    for spec, count in [
        (optim.SGD(), 0),
        (optim.SGD(momentum=0.9), 1),
        (optim.Adam(), 2),
        (optim.AdamW(), 2),
        (optim.Adagrad(), 1),
        (optim.RMSprop(), 1),
        (optim.RMSprop(momentum=0.9), 2),
        (optim.RMSprop(centered=True), 2),
        (optim.RMSprop(centered=True, momentum=0.9), 3),
        (optim.Adam(amsgrad=True), 3),
        (optim.AdamW(amsgrad=True), 3),
        (optim.Adamax(), 2),
        (optim.NAdam(), 2),
        (optim.RAdam(), 2),
        (optim.Adadelta(), 2),
        (optim.Rprop(), 2),
        (optim.ASGD(), 1),
        (optim.SGD(overrides=(optim.override("*", momentum=0.9),)), 1),
        (optim.Lion(), 1),
        (optim.FTRL(), 2),
        (optim.Mean(), 0),
    ]:
        rule = Rule(spec)
        assert len(rule.state_names) == len(set(rule.state_names)) == count
        rule.kernels[0].compile()


def test_asgd_begins_with_the_rate_of_the_step_at_which_it_begins() -> None:
    """Check it for elements that skipped all steps before, such as those of a layer that is unfrozen."""
    rule = Rule(optim.ASGD(lr=1.0, schedule=optim.Step(1, 0.5)))
    for step, lag, rate in ((0, 0, 1.0), (1, 0, 1.0), (2, 0, 0.5), (3, 3, 0.125), (4, 3, 0.125)):
        (scalars,) = rule.scalars(step, 1.0, lag=lag)
        assert scalars is not None and scalars[1] == pytest.approx(rate, rel=1e-3)


def test_lr_scale_scales_the_learning_rate() -> None:
    for slow, fast in ((optim.SGD(lr=0.25), optim.SGD(lr=0.5)), (optim.AdamW(lr=0.25), optim.AdamW(lr=0.5))):
        results = []
        for spec, scale in ((slow, 1.0), (fast, 0.5)):
            ours = Ours(spec)
            ours.step(gradient(0), 0, lr_scale=scale)
            results.append(ours.weights.tobytes())
        assert results[0] == results[1]
