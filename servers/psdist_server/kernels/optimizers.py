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

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.hyperparameters import Settings
from psdist.optim import Constant, Optimizer, asgd_average_weight, asgd_step_size, nadam_log_product, nadam_momentum
from psdist_server.kernels.means import FusedUpdate
from psdist_server.kernels.updates import UPDATES

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

    state_since: the version at which the state began. The optimizer's own count of updates starts there, less the
        updates that an element skipped; schedules count from version 0.
    state_names: the state arrays of each slice, in order; each is of ``dtype`` and of the slice's length.

    dtype: float32, or float64 for ``double``, whose arrays of float32 hold one value in two elements.

    By group: ``kernels``, which update several slices by the mean of contributions (``psdist_server.kernels.updates``),
    and ``arrays``, the places of a kernel's arrays among the weights, 0, and the state arrays, from 1.
    """

    def __init__(self, spec: Optimizer, state_since: int = 0, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.spec = spec
        self._dtype = dtype
        self.state_since = state_since
        self.state_names = spec.state_names
        self._scalars = _SCALARS[spec.kind]
        self._groups = tuple(map(spec.setting_defaults, spec.groups))
        schedules = map(spec.group_schedule, spec.groups)
        #: By group; None if its learning rate never changes.
        self._schedules = tuple(None if one == Constant() else one for one in schedules)
        self.kernels = tuple(kernel_of(spec.kind, values) for values in self._groups)
        self.arrays = tuple(
            (0, *(1 + self.state_names.index(name) for name in spec.group_state_names(group))) for group in spec.groups
        )
        self._scalars_kept: tuple[tuple[int, float, Settings, int], Scalars] | None = None

    def initialize(self, weights: Floats, states: Sequence[Floats], runs: Sequence[Run]) -> None:
        """Set the ``states`` of a slice to their values before the first update, for these float32[n] ``weights``.

        That is zeros, except for Adagrad's ``initial_accumulator_value`` and FTRL's residual, which takes the weights
        as given.

        runs: ranges inside the slice and their groups, without overlap.
        """
        words = np.dtype(self._dtype).itemsize // weights.itemsize
        for state in states:
            state.fill(0.0)
        for start, stop, group in runs:
            values, part = self._groups[group], slice(start // words, stop // words)
            if self.spec.kind == "adagrad":
                states[0].view(self._dtype)[part] = values["initial_accumulator_value"]
            if self.spec.kind == "ftrl":
                signs = np.sign(weights.view(self._dtype)[part])
                states[0].view(self._dtype)[part] = signs * self._dtype(-values["l1"])

    def scalars(self, step: int, lr_scale: float, settings: Settings = (), lag: int = 0) -> Scalars:
        """Return the kernel's arguments, of ``dtype``, for each group at this step; None if the update is skipped.

        settings: hyperparameters that differ from the specification's, as ``Optimizer.check_settings`` returns them.
        lag: number of updates that the elements have skipped since the state began. Schedules do not skip any.

        The last result is cached, since all slices of a step share it.
        """
        known = self._scalars_kept
        if known is not None and known[0] == (step, lr_scale, settings, lag):
            return known[1]
        groups = self._groups
        if settings:
            groups = tuple(map(dict, groups))
            for group, name, value in settings:
                groups[group][name] = value
        made: list[tuple[np.float32, ...] | None] = []
        with np.errstate(over="ignore"):
            for group, values in enumerate(groups):
                made.append(self._group_scalars(group, values, step, float(lr_scale), lag))
        self._scalars_kept = (step, lr_scale, settings, lag), tuple(made)
        return self._scalars_kept[1]

    def _group_scalars(
        self, group: int, values: Values, step: int, lr_scale: float, lag: int
    ) -> tuple[np.float32, ...] | None:
        age = step - lag - self.state_since
        schedule, rate = self._schedules[group], values["lr"]
        if schedule is not None:
            rate *= schedule.factor(step - self.spec.delay if age else step)
        scalars = self._scalars(values, rate, lr_scale, age)
        return None if scalars is None else tuple(map(self._dtype, scalars))


def kernel_of(kind: str, values: Values) -> FusedUpdate:
    """Return the kernel for one group of an optimizer, by kind and hyperparameters.

    It takes the group's state arrays in the order of ``Optimizer.group_state_names``.
    """
    name = "adamw" if kind == "adam" and values["decoupled_weight_decay"] else kind
    if values.get("centered"):
        name += "_centered"
    if values.get("momentum"):
        name += "_nesterov" if values.get("nesterov") else "_momentum"
    if values.get("amsgrad"):
        name += "_amsgrad"
    return UPDATES[name]


def clip_factor(total_norm: float, max_norm: float) -> float:
    """Return the factor for gradients of this global L2 norm: ``max_norm / (total_norm + 1e-6)``, at most 1.

    As torch.nn.utils.clip_grad_norm_. ``max_norm`` 0 means no limit. NaN gives NaN.
    """
    if max_norm == 0:
        return 1.0
    factor = max_norm / (total_norm + _CLIP_EPS)
    return 1.0 if factor > 1.0 else factor


# --- the scalars of a step, in the order of the kernel's arguments ----------------------------------------------------
# age: updates since the state began.


def _sgd(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    scalars = (_sign(values), rate * lr_scale, values["weight_decay"])
    if not values["momentum"]:
        return scalars
    take = 1.0 if age == 0 else 1 - values["dampening"]  # as torch: the first gradient fills the buffer undampened
    return *scalars, values["momentum"], take


def _sign(values: Values) -> float:
    """Return the factor on gradients."""
    return -1.0 if values["maximize"] else 1.0


def _asgd(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    # The step size belongs to the step before, as in torch.
    size = asgd_step_size({**values, "lambd": values["lambd_before"]}, rate * lr_scale, age)
    shrink, take = 1 - values["lambd"] * size, asgd_average_weight(values, age)
    return _sign(values), size, values["weight_decay"], shrink, take


def _rprop(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    names = ("etaminus", "etaplus", "step_size_min", "step_size_max")
    return _sign(values), rate * lr_scale, *(values[name] for name in names)


def _adam(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    if values["decoupled_weight_decay"]:
        return _adamw(values, rate, lr_scale, age)
    return _sign(values), values["weight_decay"], *_moments(values, rate * lr_scale, age)


def _adamw(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    return _sign(values), 1 - rate * lr_scale * values["weight_decay"], *_moments(values, rate * lr_scale, age)


def _moments(values: Values, rate: float, age: int) -> tuple[float, ...]:
    beta1, beta2 = values["beta1"], values["beta2"]
    size = rate / (1 - beta1 ** (age + 1))
    root = 1 / (1 - beta2 ** (age + 1)) ** 0.5
    return 1 - beta1, beta2, 1 - beta2, size, root, values["eps"]


def _adamax(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    beta1, size = values["beta1"], rate * lr_scale / (1 - values["beta1"] ** (age + 1))
    return _sign(values), values["weight_decay"], 1 - beta1, values["beta2"], size, values["eps"]


def _nadam(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    rate, beta1, decay, update = rate * lr_scale, values["beta1"], values["momentum_decay"], age + 1
    now = rate * (1 - nadam_momentum(beta1, decay, update)) / -math.expm1(nadam_log_product(beta1, decay, update))
    momentum = nadam_momentum(beta1, decay, update + 1)
    later = rate * momentum / -math.expm1(nadam_log_product(beta1, decay, update + 1))
    take1, keep2, take2, _, root, eps = _moments(values, rate, age)
    return _sign(values), *_decay(values, rate), take1, keep2, take2, now, later, root, eps


def _radam(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    take1, keep2, take2, size, _, eps = _moments(values, rate * lr_scale, age)
    power = keep2 ** (age + 1)
    end = 2 / (1 - keep2) - 1
    length = end - 2 * (age + 1) * power / (1 - power)
    is_rectified = length > 5
    if is_rectified:
        rectification = (length - 4) * (length - 2) * end / ((end - 4) * (end - 2) * length)
        size *= ((1 - power) * rectification) ** 0.5
    return _sign(values), *_decay(values, rate * lr_scale), take1, keep2, take2, size, float(is_rectified), eps


def _decay(values: Values, rate: float) -> tuple[float, float]:
    """Return the weights' factor in the gradient, and that on the weights themselves."""
    decay = values["weight_decay"]
    return (0.0, 1 - rate * decay) if values["decoupled_weight_decay"] else (decay, 1.0)


def _adagrad(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    rate *= lr_scale / (1 + age * values["lr_decay"])
    return _sign(values), rate, values["weight_decay"], values["eps"]


def _adadelta(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    return _sign(values), rate * lr_scale, values["weight_decay"], values["rho"], 1 - values["rho"], values["eps"]


def _rmsprop(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    alpha, momentum = values["alpha"], values["momentum"]
    scalars = (_sign(values), rate * lr_scale, values["weight_decay"], alpha, 1 - alpha, values["eps"])
    return (*scalars, momentum) if momentum else scalars


def _lion(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    beta1, beta2, sign = values["beta1"], values["beta2"], _sign(values)
    return rate * lr_scale, values["weight_decay"], beta1, sign * (1 - beta1), beta2, sign * (1 - beta2)


def _ftrl(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...] | None:
    if rate < _FTRL_RATE_MIN:
        return None
    return _sign(values) * lr_scale, 1 / rate, values["beta"], values["l1"], values["l2"]


def _mean(values: Values, rate: float, lr_scale: float, age: int) -> tuple[float, ...]:
    return (rate * lr_scale,)


_SCALARS: dict[str, Callable[[Values, float, float, int], tuple[Any, ...] | None]] = {
    "sgd": _sgd,
    "asgd": _asgd,
    "rprop": _rprop,
    "adam": _adam,
    "adamw": _adamw,
    "adamax": _adamax,
    "nadam": _nadam,
    "radam": _radam,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop,
    "lion": _lion,
    "ftrl": _ftrl,
    "mean": _mean,
}
