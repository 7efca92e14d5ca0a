"""JAX training through psdist. Needs the extra ``jax``.

``parameters`` trains a pytree, such as the parameters of a Flax or Equinox model, on parameter servers in any
consistency mode; ``sgd``, ``adam`` and the other optimizers have the names and arguments of optax. ``average`` averages
gradients over the workers for a script that keeps its optax chain. ``import psdist`` alone never imports jax.
"""

from __future__ import annotations

try:
    import jax as _jax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("psdist.jax needs JAX: pip install jax", name="jax") from error

from psdist.jax.optimizers import (
    ScheduledRate,
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    linear_schedule,
    lion,
    polynomial_schedule,
    rmsprop,
    sgd,
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    warmup_exponential_decay_schedule,
)
from psdist.jax.parameters import TreeParameters, average, parameters

__all__ = [
    "ScheduledRate",
    "TreeParameters",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "average",
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "linear_schedule",
    "lion",
    "parameters",
    "polynomial_schedule",
    "rmsprop",
    "sgd",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
]

del _jax
