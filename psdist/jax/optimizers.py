"""optax's optimizers as specifications, with optax's names and arguments.

An optax optimizer is a pair of functions, which servers cannot run or inspect. These functions return specifications of
``psdist.optim``, whose formulas are torch's. If the formulas of optax and torch are the same, weights agree within
1e-6. Arguments for which they differ are refused. Clipping and settings per leaf are fields of the specification:
``dataclasses.replace(adam(1e-3), max_grad_norm=1.0, overrides=(...))``.

learning_rate: a number, or a schedule of psdist.jax.

Each raises InvalidArgumentError.
"""

from __future__ import annotations

import glob
from typing import Any, Final

import jax
import numpy as np

from psdist import optim
from psdist.jax.schedules import ScheduledRate, rate_of, refuse
from psdist.jax.trees import names_of

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
