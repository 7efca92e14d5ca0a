"""optax's learning-rate schedules as specifications, with optax's names and arguments.

The servers run a schedule as a factor on the learning rate (``psdist.optim``), so each function returns both: the rate
that the factor multiplies, and the schedule. Values equal optax's, up to its rounding to float32.

Each raises InvalidArgumentError for arguments that no schedule of psdist.optim can represent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psdist.errors import InvalidArgumentError
from psdist.optim import Constant, Cosine, Linear, Polynomial, Schedule, Step


@dataclass(frozen=True)
class ScheduledRate:
    """Learning rate by step: ``value`` times the schedule's factor. Calling it with a step returns the rate."""

    value: float
    schedule: Schedule

    def __call__(self, count: int) -> float:
        return self.value * self.schedule.factor(int(count))


def rate_of(function: str, learning_rate: Any) -> ScheduledRate:
    """Convert an optimizer's ``learning_rate``: a number, or the result of a function of this module."""
    if isinstance(learning_rate, ScheduledRate):
        return learning_rate
    if callable(learning_rate):
        raise InvalidArgumentError(
            f"{function}: learning_rate is a function, which servers cannot run. Use the schedule of psdist.jax with "
            "the same name and arguments as optax's, such as psdist.jax.cosine_decay_schedule(1e-3, 1000), or set "
            "lr_factor of the parameters before each step"
        )
    return ScheduledRate(float(learning_rate), Constant())


def refuse(function: str, argument: str, value: object, remedy: str) -> InvalidArgumentError:
    """Return the error for an argument of optax that servers cannot follow."""
    return InvalidArgumentError(f"{function}: {argument}={value!r:.80} is not supported: {remedy}")


def constant_schedule(value: float) -> ScheduledRate:
    """Return a constant rate, as optax.constant_schedule."""
    return ScheduledRate(float(value), Constant())


def linear_schedule(
    init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0
) -> ScheduledRate:
    """Return a rate that is linear from ``init_value`` to ``end_value``, as optax.linear_schedule."""
    if init_value == 0 and not transition_begin:  # A warm-up from 0.
        return warmup_constant_schedule(init_value, end_value, transition_steps)
    _check_positive("linear_schedule", "init_value", init_value)
    return ScheduledRate(
        float(init_value), Linear(transition_steps, float(end_value) / float(init_value), **_from(transition_begin))
    )


def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> ScheduledRate:
    """Return a polynomial rate from ``init_value`` to ``end_value``, as optax.polynomial_schedule."""
    _check_positive("polynomial_schedule", "init_value", init_value)
    end = float(end_value) / float(init_value)
    return ScheduledRate(float(init_value), Polynomial(transition_steps, float(power), end, **_from(transition_begin)))


def cosine_decay_schedule(
    init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0
) -> ScheduledRate:
    """Return half a cosine from ``init_value`` to ``alpha`` times it, as optax.cosine_decay_schedule."""
    if exponent != 1:
        raise refuse("cosine_decay_schedule", "exponent", exponent, "use 1, or set lr_factor before each step")
    return ScheduledRate(float(init_value), Cosine(decay_steps, float(alpha)))


def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> ScheduledRate:
    """Return a rate that is multiplied by ``decay_rate`` every ``transition_steps``, as optax.exponential_decay."""
    _check_no_end("exponential_decay", end_value)
    return ScheduledRate(
        float(init_value), _exponential(transition_steps, decay_rate, staircase, **_from(transition_begin))
    )


def warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> ScheduledRate:
    """Return a linear warm-up and then a constant, as optax.warmup_constant_schedule."""
    return ScheduledRate(float(peak_value), Constant(**_warmup(init_value, peak_value, warmup_steps)))


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> ScheduledRate:
    """Return a linear warm-up and then half a cosine, as optax.warmup_cosine_decay_schedule.

    decay_steps: length of both together.
    """
    if exponent != 1:
        raise refuse("warmup_cosine_decay_schedule", "exponent", exponent, "use 1, or set lr_factor before each step")
    warmup = _warmup(init_value, peak_value, warmup_steps)
    end = float(end_value) / float(peak_value)
    return ScheduledRate(float(peak_value), Cosine(decay_steps - warmup_steps, end, **warmup))


def warmup_exponential_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> ScheduledRate:
    """Return a linear warm-up and then exponential decay, as optax.warmup_exponential_decay_schedule."""
    function = "warmup_exponential_decay_schedule"
    _check_no_end(function, end_value)
    if transition_begin:
        raise refuse(function, "transition_begin", transition_begin, "use 0")
    warmup = _warmup(init_value, peak_value, warmup_steps)
    return ScheduledRate(float(peak_value), _exponential(transition_steps, decay_rate, staircase, **warmup))


def _exponential(steps: int, decay_rate: float, staircase: bool, **warmup: Any) -> Schedule:
    _check_positive("exponential_decay", "decay_rate", decay_rate)
    _check_positive("exponential_decay", "transition_steps", steps)
    if staircase:
        return Step(steps, float(decay_rate), **warmup)
    return Step(1, float(decay_rate) ** (1 / steps), **warmup)


def _from(transition_begin: int) -> dict[str, Any]:
    """Return settings that hold the first rate for some steps: a warm-up from 1 to 1."""
    return {"warmup_steps": transition_begin, "warmup_start": 1.0}


def _warmup(init_value: float, peak_value: float, warmup_steps: int) -> dict[str, Any]:
    _check_positive("warm-up", "peak_value", peak_value)
    if init_value > peak_value:
        raise refuse("warm-up", "init_value", init_value, f"use at most peak_value={peak_value!r}")
    return {"warmup_steps": warmup_steps, "warmup_start": float(init_value) / float(peak_value)}


def _check_positive(function: str, name: str, value: float) -> None:
    if not value > 0:
        raise refuse(function, name, value, "use a number above 0")


def _check_no_end(function: str, end_value: float | None) -> None:
    if end_value is not None:
        raise refuse(function, "end_value", end_value, "use None, or set lr_factor before each step")
