"""torch.distributed with gloo: all-reduce of one flat gradient, then torch's fused Adam on each worker.

DistributedDataParallel does the same on CPUs, plus its hooks. There is one thread per process, as torchrun sets it.
With ``compute_ms`` the gradient becomes ready bucket by bucket during an emulated backward pass, and each bucket's
all-reduce runs beside the rest of it: buckets of 25 MB, the default of DistributedDataParallel.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks import emulation, turns

BUCKET_ELEMENTS = 25 * (1 << 20) // 4


class Replica:
    """One worker: its copy of the weights, its gradient, and its optimizer."""

    def __init__(self, settings: turns.Settings) -> None:
        self.workers: int = settings.workers
        self.weights = torch.nn.Parameter(torch.ones(settings.params))
        self.gradient = torch.full((settings.params,), 1e-3)
        self.weights.grad = self.gradient
        self.optimizer = torch.optim.Adam([self.weights], lr=1e-3, fused=True)
        buckets = self.gradient.split(BUCKET_ELEMENTS)
        self.schedule = emulation.Schedule(settings.compute_ms / 1e3, len(buckets))
        self.buckets = buckets[::-1]  # the last layers' gradients come first

    def step(self) -> None:
        """Make a step whose gradients are all ready: one all-reduce."""
        dist.all_reduce(self.gradient)
        self._update()

    def overlapped_step(self) -> None:
        """Make a step whose gradients become ready during the backward pass."""
        begin = time.perf_counter()
        works = []
        for bucket, ready in zip(self.buckets, self.schedule.ready_seconds, strict=True):
            emulation.compute_until(begin + ready)
            works.append(dist.all_reduce(bucket, async_op=True))
        for work in works:
            work.wait()
        self._update()

    def _update(self) -> None:
        self.gradient.div_(self.workers)
        self.optimizer.step()


def main() -> None:
    """Take turns until the benchmark ends."""
    settings = turns.settings()
    torch.set_num_threads(1)
    # The file is in the benchmark's own directory, so no port has to be found.
    store = f"file://{turns.directory() / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=settings.rank, world_size=settings.workers)
    replica = Replica(settings)
    step = replica.overlapped_step if settings.compute_ms else replica.step
    try:
        turns.serve(lambda steps: turns.timed(step, steps), {"torch": torch.__version__})
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
