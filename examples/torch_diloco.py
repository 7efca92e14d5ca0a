"""Local steps: each worker trains alone, and every fifty steps the servers merge the models of the workers.

psdist run --nservers 2 --nproc-per-node 4 examples/torch_diloco.py
psdist run --nservers 2 --nproc-per-node 4 examples/torch_diloco.py --every 1     # meets in each step
psdist run --nservers 2 --nproc-per-node 4 examples/torch_diloco.py --every 20 --fragments 2 --compression bfloat16

The workers send ``every`` times fewer bytes than in data-parallel training, so this also suits slow links.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import psdist.torch


def main() -> None:
    """Train a network on handwritten digits, and print its accuracy and the bytes that each worker sent."""
    parser = argparse.ArgumentParser(description="Local steps on handwritten digits.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--compression", help="codec of the contributions, such as bfloat16")
    options = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    images, classes = torch.from_numpy(pixels.astype(np.float32)) / 16, torch.from_numpy(labels).long()
    is_test = torch.arange(len(images)) % 5 == 0
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with psdist.torch.DiLoCo(
        model, optimizer, every=options.every, fragments=options.fragments, compression=options.compression
    ) as local:
        rank = local.context.rank
        training = torch.nonzero(~is_test).flatten()[rank :: local.context.world_size]
        order = torch.Generator().manual_seed(rank)
        while local.steps < options.steps:
            batch = training[torch.randint(len(training), (32,), generator=order)]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), classes[batch])
            loss.backward()
            optimizer.step()
            local.context.report(loss=loss, samples=len(batch))
    if rank == 0:
        with torch.no_grad():
            right = (model(images[is_test]).argmax(1) == classes[is_test]).float().mean()
        sent = sum(handle.statistics().push_bytes for handle in local.handles)
        print(f"test accuracy {right:.1%} after {local.round} rounds, {sent / 1e6:.2f} MB sent by each worker")


if __name__ == "__main__":
    main()
