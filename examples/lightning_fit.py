"""A Lightning module that tells two spirals apart.

psdist run --nservers 2 --nproc-per-node 2 examples/lightning_fit.py
python examples/lightning_fit.py --plain    # the same script without psdist

Only the lines marked with ``psdist`` differ, and those with ``metrics``, which ``psdist run`` shows.
"""

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def spirals(count: int) -> TensorDataset:
    """Return points of two spirals, float32[count, 2], and their classes, float32[count, 1]."""
    random = torch.Generator().manual_seed(0)
    turn, label = torch.rand(count, generator=random).sqrt() * 4, torch.arange(count) % 2
    angle = turn + torch.pi * label
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 4
    return TensorDataset(points, label.float()[:, None])


class Classifier(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Log the accuracy over all workers."""
        self.log("accuracy", ((self.net(batch[0]) > 0) == (batch[1] > 0.5)).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ReportLoss(lightning.Callback):  # metrics
    """Reports the loss and the speed of this worker."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: tuple[Tensor, ...], _: int) -> None:
        """Report a batch."""
        self.context.report(loss=outputs["loss"], samples=len(batch[0]))


def main() -> None:
    """Train and validate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="without psdist")
    given = parser.parse_args()
    strategy: Any = "auto"
    callbacks: list[lightning.Callback] = []
    if not given.plain:
        import psdist.lightning  # psdist

        strategy = psdist.lightning.PsdistStrategy()  # psdist
        callbacks = [ReportLoss(psdist.init())]  # metrics
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=given.epochs,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(spirals(512), 16, shuffle=True), DataLoader(spirals(256), 64))
    if trainer.is_global_zero:
        print(f"accuracy {100 * float(trainer.callback_metrics['accuracy']):.1f}% after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
