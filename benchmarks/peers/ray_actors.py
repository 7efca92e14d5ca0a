"""A sharded parameter server of Ray actors, as Ray's documentation writes one: runs in an environment of its own.

Worker actors return their gradient in as many parts as there are server actors; each server actor sums its parts, which
it reads in Ray's shared memory without a copy, and updates its shard by torch's fused Adam; the workers get the new
weights, in shared memory too, with the next step. The driver takes the turns; a step ends when all weights are there.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
import torch

from benchmarks import turns


@ray.remote(num_cpus=0)
class Worker:
    """Holds a gradient, part by part."""

    def __init__(self, sizes: list[int]) -> None:
        self._parts = [np.full(size, 1e-3, np.float32) for size in sizes]

    def gradient(self, *weights: Any) -> Any:
        """The gradient for ``weights``, which arrive as arrays."""
        return tuple(self._parts) if len(self._parts) > 1 else self._parts[0]


@ray.remote(num_cpus=0)
class Server:
    """Holds a shard and its optimizer."""

    def __init__(self, size: int) -> None:
        torch.set_num_threads(1)
        self._weights = torch.nn.Parameter(torch.ones(size))
        self._weights.grad = torch.empty(size)
        self._optimizer = torch.optim.Adam([self._weights], lr=1e-3, fused=True)

    def update(self, *gradients: Any) -> Any:
        """Applies the mean of the gradients and returns the new weights."""
        total = self._weights.grad
        assert total is not None
        parts = [torch.from_numpy(gradient) for gradient in gradients]
        if len(parts) == 1:
            total.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)
        total.div_(len(parts))
        self._optimizer.step()
        return self._weights.detach().numpy()


class Training:
    """The driver's side."""

    def __init__(self, settings: turns.Settings) -> None:
        cut = settings.params // settings.servers
        sizes = [cut] * (settings.servers - 1) + [settings.params - cut * (settings.servers - 1)]
        self.workers = [Worker.remote(sizes) for _ in range(settings.workers)]  # type: ignore[attr-defined]
        self.servers = [Server.remote(size) for size in sizes]  # type: ignore[attr-defined]
        self.weights: list[Any] = []

    def step(self) -> None:
        """One synchronous step of all workers."""
        parts = len(self.servers)
        calls = [worker.gradient.options(num_returns=parts).remote(*self.weights) for worker in self.workers]
        gradients = [call if parts > 1 else [call] for call in calls]
        self.weights = [
            server.update.remote(*(gradient[number] for gradient in gradients))
            for number, server in enumerate(self.servers)
        ]
        ray.wait(self.weights, num_returns=parts, fetch_local=False)


def main() -> None:
    """Takes turns until the benchmark ends."""
    settings = turns.settings()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Room for two steps of all gradients and weights.
    room = 2 * 4 * settings.params * (settings.workers + 1) + (256 << 20)
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=room,
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
        log_to_driver=False,
    )
    try:
        training = Training(settings)
        training.step()
        turns.serve(lambda steps: turns.timed(training.step, steps), {"ray": ray.__version__})
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
