"""Specifications with optax's names train as optax does, over 200 steps.

Both compute in float64, so that the formulas are compared and not the rounding of float32, which moves Adam's weights
by 2e-6 in these steps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import psdist.jax
from psdist.errors import InvalidArgumentError
from psdist.optim import Optimizer, group_of
from tests.support import reference

STEPS = 200
NAMES = {"w": (40,), "b": (5,)}

#: Function of both libraries, and its arguments.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"nesterov": True}),
    ("adam", {}),
    ("adam", {"b1": 0.8, "b2": 0.95, "eps": 1e-6}),
    ("adamw", {}),
    ("adamw", {"weight_decay": 0.1, "mask": {"w": True, "b": False}}),
    ("lion", {"mask": {"w": False, "b": True}}),
    ("adagrad", {}),
    ("adagrad", {"initial_accumulator_value": 0.0, "eps": 1e-3}),
    ("adadelta", {"rho": 0.8, "weight_decay": 0.1, "weight_decay_mask": {"w": True, "b": False}}),
    ("adamax", {"b2": 0.99}),
    ("rmsprop", {"eps_in_sqrt": False}),
    ("rmsprop", {"eps_in_sqrt": False, "centered": True, "decay": 0.8}),
    ("rmsprop", {"eps_in_sqrt": False, "momentum": 0.9}),
]

SCHEDULES: list[tuple[str, tuple[Any, ...]]] = [
    ("constant_schedule", (0.1,)),
    ("linear_schedule", (0.1, 0.01, 50)),
    ("linear_schedule", (0.1, 0.2, 50, 20)),
    ("linear_schedule", (0.0, 0.1, 70)),
    ("polynomial_schedule", (0.1, 0.02, 2.0, 60, 10)),
    ("cosine_decay_schedule", (0.1, 150)),
    ("cosine_decay_schedule", (0.1, 150, 0.2)),
    ("exponential_decay", (0.1, 30, 0.5)),
    ("exponential_decay", (0.1, 30, 0.5, 7, True)),
    ("warmup_constant_schedule", (0.02, 0.1, 40)),
    ("warmup_cosine_decay_schedule", (0.0, 0.1, 20, 120)),
    ("warmup_cosine_decay_schedule", (0.05, 0.1, 20, 120, 0.01)),
    ("warmup_exponential_decay_schedule", (0.0, 0.1, 20, 25, 0.7)),
    ("warmup_exponential_decay_schedule", (0.01, 0.1, 20, 25, 0.7, 0, True)),
]


def gradients(step: int) -> dict[str, Any]:
    random = np.random.default_rng(step)
    return {name: random.standard_normal(shape) for name, shape in NAMES.items()}


def by_optax(optimizer: optax.GradientTransformation) -> dict[str, Any]:
    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.enable_x64(True):
        params = {name: jnp.ones(shape) for name, shape in NAMES.items()}
        state = optimizer.init(params)
        for number in range(STEPS):
            params, state = step(params, state, gradients(number))
        return {name: np.asarray(value) for name, value in params.items()}


def by_servers(spec: Optimizer) -> dict[str, Any]:
    """Train with the servers' arithmetic in plain numpy."""
    params = {name: np.ones(shape) for name, shape in NAMES.items()}
    first = float(getattr(spec, "initial_accumulator_value", 0.0))
    states = {name: [np.full_like(value, first) for _ in spec.state_names] for name, value in params.items()}
    for number in range(STEPS):
        grads = gradients(number)
        for name, weights in params.items():
            values = spec.group_values(group_of(name, spec.overrides))
            reference.update(spec, values, weights, states[name], grads[name], number)
    return params


def compare(theirs: optax.GradientTransformation, ours: Optimizer) -> None:
    expected = by_optax(theirs)
    for name, value in by_servers(ours).items():
        assert expected[name].dtype == np.float64
        assert np.abs(value - expected[name]).max() <= 1e-6, name


def test_weights_are_those_of_optax() -> None:
    for function, arguments in CASES:
        compare(getattr(optax, function)(0.01, **arguments), getattr(psdist.jax, function)(0.01, **arguments))


def test_rates_are_those_of_optax() -> None:
    for function, arguments in SCHEDULES:
        ours, theirs = getattr(psdist.jax, function)(*arguments), getattr(optax, function)(*arguments)
        with jax.enable_x64(True):
            expected = jax.vmap(theirs)(jnp.arange(STEPS)) if len(arguments) > 1 else jnp.full(STEPS, theirs(0))
        assert [ours(step) for step in range(STEPS)] == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)


def test_a_schedule_is_that_of_optax() -> None:
    for function in ["sgd", "adam", "adamw", "lion", "adagrad", "adadelta", "adamax"]:
        arguments = (0.0, 0.05, 20, 120, 0.001)
        compare(
            getattr(optax, function)(optax.warmup_cosine_decay_schedule(*arguments)),
            getattr(psdist.jax, function)(psdist.jax.warmup_cosine_decay_schedule(*arguments)),
        )


def test_what_servers_cannot_follow_is_refused() -> None:
    for call, said in [
        (lambda: psdist.jax.adam(optax.constant_schedule(0.1)), "learning_rate is a function.* set lr_factor"),
        (lambda: psdist.jax.adam(0.1, eps_root=1e-8), "adam: eps_root=1e-08 is not supported: use 0, or keep"),
        (lambda: psdist.jax.adamw(0.1, nesterov=True), "adamw: nesterov=True is not supported"),
        (lambda: psdist.jax.adam(0.1, mu_dtype="bfloat16"), "mu_dtype='bfloat16'.* hold all state in float32"),
        (lambda: psdist.jax.rmsprop(0.1), "eps_in_sqrt=True is not supported: pass False"),
        (lambda: psdist.jax.rmsprop(0.1, eps_in_sqrt=False, nesterov=True), "nesterov=True"),
        (
            lambda: psdist.jax.rmsprop(psdist.jax.linear_schedule(1, 0, 9), eps_in_sqrt=False, momentum=0.9),
            "momentum=0.9 is not supported: use a constant rate",
        ),
        (lambda: psdist.jax.adagrad(0.1, 0.0, 0.0), "adagrad: eps=0.0 is not supported"),
        (lambda: psdist.jax.lion(0.1, mask=lambda params: params), r"mask=.*call the function first"),
        (lambda: psdist.jax.lion(0.1, mask={"w": 1.0}), "mask=1.0 is not supported: give a tree like the parameters"),
        (lambda: psdist.jax.lion(0.1, mask=False), "mask=False is not supported: give a tree like the parameters"),
        (lambda: psdist.jax.linear_schedule(0.0, 1.0, 5, 3), "init_value=0.0 is not supported: use a number above 0"),
        (lambda: psdist.jax.cosine_decay_schedule(0.1, 5, exponent=2.0), "exponent=2.0 is not supported: use 1"),
        (lambda: psdist.jax.exponential_decay(0.1, 5, 0.5, end_value=0.0), "end_value=0.0 is not supported: use None"),
        (lambda: psdist.jax.warmup_constant_schedule(0.2, 0.1, 5), "init_value=0.2 is not supported: use at most peak"),
        (lambda: psdist.jax.cosine_decay_schedule(0.1, 0), "total_steps=0 is out of range"),
    ]:
        with pytest.raises(InvalidArgumentError, match=said):
            call()


def test_a_mask_names_leaves_as_parameters_do() -> None:
    spec = psdist.jax.adamw(0.1, weight_decay=0.5, mask={"norm": [False], "out": {"w": True, "b[*]": np.False_}})
    names = {"norm.0": 1, "out.w": 0, "out.b[*]": 2, "out.b*": 0}
    assert {name: group_of(name, spec.overrides) for name in names} == names
    assert all(spec.group_values(group)["weight_decay"] == 0.0 for group in (1, 2))
