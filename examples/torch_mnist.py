"""A convolutional network that reads handwritten digits: MNIST's IDX files, or scikit-learn's digits without them.

psdist run --nservers 2 --nproc-per-node 2 examples/torch_mnist.py
psdist run --nservers 2 --nproc-per-node 2 examples/torch_mnist.py --data FOLDER   # with MNIST's four files
python examples/torch_mnist.py --plain            # the same script without psdist: plain PyTorch in one process

Only the lines marked with ``psdist`` differ. Those marked with ``metrics`` report the loss and the throughput.
"""

import argparse
import functools
import gzip
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

Images = tuple[Tensor, Tensor]


def read_idx(folder: Path, name: str) -> Tensor:
    """Read an IDX file of unsigned bytes, such as ``train-images-idx3-ubyte``, or its .gz. Raises ValueError."""
    path = next((found for found in (folder / name, folder / f"{name}.gz") if found.exists()), None)
    if path is None:
        raise ValueError(f"{folder} has neither {name} nor {name}.gz")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    kind, dimensions = data[2], data[3]
    shape = np.frombuffer(data, ">i4", dimensions, 4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)
    if data[:2] != b"\0\0" or kind != 8 or values.size != shape.prod():
        raise ValueError(f"{path} is no IDX file of unsigned bytes")
    return torch.from_numpy(values.reshape(shape).copy())


def mnist(folder: Path) -> tuple[Images, Images]:
    """Return MNIST's training and test images, float32[n, 1, 28, 28], and their digits."""
    return tuple(  # type: ignore[return-value]  # a tuple of two
        (
            read_idx(folder, f"{part}-images-idx3-ubyte")[:, None] / 255,
            read_idx(folder, f"{part}-labels-idx1-ubyte").long(),
        )
        for part in ("train", "t10k")
    )


def digits() -> tuple[Images, Images]:
    """Return the 1,797 digits of scikit-learn, float32[n, 1, 8, 8]; every fifth is for the test."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels.astype(np.float32)).reshape(-1, 1, 8, 8) / 16
    classes = torch.from_numpy(labels).long()
    test = torch.arange(len(images)) % 5 == 0
    return (images[~test], classes[~test]), (images[test], classes[test])


@functools.lru_cache(maxsize=1)
def order_of(epoch: int, size: int) -> Tensor:
    """Return the images of one pass, in an order that is the same for all workers."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch))


def network(side: int) -> nn.Module:
    """Return two convolutions and two layers, for images of ``side`` pixels squared."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, images: Images) -> float:
    """Return the share of the images that the model reads as they are labelled."""
    with torch.no_grad():
        return float((model(images[0]).argmax(1) == images[1]).float().mean())


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A convolutional network on handwritten digits.")
    parser.add_argument("--data", type=Path, help="folder with MNIST's four IDX files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all workers together")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--plain", action="store_true", help="plain PyTorch in one process")
    return parser.parse_args()


def main() -> None:
    """Train the network and print its accuracy."""
    options = arguments()
    torch.manual_seed(0)
    train, test = mnist(options.data) if options.data else digits()
    model = network(train[0].shape[-1])
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    rank, world, step = 0, 1, 0
    if not options.plain:
        import psdist.torch  # psdist

        optimizer = psdist.torch.DistributedOptimizer(model, optimizer)  # psdist
        rank, world, step = optimizer.context.rank, optimizer.context.world_size, optimizer.handle.step  # psdist
    steps = len(train[0]) // options.batch
    first, began = step, time.perf_counter()
    while step < options.epochs * steps:
        epoch, number = divmod(step, steps)
        batch = order_of(epoch, len(train[0]))[number * options.batch : (number + 1) * options.batch]
        mine = batch[rank::world]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(train[0][mine]), train[1][mine])
        loss.backward()
        optimizer.step()
        if not options.plain:  # metrics
            optimizer.context.report(loss=loss, samples=len(mine))  # metrics
        step = step + 1 if options.plain else optimizer.handle.step  # psdist
        if step // steps > epoch:
            rate = (step - first) * options.batch / (time.perf_counter() - began)
            if rank == 0:
                progress = f"epoch {epoch + 1}  loss {loss.item():.4f}"
                print(f"{progress}  test accuracy {accuracy(model, test):.1%}  {rate:,.0f} images/s", flush=True)
            first, began = step, time.perf_counter()


if __name__ == "__main__":
    main()
