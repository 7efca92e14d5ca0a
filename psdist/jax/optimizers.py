"""optax's optimizers and learning-rate schedules as specifications, with optax's names and arguments.

The servers run a schedule as a factor on the learning rate (``psdist.optim``), so each function returns both: the rate
that the factor multiplies, and the schedule. Values equal optax's, up to its rounding to float32.

An optax optimizer is a pair of functions, which servers cannot run or inspect. These functions return specifications of
``psdist.optim``, whose formulas are torch's. If the formulas of optax and torch are the same, weights agree within
1e-6. Arguments for which they differ are refused. Clipping and settings per leaf are fields of the specification:
``dataclasses.replace(adam(1e-3), max_grad_norm=1.0, overrides=(...))``.

learning_rate: a number, or a schedule of psdist.jax.

Each raises InvalidArgumentError for arguments that psdist.optim cannot represent.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from psdist import optim
from psdist.errors import InvalidArgumentError
from psdist.jax.trees import names_of
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


Rate = float | ScheduledRate

#: Smallest eps of a specification.
_TINY: Final = float(np.finfo(np.float32).tiny)


def sgd(
    learning_rate: Rate, momentum: float | None = None, nesterov: bool = False, accumulator_dtype: Any = None
) -> optim.SGD:
    """Return optax.sgd as a specification."""
    rate = rate_of("sgd", learning_rate)
    _check_float32("sgd", "accumulator_dtype", accumulator_dtype)
    if not momentum:  # optax ignores nesterov then.
        return optim.SGD(lr=rate.value, schedule=rate.schedule)
    return optim.SGD(lr=rate.value, momentum=float(momentum), nesterov=nesterov, schedule=rate.schedule)


def adam(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> optim.Adam:
    """Return optax.adam as a specification. ``eps_root`` must be 0 and ``nesterov`` False."""
    rate = rate_of("adam", learning_rate)
    _check_adam("adam", eps_root, mu_dtype, nesterov)
    return optim.Adam(lr=rate.value, betas=(float(b1), float(b2)), eps=float(eps), schedule=rate.schedule)


def adamw(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> optim.AdamW:
    """Return optax.adamw as a specification. ``eps_root`` must be 0 and ``nesterov`` False.

    mask: tree of booleans like the parameters: leaves with False do not decay. A function of the parameters is refused:
        call it first.
    """
    rate = rate_of("adamw", learning_rate)
    _check_adam("adamw", eps_root, mu_dtype, nesterov)
    return optim.AdamW(
        lr=rate.value, betas=(float(b1), float(b2)), eps=float(eps), weight_decay=float(weight_decay),
        schedule=rate.schedule, overrides=_without_decay("adamw", mask),
    )  # fmt: skip


def lion(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    weight_decay: float = 1e-3,
    mask: Any = None,
) -> optim.Lion:
    """Return optax.lion as a specification. mask: as for ``adamw``."""
    rate = rate_of("lion", learning_rate)
    _check_float32("lion", "mu_dtype", mu_dtype)
    return optim.Lion(
        lr=rate.value, betas=(float(b1), float(b2)), weight_decay=float(weight_decay),
        schedule=rate.schedule, overrides=_without_decay("lion", mask),
    )  # fmt: skip


def adagrad(learning_rate: Rate, initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> optim.Adagrad:
    """Return optax.adagrad as a specification.

    optax adds ``eps`` inside of the root, to a sum that begins at ``initial_accumulator_value``. That equals a sum that
    begins at both together, with an eps outside that is too small to matter.
    """
    rate = rate_of("adagrad", learning_rate)
    first = float(initial_accumulator_value) + float(eps)
    if not first > 0:
        raise refuse("adagrad", "eps", eps, "use a number above 0, or a higher initial_accumulator_value")
    return optim.Adagrad(lr=rate.value, initial_accumulator_value=first, eps=_TINY, schedule=rate.schedule)


def rmsprop(
    learning_rate: Rate,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> optim.RMSprop:
    """Return optax.rmsprop as a specification.

    ``eps_in_sqrt`` must be given as False: servers add eps outside of the root, as torch does. ``initial_scale`` must
    be 0, ``nesterov`` and ``bias_correction`` False, and momentum needs a constant rate, because optax applies the rate
    before the momentum.
    """
    rate = rate_of("rmsprop", learning_rate)
    if eps_in_sqrt:
        raise refuse("rmsprop", "eps_in_sqrt", True, "pass False, which adds eps outside of the root, as servers do")
    for name, value in {
        "initial_scale": initial_scale,
        "nesterov": nesterov,
        "bias_correction": bias_correction,
    }.items():
        if value:
            raise refuse("rmsprop", name, value, f"use the default, or keep the optax chain with {_AVERAGE}")
    if momentum and rate.schedule != optim.Constant():
        raise refuse("rmsprop", "momentum", momentum, f"use a constant rate, or keep the optax chain with {_AVERAGE}")
    return optim.RMSprop(
        lr=rate.value, alpha=float(decay), eps=float(eps), momentum=float(momentum or 0.0), centered=centered,
        schedule=rate.schedule,
    )  # fmt: skip


def adadelta(
    learning_rate: Rate | None = None,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
) -> optim.Adadelta:
    """Return optax.adadelta as a specification. weight_decay_mask: as ``mask`` of ``adamw``."""
    rate = rate_of("adadelta", 1.0 if learning_rate is None else learning_rate)
    return optim.Adadelta(
        lr=rate.value, rho=float(rho), eps=float(eps), weight_decay=float(weight_decay),
        schedule=rate.schedule, overrides=_without_decay("adadelta", weight_decay_mask),
    )  # fmt: skip


def adamax(learning_rate: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optim.Adamax:
    """Return optax.adamax as a specification."""
    rate = rate_of("adamax", learning_rate)
    return optim.Adamax(lr=rate.value, betas=(float(b1), float(b2)), eps=float(eps), schedule=rate.schedule)


_AVERAGE: Final = "psdist.jax.average"


def _check_adam(function: str, eps_root: float, mu_dtype: Any, nesterov: bool) -> None:
    if eps_root:
        raise refuse(function, "eps_root", eps_root, f"use 0, or keep the optax chain with {_AVERAGE}")
    if nesterov:
        raise refuse(function, "nesterov", nesterov, f"use False, or keep the optax chain with {_AVERAGE}")
    _check_float32(function, "mu_dtype", mu_dtype)


def _check_float32(function: str, name: str, dtype: Any) -> None:
    if dtype is not None and jax.numpy.dtype(dtype) != jax.numpy.float32:
        raise refuse(function, name, dtype, "leave it out, since servers hold all state in float32")


def _without_decay(function: str, mask: Any) -> tuple[optim.Override, ...]:
    """Return overrides for the leaves of a mask that are False."""
    if mask is None:
        return ()
    if callable(mask):
        raise refuse(function, "mask", mask, "call the function first, as in mask=function(params)")
    pairs, _ = jax.tree_util.tree_flatten_with_path(mask)
    names = names_of([path for path, _ in pairs])
    patterns = []
    for name, (path, value) in zip(names, pairs, strict=True):
        if not path or not isinstance(value, bool | np.bool_):
            raise refuse(function, "mask", value, "give a tree like the parameters, with True or False at its leaves")
        patterns += [] if value else [glob.escape(name)]
    return tuple(optim.override(pattern, weight_decay=0.0) for pattern in patterns)
