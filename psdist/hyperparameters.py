"""Settings that all optimizers share, learning-rate schedules, and other hyperparameters for some of the tensors.
Scripts use ``psdist.optim``.

Elements of a parameter set belong to groups. Group 0 has the optimizer's own hyperparameters, group i those of override
number i. Groups may differ in each hyperparameter. Those that decide which state arrays an optimizer needs (momentum,
amsgrad) only make the set have the arrays of all groups.

A learning-rate schedule is a frozen dataclass, too. The wire carries its kind and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from numbers import Integral, Real
from typing import Any, ClassVar, Final, NamedTuple

from psdist.errors import InvalidArgumentError

#: Largest and smallest normal numbers of float32, the servers' type. Larger ones overflow, smaller ones round to 0.
LARGEST: Final = 3.4028234663852886e38
SMALLEST: Final = 1.1754943508222875e-38


def check(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise InvalidArgumentError with the value and the ``allowed`` range, unless the condition holds."""
    if not condition:
        raise InvalidArgumentError(f"{name}={value!r:.80} is out of range: use {allowed}", **{name: value})


def _finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def normalize(spec: object, kind: str) -> None:
    """Convert the numbers of a specification to its declared int, float and bool.

    So equal settings compare equal (``lr=1`` and ``lr=numpy.float64(1)``), also after the wire.
    """
    for field in fields(spec):  # type: ignore[arg-type]  # every specification is a dataclass
        convert = _CONVERSIONS.get(str(field.type))
        if convert is not None:
            value = convert(f"{kind} {field.name}".strip(), getattr(spec, field.name))
            object.__setattr__(spec, field.name, value)


def as_float(name: str, value: Any) -> float:
    """Return a number from 0 to float32's largest as float. Raises InvalidArgumentError for anything else."""
    check(_finite(value) and 0 <= value <= LARGEST, name, value, f"a number from 0 to {LARGEST:.3g}")
    return float(value)


def as_int(name: str, value: Any) -> int:
    """Return a whole number from 0 to 2**53 as int. Raises InvalidArgumentError for anything else."""
    # The wire carries all numbers as float64, so 3.0 counts as a whole number.
    whole = isinstance(value, Integral) or (_finite(value) and value == int(value))
    check(whole and not isinstance(value, bool) and 0 <= value <= 2**53, name, value, "a whole number of 0 or more")
    return int(value)


def _as_bool(name: str, value: Any) -> bool:
    check(isinstance(value, bool | Real) and value in (0, 1), name, value, "True or False")
    return bool(value)


def _as_pair(name: str, value: Any) -> tuple[float, float]:
    check(isinstance(value, tuple | list) and len(value) == 2, name, value, "two numbers, such as (0.9, 0.999)")
    return as_float(f"{name}[0]", value[0]), as_float(f"{name}[1]", value[1])


_CONVERSIONS: Final = {"float": as_float, "int": as_int, "bool": _as_bool, "tuple[float, float]": _as_pair}


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
        normalize(self, "schedule")
        check(self.warmup_start <= 1, "warmup_start", self.warmup_start, "0 to 1")
        for name in ("total_steps", "every"):
            if hasattr(self, name):
                check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")

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
        try:
            return float(self.gamma ** (step // self.every))
        except OverflowError:  # It grows beyond float64.
            return math.inf


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


SCHEDULES: dict[str, type[Schedule]] = {cls.kind: cls for cls in (Constant, Linear, Cosine, Step, Polynomial)}


def schedule_from_values(kind: str, values: Mapping[str, float]) -> Schedule:
    """Return the schedule of this kind with these numbers.

    Raises InvalidArgumentError for an unknown kind, and for an unknown or missing number. Defaults do not
    apply here, because they may differ between releases.
    """
    cls = SCHEDULES.get(kind)
    if cls is None:
        raise InvalidArgumentError(f"schedule kind {kind!r:.40} is unknown: use one of {', '.join(SCHEDULES)}")
    check_names(cls, values, [field.name for field in fields(cls)])
    given: dict[str, Any] = dict(values)
    return cls(**given)


def check_names(cls: type, given: Mapping[str, float], known: Sequence[str]) -> None:
    """Raise InvalidArgumentError unless ``given`` has exactly the ``known`` numbers of ``cls``."""
    if unknown := sorted(given.keys() - set(known)):
        raise InvalidArgumentError(f"{cls.__name__} has no {unknown[0]!r:.40}; it has {', '.join(known)}")
    if missing := [name for name in known if name not in given]:
        raise InvalidArgumentError(
            f"{cls.__name__} needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} missing: "
            f"give all of {', '.join(known)}"
        )


# --- optimizers ---

_OVERRIDES_MAX: Final = 256
#: FTRL multiplies gradients by the factor, and they must stay finite.
_LR_FACTOR_LAST: Final = 1e9
_CONSTANT: Final = Constant()
#: Names of the two numbers of a setting.
PAIRS: Final = {
    "betas": ("beta1", "beta2"),
    "etas": ("etaminus", "etaplus"),
    "step_sizes": ("step_size_min", "step_size_max"),
}
#: Hyperparameters that are True or False.
_SWITCHES: Final = ("nesterov", "centered", "amsgrad", "maximize", "decoupled_weight_decay")
#: Switches that earlier releases lack. They are sent and saved only if they are True.
ADDED: Final = ("amsgrad", "maximize", "decoupled_weight_decay")
#: Number of the schedule that an override may set for its group.
END_FACTOR: Final = "end_factor"


class Setting(NamedTuple):
    """Hyperparameter of one group that differs from the specification."""

    group: int
    name: str
    value: float


#: All such hyperparameters of an update, in order. ``Optimizer.check_settings`` makes them.
Settings = tuple[Setting, ...]


def by_group(settings: Settings) -> dict[int, dict[str, float]]:
    """Return hyperparameters by group and name. Raises InvalidArgumentError for one that is given twice."""
    groups: dict[int, dict[str, float]] = {}
    for group, name, value in settings:
        if name in groups.setdefault(group, {}):
            raise InvalidArgumentError(f"settings of group {group}: {name!r:.40} is given twice")
        groups[group][name] = value
    return groups


@dataclass(frozen=True, slots=True)
class Override:
    """Different hyperparameters for the tensors whose name matches ``pattern``. Created by ``override``."""

    pattern: str
    values: tuple[tuple[str, float], ...]


def override(pattern: str, **values: float) -> Override:
    """Return other hyperparameters for the tensors whose name matches ``pattern``.

    Example: ``override("*.bias", weight_decay=0.0)``.

    pattern: shell style: ``*``, ``?``, ``[abc]``. The first override that matches a tensor applies.
    values: hyperparameters of the optimizer by name, including ``lr``; betas are ``beta1`` and ``beta2``, etas
        ``etaminus`` and ``etaplus``, step sizes ``step_size_min`` and ``step_size_max``. ``end_factor`` is that of the
        schedule.
    Raises InvalidArgumentError.
    """
    if not isinstance(pattern, str) or not 1 <= len(pattern) <= 256:
        raise InvalidArgumentError(f"override pattern {pattern!r:.80} must have 1 to 256 characters")
    if not values:
        raise InvalidArgumentError(f"override {pattern!r} changes nothing: name a hyperparameter, such as lr=0.01")
    checked = {
        name: float(value)
        if name in _SWITCHES and isinstance(value, bool)
        else as_float(f"override {pattern!r} {name}", value)
        for name, value in values.items()
    }
    return Override(pattern, tuple(sorted(checked.items())))


def group_of(name: str, overrides: Sequence[Override]) -> int:
    """Return the group of a tensor: 0 if no override matches its name, else 1 + the index of the first that does."""
    matches = (index for index, item in enumerate(overrides, 1) if fnmatchcase(name, item.pattern))
    return next(matches, 0)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Settings that all optimizers share. Abstract.

    schedule: factor on the learning rate, by step.
    max_grad_norm: global L2 norm to which gradients are scaled down (torch's clip_grad_norm_); 0 for no limit. In BSP
        it is the norm of the mean gradient over all servers; in SSP and ASP that of each pushed gradient.
    overrides: other hyperparameters for some tensors, like torch's parameter groups. At most 256.
    """

    schedule: Schedule = _CONSTANT
    max_grad_norm: float = 0.0
    overrides: tuple[Override, ...] = ()

    kind: ClassVar[str] = ""
    #: Steps by which the schedule's factor takes effect later.
    delay: ClassVar[int] = 0
    #: State arrays in order, each with the hyperparameter that must not be 0 for it to exist, or "".
    _state: ClassVar[Mapping[str, str]] = {}
    #: Hyperparameters that take effect only when the state begins.
    initial: ClassVar[tuple[str, ...]] = ()
    #: Hyperparameters that the state of earlier updates depends on, so that they may not change.
    fixed: ClassVar[tuple[str, ...]] = ()
    #: Names that only settings have, each with the hyperparameter whose value it has otherwise.
    earlier: ClassVar[Mapping[str, str]] = {}
    #: Hyperparameters that must be less than 1.
    _below_one: ClassVar[tuple[str, ...]] = ()
    #: Hyperparameters that must be at least float32's smallest normal number.
    _positive: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule) or not self.schedule.kind:
            raise InvalidArgumentError(f"schedule={self.schedule!r} is not a psdist.optim schedule")
        normalize(self, self.kind)
        check(isinstance(self.overrides, tuple | list), "overrides", self.overrides, "a tuple of override(...)")
        object.__setattr__(self, "overrides", tuple(self.overrides))
        check(len(self.overrides) <= _OVERRIDES_MAX, "overrides", len(self.overrides), f"at most {_OVERRIDES_MAX}")
        self._check_values(self.values())
        for item in self.overrides:
            self._check_override(item)

    def values(self) -> dict[str, float]:
        """Return hyperparameters by name: booleans as 0 or 1, pairs as two numbers such as ``beta1``, ``beta2``."""
        return dict(self._values)

    @cached_property
    def _values(self) -> Mapping[str, float]:
        values: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in PAIRS:
                values.update(zip(PAIRS[field.name], map(float, value), strict=True))
            elif field.name not in _SHARED:
                values[field.name] = float(value)
        return values

    def stated_values(self) -> dict[str, float]:
        """Return ``values`` for the wire and for manifests: without switches that earlier releases lack, if False."""
        return {name: value for name, value in self.values().items() if value or name not in ADDED}

    def group_values(self, group: int) -> dict[str, float]:
        """Return hyperparameters of group 0, the optimizer's own, or with override number ``group`` applied."""
        if group == 0:
            return self.values()
        return self.values() | {name: value for name, value in self.overrides[group - 1].values if name != END_FACTOR}

    def group_schedule(self, group: int) -> Schedule:
        """Return the schedule of a group: the optimizer's own, with the ``end_factor`` of its override if that has
        one."""
        values = dict(self.overrides[group - 1].values) if group else {}
        schedule: Any = self.schedule
        return replace(schedule, end_factor=values[END_FACTOR]) if END_FACTOR in values else self.schedule

    def check_lr_factor(self, factor: float) -> float:
        """Return ``factor``, on the learning rate of one push, as float.

        Raises InvalidArgumentError unless it is a number from 0 to 1e9 whose product with every learning rate fits
        float32.
        """
        checked = as_float("lr_factor", factor)
        check(checked <= _LR_FACTOR_LAST, "lr_factor", factor, f"0 to {_LR_FACTOR_LAST:g}")
        rate = max(self.group_values(group)["lr"] for group in self.groups)
        allowed = f"less, as lr={rate:g} times it is beyond float32"
        check(rate * checked <= LARGEST, "lr_factor", factor, allowed)
        return checked

    def setting_defaults(self, group: int) -> dict[str, float]:
        """Return the value that each possible setting of a group has unless it is set."""
        values = self.group_values(group)
        return values | {name: values[of] for name, of in self.earlier.items()}

    def check_settings(self, changes: Mapping[int, Mapping[str, float]]) -> Settings:
        """Return hyperparameters by group that differ from the specification's, as pushes carry them.

        Raises InvalidArgumentError for a group or name that does not exist, a value out of its range, and a
        hyperparameter that may not change while training.
        """
        found: list[Setting] = []
        check(isinstance(changes, Mapping), "settings", changes, 'a mapping such as {0: {"momentum": 0.85}}')
        for group, values in changes.items():
            if not isinstance(group, Integral) or group not in self.groups:
                raise InvalidArgumentError(
                    f"settings of group {group!r:.40}: use 0 for the optimizer's own, or the number of an override, up "
                    f"to {len(self.overrides)}"
                )
            try:
                checked = self.check_group_settings(group, values)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"settings of group {group}: {error.message}", **error.details) from None
            found += [Setting(int(group), name, value) for name, value in checked.items()]
        return tuple(sorted(found))

    def check_group_settings(self, group: int, changes: Mapping[str, float]) -> dict[str, float]:
        """Return those of ``changes`` that differ from the group's defaults. Raises as ``check_settings``."""
        before = self.setting_defaults(group)
        check(isinstance(changes, Mapping), "settings", changes, 'a mapping such as {"momentum": 0.85}')
        for name in changes:
            if name not in before:
                raise InvalidArgumentError(
                    f"{type(self).__name__} has no hyperparameter {name!r:.40}; it has {', '.join(before)}"
                )
        found: dict[str, float] = {}
        for name, value in changes.items():
            checked = as_float(f"{self.kind} {name}", value)
            if checked != before[name]:
                self._check_change(name, before[name], checked)
                found[name] = checked
        self._check_values(before | found)
        return found

    def _check_change(self, name: str, before: float, after: float) -> None:
        """Raise InvalidArgumentError unless a hyperparameter may change while training."""
        reason = ""
        if name in _SWITCHES:
            reason = "it decides how an update is computed"
        elif name in self.initial and name != "lr":
            reason = "it takes effect only when the state begins"
        elif name in self.fixed:
            reason = "the state of earlier updates depends on it"
        elif name in self.structural and not (before and after):
            reason = "it decides which state exists: use a value above 0 in the specification and in each step"
        if reason:
            raise InvalidArgumentError(f"{name} cannot change from {before:g} to {after:g} while training, as {reason}")

    def check_rates(self, lr_factor: float, settings: Settings) -> None:
        """Raise InvalidArgumentError if a learning rate that is set, times a factor, does not fit float32."""
        for group, name, value in settings:
            allowed = f"less, as lr={value:g} of group {group} times it is beyond float32"
            check(name != "lr" or value * lr_factor <= LARGEST, "lr_factor", lr_factor, allowed)

    @property
    def groups(self) -> range:
        """Numbers of the groups."""
        return range(len(self.overrides) + 1)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays, in order: those of all groups. Each has one float32 per element of the slice."""
        kept = {name for group in self.groups for name in self.group_state_names(group)}
        return tuple(name for name in self._state if name in kept)

    def group_state_names(self, group: int) -> tuple[str, ...]:
        """Names of the state arrays that a group uses, in order."""
        values = self.group_values(group)
        return tuple(name for name, needed in self._state.items() if not needed or values[needed])

    @property
    def structural(self) -> tuple[str, ...]:
        """Hyperparameters by which a state array exists unless they are 0."""
        return tuple(needed for needed in self._state.values() if needed)

    def _check_values(self, values: Mapping[str, float]) -> None:
        """Raise InvalidArgumentError unless these hyperparameters, of one group, go together."""
        for name, value in values.items():
            as_float(f"{self.kind} {name}", value)
            if name in _SWITCHES:
                check(value in (0, 1), f"{self.kind} {name}", value, "True or False")
            if name in self._below_one:
                check(value < 1, f"{self.kind} {name}", value, "0 or more and less than 1")
            if name in self._positive:
                check(value >= SMALLEST, f"{self.kind} {name}", value, "float32's smallest normal 1.18e-38 or more")

    def _check_override(self, item: Override) -> None:
        if not isinstance(item, Override):
            raise InvalidArgumentError(f"{item!r:.80} is not an override: make it with psdist.optim.override")
        own = self.values()
        for name, value in item.values:
            if name == END_FACTOR:
                as_float(f"override {item.pattern!r} {name}", value)
                self._check_end_factor(item)
            elif name not in own:
                raise InvalidArgumentError(
                    f"override {item.pattern!r}: {type(self).__name__} has no hyperparameter {name!r}; it has "
                    + ", ".join(own)
                )
        self._check_values(own | {name: value for name, value in item.values if name != END_FACTOR})

    def _check_end_factor(self, item: Override) -> None:
        if not hasattr(self.schedule, END_FACTOR):
            raise InvalidArgumentError(
                f"override {item.pattern!r}: end_factor needs a schedule that has one, and {self.schedule.kind!r} has "
                "none: use Linear, Cosine or Polynomial"
            )


_SHARED = tuple(field.name for field in fields(Optimizer))
