"""A training run beside the fuzzing: ``python -m tests.fuzz.trainer SCHEDULER``.

Two workers, one with shared memory and one with TCP connections, train the set "model" until the standard input ends.
Each step's weights must equal those of plain numpy, byte for byte; the workers also add an array by a collective. It
prints its ports when it trains, and at the end the number of steps.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

import numpy as np

import psdist
from psdist.collectives.workers import AsyncCollectives
from tests.support.reference import combine, update

SHAPES: Final = {"w": (90, 99), "b": (90,)}
OPTIMIZER: Final = psdist.optim.SGD(lr=0.125, momentum=0.5)
WORKERS: Final = ("trainer-0", "trainer-1")
NAME: Final = "model"
_PACE_SECONDS: Final = 0.1


def gradient(rank: int, step: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the gradient of a worker in a step."""
    rng = np.random.default_rng((rank, step))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


class Expected:
    """The weights of the run without faults, in numpy."""

    def __init__(self) -> None:
        self.weights = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self._states = {name: [np.zeros(shape, np.float32)] for name, shape in SHAPES.items()}

    def add_step(self, step: int) -> None:
        """Apply the mean of both gradients."""
        parts = [gradient(rank, step) for rank in range(len(WORKERS))]
        for name, weights in self.weights.items():
            mean = np.empty_like(weights)
            combine(mean, [part[name] for part in parts], len(WORKERS))
            update(OPTIMIZER, OPTIMIZER.values(), weights, self._states[name], mean, step)


async def train(scheduler: str) -> int:
    """Train until the standard input ends. Returns the number of steps."""
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    transports = ("shm", "tcp")
    clients = [
        await psdist.AsyncClient(scheduler, worker_id=name, rank=rank, transport=transport).connect()
        for rank, (name, transport) in enumerate(zip(WORKERS, transports, strict=True))
    ]
    expected = Expected()
    handles = await asyncio.gather(
        *(c.parameters(NAME, expected.weights, OPTIMIZER, workers=range(len(WORKERS))) for c in clients)
    )
    collectives = [AsyncCollectives(client._opened()) for client in clients]
    groups = [one.new_group(range(len(WORKERS))) for one in collectives]
    step = 0
    while not ended.done():
        given = [np.full(1000, 1.0 + rank + step, np.float32) for rank in range(len(WORKERS))]
        sums = await asyncio.gather(*(group.all_reduce(one) for group, one in zip(groups, given, strict=True)))
        assert all((total == given[0] + given[1]).all() for total in sums), f"step {step}: a wrong sum"
        pulled = await asyncio.gather(*(h.push_pull(gradient(rank, step)) for rank, h in enumerate(handles)))
        expected.add_step(step)
        for weights in pulled:
            for name, values in weights.items():
                assert (values == expected.weights[name]).all(), f"step {step}: wrong weights of {name!r}"
        if step == 0:
            ports = [client._opened().registrar.listener.port for client in clients]
            print(json.dumps({"ports": ports}), flush=True)
        step += 1
        await asyncio.wait({ended}, timeout=_PACE_SECONDS)
    for client in clients:
        await client.close()
    return step


def main() -> None:
    print(json.dumps({"steps": asyncio.run(train(sys.argv[1]))}), flush=True)


if __name__ == "__main__":
    main()
