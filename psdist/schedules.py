"""Learning-rate schedules as specifications, and the checks of numbers that optimizers share with them.

A schedule is a frozen dataclass. The wire carries its kind and numbers. Scripts use it through ``psdist.optim``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Final

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
