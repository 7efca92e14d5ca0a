"""An Equinox network that imitates a fixed one. Its weights and Adam live on the servers.

psdist run --nservers 2 --nproc-per-node 2 examples/jax_equinox.py
psdist run --nservers 2 --nproc-per-node 2 examples/jax_equinox.py --average   # optax in each worker
python examples/jax_equinox.py --plain            # the same script without psdist: optax in one process

With ``--average`` the workers keep their optax chain, and only the gradients go through the servers. Such a script has
its own checkpoints; otherwise the run's snapshots have everything.
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import psdist.jax


def network(seed: int) -> eqx.nn.MLP:
    """Return a network from 8 numbers to one."""
    return eqx.nn.MLP(8, 1, 32, 2, activation=jnp.tanh, key=jax.random.key(seed))


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss_and_gradients(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error over the samples."""
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def samples(step: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the batch of a step, the same for all workers."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(2), step), (size, 8))
    return x, jax.vmap(network(1))(x)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="An Equinox network on parameter servers.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, of all workers together")
    parser.add_argument("--average", action="store_true", help="optax in each worker, on averaged gradients")
    parser.add_argument("--plain", action="store_true", help="optax in one process")
    parser.add_argument("--save", type=Path, help="npz file for the trained weights")
    return parser.parse_args()


def train_with_optax(options: argparse.Namespace, model: eqx.nn.MLP, rank: int, world: int) -> eqx.nn.MLP:
    """Train with an optax chain in this process, on the mean of the workers' gradients."""
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    state = chain.init(eqx.filter(model, eqx.is_inexact_array))
    for step in range(options.steps):
        x, y = (part[rank::world] for part in samples(step, options.batch))
        loss, gradients = loss_and_gradients(model, x, y)
        if not options.plain:
            gradients = psdist.jax.average(gradients)
            psdist.init().report(loss=loss, samples=len(x))
        updates, state = chain.update(gradients, state)
        model = eqx.apply_updates(model, updates)
    return model


def train_on_servers(options: argparse.Namespace, model: eqx.nn.MLP, rank: int, world: int) -> eqx.nn.MLP:
    """Train with Adam on the servers."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    weights = psdist.jax.parameters(params, psdist.jax.adam(3e-3))
    model = eqx.combine(weights.pull(), static)
    while weights.step < options.steps:
        x, y = (part[rank::world] for part in samples(weights.step, options.batch))
        loss, gradients = loss_and_gradients(model, x, y)
        model = eqx.combine(weights.push_pull(gradients), static)
        weights.context.report(loss=loss, samples=len(x))
        if rank == 0 and weights.step % 20 == 0:
            print(f"step {weights.step}  loss {float(loss):.5f}", flush=True)
    return model


def main() -> None:
    """Train the network and print its error."""
    options = arguments()
    rank, world = 0, 1
    if not options.plain:
        context = psdist.init()
        rank, world = context.rank, context.world_size
    train = train_with_optax if options.plain or options.average else train_on_servers
    model = train(options, network(0), rank, world)
    if rank == 0:
        error, _ = loss_and_gradients(model, *samples(-1 % 2**31, 256))
        print(f"error {float(error):.6f} after {options.steps} steps", flush=True)
        if options.save:
            np.savez(options.save, *jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))


if __name__ == "__main__":
    main()
