"""A Flax network that reads handwritten digits. Its weights and Adam live on the servers.

psdist run --nservers 2 --nproc-per-node 2 examples/jax_flax.py
python examples/jax_flax.py --plain            # the same script without psdist: optax in one process

Only the lines marked with ``psdist`` differ, and the one with ``metrics``, which ``psdist run`` shows.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    """Two layers, from 64 pixels to 10 digits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Return the logits, float32[n, 10], of float32[n, 64]."""
        return self.out(nnx.tanh(self.hidden(pixels)))


def digits() -> tuple[jax.Array, jax.Array]:
    """Return the 1,797 digits of scikit-learn: pixels float32[n, 64], and labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return jnp.asarray(pixels / 16, jnp.float32), jnp.asarray(labels)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A Flax network on handwritten digits.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all workers together")
    parser.add_argument("--save", type=Path, help="npz file for the trained weights")
    parser.add_argument("--plain", action="store_true", help="optax in one process")
    return parser.parse_args()


def main() -> None:
    """Train the network and print its accuracy."""
    options = arguments()
    pixels, labels = digits()
    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(params: Any, pixels: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(pixels)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    rank, world, step = 0, 1, 0
    if options.plain:
        optimizer = optax.adam(3e-3)
        state = optimizer.init(params)
    else:
        import psdist.jax  # psdist

        weights = psdist.jax.parameters(params, psdist.jax.adam(3e-3))  # psdist
        params = weights.pull()  # psdist
        rank, world, step = weights.context.rank, weights.context.world_size, weights.step
    while step < options.steps:
        batch = np.random.default_rng(step).permutation(len(pixels))[: options.batch]
        mine = batch[rank::world]
        loss, gradients = loss_and_gradients(params, pixels[mine], labels[mine])
        if options.plain:
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            step += 1
        else:
            params = weights.push_pull(gradients)  # psdist
            weights.context.report(loss=loss, samples=len(mine))  # metrics
            step = weights.step
        if rank == 0 and step % 20 == 0:
            print(f"step {step}  loss {float(loss):.4f}", flush=True)
    if rank == 0:
        right = nnx.merge(graph, params)(pixels).argmax(1) == labels
        print(f"accuracy {float(right.mean()):.1%} after {step} steps", flush=True)
        if options.save:
            np.savez(options.save, *jax.tree.leaves(params))


if __name__ == "__main__":
    main()
