"""Script for ``psdist run``, and models for tests: layers that are frozen, unused, or without a gradient in some steps.

Arguments: the folder of the tests' package, number of steps, and optimizers by name. Rank 0 prints a line for each case
and optimizer: the largest difference of a parameter from torch in one process, and a digest of all weights.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])

from psdist.torch import DistributedOptimizer  # the path is an argument


class Parts(nn.Module):
    """Model with a first layer to freeze, a trunk, a branch for some steps, and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.trunk, self.branch = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4)

    def forward(self, inputs: Tensor, uses_branch: bool) -> Tensor:
        hidden = self.first(inputs).tanh()
        return self.trunk(hidden) + self.branch(hidden) if uses_branch else self.trunk(hidden)


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one worker."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def freeze(model: Parts, step: int) -> None:
    """Freeze and unfreeze the first layer; it is frozen at the start."""
    model.first.requires_grad_((step // 7) % 2 == 1)


def nothing(model: Parts, step: int) -> None:
    """Change nothing."""


Uses = Callable[[int, int], bool]
#: By name: the change before each step, and whether a rank uses the branch in a step.
CASES: dict[str, tuple[Callable[[Parts, int], None], Uses]] = {
    "freeze": (freeze, lambda step, rank: True),
    "unused": (nothing, lambda step, rank: False),
    "alternate": (nothing, lambda step, rank: step % 2 == 1),
    "ranks": (nothing, lambda step, rank: (step + rank) % 3 == 0),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, lambd=0.1, t0=3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
}


def made(case: str) -> Parts:
    """Return the model at the start of a case."""
    torch.manual_seed(0)
    model = Parts()
    CASES[case][0](model, 0)
    return model


def train(case: str, model: Parts, optimizer: torch.optim.Optimizer, steps: range, ranks: list[int]) -> Iterator[int]:
    """Train on the batches of ``ranks``. Yields after each step."""
    change, uses = CASES[case]
    for step in steps:
        change(model, step)
        optimizer.zero_grad()
        losses = []
        for rank in ranks:
            inputs, targets = batch_of(step, rank)
            losses.append(functional.mse_loss(model(inputs, uses(step, rank)), targets))
        torch.stack(losses).mean().backward()
        optimizer.step()
        yield step


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of an element."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def main() -> None:
    """Train all cases with psdist, and with torch."""
    torch.set_num_threads(1)
    for kind in sys.argv[3:]:
        for case in CASES:
            model, other = made(case), made(case)
            inner = OPTIMIZERS[kind](model.parameters())
            optimizer = DistributedOptimizer(model, inner, name=f"{case}-{kind}", bucket_cap_mb=0.0005)
            rank, world = optimizer.context.rank, optimizer.context.world_size
            steps = range(optimizer.handle.step, int(sys.argv[2]))
            for step in train(case, model, optimizer, steps, [rank]):
                if rank == 0 and step == 20:
                    print(f"{case} is under way", flush=True)
            for _ in train(case, other, OPTIMIZERS[kind](other.parameters()), range(int(sys.argv[2])), [*range(world)]):
                pass
            digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
            if rank == 0:
                print(f"{case} {kind} difference {difference(model, other):.1e} digest {digest[:16]}", flush=True)


if __name__ == "__main__":
    main()
