"""Trainings with Lightning that tests compare, with and without psdist."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from tests.support.nursery import serve

STEPS = 9


class Module(lightning.LightningModule):
    """A small network whose scheduler is stepped with each step. kill: step, and processes that end then; 0 is this."""

    def __init__(self, *, is_manual: bool, kill: tuple[int, list[int]] | None) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen: list[float] = []
        self.losses: list[float] = []
        self._kill = kill

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        if self._kill is not None and self.global_step == self._kill[0]:
            for pid in self._kill[1]:
                os.kill(pid or os.getpid(), signal.SIGKILL)
            self._kill = None
        loss = self._loss(batch)
        if not self.automatic_optimization:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("loss", self._loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = {"scheduler": CosineAnnealingLR(optimizer, STEPS), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def fit(
    directory: str,
    batch: int,
    *,
    uses: bool = True,
    is_manual: bool = False,
    kill: tuple[int, list[int]] | None = None,
    resume: bool = False,
    shuffle: bool = True,
    **given: Any,
) -> dict[str, Any]:
    """Train, and return weights and the losses of validations. uses: with psdist. batch: samples of a worker."""
    strategy: Any = "auto"
    if uses:
        import psdist.lightning

        strategy = psdist.lightning.PsdistStrategy()
    lightning.seed_everything(0)
    module = Module(is_manual=is_manual, kill=kill)
    inputs = torch.randn(32 if is_manual else 64, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
    settings: dict[str, Any] = {} if is_manual else {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=STEPS, default_root_dir=directory, logger=False,
        callbacks=[ModelCheckpoint(directory, save_last=True, save_on_train_epoch_end=True)], enable_progress_bar=False,
        enable_model_summary=False, check_val_every_n_epoch=1, **(settings | given),
    )  # fmt: skip
    last = os.path.join(directory, "last.ckpt") if resume else None
    trainer.fit(module, DataLoader(data, batch, shuffle=shuffle), DataLoader(data, 4), ckpt_path=last)
    return {
        "weights": {name: one.detach().clone() for name, one in module.named_parameters()}, "losses": module.losses,
        "step": trainer.global_step, "main": trainer.is_global_zero,
    }  # fmt: skip


if __name__ == "__main__":
    serve(fit)
