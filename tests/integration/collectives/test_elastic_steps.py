"""Steps of workers that leave in the middle and are added: all that are left have the same results and state."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist import AsyncClient
from psdist.collectives.elastic import ElasticSteps, StepArrays
from psdist.collectives.workers import AsyncCollectives
from psdist.errors import ClosedError, CollectiveMismatchError, LateWorkerError
from psdist.launcher.embedded import EmbeddedCluster

SIZE = 3
COUNT = 300_000
#: Steps of the workers that are left: more than are made while the other one leaves.
LAST = 40


class Worker:
    """One worker, whose weights are the sum of all means."""

    def __init__(self, cluster: EmbeddedCluster, name: str, rank: int, size_min: int = 1) -> None:
        self.size_min = size_min
        self.client = AsyncClient(cluster.address, cluster.token, rank=rank)
        self.name, self.rank = name, rank
        self.weights = np.zeros(COUNT)
        self.buffer = np.full(5, float(rank))
        self.steps: ElasticSteps

    async def start(self) -> None:
        await self.client.connect()
        collectives = AsyncCollectives(self.client._opened())
        self.steps = ElasticSteps(lambda: collectives.join_group(self.name, size=SIZE, size_min=self.size_min), self)
        await self.steps.start()

    bytes_max = 1 << 30

    async def export(self) -> NDArray[np.uint8]:
        return self.weights.view(np.uint8)

    async def load(self, data: NDArray[np.uint8]) -> None:
        self.weights = data.view(np.float64).copy()

    async def train(self, until: int) -> None:
        while self.steps.step < until:
            await self.steps.begin_step()
            given = np.full(COUNT, float(10**self.rank))
            out, buffer = np.empty_like(given), np.empty_like(self.buffer)
            await self.steps.reduce(StepArrays([given, self.buffer], [out, buffer], 1))
            assert (out == out[0]).all()
            self.weights += out
            self.buffer = buffer


async def started(cluster: EmbeddedCluster, name: str, size_min: int = 1) -> list[Worker]:
    workers = [Worker(cluster, name, rank, size_min) for rank in range(SIZE)]
    await asyncio.gather(*(one.start() for one in workers))
    return workers


@pytest.mark.parametrize("seed", range(4))
async def test_the_others_continue_with_one_result(cluster: EmbeddedCluster, seed: int) -> None:
    workers = await started(cluster, f"leave-{seed}")
    left, victim = workers[:2], workers[2]
    training = [asyncio.ensure_future(one.train(LAST)) for one in left]
    lost = asyncio.ensure_future(victim.train(1000))
    while victim.steps.step < 3:
        assert not lost.done()
        await asyncio.sleep(0)
    for _ in range(37 * seed):  # At any moment of a step.
        await asyncio.sleep(0)
    await victim.client.close()
    await asyncio.gather(*training)
    with pytest.raises(ClosedError):
        await lost
    assert left[0].weights.tobytes() == left[1].weights.tobytes() and left[0].steps.group.size == 2
    steps = [count for count in range(LAST + 1) if np.isclose(left[0].weights[0], count * 37 + (LAST - count) * 5.5)]
    assert steps and steps[0] >= 3, "each step is the mean of all three, or of the two that are left"
    assert left[1].buffer.tolist() == [0.0] * 5
    for one in left:
        await one.client.close()


async def test_a_new_worker_receives_the_state_and_the_step(cluster: EmbeddedCluster) -> None:
    workers = await started(cluster, "join")
    training = [asyncio.ensure_future(one.train(60)) for one in workers]
    new = Worker(cluster, "join", SIZE)
    joining = asyncio.ensure_future(new.start())
    await asyncio.wait([joining, *training], return_when=asyncio.FIRST_COMPLETED)
    assert joining.done() and 0 < new.steps.step < 60 and new.weights[0] == 37 * new.steps.step
    await asyncio.gather(*training, new.train(60))
    everyone = [*workers, new]
    assert len({one.weights.tobytes() for one in everyone}) == 1
    await asyncio.gather(*(one.steps.close() for one in everyone))
    late = Worker(cluster, "join", SIZE + 1)
    with pytest.raises(LateWorkerError, match="members have completed their work"):
        await late.start()
    for one in (*everyone, late):
        await one.client.close()


async def test_too_few_members_wait_for_a_new_worker_and_take_it_in(cluster: EmbeddedCluster) -> None:
    workers = await started(cluster, "few", size_min=SIZE)
    left, victim = workers[:2], workers[2]
    training = [asyncio.ensure_future(one.train(12)) for one in left]
    await victim.train(3)
    await victim.client.close()
    new = Worker(cluster, "few", 2, size_min=SIZE)
    await new.start()
    assert new.steps.step == 3
    await asyncio.gather(*training, new.train(12))
    assert {one.weights.tobytes() for one in (*left, new)} == {np.full(COUNT, 12 * 37.0).tobytes()}
    for one in (*left, new):
        await one.client.close()


async def test_workers_that_make_different_numbers_of_steps(cluster: EmbeddedCluster) -> None:
    workers = await started(cluster, "uneven")
    await asyncio.gather(*(one.train(2) for one in workers))
    calls = [workers[0].steps.close(), *(one.train(3) for one in workers[1:])]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, CollectiveMismatchError) for error in errors), errors
    for one in workers:
        await one.client.close()
