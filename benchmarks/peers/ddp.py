"""torch's DistributedDataParallel over gloo, then torch's fused Adam on each worker.

The gradients of the model, a list of tensors, exist before the step: its backward pass hands them over and computes
nothing. A step is therefore the time of DistributedDataParallel itself, with its buckets of 25 MB and its hooks. Role
``fp16`` registers torch's own hook that sends gradients as float16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import turns
from benchmarks.psdist_step import BenchSettings

FP16 = "fp16"


class _Given(torch.autograd.Function):
    """Function whose gradients are given."""

    @staticmethod
    def forward(context: Any, gradients: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        context.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        return (None, *context.gradients)


class Model(torch.nn.Module):
    """Tensors as large as those of psdist's worker."""

    def __init__(self, params: int) -> None:
        super().__init__()
        sizes = BenchSettings(params=params).layers().values()
        self.layers = torch.nn.ParameterList(torch.ones(size) for size in sizes)
        self.gradients = [torch.full((size,), 1e-3) for size in sizes]

    def forward(self) -> torch.Tensor:
        """Return a loss."""
        return _Given.apply(self.gradients, *self.layers)


class Replica:
    """One worker."""

    def __init__(self, settings: turns.Settings) -> None:
        self.model = DistributedDataParallel(Model(settings.params), gradient_as_bucket_view=True)
        if settings.role == FP16:
            self.model.register_comm_hook(None, fp16_compress_hook)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)

    def step(self) -> None:
        """One step of a usual loop."""
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()


def main() -> None:
    """Take turns until the benchmark ends."""
    settings = turns.settings()
    torch.set_num_threads(1)
    store = f"file://{turns.directory() / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=settings.rank, world_size=settings.workers)
    replica = Replica(settings)
    try:
        turns.serve(lambda steps: turns.timed(replica.step, steps), {"torch": torch.__version__})
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
