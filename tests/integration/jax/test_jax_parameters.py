"""Pytrees on real servers: two workers in two threads of this process make the steps of one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import psdist
import psdist.jax
from psdist.client.context import Context
from psdist.errors import ClosedError, InvalidArgumentError

Work = Callable[[Context], Any]
STEPS = 30


def first() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "layers": [jax.random.normal(keys[0], (8, 16)) * 0.3, jax.random.normal(keys[1], (16, 1)) * 0.3],
        "bias": jnp.zeros(16),
    }


def batch(step: int, rank: int | None = None) -> tuple[Any, Any]:
    """Return a worker's half of a batch, or all of it."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(2), step), (32, 8))
    mine = slice(None) if rank is None else slice(16 * rank, 16 * rank + 16)
    return x[mine], jnp.tanh(x.sum(1, keepdims=True))[mine]


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["layers"][0] + params["bias"])
    return jnp.mean((hidden @ params["layers"][1] - y) ** 2)


gradients = jax.jit(jax.grad(loss))


def alone(optimizer: optax.GradientTransformation, scale: float = 1.0) -> Any:
    """Train with optax in one process. scale: of the gradients."""
    params = first()
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.tree.map(lambda grad: scale * grad, jax.grad(loss)(params, x, y))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(STEPS):
        params, state = step(params, state, *batch(number))
    return params


def assert_close(one: Any, other: Any, within: float = 1e-5) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=within, atol=within)


def same_bytes(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(mine).tobytes() == np.asarray(theirs).tobytes() for mine, theirs in pairs)


def test_two_workers_make_the_steps_of_one_process(both: Callable[[Work], list[Any]], name: str) -> None:
    rate = (0.001, 0.02, 5, 40)

    def worker(context: Context) -> tuple[Any, list[Any]]:
        optimizer = psdist.jax.adamw(psdist.jax.warmup_cosine_decay_schedule(*rate), weight_decay=0.1)
        weights = psdist.jax.parameters(first(), optimizer, name=name, context=context)
        params, seen = weights.pull(), []
        while weights.step < STEPS:
            before = params
            seen.append(float(before["bias"][0]))
            params = weights.push_pull(gradients(params, *batch(weights.step, context.rank)))
            assert float(before["bias"][0]) == seen[-1], "an earlier tree has its own memory"
        assert weights.names == ("bias", "layers.0", "layers.1") and weights.version == STEPS
        assert same_bytes(weights.pull(), params)
        weights.close()
        with pytest.raises(ClosedError, match="are closed: make new ones, with another name="):
            weights.pull()
        return params, seen

    (one, seen), (other, _) = both(worker)
    assert same_bytes(one, other) and len(set(seen)) == STEPS
    assert_close(one, alone(optax.adamw(optax.warmup_cosine_decay_schedule(*rate), weight_decay=0.1)))


def test_an_optax_chain_trains_on_averaged_gradients(both: Callable[[Work], list[Any]], name: str) -> None:
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.noisy_sgd(0.05, 0.01, 0.5, key=3))

    def worker(context: Context) -> Any:
        params = first()
        state = chain.init(params)
        for number in range(STEPS):
            grads = gradients(params, *batch(number, context.rank))
            grads = psdist.jax.average(grads, name=name, context=context)
            updates, state = chain.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    one, other = both(worker)
    assert same_bytes(one, other)
    assert_close(one, alone(chain))


@pytest.mark.parametrize("kind", ["parameters", "average"])
def test_gradients_of_sums_are_added_up(both: Callable[[Work], list[Any]], name: str, kind: str) -> None:
    def worker(context: Context) -> Any:
        params, chain = first(), optax.sgd(0.01)
        if kind == "parameters":
            weights = psdist.jax.parameters(params, psdist.jax.sgd(0.01), reduction="sum", name=name, context=context)
        for number in range(STEPS):
            grads = gradients(params, *batch(number, context.rank))
            if kind == "parameters":
                params = weights.push_pull(grads)
            else:
                grads = psdist.jax.average(grads, reduction="sum", name=name, context=context)
                params = optax.apply_updates(params, chain.update(grads, chain.init(params))[0])
        return params

    one, other = both(worker)
    assert same_bytes(one, other)
    assert_close(one, alone(optax.sgd(0.01), scale=2.0))


def test_the_mean_of_bfloat16_is_rounded_once(both: Callable[[Work], list[Any]], name: str) -> None:
    values = [np.linspace(0.1, 9.7, 33, dtype=np.float32), np.linspace(-4.1, 2.3, 33, dtype=np.float32)]

    def worker(context: Context) -> Any:
        tree = {"w": jnp.asarray(values[context.rank], jnp.bfloat16), "b": jnp.float16(context.rank)}
        return psdist.jax.average(tree, weight=1.0 + 2 * context.rank, name=name, context=context)

    rounded = [np.asarray(jnp.asarray(value, jnp.bfloat16), np.float32) for value in values]
    mean = (rounded[0] + 3 * rounded[1]) / 4
    for tree in both(worker):
        assert tree["w"].dtype == jnp.bfloat16 and tree["b"].dtype == jnp.float16
        assert np.asarray(tree["w"]).tobytes() == np.asarray(jnp.asarray(mean, jnp.bfloat16)).tobytes()
        assert float(tree["b"]) == 0.75


def test_weights_of_bfloat16_keep_small_updates(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> Any:
        ones = {"w": jnp.ones(4, jnp.bfloat16)}
        weights = psdist.jax.parameters(ones, psdist.jax.sgd(1e-3), name=name, context=context)
        for _ in range(100):
            tree = weights.push_pull(ones)
        return tree

    for tree in both(worker):
        assert tree["w"].dtype == jnp.bfloat16
        assert float(tree["w"][0]) == pytest.approx(0.9, abs=0.004), "optax alone would stay at 1"


@pytest.mark.parametrize("mode", [psdist.SSP(1), psdist.ASP()], ids=["ssp", "asp"])
def test_every_mode_applies_each_push(
    both: Callable[[Work], list[Any]], name: str, mode: psdist.SSP | psdist.ASP
) -> None:
    def worker(context: Context) -> Any:
        weights = psdist.jax.parameters({"w": jnp.zeros(5000)}, psdist.jax.sgd(1.0), mode, name=name, context=context)
        for _ in range(10):
            weights.push({"w": jnp.ones(5000)})
        context.client.barrier(name)
        return weights.pull()

    assert [float(tree["w"].sum()) for tree in both(worker)] == [-100_000.0] * 2


def test_hyperparameters_change_between_steps(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> list[float]:
        weights = psdist.jax.parameters({"w": jnp.ones(3)}, psdist.jax.sgd(1.0), name=name, context=context)
        seen = []
        for settings in ({0: {"lr": 0.25}}, {}):
            weights.settings = settings
            assert weights.settings == settings
            seen.append(float(weights.push_pull({"w": jnp.ones(3)})["w"][0]))
        with pytest.raises(InvalidArgumentError, match="group 1"):
            weights.settings = {1: {"lr": 0.5}}
        return seen

    assert both(worker) == [[0.75, -0.25]] * 2


def test_gradients_that_are_not_finite_become_nan_everywhere(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> list[bool]:
        trees = [{"a": jnp.ones(3), "b": jnp.ones(2)} for _ in range(2)]
        if context.rank:
            trees[0]["a"] = trees[0]["a"].at[1].set(jnp.inf)
        averaged = [psdist.jax.average(tree, name=name, context=context) for tree in trees]
        return [bool(jnp.isnan(tree[key]).all()) for tree in averaged for key in "ab"]

    assert both(worker) == [[True, True, False, False]] * 2


def test_gradients_are_compressed(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> Any:
        weights = psdist.jax.parameters(
            first(), psdist.jax.adam(0.01), compression="bfloat16", name=name, context=context
        )
        params = weights.pull()
        while weights.step < STEPS:
            params = weights.push_pull(gradients(params, *batch(weights.step, context.rank)))
        assert weights.statistics().compression.ratio > 1.9
        return params

    one, other = both(worker)
    assert same_bytes(one, other)
    assert_close(one, alone(optax.adam(0.01)), within=0.1)


def test_what_cannot_work_is_refused(contexts: list[Context], name: str) -> None:
    optimizers: list[tuple[Any, str]] = [
        (
            optax.adam(0.1),
            r"an optax optimizer is a pair of functions.*same name and arguments, such as psdist.jax.adam",
        ),
        ("adam", "optimizer is of type str"),
    ]
    for optimizer, said in optimizers:
        with pytest.raises(InvalidArgumentError, match=said):
            psdist.jax.parameters(first(), optimizer, name=name, context=contexts[0])
    with pytest.raises(InvalidArgumentError, match="reduction='sum' in ASP"):
        psdist.jax.parameters(
            first(), psdist.jax.sgd(0.1), psdist.ASP(), reduction="sum", name=name, context=contexts[0]
        )


def test_trees_of_another_form_are_refused(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> int:
        weights = psdist.jax.parameters(first(), psdist.jax.sgd(0.1), name=name, context=context)
        with pytest.raises(InvalidArgumentError, match=r"push_pull: the tree has another .*leaf \['bias'\] is missing"):
            weights.push_pull({"layers": first()["layers"]})
        with pytest.raises(InvalidArgumentError, match=r"push_pull: leaf .* is a tracer"):
            jax.jit(weights.push_pull)(first())
        weights.close()
        with pytest.raises(InvalidArgumentError, match=r"made the parameters .* before.*Give it another name="):
            psdist.jax.parameters(first(), psdist.jax.sgd(0.1), name=name, context=context)
        return weights.step

    assert both(worker) == [0, 0]


def test_an_average_keeps_its_settings(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> None:
        psdist.jax.average({"a": jnp.ones(3)}, name=name, context=context)
        with pytest.raises(InvalidArgumentError, match="reduction='sum', compression=None is asked for: give the"):
            psdist.jax.average({"a": jnp.ones(3)}, reduction="sum", name=name, context=context)
        with pytest.raises(InvalidArgumentError, match=r"average: the tree has another structure.*leaf \['b'\] is new"):
            psdist.jax.average({"a": jnp.ones(3), "b": jnp.ones(3)}, name=name, context=context)
        with pytest.raises(InvalidArgumentError, match=r"average: leaf .* is a tracer"):
            jax.jit(lambda tree: psdist.jax.average(tree, name=name, context=context))({"a": jnp.ones(3)})

    both(worker)


def test_float64_trees_are_trained_in_float64() -> None:
    done = subprocess.run([sys.executable, "-c", _FLOAT64], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


_FLOAT64 = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, optax, psdist.jax
optimizer, params = optax.adamw(0.01), {"w": jnp.linspace(0.0, 1.0, 50), "b": jnp.zeros(3, jnp.float32)}
state, weights = optimizer.init(params), psdist.jax.parameters(params, psdist.jax.adamw(0.01))
theirs = weights.pull()
for step in range(50):
    grads = {"w": jnp.sin(params["w"] + step), "b": jnp.full(3, 0.1, jnp.float32)}
    theirs = weights.push_pull(grads)
    averaged = psdist.jax.average(grads)
    assert all(averaged[key].dtype == grads[key].dtype and (averaged[key] == grads[key]).all() for key in grads)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
assert theirs["w"].dtype == jnp.float64 and theirs["b"].dtype == jnp.float32
assert float(abs(theirs["w"] - params["w"]).max()) < 1e-12, float(abs(theirs["w"] - params["w"]).max())
print("equal")
"""
