"""Small models for tests of ``psdist.torch``, with data that every worker can compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Transformer block over characters, whose output weights are its embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        """Map int[batch, length] to float[batch, 32, length]."""
        logits: Tensor = self.head(self.block(self.embed(text)))
        return logits.transpose(1, 2)


def mlp() -> nn.Module:
    """Return a model for inputs float[batch, 12] and 4 classes."""
    return nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 4))


def cnn() -> nn.Module:
    """Return a model for inputs float[batch, 1, 8, 8] and 4 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.GroupNorm(2, 6),
        nn.GELU(),
        nn.Conv2d(6, 8, 3),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


Batch = tuple[Tensor, Tensor]


def _classes(shape: tuple[int, ...]) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, *shape, generator=generator)
        return inputs, inputs.flatten(1)[:, :4].argmax(1)

    return batch


def _text(step: int) -> Batch:
    text = torch.randint(32, (16, 10), generator=torch.Generator().manual_seed(step))
    return text, (text * 3 + 1) % 32


#: Model, batches of all workers together by step, and torch optimizer.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Callable[[nn.Module], torch.optim.Optimizer]]]
MODELS = {
    "mlp": (mlp, _classes((12,)), lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)),
    "cnn": (cnn, _classes((1, 8, 8)), lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-3)),
    "transformer": (Attention, _text, lambda model: torch.optim.AdamW(decayed(model), lr=1e-3, eps=1e-4)),
}


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups: weights with weight decay, and vectors without."""
    parameters = list(model.parameters())
    return [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def part(batch: Batch, rank: int, world: int) -> Batch:
    """Return a worker's part of a batch."""
    return batch[0][rank::world], batch[1][rank::world]


STEPS = 12
BATCHES = MODELS["mlp"][1]


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the largest relative difference of a parameter."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().double().norm() / b.detach().double().norm()) for a, b in pairs)


def same_bytes(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two models are equal to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def train(
    model: nn.Module, optimizer: Any, scheduler: Any = None, *, clip: float = 0.0, steps: int = STEPS, rank: int = 0,
    world: int = 1, first: int = 0,
) -> None:  # fmt: skip
    """Run a plain training loop on a worker's parts of the batches."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, part(BATCHES(step), rank, world)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
