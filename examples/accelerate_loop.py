"""A loop with Hugging Face's Accelerate that tells two moons apart.

psdist run --nservers 2 --nproc-per-node 2 examples/accelerate_loop.py
python examples/accelerate_loop.py --plain    # the same script without psdist

Only the lines marked with ``psdist`` differ, and those with ``metrics``, which ``psdist run`` shows.
"""

import argparse

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def moons(count: int) -> TensorDataset:
    """Return points of two half circles, float32[count, 2], and their classes, int64[count]."""
    random = torch.Generator().manual_seed(0)
    angle, label = torch.rand(count, generator=random) * torch.pi, torch.arange(count) % 2
    side = 1 - 2 * label
    points = torch.stack([angle.cos() * side + label, angle.sin() * side + label / 2], dim=1)
    return TensorDataset(points + 0.1 * torch.randn(count, 2, generator=random), label)


def main() -> None:
    """Train, and report the accuracy over all workers' parts of the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="without psdist")
    given = parser.parse_args()
    if given.plain:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    else:
        import psdist.hf  # psdist

        accelerator = psdist.hf.Accelerator(gradient_accumulation_steps=2, max_grad_norm=1.0)  # psdist
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(moons(512), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(given.epochs):
        right = count = 0
        for points, labels in loader:
            with accelerator.accumulate(model):
                scores = model(points)
                loss = nn.functional.cross_entropy(scores, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not given.plain:  # metrics
                psdist.init().report(loss=loss, samples=len(points))  # metrics
            found = accelerator.gather_for_metrics(scores.argmax(dim=1) == labels)
            right, count = right + int(found.sum()), count + len(found)
        accelerator.print(f"epoch {epoch + 1}  accuracy {100 * right / count:.1f}% of {count}")


if __name__ == "__main__":
    main()
