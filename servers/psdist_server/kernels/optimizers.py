"""Optimizer specifications as update rules of slices: their state arrays, and the scalars of one update.

A ``Rule`` is created once per parameter set. It computes the scalars of a step (bias corrections, learning rate by
schedule) in float64, rounds each to float32 once, and names the kernel that takes them. It holds no weights and no
state, and knows no versions; its caller does.

Invariant: An element's update depends on that element alone, so the slicing of a vector does not matter.

FTRL-Proximal (McMahan et al. 2013, algorithm 1) stores z and n per coordinate and recomputes the weights from them: w =
-(z - sign(z) l1) / D if abs(z) > l1, else 0, with D = (beta + sqrt(n)) / alpha + l2. Here the state is n and q = z + D
w, the part of z that the weights do not determine: it is z clipped to [-l1, l1]. With the gradient g, D' after it and
sigma = D' - D, the algorithm's z' = z + g - sigma w becomes z' = q + g - D' w. So the old D is not needed, alpha may
follow a schedule without moving weights by itself, weights start at any value exactly, and a gradient of zero changes
nothing. If alpha is constant, the result is the algorithm's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.compiled import Kernel
from psdist.optim import Optimizer
from psdist_server.kernels import fused

Floats = NDArray[np.float32]
Values = Mapping[str, float]
#: (start, stop, group): elements [start, stop) of a slice have the hyperparameters ``Optimizer.group_values(group)``.
Run = tuple[int, int, int]
#: Arguments of the kernel, by group.
Scalars = tuple[tuple[np.float32, ...] | None, ...]

_CLIP_EPS: Final = 1e-6
#: FTRL divides by its rate. Below this value the inverse is not a float32, and the update is skipped.
_FTRL_RATE_MIN: Final = 1e-38


class Rule:
    """Update rule of one optimizer specification.

    state_since: the version at which the state began. The optimizer's own count of updates starts there; schedules
        count from version 0.
    state_names: the state arrays of each slice, in order; each is float32 of the slice's length.
    """

    def __init__(self, spec: Optimizer, state_since: int = 0) -> None:
        self.spec = spec
        self.state_since = state_since
        self.state_names = spec.state_names
        #: Kernel that updates several slices by the mean of contributions; see ``psdist_server.kernels.fused``.
        self.fused = _kernel_of(spec)
        self._scalars = _SCALARS[spec.kind]
        self._groups = tuple(spec.group_values(group) for group in range(len(spec.overrides) + 1))
        self._scalars_kept: tuple[tuple[int, float], Scalars] | None = None

    def initialize(self, weights: Floats, states: Sequence[Floats], runs: Sequence[Run]) -> None:
        """Set the ``states`` of a slice to their values before the first update, for these float32[n] ``weights``.

        That is zeros, except for Adagrad's ``initial_accumulator_value`` and FTRL's residual, which takes the weights
        as given.

        runs: ranges inside the slice and their groups, without overlap.
        """
        for state in states:
            state.fill(0.0)
        if self.spec.kind == "adagrad":
            states[0].fill(self._groups[0]["initial_accumulator_value"])
        if self.spec.kind == "ftrl":
            for start, stop, group in runs:
                states[0][start:stop] = np.sign(weights[start:stop]) * np.float32(-self._groups[group]["l1"])

    def scalars(self, step: int, lr_scale: float) -> Scalars:
        """Return the kernel's float32 arguments for each group at this step; None if the update is skipped. The last
        result is cached, since all slices of a step share it."""
        known = self._scalars_kept
        if known is not None and known[0] == (step, lr_scale):
            return known[1]
        factor, age = self.spec.schedule.factor(step), step - self.state_since
        with np.errstate(over="ignore"):
            made = tuple(
                None if values is None else tuple(map(np.float32, values))
                for values in (self._scalars(one, one["lr"] * factor, float(lr_scale), age) for one in self._groups)
            )
        self._scalars_kept = ((step, lr_scale), made)
        return made


def clip_factor(total_norm: float, max_norm: float) -> float:
    """Return the factor for gradients of this global L2 norm: ``max_norm / (total_norm + 1e-6)``, at most 1.

    As torch.nn.utils.clip_grad_norm_. ``max_norm`` 0 means no limit. NaN gives NaN.
    """
    if max_norm == 0:
        return 1.0
    factor = max_norm / (total_norm + _CLIP_EPS)
    return 1.0 if factor > 1.0 else factor


def _kernel_of(spec: Optimizer) -> Kernel:
    """Return the kernel of this optimizer, which takes the state in the order of ``spec.state_names``."""
    values, name = spec.values(), spec.kind
    if values.get("centered"):
        name += "_centered"
    if values.get("momentum"):
        name += "_nesterov" if values.get("nesterov") else "_momentum"
    kernel: Kernel = vars(fused)[name]
    return kernel


# --- the scalars of a step, in the order of the kernel's arguments ----------------------------------------------------
# age: updates since the state began.


def _sgd(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    if not values["momentum"]:
        return rate * lr_scale, values["weight_decay"]
    take = 1.0 if age == 0 else 1 - values["dampening"]  # as torch: the first gradient fills the buffer undampened
    return rate * lr_scale, values["weight_decay"], values["momentum"], take


def _adam(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    return values["weight_decay"], *_moments(values, rate * lr_scale, age)


def _adamw(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    return 1 - rate * lr_scale * values["weight_decay"], *_moments(values, rate * lr_scale, age)


def _moments(values: Values, rate: float, age: int) -> tuple[float, ...]:
    beta1, beta2 = values["beta1"], values["beta2"]
    size = rate / (1 - beta1 ** (age + 1))
    root = 1 / (1 - beta2 ** (age + 1)) ** 0.5
    return 1 - beta1, beta2, 1 - beta2, size, root, values["eps"]


def _adagrad(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    return rate * lr_scale / (1 + age * values["lr_decay"]), values["weight_decay"], values["eps"]


def _rmsprop(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    alpha, momentum = values["alpha"], values["momentum"]
    scalars = (rate * lr_scale, values["weight_decay"], alpha, 1 - alpha, values["eps"])
    return (*scalars, momentum) if momentum else scalars


def _lion(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    beta1, beta2 = values["beta1"], values["beta2"]
    return rate * lr_scale, values["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2


def _ftrl(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...] | None:
    if rate < _FTRL_RATE_MIN:
        return None
    return lr_scale, 1 / rate, values["beta"], values["l1"], values["l2"]


def _mean(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    return (rate * lr_scale,)


_SCALARS: dict[str, Callable[[Values, float, float, int], tuple[Any, ...] | None]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "lion": _lion,
    "ftrl": _ftrl,
    "mean": _mean,
}
