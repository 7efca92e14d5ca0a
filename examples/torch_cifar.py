"""A residual network on small colour images, with torch's own optimizer.

The images are CIFAR-10's binary batches, or synthetic ones.

psdist run --nservers 2 --nproc-per-node 2 examples/torch_cifar.py
psdist run --nservers 2 --nproc-per-node 2 examples/torch_cifar.py --data FOLDER   # with CIFAR-10's files
python examples/torch_cifar.py --plain            # the same script without psdist: plain PyTorch in one process

Only the lines marked with ``psdist`` differ. Gradients are averaged through the servers.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10
SIDE = 32


def read_batch(path: Path) -> TensorDataset:
    """Read a file of CIFAR-10's binary version: for each image its class, and its red, green and blue rows.

    Raises ValueError.
    """
    records = np.fromfile(path, np.uint8)
    if records.size == 0 or records.size % (1 + 3 * SIDE * SIDE) or records[:: 1 + 3 * SIDE * SIDE].max() >= CLASSES:
        raise ValueError(f"{path} is no batch of CIFAR-10's binary version")
    records = records.reshape(-1, 1 + 3 * SIDE * SIDE)
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, SIDE, SIDE).astype(np.float32) / 255 - 0.5)
    return TensorDataset(images, torch.from_numpy(records[:, 0].astype(np.int64)))


def cifar(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return CIFAR-10's training and test images, float32[n, 3, 32, 32], and their classes. Raises ValueError."""
    paths = sorted(folder.glob("data_batch_*.bin"))
    if not paths or not (folder / "test_batch.bin").exists():
        raise ValueError(f"{folder} has no data_batch_1.bin, or no test_batch.bin")
    parts = [read_batch(path).tensors for path in paths]
    train = TensorDataset(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    return train, read_batch(folder / "test_batch.bin")


def made_up(size: int, seed: int) -> TensorDataset:
    """Return synthetic images: ten coarse patterns, each shifted by some pixels, with noise."""
    patterns = torch.rand(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.5
    patterns = functional.interpolate(patterns, SIDE, mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (size,), generator=generator)
    moves = torch.randint(-6, 7, (size, 2), generator=generator).tolist()
    images = [
        patterns[number].roll(move, (1, 2)) for number, move in zip(classes.tolist(), map(tuple, moves), strict=True)
    ]
    noise = torch.randn(size, 3, SIDE, SIDE, generator=generator)
    return TensorDataset(torch.stack(images) + 0.5 * noise, classes)


class Residual(nn.Module):
    """Two convolutions beside a shortcut. stride: stride of the first convolution, which makes images smaller."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[batch, before, side, side] to float[batch, width, side / stride, side / stride]."""
        return functional.relu(self.body(x) + self.shortcut(x))


def network(width: int) -> nn.Module:
    """Return three residual blocks, for images of 32 pixels squared."""
    return nn.Sequential(
        Residual(3, width, 2), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES),
    )  # fmt: skip


def accuracy(model: nn.Module, images: TensorDataset) -> float:
    """Return the share of the images that the model classifies correctly."""
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).sum() for x, y in DataLoader(images, 256)]
    model.train()
    return float(sum(right)) / len(images)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A residual network on small colour images.")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's binary batches")
    parser.add_argument("--images", type=int, default=2000, help="number of synthetic images, without --data")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all workers together")
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--plain", action="store_true", help="plain PyTorch in one process")
    return parser.parse_args()


def main() -> None:
    """Train the network and print its accuracy."""
    options = arguments()
    torch.manual_seed(0)
    train, test = cifar(options.data) if options.data else (made_up(options.images, 1), made_up(500, 2))
    model = network(options.width)
    rank, world = 0, 1
    if not options.plain:
        import psdist.torch  # psdist

        model = psdist.torch.DistributedDataParallel(model)  # psdist
        rank, world = model.context.rank, model.context.world_size  # psdist
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, options.batch // world, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    for epoch in range(options.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        for images, classes in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            if not options.plain:  # metrics
                model.context.report(loss=loss, samples=len(images))  # metrics
        scheduler.step()
        if rank == 0:
            rate = len(train) / (time.perf_counter() - began)
            progress = f"epoch {epoch + 1}  loss {loss.item():.4f}"
            print(f"{progress}  test accuracy {accuracy(model, test):.1%}  {rate:,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
