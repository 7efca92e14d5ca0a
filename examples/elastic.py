"""Train the classifier of digits.py with any number of workers, which may join, die and rejoin while it runs.

    psdist run --nservers 2 --nproc-per-node 3 examples/elastic.py

No worker has a fixed part of the data: each requests the next images as long as some are left. The images of a worker
that dies are given to another. A worker that gets no more images exits, and the others continue without it.
"""

from __future__ import annotations

import argparse

from digits import TRAIN_IMAGES, accuracy, gradients, initial, load

import psdist


def main() -> None:
    """Train, and print how many ranges were repeated."""
    options = arguments()
    images, labels = load()
    test_set = images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:]
    with psdist.init() as context:
        data = context.client.dataset("digits", TRAIN_IMAGES, options.batch_size, data_epochs=options.epochs)
        weights = context.client.parameters("mlp", init=initial(seed=0), optimizer=psdist.optim.Adam(lr=options.lr))
        values, steps, data_epoch = weights.pull(), 0, 0
        for indices in data:
            if context.rank == 0 and data.data_epoch > data_epoch:
                data_epoch = data.data_epoch
                print(f"data epoch {data_epoch}: {accuracy(values, *test_set):.1%} of the test images", flush=True)
            loss, grads = gradients(values, images[indices], labels[indices])
            values = weights.push_pull(grads)
            context.report(loss=loss, samples=len(indices))
            steps += 1
        reached = f"test accuracy {accuracy(values, *test_set):.1%}"
        print(f"rank {context.rank} ends after {steps} steps: {reached}, {data.repeated} ranges repeated", flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Trains on handwritten digits with workers that come and go.")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data, of all workers together")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker and step")
    parser.add_argument("--lr", type=float, default=4e-3, help="Adam's learning rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
