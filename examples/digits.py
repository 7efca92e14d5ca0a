"""Train a classifier of real handwritten digits through sharded parameter servers, with numpy alone.

    psdist run --nservers 2 --nproc-per-node 2 examples/digits.py
    psdist run --nservers 2 --nproc-per-node 4 examples/digits.py --consistency ssp --staleness 2

Every worker computes gradients on its part of each batch; the servers hold the weights and run Adam. Batches and steps
are the same for any number of workers, so a run may resume with another number of them, and workers may join late.
Without a launcher (``python examples/digits.py``) it is a world of one. The 1797 images of 8 x 8 pixels are
scikit-learn's.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from pathlib import Path

import numpy as np
import psutil

import psdist
from psdist.data import DistributedSampler

Arrays = dict[str, np.ndarray]
Pair = tuple[np.ndarray, np.ndarray]
HIDDEN, CLASSES, TRAIN_IMAGES = 128, 10, 1437


def load() -> Pair:
    """Return images (1797, 64) from 0 to 1 and labels (1797,), in an order that is the same everywhere.

    Reads the file that ``sklearn.datasets.load_digits`` reads; importing scikit-learn for it would take over a second.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the digits are scikit-learn's: pip install scikit-learn")
    table = np.loadtxt(
        Path(spec.submodule_search_locations[0], "datasets/data/digits.csv.gz"), np.float32, delimiter=","
    )
    table = table[np.random.default_rng(0).permutation(len(table))]
    return table[:, :-1] / 16, table[:, -1].astype(np.int64)


def initial(seed: int) -> Arrays:
    """Return the weights of two dense layers, He et al. 2015."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(0, np.sqrt(2 / 64), (64, HIDDEN))
    output = rng.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, CLASSES))
    weights = {"hidden.w": hidden, "hidden.b": np.zeros(HIDDEN), "output.w": output, "output.b": np.zeros(CLASSES)}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def forward(weights: Arrays, images: np.ndarray) -> Pair:
    """Return the activations of the hidden layer, and the classes' probabilities."""
    hidden = np.maximum(images @ weights["hidden.w"] + weights["hidden.b"], 0)
    scores = hidden @ weights["output.w"] + weights["output.b"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradients(weights: Arrays, images: np.ndarray, labels: np.ndarray) -> tuple[float, Arrays]:
    """Return the mean cross-entropy of a batch, and its gradient by the weights."""
    hidden, probabilities = forward(weights, images)
    rows = np.arange(len(labels))
    loss = -np.log(probabilities[rows, labels] + 1e-12).mean()
    probabilities[rows, labels] -= 1
    at_output = probabilities / len(labels)
    at_hidden = (at_output @ weights["output.w"].T) * (hidden > 0)
    return float(loss), {
        "hidden.w": images.T @ at_hidden,
        "hidden.b": at_hidden.sum(axis=0),
        "output.w": hidden.T @ at_output,
        "output.b": at_output.sum(axis=0),
    }


def accuracy(weights: Arrays, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of the images that are classified correctly."""
    return float((forward(weights, images)[1].argmax(axis=1) == labels).mean())


def batches(rank: int, world: int, epoch: int, size: int, options: argparse.Namespace) -> list[np.ndarray]:
    """Return this rank's parts of the batches of one pass over ``size`` samples, as indices. No part is empty."""
    sampler = DistributedSampler(size, world, rank, seed=options.seed)
    sampler.set_epoch(epoch)
    mine = sampler.indices()
    return np.array_split(mine, min(math.ceil(size / options.batch_size), len(mine)))


def updates(world: int, options: argparse.Namespace) -> int:
    """Return how often the servers update the weights: once per step in BSP, else once per push of a worker."""
    steps = options.epochs * len(batches(0, world, 0, TRAIN_IMAGES, options))
    return steps if options.consistency == "bsp" else steps * world


def train(context: psdist.Context, options: argparse.Namespace, train_set: Pair, test_set: Pair) -> Arrays:
    """Train through the servers. Returns the weights after this worker's last step."""
    images, labels = train_set
    weights = context.client.parameters(
        "mlp",
        init=initial(options.seed),
        optimizer=psdist.optim.Adam(lr=options.lr, schedule=psdist.optim.Cosine(updates(context.world_size, options))),
        consistency=consistency(options),
        compression=options.compression,
    )
    values = weights.pull()
    # The servers count steps. A counter of this loop would be wrong after this worker missed some of them, and in a
    # resumed run. Asynchronous workers count their own pushes, from 0 whenever they start.
    before = 0 if options.consistency == "bsp" else weights.version // context.world_size - weights.step
    per_epoch = len(batches(0, context.world_size, 0, len(images), options))
    progress, shown = Progress(context), max(1, options.epochs // 10) * per_epoch
    while (step := before + weights.step) < options.epochs * per_epoch:
        epoch, number = divmod(step, per_epoch)
        batch = batches(context.rank, context.world_size, epoch, len(images), options)[number]
        loss, grads = gradients(values, images[batch], labels[batch])
        values = weights.push_pull(grads)
        context.report(loss=loss, samples=len(batch))
        progress.count(len(batch))
        if (step + 1) % shown == 0:
            progress.show(step + 1, loss, accuracy(values, *test_set))
    return values


class Progress:
    """Count of samples on every rank, printed on rank 0."""

    def __init__(self, context: psdist.Context) -> None:
        self.rank, self.world = context.rank, context.world_size
        self.samples = 0
        self.begin = time.perf_counter()

    def count(self, samples: int) -> None:
        """Count one more step of ``samples`` samples on each rank."""
        if self.samples == 0 and self.rank == 0:
            print(f"first step {time.time() - psutil.Process().create_time():.1f} s after the start", flush=True)
        self.samples += samples * self.world

    def show(self, step: int, loss: float, accuracy: float) -> None:
        """Print the progress line."""
        rate = self.samples / (time.perf_counter() - self.begin)
        if self.rank == 0:
            print(
                f"step {step:5d}  loss {loss:6.4f}  test accuracy {accuracy:6.1%}  {rate:9,.0f} samples/s",
                flush=True,
            )


def train_alone(world: int, options: argparse.Namespace, images: np.ndarray, labels: np.ndarray) -> Arrays:
    """Train in this process: the same batches, their gradients averaged, Adam (Kingma and Ba 2015)."""
    weights = initial(options.seed)
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    schedule, step = psdist.optim.Cosine(updates(world, options)), 0
    for epoch in range(options.epochs):
        for batch in zip(*(batches(rank, world, epoch, len(images), options) for rank in range(world)), strict=True):
            lr, step = options.lr * schedule.factor(step), step + 1
            each = [gradients(weights, images[part], labels[part])[1] for part in batch]
            for name, value in weights.items():
                gradient = sum(grads[name] for grads in each) / world
                first[name] += 0.1 * (gradient - first[name])
                second[name] += 0.001 * (gradient**2 - second[name])
                root = np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
                value -= lr / (1 - 0.9**step) * first[name] / root
    return weights


def consistency(options: argparse.Namespace) -> psdist.consistency.Consistency:
    """Return the consistency that the command line names."""
    choices = {"bsp": psdist.BSP(), "ssp": psdist.SSP(options.staleness), "asp": psdist.ASP()}
    return choices[options.consistency]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Trains on handwritten digits through parameter servers.")
    parser.add_argument("--consistency", choices=("bsp", "ssp", "asp"), default="bsp")
    parser.add_argument("--staleness", type=int, default=2, help="steps a worker may be ahead (with ssp)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, of all workers together")
    parser.add_argument("--lr", type=float, default=6e-3, help="Adam's learning rate at first; it falls along a cosine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compression", default="none", help="codec of the gradients: none, bfloat16, int8, topk, ...")
    parser.add_argument("--compare", action="store_true", help="train once more in one process and compare")
    return parser.parse_args()


def main() -> None:
    """Train, and print the accuracy on images that no worker has seen."""
    options = arguments()
    images, labels = load()
    train_set, test_set = zip(np.split(images, [TRAIN_IMAGES]), np.split(labels, [TRAIN_IMAGES]), strict=True)
    with psdist.init() as context:
        weights = train(context, options, train_set, test_set)
        if context.rank == 0:
            print(f"test accuracy {accuracy(weights, *test_set):.1%}", flush=True)
            if options.compare:
                alone = train_alone(context.world_size, options, *train_set)
                print(f"test accuracy {accuracy(alone, *test_set):.1%} when trained in one process", flush=True)


if __name__ == "__main__":
    main()
