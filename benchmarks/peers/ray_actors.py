"""Sharded parameter server of Ray actors. Runs in an environment of its own.

Server actors hold a shard each, sum the workers' parts, which they read in Ray's shared memory without a copy, and
update by torch's fused Adam. There are two ways to use them:

- role ``""``: as with psdist, each worker actor makes its own steps: it calls ``push_pull`` of every server actor and
waits for the new weights; the call returns once all workers have made theirs;
- role ``dataflow``: the driver makes the steps, as in Ray's own example: the workers' gradients are arguments of the
servers' updates, whose results are arguments of the workers' next gradients. Ray's scheduler waits, no actor does, and
weights are written once for all workers; this is the fastest way found.

A step ends when the workers hold the new weights.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from benchmarks import turns


@ray.remote(num_cpus=0)
class Worker:
    """Holds a gradient, part by part."""

    def __init__(self, sizes: list[int], servers: list[Any]) -> None:
        self._parts = [np.full(size, 1e-3, np.float32) for size in sizes]
        self._servers = servers

    def gradient(self, *weights: Any) -> Any:
        """Return the gradient for ``weights``, which arrive as arrays."""
        return tuple(self._parts) if len(self._parts) > 1 else self._parts[0]

    def turn(self, steps: int) -> list[float]:
        """Make steps."""
        return turns.timed(self._step, steps)

    def _step(self) -> None:
        calls = zip(self._servers, self._parts, strict=True)
        ray.get([server.push_pull.remote(part) for server, part in calls])


@ray.remote(num_cpus=0)
class Server:
    """Holds a shard and its optimizer."""

    def __init__(self, size: int, workers: int) -> None:
        torch.set_num_threads(1)
        self._weights = torch.nn.Parameter(torch.ones(size))
        self._weights.grad = torch.empty(size)
        self._optimizer = torch.optim.Adam([self._weights], lr=1e-3, fused=True)
        self._workers, self._version = workers, 0
        self._gradients: list[Any] = []
        self._changed = threading.Condition()

    def update(self, *gradients: Any) -> Any:
        """Apply the mean of the gradients and returns the new weights."""
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

    def push_pull(self, gradient: Any) -> Any:
        """Add a worker's gradient, and return the weights once they include all workers'.

        Runs in a thread per worker.
        """
        with self._changed:
            self._gradients.append(gradient)
            version = self._version
            if len(self._gradients) == self._workers:
                self.update(*self._gradients)
                self._gradients, self._version = [], version + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._version > version)
            return self._weights.detach().numpy()


class Training:
    """The driver's side."""

    def __init__(self, settings: turns.Settings) -> None:
        cut = settings.params // settings.servers
        sizes = [cut] * (settings.servers - 1) + [settings.params - cut * (settings.servers - 1)]
        serving = Server.options(max_concurrency=settings.workers)  # type: ignore[attr-defined]
        self.servers = [serving.remote(size, settings.workers) for size in sizes]
        self.workers = [
            Worker.remote(sizes, self.servers)  # type: ignore[attr-defined]
            for _ in range(settings.workers)
        ]
        self.weights: list[Any] = []

    def step(self) -> None:
        """One synchronous step of all workers as a dataflow."""
        parts = len(self.servers)
        calls = [worker.gradient.options(num_returns=parts).remote(*self.weights) for worker in self.workers]
        gradients = [call if parts > 1 else [call] for call in calls]
        self.weights = [
            server.update.remote(*(gradient[number] for gradient in gradients))
            for number, server in enumerate(self.servers)
        ]
        ray.wait(self.weights, num_returns=parts, fetch_local=False)

    def turn(self, steps: int) -> list[float]:
        """Let all workers make steps of their own. Returns the slowest worker's time of each step."""
        times = ray.get([worker.turn.remote(steps) for worker in self.workers])
        return [max(step) for step in zip(*times, strict=True)]


def main() -> None:
    """Take turns until the benchmark ends."""
    settings = turns.settings()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Room for two steps of all gradients and of weights for each worker.
    room = 2 * 2 * 4 * settings.params * settings.workers + (256 << 20)
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=room,
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
        log_to_driver=False,
    )
    try:
        training = Training(settings)
        turn = partial(turns.timed, training.step) if settings.role == "dataflow" else training.turn
        turns.serve(turn, {"ray": ray.__version__})
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
