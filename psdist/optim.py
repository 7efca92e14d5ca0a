"""Optimizers and learning-rate schedules, as specifications.

A specification is a frozen dataclass. The wire carries its kind and numbers; the servers run it
(``psdist_server.kernels.optimizers``) with weights and state in float32. Formulas follow torch.optim
(https://docs.pytorch.org/docs/stable/optim.html) for the optimizers that torch has. Lion is Chen et al. 2023 (arXiv
2302.06675, algorithm 2); FTRL is McMahan et al. 2013 ("Ad Click Prediction", algorithm 1).

In the formulas w is a weight, g its gradient, lr the learning rate times the schedule's factor, and t the step: the
slice's version + 1, so a slice's first update is step 1. If a run that resumes from a snapshot resets the optimizer's
state (``reset_optimizer=True``), the optimizer's own t (Adam's bias corrections, Adagrad's ``lr_decay``, SGD's
undampened first gradient) restarts at 1, as for a new torch optimizer; schedules continue.

Constructors raise InvalidArgumentError for a value out of its range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, ClassVar, Final, Literal, TypeVar

from psdist.errors import InvalidArgumentError

_OVERRIDES_MAX: Final = 256
#: Largest and smallest normal numbers of float32, the servers' type: larger ones become infinite, smaller ones 0.
_LARGEST: Final = 3.4028234663852886e38
_SMALLEST: Final = 1.1754943508222875e-38
#: FTRL multiplies gradients by the factor, and they must stay finite.
_LR_FACTOR_LAST: Final = 1e9


def _check(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"{name}={value!r:.80} is out of range: use {allowed}", **{name: value})


def _finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _normalize(spec: object, kind: str) -> None:
    """Convert the numbers of a specification to plain int, float and bool, as declared.

    Equal settings then compare equal (``lr=1`` and ``lr=numpy.float64(1)``) and survive the wire.
    """
    for field in fields(spec):  # type: ignore[arg-type]
        convert = _CONVERSIONS.get(str(field.type))
        if convert is not None:
            value = convert(f"{kind} {field.name}".strip(), getattr(spec, field.name))
            object.__setattr__(spec, field.name, value)


def _as_float(name: str, value: Any) -> float:
    _check(_finite(value) and 0 <= value <= _LARGEST, name, value, f"a number from 0 to {_LARGEST:.3g}")
    return float(value)


def _as_int(name: str, value: Any) -> int:
    # The wire carries all numbers as float64, so 3.0 counts as a whole number.
    whole = isinstance(value, Integral) or (_finite(value) and value == int(value))
    _check(whole and not isinstance(value, bool) and 0 <= value <= 2**53, name, value, "a whole number of 0 or more")
    return int(value)


def _as_bool(name: str, value: Any) -> bool:
    _check(isinstance(value, bool | Real) and value in (0, 1), name, value, "True or False")
    return bool(value)


def _as_pair(name: str, value: Any) -> tuple[float, float]:
    _check(isinstance(value, tuple | list) and len(value) == 2, name, value, "two numbers, such as (0.9, 0.999)")
    return _as_float(f"{name}[0]", value[0]), _as_float(f"{name}[1]", value[1])


_CONVERSIONS: Final = {"float": _as_float, "int": _as_int, "bool": _as_bool, "tuple[float, float]": _as_pair}


# --- schedules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Factor on the learning rate, by step.

    A linear warm-up from ``warmup_start`` to 1 over ``warmup_steps`` (torch's LinearLR) is followed by the schedule
    itself, counted from the end of the warm-up (torch's SequentialLR). Abstract.

    warmup_steps: length of the warm-up; 0 for none.
    warmup_start: factor at step 0 of the warm-up, 0 to 1.
    """

    warmup_steps: int = 0
    warmup_start: float = 1 / 3

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _normalize(self, "schedule")
        _check(self.warmup_start <= 1, "warmup_start", self.warmup_start, "0 to 1")
        for name in ("total_steps", "every"):
            if hasattr(self, name):
                _check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate in ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.warmup_start + (1 - self.warmup_start) * step / self.warmup_steps
        return self._after_warmup(step - self.warmup_steps)

    def _after_warmup(self, step: int) -> float:
        # Reached only by the base class, which no optimizer accepts as its schedule.
        raise NotImplementedError(f"{type(self).__name__} is not a schedule")


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Constant factor 1."""

    kind: ClassVar[str] = "constant"

    def _after_warmup(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Linear(Schedule):
    """Linear from 1 to ``end_factor`` over ``total_steps``, then constant (torch's LinearLR)."""

    total_steps: int
    end_factor: float = 0.0
    kind: ClassVar[str] = "linear"

    def _after_warmup(self, step: int) -> float:
        return 1.0 + (self.end_factor - 1.0) * min(step, self.total_steps) / self.total_steps


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 to ``end_factor`` over ``total_steps``, then constant (torch's CosineAnnealingLR)."""

    total_steps: int
    end_factor: float = 0.0
    kind: ClassVar[str] = "cosine"

    def _after_warmup(self, step: int) -> float:
        angle = math.pi * min(step, self.total_steps) / self.total_steps
        return self.end_factor + (1.0 - self.end_factor) * (1.0 + math.cos(angle)) / 2.0


@dataclass(frozen=True)
class Step(Schedule):
    """gamma ** (step // every): a factor of ``gamma`` after every ``every`` steps (torch's StepLR)."""

    every: int
    gamma: float = 0.1
    kind: ClassVar[str] = "step"

    def _after_warmup(self, step: int) -> float:
        return float(self.gamma ** (step // self.every))


@dataclass(frozen=True)
class Polynomial(Schedule):
    """end_factor + (1 - end_factor) * (1 - step / total_steps) ** power, then constant.

    With ``end_factor=0`` this is torch's PolynomialLR.
    """

    total_steps: int
    power: float = 1.0
    end_factor: float = 0.0
    kind: ClassVar[str] = "polynomial"

    def _after_warmup(self, step: int) -> float:
        left = 1.0 - min(step, self.total_steps) / self.total_steps
        return self.end_factor + (1.0 - self.end_factor) * float(left**self.power)


# --- overrides --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Override:
    """Different hyperparameters for the tensors whose name matches ``pattern``. Created by ``override``."""

    pattern: str
    values: tuple[tuple[str, float], ...]


def override(pattern: str, **values: float) -> Override:
    """Return other hyperparameters for the tensors whose name matches ``pattern``.

    Example: ``override("*.bias", weight_decay=0.0)``.

    pattern: shell style: ``*``, ``?``, ``[abc]``. The first override that matches a tensor applies.
    values: hyperparameters of the optimizer by name, including ``lr``; betas are ``beta1`` and ``beta2``.
    Raises InvalidArgumentError.
    """
    if not isinstance(pattern, str) or not 1 <= len(pattern) <= 256:
        raise InvalidArgumentError(f"override pattern {pattern!r:.80} must have 1 to 256 characters")
    if not values:
        raise InvalidArgumentError(f"override {pattern!r} changes nothing: name a hyperparameter, such as lr=0.01")
    checked = {name: _as_float(f"override {pattern!r} {name}", value) for name, value in values.items()}
    return Override(pattern, tuple(sorted(checked.items())))


def group_of(name: str, overrides: Sequence[Override]) -> int:
    """Return the group of a tensor: 0 if no override matches its name, else 1 + the index of the first that does."""
    matches = (index for index, item in enumerate(overrides, 1) if fnmatchcase(name, item.pattern))
    return next(matches, 0)


# --- optimizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Settings that all optimizers share. Abstract.

    schedule: factor on the learning rate, by step.
    max_grad_norm: global L2 norm to which gradients are scaled down (torch's clip_grad_norm_); 0 for no limit. In BSP
        it is the norm of the mean gradient over all servers; in SSP and ASP that of each pushed gradient.
    overrides: other hyperparameters for some tensors, like torch's parameter groups. At most 256.
    """

    schedule: Schedule = Constant()
    max_grad_norm: float = 0.0
    overrides: tuple[Override, ...] = ()

    kind: ClassVar[str] = ""
    #: State arrays, unless ``state_names`` depends on a setting.
    _state: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule) or not self.schedule.kind:
            raise InvalidArgumentError(f"schedule={self.schedule!r} is not a psdist.optim schedule")
        _normalize(self, self.kind)
        _check(isinstance(self.overrides, tuple | list), "overrides", self.overrides, "a tuple of override(...)")
        object.__setattr__(self, "overrides", tuple(self.overrides))
        _check(len(self.overrides) <= _OVERRIDES_MAX, "overrides", len(self.overrides), f"at most {_OVERRIDES_MAX}")
        _check_values(self.kind, self.values())
        for item in self.overrides:
            self._check_override(item)

    def values(self) -> dict[str, float]:
        """Return hyperparameters by name: booleans as 0 or 1, betas as ``beta1`` and ``beta2``."""
        values: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "betas":
                values["beta1"], values["beta2"] = map(float, value)
            elif field.name not in _SHARED:
                values[field.name] = float(value)
        return values

    def group_values(self, group: int) -> dict[str, float]:
        """Return hyperparameters of group 0, the optimizer's own, or with override number ``group`` applied."""
        return self.values() if group == 0 else self.values() | dict(self.overrides[group - 1].values)

    def check_lr_factor(self, factor: float) -> float:
        """Return ``factor``, on the learning rate of one push, as float.

        Raises InvalidArgumentError unless it is a number from 0 to 1e9 whose product with every learning rate fits
        float32.
        """
        checked = _as_float("lr_factor", factor)
        _check(checked <= _LR_FACTOR_LAST, "lr_factor", factor, f"0 to {_LR_FACTOR_LAST:g}")
        rate = max(self.group_values(group)["lr"] for group in range(len(self.overrides) + 1))
        allowed = f"less, as lr={rate:g} times it is beyond float32"
        _check(rate * checked <= _LARGEST, "lr_factor", factor, allowed)
        return checked

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays, in order. Each has one float32 per element of the slice."""
        return self._state

    def _check_override(self, item: Override) -> None:
        if not isinstance(item, Override):
            raise InvalidArgumentError(f"{item!r:.80} is not an override: make it with psdist.optim.override")
        own = self.values()
        for name, _ in item.values:
            if name not in own:
                raise InvalidArgumentError(
                    f"override {item.pattern!r}: {type(self).__name__} has no hyperparameter {name!r}; it has "
                    + ", ".join(own)
                )
            if name in _STRUCTURAL:
                raise InvalidArgumentError(f"override {item.pattern!r}: {name} must be the same for all tensors")
        _check_values(self.kind, own | dict(item.values))


_SHARED = tuple(field.name for field in fields(Optimizer))
#: These decide which state arrays exist or which kernel runs, so they are the same for all tensors.
_STRUCTURAL = ("momentum", "nesterov", "centered", "initial_accumulator_value")


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
    kind: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise InvalidArgumentError("nesterov=True needs momentum above 0 and dampening=0")

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays, in order."""
        return ("momentum_buffer",) if self.momentum else ()


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as torch.optim.Adam without amsgrad; ``weight_decay`` is L2, added to the gradient.

    g = g + weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    w = w - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    State: exp_avg (m), exp_avg_sq (v).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    kind: ClassVar[str] = "adam"
    _state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, as torch.optim.AdamW without amsgrad.

    w = w * (1 - lr * weight_decay), then Adam's update without weight decay.

    State: exp_avg, exp_avg_sq.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    kind: ClassVar[str] = "adamw"
    _state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")


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
    kind: ClassVar[str] = "adagrad"
    _state: ClassVar[tuple[str, ...]] = ("sum",)


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
    kind: ClassVar[str] = "rmsprop"

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays, in order."""
        optional = {"grad_avg": self.centered, "momentum_buffer": self.momentum}
        return ("square_avg", *(name for name, is_kept in optional.items() if is_kept))


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
    kind: ClassVar[str] = "lion"
    _state: ClassVar[tuple[str, ...]] = ("exp_avg",)


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
    kind: ClassVar[str] = "ftrl"
    _state: ClassVar[tuple[str, ...]] = ("residual", "sum")


@dataclass(frozen=True)
class Mean(Optimizer):
    """All-reduce instead of training: the weights of a step are ``lr`` times the mean of its gradients.

    Earlier weights have no effect. With ``lr=1.0`` the weights are exactly that mean. There is no state.
    """

    lr: float = 1.0
    kind: ClassVar[str] = "mean"


SCHEDULES: dict[str, type[Schedule]] = {cls.kind: cls for cls in (Constant, Linear, Cosine, Step, Polynomial)}
OPTIMIZERS: dict[str, type[Optimizer]] = {
    cls.kind: cls for cls in (SGD, Adam, AdamW, Adagrad, RMSprop, Lion, FTRL, Mean)
}

_UNIT_OPEN = ("beta1", "beta2", "alpha")


def _check_values(kind: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        _as_float(f"{kind} {name}", value)
        if name in _UNIT_OPEN:
            _check(value < 1, f"{kind} {name}", value, "0 or more and less than 1")
    if kind in ("adam", "adamw", "rmsprop", "adagrad"):
        _check(values["eps"] >= _SMALLEST, f"{kind} eps", values["eps"], "float32's smallest normal 1.18e-38 or more")
    if kind == "ftrl":
        _check(values["lr"] >= _SMALLEST, "ftrl lr", values["lr"], "float32's smallest normal 1.18e-38 or more")


def schedule_from_values(kind: str, values: Mapping[str, float]) -> Schedule:
    """Return the schedule with this kind and these numbers.

    Raises InvalidArgumentError for an unknown kind, and for an unknown or missing number. Numbers have no default
    here, because another release may have a different one.
    """
    cls = SCHEDULES.get(kind)
    if cls is None:
        raise InvalidArgumentError(f"schedule kind {kind!r:.40} is unknown: use one of {', '.join(SCHEDULES)}")
    _check_names(cls, values, [field.name for field in fields(cls)])
    given: dict[str, Any] = dict(values)
    return cls(**given)


def optimizer_from_values(
    kind: str, values: Mapping[str, float], schedule: Schedule, max_grad_norm: float, overrides: Sequence[Override]
) -> Optimizer:
    """Return the optimizer with this kind and these numbers.

    Raises InvalidArgumentError for an unknown kind, and for an unknown or missing number, as ``schedule_from_values``.
    """
    cls = OPTIMIZERS.get(kind)
    if cls is None:
        raise InvalidArgumentError(f"optimizer kind {kind!r:.40} is unknown: use one of {', '.join(OPTIMIZERS)}")
    _check_names(cls, values, list(cls().values()))
    given: dict[str, Any] = dict(values)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    return cls(**given, schedule=schedule, max_grad_norm=max_grad_norm, overrides=tuple(overrides))


def _check_names(cls: type, given: Mapping[str, float], known: Sequence[str]) -> None:
    if unknown := sorted(given.keys() - set(known)):
        raise InvalidArgumentError(f"{cls.__name__} has no {unknown[0]!r:.40}; it has {', '.join(known)}")
    if missing := [name for name in known if name not in given]:
        raise InvalidArgumentError(
            f"{cls.__name__} needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} missing: "
            f"give all of {', '.join(known)}"
        )


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
    world_size = _as_int("world_size", world_size)
    _check(world_size >= 1, "world_size", world_size, "1 or more")
    factors = {"linear": float(world_size), "sqrt": math.sqrt(world_size), "none": 1.0}
    if mode not in factors:
        raise InvalidArgumentError(f"mode={mode!r} is unknown: use one of {', '.join(factors)}")
    lr = optimizer.values()["lr"] * factors[mode]
    schedule = optimizer.schedule
    if warmup_steps:
        schedule = replace(schedule, warmup_steps=warmup_steps, warmup_start=1 / factors[mode])
    overrides = tuple(_scale_override(item, factors[mode]) for item in optimizer.overrides)
    return replace(optimizer, lr=lr, schedule=schedule, overrides=overrides)  # type: ignore[call-arg]


def _scale_override(item: Override, factor: float) -> Override:
    return Override(item.pattern, tuple((n, v * factor if n == "lr" else v) for n, v in item.values))
