"""Arithmetic of the servers in plain numpy: the expected bytes of ``psdist_server.kernels``.

This is the specification of every kernel, to be read beside the pages that it cites. Tests, and the single-process
reference of a training run, use it. It is about ten times slower than the kernels.

Invariants: Arrays stay float32. Every scalar is computed in float64 and rounded to float32 once, as in
``psdist_server.kernels.optimizers``. Float32 operations have the order of the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from psdist.optim import Optimizer, nadam_log_product, nadam_momentum

Floats = NDArray[np.float32]
AnyArray = NDArray[Any]
States = Sequence[Floats]

_SUM_LANES = 256


def combine(out: Floats, parts: Sequence[AnyArray], divisor: float) -> None:
    """Compute out[n] = (parts[0] + parts[1] + ...) / divisor, in this order, in float32.

    parts: float32, or 16 bits wide.
    """
    with np.errstate(all="ignore"):
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total = total + part.astype(np.float32)
        out[:] = total / np.float32(divisor)


def sum_squares(values: Floats) -> float:
    """Return the sum of squares in float64: element i goes to lane i % 256, then the lanes are halved eight times."""
    rows = -(-values.size // _SUM_LANES)
    squares = np.zeros(rows * _SUM_LANES, np.float64)
    with np.errstate(all="ignore"):
        squares[: values.size] = values.astype(np.float64) ** 2
        lanes = np.zeros(_SUM_LANES, np.float64)
        for row in squares.reshape(rows, _SUM_LANES):
            lanes = lanes + row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def scale(values: Floats, factor: float | np.float32) -> None:
    """Compute values[n] *= factor, in float32."""
    with np.errstate(all="ignore"):
        values *= np.float32(factor)


def all_finite(values: AnyArray) -> bool:
    """True if values[n] contains neither NaN nor infinity."""
    return bool(np.isfinite(values.astype(np.float32)).all())


def cast(values: Floats, dtype: str) -> AnyArray:
    """Return values[n] as "float32", "float16" or "bfloat16", rounded to nearest, ties to even."""
    types: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    with np.errstate(all="ignore"):
        return values.astype(types[dtype])


def update(
    spec: Optimizer,
    values: Mapping[str, float],
    weights: Floats,
    states: States,
    gradient: Floats,
    step: int,
    lr_scale: float = 1.0,
    state_since: int = 0,
) -> None:
    """Update float32[n] ``weights`` and ``states`` once, in place.

    states: arrays in the order of ``spec.state_names``. Those that the hyperparameters do not need stay as they are.
    spec: the optimizer and its schedule.
    values: its hyperparameters for these elements, from ``spec.group_values`` or as they were set.
    step: from 0.
    lr_scale: additional factor on the learning rate (FTRL: on the gradient).
    state_since: step at which the state began. The schedule follows the step; the optimizer's own count of updates,
        ``age`` below, begins there.
    """
    rate = values["lr"] * spec.schedule.factor(step - 1 if spec.kind == "asgd" and step > state_since else step)
    own = _own_states(spec, values, states)
    with np.errstate(all="ignore"):
        if values.get("maximize"):
            gradient = -gradient
        if spec.kind == "ftrl":
            gradient = np.float32(lr_scale) * gradient
        else:
            rate *= float(lr_scale)
        _UPDATES[spec.kind](values, weights, own, gradient, step - state_since, rate)


def _own_states(spec: Optimizer, values: Mapping[str, float], states: States) -> States:
    """Return the states that an optimizer with these hyperparameters has."""
    needed = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}
    by_name = zip(spec.state_names, states, strict=True)
    return [state for name, state in by_name if name not in needed or values[needed[name]]]


def _with_decay(h: Mapping[str, float], w: Floats, g: Floats) -> Floats:
    """Return the gradient with L2 decay. As in torch, 0 adds nothing, not even for infinite weights."""
    return g + h["weight_decay"] * w if np.float32(h["weight_decay"]) else g


def _sgd(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.SGD.html"""
    g = _with_decay(h, w, g)
    if h["momentum"]:
        b = states[0]
        b[:] = h["momentum"] * b + (1.0 if age == 0 else 1 - h["dampening"]) * g  # b is zero before the first update
        g = g + h["momentum"] * b if h["nesterov"] else b
    w[:] = w - rate * g


def _asgd(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.ASGD.html"""
    (average,) = states
    eta = rate / (1 + h.get("lambd_before", h["lambd"]) * rate * age) ** h["alpha"]
    weight = np.float32(1 / max(1, age - h["t0"]))
    g = _with_decay(h, w, g)
    w[:] = w * (1 - h["lambd"] * eta) - eta * g
    average[:] = w if weight == 1 else average + (w - average) * weight


def _rprop(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.Rprop.html; a step of 0 has not begun."""
    previous, step = states
    step[step == 0] = rate
    product = g * previous
    step[product > 0] *= np.float32(h["etaplus"])
    step[product < 0] *= np.float32(h["etaminus"])
    np.maximum(step, np.float32(h["step_size_min"]), out=step)
    np.minimum(step, np.float32(h["step_size_max"]), out=step)
    previous[:] = np.where(product < 0, np.float32(0), g)
    w[:] = w - step * np.sign(previous)


def _adam(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.Adam.html; the bias corrections are in the scalars."""
    if h["decoupled_weight_decay"]:
        _adamw(h, w, states, g, age, rate)
    else:
        _adam_step(h, w, states, _with_decay(h, w, g), age, rate)


def _adamw(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.AdamW.html"""
    w[:] = w * (1 - rate * h["weight_decay"])
    _adam_step(h, w, states, g, age, rate)


def _adam_step(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    m, v = _moments(h, states, g)
    if h["amsgrad"]:
        largest = states[2]
        largest[:] = np.where(v > largest, v, largest)
        v = largest
    size = rate / (1 - h["beta1"] ** (age + 1))
    root = 1 / (1 - h["beta2"] ** (age + 1)) ** 0.5
    w[:] = w - size * m / (np.sqrt(v) * root + h["eps"])


def _moments(h: Mapping[str, float], states: States, g: Floats) -> tuple[Floats, Floats]:
    """Update the first and the second moment."""
    m, v = states[:2]
    m[:] = m + (1 - h["beta1"]) * (g - m)
    v[:] = h["beta2"] * v + (1 - h["beta2"]) * g * g
    return m, v


def _decayed(h: Mapping[str, float], w: Floats, g: Floats, rate: float) -> Floats:
    """Return the gradient with L2 decay, or the gradient after the weights have decayed."""
    if not h["decoupled_weight_decay"]:
        return _with_decay(h, w, g)
    w[:] = w * (1 - rate * h["weight_decay"])
    return g


def _adamax(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.Adamax.html"""
    m, largest = states
    g = _with_decay(h, w, g)
    m[:] = m + (1 - h["beta1"]) * (g - m)
    largest[:] = np.maximum(h["beta2"] * largest, np.abs(g) + h["eps"])
    w[:] = w - rate / (1 - h["beta1"] ** (age + 1)) * m / largest


def _nadam(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.NAdam.html; the products of momentums are tested
    by themselves."""
    mu, following = (nadam_momentum(h["beta1"], h["momentum_decay"], age + number) for number in (1, 2))
    logs = [nadam_log_product(h["beta1"], h["momentum_decay"], age + number) for number in (1, 2)]
    g = _decayed(h, w, g, rate)
    m, v = _moments(h, states, g)
    now, later = rate * (1 - mu) / -math.expm1(logs[0]), rate * following / -math.expm1(logs[1])
    root = 1 / (1 - h["beta2"] ** (age + 1)) ** 0.5
    inverse = np.float32(1) / (np.sqrt(v) * root + h["eps"])
    w[:] = w - now * g * inverse - later * m * inverse


def _radam(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.RAdam.html"""
    beta2 = h["beta2"]
    g = _decayed(h, w, g, rate)
    m, v = _moments(h, states, g)
    size, correction = rate / (1 - h["beta1"] ** (age + 1)), 1 - beta2 ** (age + 1)
    end = 2 / (1 - beta2) - 1
    length = end - 2 * (age + 1) * beta2 ** (age + 1) / correction
    if length > 5:
        rectification = (length - 4) * (length - 2) * end / ((end - 4) * (end - 2) * length)
        w[:] = w - size * (correction * rectification) ** 0.5 * m / (np.sqrt(v) + h["eps"])
    else:
        w[:] = w - size * m


def _adagrad(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.Adagrad.html"""
    (total,) = states
    g = _with_decay(h, w, g)
    total[:] = total + g * g
    w[:] = w - rate / (1 + age * h["lr_decay"]) * g / (np.sqrt(total) + h["eps"])


def _adadelta(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.Adadelta.html"""
    v, changes = states
    g = _with_decay(h, w, g)
    v[:] = h["rho"] * v + (1 - h["rho"]) * g * g
    delta = np.sqrt(changes + h["eps"]) / np.sqrt(v + h["eps"]) * g
    changes[:] = h["rho"] * changes + (1 - h["rho"]) * delta * delta
    w[:] = w - rate * delta


def _rmsprop(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.RMSprop.html

    The states are v, then the mean gradient if centered, then the buffer if there is momentum. If rounding makes the
    centered variance negative, torch gives NaN; here it is 0.
    """
    v = states[0]
    g = _with_decay(h, w, g)
    v[:] = h["alpha"] * v + (1 - h["alpha"]) * g * g
    variance = v
    if h["centered"]:
        mean = states[1]
        mean[:] = mean + (1 - h["alpha"]) * (g - mean)
        variance = v - mean * mean
        variance = np.where(variance < 0, np.float32(0), variance)
    if h["momentum"]:
        b = states[-1]
        b[:] = h["momentum"] * b + g / (np.sqrt(variance) + h["eps"])
        w[:] = w - rate * b
    else:
        w[:] = w - rate * g / (np.sqrt(variance) + h["eps"])


def _lion(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://arxiv.org/abs/2302.06675, algorithm 2."""
    (m,) = states
    c = h["beta1"] * m + (1 - h["beta1"]) * g
    sign = (c > 0).astype(np.float32) - (c < 0).astype(np.float32)
    w[:] = w - rate * _with_decay(h, w, sign)
    m[:] = h["beta2"] * m + (1 - h["beta2"]) * g


def _ftrl(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """Update by FTRL-Proximal, as derived in ``psdist_server.kernels.optimizers``.

    https://research.google/pubs/ad-click-prediction-a-view-from-the-trenches/, algorithm 1.
    """
    residual, total = states
    if rate < 1e-38:
        return
    inverse = 1 / rate
    total[:] = total + g * g
    curvature = (h["beta"] + np.sqrt(total)) * inverse + h["l2"]
    pull = residual + g
    dual = pull - curvature * w
    held = np.where(dual > h["l1"], np.float32(h["l1"]), np.where(dual < -h["l1"], np.float32(-h["l1"]), dual))
    residual[:] = held
    moved = np.where(held != dual, w - (pull - held) / curvature, np.float32(0))
    w[:] = np.where(curvature > 0, moved, w)


def _mean(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """Set the weights to the gradient times the rate."""
    w[:] = np.float32(rate) * g


_UPDATES: dict[str, Callable[..., None]] = {
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
