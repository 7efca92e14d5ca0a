"""Optimizers and learning-rate schedules, as specifications.

A specification is a frozen dataclass. The wire carries its kind and numbers; the servers run it
(``psdist_server.kernels.optimizers``) with weights and state in float32. Formulas follow torch.optim
(https://docs.pytorch.org/docs/stable/optim.html) for the optimizers that torch has. Lion is Chen et al. 2023 (arXiv
2302.06675, algorithm 2); FTRL is McMahan et al. 2013 ("Ad Click Prediction", algorithm 1).

In the formulas w is a weight, g its gradient, lr the learning rate times the schedule's factor, and t the step: the
slice's version + 1, so a slice's first update is step 1. If a run that resumes from a snapshot resets the optimizer's
state (``reset_optimizer=True``), the optimizer's own t (Adam's bias corrections, Adagrad's ``lr_decay``, SGD's
undampened first gradient, the momentum of NAdam and the step size of ASGD) restarts at 1, as for a new torch
optimizer; schedules continue.

With ``maximize``, g is the negated gradient.

Constructors raise InvalidArgumentError for a value out of its range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeVar

from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import (
    ADDED,
    PAIRS,
    SCHEDULES,
    Constant,
    Cosine,
    Linear,
    Optimizer,
    Override,
    Polynomial,
    Schedule,
    Step,
    as_int,
    check,
    check_names,
    group_of,
    override,
    schedule_from_values,
)

__all__ = [
    "ASGD", "FTRL", "OPTIMIZERS", "SCHEDULES", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Constant",
    "Cosine", "Linear", "Lion", "Mean", "NAdam", "Optimizer", "Override", "Polynomial", "RAdam", "RMSprop", "Rprop",
    "Schedule", "Step", "group_of", "optimizer_from_values", "override", "scale_lr", "schedule_from_values",
]  # fmt: skip

#: Terms of a series whose k-th term is at most 2**-k; the rest is less than float64's rounding.
_SERIES_TERMS = 60
_MOMENTS = {"exp_avg": "", "exp_avg_sq": ""}
_MOMENTS_AND_MAXIMUM = _MOMENTS | {"max_exp_avg_sq": "amsgrad"}


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD.

    g = g + weight_decay * w
    b = momentum * b + (1 - dampening) * g, but b = g in step 1
    w = w - lr * b, or with ``nesterov`` w = w - lr * (g + momentum * b)

    Without momentum, w = w - lr * g, and there is no state. State: momentum_buffer (b).
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    kind: ClassVar[str] = "sgd"
    _state: ClassVar[Mapping[str, str]] = {"momentum_buffer": "momentum"}

    def _check_values(self, values: Mapping[str, float]) -> None:
        super()._check_values(values)
        if values["nesterov"] and (values["momentum"] <= 0 or values["dampening"] != 0):
            raise InvalidArgumentError("nesterov=True needs momentum above 0 and dampening=0")


@dataclass(frozen=True)
class ASGD(Optimizer):
    """Averaged stochastic gradient descent, as torch.optim.ASGD.

    g = g + weight_decay * w
    eta = lr in step 1, then lr' / (1 + lambd * lr' * (t - 1))**alpha, with lr' the rate of the step before
    w = w * (1 - lambd * eta) - eta * g
    a = a + (w - a) / max(1, t - 1 - t0)

    The average a is in snapshots, and the weights do not depend on it. Of hyperparameters that a push sets, torch takes
    those in eta and max from the step before, and sets ``lambd_before`` to the lambd in eta. State: ax (a).
    """

    lr: float = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0.0
    maximize: bool = False
    kind: ClassVar[str] = "asgd"
    delay: ClassVar[int] = 1
    earlier: ClassVar[Mapping[str, str]] = {"lambd_before": "lambd"}
    _state: ClassVar[Mapping[str, str]] = {"ax": ""}


@dataclass(frozen=True)
class Rprop(Optimizer):
    """Resilient backpropagation, as torch.optim.Rprop.

    s = s * etaplus if g * p > 0, s * etaminus if g * p < 0, else s; within ``step_sizes``
    g = 0 if g * p < 0
    w = w - s * sign(g)
    p = g

    etas: etaminus, between 0 and 1, and etaplus, above 1.
    step_sizes: smallest and largest s.

    State: prev (p), step_size (s), which is lr in step 1 and does not depend on it later.
    """

    lr: float = 1e-2
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50.0)
    maximize: bool = False
    kind: ClassVar[str] = "rprop"
    initial: ClassVar[tuple[str, ...]] = ("lr",)
    _state: ClassVar[Mapping[str, str]] = {"prev": "", "step_size": ""}
    _below_one: ClassVar[tuple[str, ...]] = ("etaminus",)
    _positive: ClassVar[tuple[str, ...]] = ("lr", "etaminus", "step_size_min", "step_size_max")

    def _check_values(self, values: Mapping[str, float]) -> None:
        super()._check_values(values)
        check(values["etaplus"] > 1, "rprop etaplus", values["etaplus"], "more than 1")


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as torch.optim.Adam; ``weight_decay`` is L2, added to the gradient.

    g = g + weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    w = w - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    With ``amsgrad``, the largest v so far replaces v in w. With ``decoupled_weight_decay`` it is AdamW.

    State: exp_avg (m), exp_avg_sq (v), with ``amsgrad`` max_exp_avg_sq.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
    kind: ClassVar[str] = "adam"
    _state: ClassVar[Mapping[str, str]] = _MOMENTS_AND_MAXIMUM
    _below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    _positive: ClassVar[tuple[str, ...]] = ("eps",)


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, as torch.optim.AdamW.

    w = w * (1 - lr * weight_decay), then Adam's update without weight decay.

    State: exp_avg, exp_avg_sq, with ``amsgrad`` max_exp_avg_sq.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    kind: ClassVar[str] = "adamw"
    _state: ClassVar[Mapping[str, str]] = _MOMENTS_AND_MAXIMUM
    _below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    _positive: ClassVar[tuple[str, ...]] = ("eps",)


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adamax, as torch.optim.Adamax: Adam with the infinity norm.

    g = g + weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    u = max(beta2 * u, abs(g) + eps)
    w = w - lr / (1 - beta1**t) * m / u

    State: exp_avg (m), exp_inf (u).
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False
    kind: ClassVar[str] = "adamax"
    _state: ClassVar[Mapping[str, str]] = {"exp_avg": "", "exp_inf": ""}
    _below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    _positive: ClassVar[tuple[str, ...]] = ("eps",)


@dataclass(frozen=True)
class NAdam(Optimizer):
    """Adam with Nesterov's momentum, as torch.optim.NAdam.

    g = g + weight_decay * w, or with ``decoupled_weight_decay`` w = w * (1 - lr * weight_decay)
    m and v as in Adam
    mu(t) = beta1 * (1 - 0.5 * 0.96**(t * momentum_decay)), M(t) = mu(1) * ... * mu(t)
    d = g * (1 - mu(t)) / (1 - M(t)) + m * mu(t + 1) / (1 - M(t + 1))
    w = w - lr * d / (sqrt(v / (1 - beta2**t)) + eps)

    State: exp_avg (m), exp_avg_sq (v).
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = False
    kind: ClassVar[str] = "nadam"
    fixed: ClassVar[tuple[str, ...]] = ("beta1", "momentum_decay")
    _state: ClassVar[Mapping[str, str]] = _MOMENTS
    _below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    _positive: ClassVar[tuple[str, ...]] = ("eps",)


@dataclass(frozen=True)
class RAdam(Optimizer):
    """Adam with a rectified learning rate, as torch.optim.RAdam.

    g = g + weight_decay * w, or with ``decoupled_weight_decay`` w = w * (1 - lr * weight_decay)
    m and v as in Adam
    R = 2 / (1 - beta2) - 1, r = R - 2 * t * beta2**t / (1 - beta2**t)
    w = w - lr * m / (1 - beta1**t), and if r > 5 the step is multiplied by
        sqrt((r - 4) * (r - 2) * R / ((R - 4) * (R - 2) * r)) * sqrt(1 - beta2**t) / (sqrt(v) + eps)

    State: exp_avg (m), exp_avg_sq (v).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False
    kind: ClassVar[str] = "radam"
    _state: ClassVar[Mapping[str, str]] = _MOMENTS
    _below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    _positive: ClassVar[tuple[str, ...]] = ("eps",)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, as torch.optim.Adagrad.

    g = g + weight_decay * w
    sum = sum + g**2
    w = w - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum) + eps)

    State: sum, which begins at ``initial_accumulator_value``.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    kind: ClassVar[str] = "adagrad"
    initial: ClassVar[tuple[str, ...]] = ("initial_accumulator_value",)
    _state: ClassVar[Mapping[str, str]] = {"sum": ""}
    _positive: ClassVar[tuple[str, ...]] = ("eps",)


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta, as torch.optim.Adadelta.

    g = g + weight_decay * w
    v = rho * v + (1 - rho) * g**2
    d = sqrt(a + eps) / sqrt(v + eps) * g
    a = rho * a + (1 - rho) * d**2
    w = w - lr * d

    rho: 0 to 1.

    State: square_avg (v), acc_delta (a).
    """

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False
    kind: ClassVar[str] = "adadelta"
    _state: ClassVar[Mapping[str, str]] = {"square_avg": "", "acc_delta": ""}
    _positive: ClassVar[tuple[str, ...]] = ("eps",)

    def _check_values(self, values: Mapping[str, float]) -> None:
        super()._check_values(values)
        check(values["rho"] <= 1, "adadelta rho", values["rho"], "0 to 1")


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop, as torch.optim.RMSprop.

    g = g + weight_decay * w
    v = alpha * v + (1 - alpha) * g**2
    d = g / (sqrt(v) + eps)
    w = w - lr * d

    With ``centered``, a = alpha * a + (1 - alpha) * g, and v - a**2 replaces v in d.
    With momentum, b = momentum * b + d and w = w - lr * b.

    State: square_avg (v), grad_avg (a) if ``centered``, momentum_buffer (b) if momentum is not 0.
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False
    kind: ClassVar[str] = "rmsprop"
    _state: ClassVar[Mapping[str, str]] = {"square_avg": "", "grad_avg": "centered", "momentum_buffer": "momentum"}
    _below_one: ClassVar[tuple[str, ...]] = ("alpha",)
    _positive: ClassVar[tuple[str, ...]] = ("eps",)


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion, with decoupled weight decay (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

    c = beta1 * m + (1 - beta1) * g
    w = w - lr * (sign(c) + weight_decay * w)
    m = beta2 * m + (1 - beta2) * g

    State: exp_avg (m).
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False
    kind: ClassVar[str] = "lion"
    _state: ClassVar[Mapping[str, str]] = {"exp_avg": ""}
    _below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-Proximal (McMahan et al. 2013, "Ad Click Prediction", algorithm 1).

    s = (sqrt(n + g**2) - sqrt(n)) / lr
    z = z + g - s * w
    n = n + g**2
    w = 0 if abs(z) <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)

    lr: alpha of the paper. A push's ``lr_factor`` scales the gradient instead.
    beta, l1, l2: beta and the lambdas of the paper.

    State: residual (z without the part that follows from w), sum (n).
    """

    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    maximize: bool = False
    kind: ClassVar[str] = "ftrl"
    _state: ClassVar[Mapping[str, str]] = {"residual": "", "sum": ""}
    _positive: ClassVar[tuple[str, ...]] = ("lr",)


@dataclass(frozen=True)
class Mean(Optimizer):
    """All-reduce instead of training: the weights of a step are ``lr`` times the mean of its gradients.

    Earlier weights have no effect. With ``lr=1.0`` the weights are exactly that mean. There is no state.
    """

    lr: float = 1.0
    kind: ClassVar[str] = "mean"


#: Suffix of the parameter set with the means of another set's gradients, which workers then push to that set.
MEANS_SUFFIX: Final = "/means"

_TORCH = (SGD, ASGD, Rprop, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop)
OPTIMIZERS: dict[str, type[Optimizer]] = {cls.kind: cls for cls in (*_TORCH, Lion, FTRL, Mean)}


def optimizer_from_values(
    kind: str, values: Mapping[str, float], schedule: Schedule, max_grad_norm: float, overrides: Sequence[Override]
) -> Optimizer:
    """Return the optimizer with this kind and these numbers.

    Raises InvalidArgumentError for an unknown kind, and for an unknown or missing number, as ``schedule_from_values``.
    A switch that earlier releases lack (``ADDED``) is False if it is missing.
    """
    cls = OPTIMIZERS.get(kind)
    if cls is None:
        raise InvalidArgumentError(f"optimizer kind {kind!r:.40} is unknown: use one of {', '.join(OPTIMIZERS)}")
    known = list(cls().values())
    given: dict[str, Any] = {name: 0.0 for name in known if name in ADDED} | dict(values)
    check_names(cls, given, known)
    for name, (first, second) in PAIRS.items():
        if first in given:
            given[name] = (given.pop(first), given.pop(second))
    return cls(**given, schedule=schedule, max_grad_norm=max_grad_norm, overrides=tuple(overrides))


# --- numbers that follow from the count of updates --------------------------------------------------------------------


def nadam_momentum(beta1: float, momentum_decay: float, update: int) -> float:
    """Return mu of update number ``update``, from 1: float64."""
    return beta1 * (1.0 - 0.5 * float(0.96 ** (update * momentum_decay)))


def nadam_log_product(beta1: float, momentum_decay: float, updates: int) -> float:
    """Return the logarithm of mu(1) * ... * mu(updates): float64, at most 0, accurate to about 1e-15 absolutely where
    the product differs from 0.

    The logarithm of a factor 1 - q**i / 2 is the series -sum_k (q**i / 2)**k / k. Summed over i first, each of its
    terms is a geometric sum, so the cost does not depend on ``updates``.
    """
    if not beta1:
        return -math.inf
    log, total = momentum_decay * math.log(0.96), updates * math.log(beta1)
    for k in range(1, _SERIES_TERMS + 1):
        ratio = math.expm1(k * log)
        powers = math.exp(k * log) * math.expm1(k * updates * log) / ratio if ratio else float(updates)
        total -= 0.5**k / k * powers
    return total


def asgd_step_size(values: Mapping[str, float], rate: float, updates: int) -> float:
    """Return eta after this number of updates, from the rate of the last of them (before the first: of the first)."""
    try:
        return rate / float((1.0 + values["lambd"] * rate * updates) ** values["alpha"])
    except OverflowError:  # The divisor is beyond float64.
        return 0.0


def asgd_average_weight(values: Mapping[str, float], updates: int) -> float:
    """Return the weight of the new weights in their average, after this number of updates."""
    return 1.0 / max(1.0, updates - values["t0"])


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def scale_lr(
    optimizer: AnyOptimizer, world_size: int, mode: Literal["linear", "sqrt", "none"] = "linear", warmup_steps: int = 0
) -> AnyOptimizer:
    """Return the optimizer with its learning rate scaled for ``world_size`` workers.

    mode: "linear" multiplies by world_size (Goyal et al. 2017, arXiv 1706.02677), "sqrt" by its square root
        (Krizhevsky 2014, arXiv 1404.5997), "none" leaves it.
    warmup_steps: steps over which the rate grows from its unscaled to its scaled value (Goyal et al.'s gradual
        warm-up), instead of the schedule's own warm-up. 0 leaves the schedule unchanged.
    Raises InvalidArgumentError.
    """
    world_size = as_int("world_size", world_size)
    check(world_size >= 1, "world_size", world_size, "1 or more")
    factors = {"linear": float(world_size), "sqrt": math.sqrt(world_size), "none": 1.0}
    if mode not in factors:
        raise InvalidArgumentError(f"mode={mode!r} is unknown: use one of {', '.join(factors)}")
    lr = optimizer.values()["lr"] * factors[mode]
    schedule = optimizer.schedule
    if warmup_steps:
        schedule = replace(schedule, warmup_steps=warmup_steps, warmup_start=1 / factors[mode])
    overrides = tuple(_scale_override(item, factors[mode]) for item in optimizer.overrides)
    return replace(optimizer, lr=lr, schedule=schedule, overrides=overrides)  # type: ignore[call-arg]  # all have lr


def _scale_override(item: Override, factor: float) -> Override:
    return Override(item.pattern, tuple((n, v * factor if n == "lr" else v) for n, v in item.values))
