"""Arithmetic of the servers in plain numpy: the expected bytes of ``psdist_server.kernels``.

This is the specification of every kernel, to be read beside the pages that it cites. Tests, and the single-process
reference of a training run, use it. It is about ten times slower than the kernels.

Invariants: Arrays stay float32. Every scalar is computed in float64 and rounded to float32 once, as in
``psdist_server.kernels.optimizers``. Float32 operations have the order of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from psdist.optim import Optimizer

Floats = NDArray[np.float32]
AnyArray = NDArray[Any]
States = Sequence[Floats]

_SUM_LANES = 256


def combine(out: Floats, parts: Sequence[AnyArray], divisor: int) -> None:
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
    """Update float32[n] ``weights`` and ``states`` (in the order of ``Rule.state_names``) once, in place.

    spec: the optimizer and its schedule.
    values: its hyperparameters for these elements, from ``spec.group_values``.
    step: from 0.
    lr_scale: additional factor on the learning rate (FTRL: on the gradient).
    state_since: step at which the state began. The schedule follows the step; the optimizer's own count of updates,
        ``age`` below, begins there.
    """
    rate = values["lr"] * spec.schedule.factor(step)
    with np.errstate(all="ignore"):
        if spec.kind == "ftrl":
            gradient = np.float32(lr_scale) * gradient
        else:
            rate *= float(lr_scale)
        _UPDATES[spec.kind](values, weights, states, gradient, step - state_since, rate)


def _sgd(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.SGD.html"""
    g = g + h["weight_decay"] * w
    if h["momentum"]:
        b = states[0]
        b[:] = h["momentum"] * b + (1.0 if age == 0 else 1 - h["dampening"]) * g  # b is zero before the first update
        g = g + h["momentum"] * b if h["nesterov"] else b
    w[:] = w - rate * g


def _adam(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.Adam.html; the bias corrections are in the scalars."""
    g = g + h["weight_decay"] * w
    _adam_step(h, w, states, g, age, rate)


def _adamw(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.AdamW.html"""
    w[:] = w * (1 - rate * h["weight_decay"])
    _adam_step(h, w, states, g, age, rate)


def _adam_step(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    m, v = states
    m[:] = m + (1 - h["beta1"]) * (g - m)
    v[:] = h["beta2"] * v + (1 - h["beta2"]) * g * g
    size = rate / (1 - h["beta1"] ** (age + 1))
    root = 1 / (1 - h["beta2"] ** (age + 1)) ** 0.5
    w[:] = w - size * m / (np.sqrt(v) * root + h["eps"])


def _adagrad(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.Adagrad.html"""
    (total,) = states
    g = g + h["weight_decay"] * w
    total[:] = total + g * g
    w[:] = w - rate / (1 + age * h["lr_decay"]) * g / (np.sqrt(total) + h["eps"])


def _rmsprop(h: Mapping[str, float], w: Floats, states: States, g: Floats, age: int, rate: float) -> None:
    """https://docs.pytorch.org/docs/2.13/generated/torch.optim.RMSprop.html

    The states are v, then the mean gradient if centered, then the buffer if there is momentum. If rounding makes the
    centered variance negative, torch gives NaN; here it is 0.
    """
    v = states[0]
    g = g + h["weight_decay"] * w
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
    w[:] = w - rate * (sign + h["weight_decay"] * w)
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
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "lion": _lion,
    "ftrl": _ftrl,
    "mean": _mean,
}
