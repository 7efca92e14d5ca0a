"""Workers that push, pull, give up, die without notice and come back, on real servers, from a seed.

The oracle is one-hot counting. Every slice holds one table with a cell for each step of each life; the gradient of a
push is -1 in its own cell, and SGD with rate 1 adds its share. So each slice shows at the end which workers were
counted in which step: an acknowledged push in all slices, a given-up push in some slices or none, anything else in
none. In SSP and ASP the count is exactly 1, in BSP it is 1 over the number of workers in the same step.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist import ASP, BSP, SSP, AsyncClient, AsyncParameters, optim
from psdist.consistency import Consistency
from psdist.errors import ClosedError
from psdist.launcher.embedded import EmbeddedCluster

#: Of the cluster.
SERVERS = 3

STEPS, LIVES, SLICES = 60, 12, 11
TABLE = (SLICES, STEPS, LIVES)
Table = NDArray[np.float32]


class Training:
    """One set of parameters, its workers, and their records of their pushes."""

    def __init__(self, cluster: EmbeddedCluster, name: str, consistency: Consistency, clipping: bool) -> None:
        self.cluster, self.name, self.consistency = cluster, name, consistency
        # No norm reaches the limit: clipping only changes the path of an update.
        self.optimizer = optim.SGD(lr=1.0, max_grad_norm=1e9 if clipping else 0.0)
        self.exact = consistency == BSP()
        self.lives = 0
        self.acknowledged: dict[int, set[int]] = defaultdict(set)
        self.begun: dict[int, set[int]] = defaultdict(set)
        self.results: dict[int, bytes] = {}

    def client(self, name: str) -> AsyncClient:
        return AsyncClient(self.cluster.address, self.cluster.token, worker_id=f"{self.name}-{name}")

    async def live(self, rank: int, pushes: int, rng: random.Random, *, dies: bool) -> None:
        """Run one life of a worker: this many pushes, and its end in the middle of the next one, if it ``dies``."""
        life, self.lives = self.lives, self.lives + 1
        client = await self.client(f"worker-{rank}").connect()
        try:
            handle = await client.parameters(
                self.name,
                init={"table": np.zeros(TABLE, np.float32)},
                optimizer=self.optimizer,
                consistency=self.consistency,
                slice_elements=STEPS * LIVES,
            )
            while len(self.acknowledged[life]) < pushes and handle.step < STEPS:
                await self.call(handle, life, rng)
            if dies and handle.step < STEPS:
                await self.die(client, asyncio.create_task(self.push(handle, life, rng)), rng)
        finally:
            await client.close()

    async def call(self, handle: AsyncParameters, life: int, rng: random.Random) -> None:
        """Make one call, which may be given up at any moment."""
        work = self.pull(handle) if rng.random() < 0.25 else self.push(handle, life, rng)
        patience = rng.random() * 0.01 if rng.random() < 0.2 else None
        try:
            async with asyncio.timeout(patience):
                await work
        except TimeoutError:
            assert patience is not None

    async def push(self, handle: AsyncParameters, life: int, rng: random.Random) -> None:
        if not self.exact and handle.step == handle.first_step > handle.version:
            await self.pull(handle)  # With backup workers the others do not wait: the first step may be a later one.
        step, ignored = handle.step, handle.statistics().ignored
        gradient = np.zeros(TABLE, np.float32)
        gradient[:, step, life] = -1
        self.begun[life].add(step)
        if rng.random() < 0.3:
            await handle.push({"table": gradient})
        else:
            table = (await handle.push_pull({"table": gradient}))["table"]
            self.check(table)
            if self.exact:
                assert self.results.setdefault(step, table.tobytes()) == table.tobytes(), f"step {step}: two results"
        # An ignored push had been taken before (begun), or came too late (backup workers).
        if handle.statistics().ignored == ignored:
            self.acknowledged[life].add(step)

    async def pull(self, handle: AsyncParameters) -> None:
        self.check((await handle.pull())["table"])

    async def die(self, client: AsyncClient, push: asyncio.Task[None], rng: random.Random) -> None:
        """Kill ``client`` while it pushes, without notice: the scheduler sees only a broken stream."""
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        assert client.session is not None
        client.session.membership.view.on_fatal(ClosedError("dead"))
        await client.close()
        await asyncio.gather(push, return_exceptions=True)

    def check(self, table: Table) -> None:
        """Check invariants that hold at any moment: no push is in a slice twice, and none in half a slice."""
        if isinstance(self.consistency, BSP):
            counted = np.count_nonzero(table, axis=2, keepdims=True)
            np.testing.assert_allclose(table * counted, table != 0, rtol=1e-6)
        else:
            assert np.isin(table, (0, 1)).all()

    def verify(self, table: Table) -> None:
        """Check the final state."""
        self.check(table)
        for life in range(self.lives):
            for step in range(STEPS):
                cells = table[:, step, life]
                if step in self.acknowledged[life]:
                    assert cells.all(), f"life {life}: step {step} was acknowledged and is lost: {cells}"
                elif step not in self.begun[life]:
                    assert not cells.any(), f"life {life}: step {step} was never pushed: {cells}"


MODES: list[tuple[str, Consistency, bool]] = [
    ("bsp", BSP(), False),
    ("bsp-clipping", BSP(), True),
    ("backup-clipping", BSP(backup_workers=1), True),
    ("ssp-clipping", SSP(0), True),
    ("ssp", SSP(2), False),
    ("asp", ASP(), False),
]


@pytest.mark.parametrize(("name", "consistency", "clipping"), MODES, ids=[mode[0] for mode in MODES])
async def test_workers_that_die_and_come_back(
    cluster: EmbeddedCluster, name: str, consistency: Consistency, clipping: bool
) -> None:
    training = Training(cluster, name, consistency, clipping)

    async def lives(rank: int) -> None:
        rng = random.Random(rank)
        for life in range(1 if rank == 0 else 3):
            pushes = 20 if rank == 0 else rng.randrange(2, 8)
            await training.live(rank, pushes, rng, dies=rank > 0 and life < 2 and rng.random() < 0.6)

    await asyncio.gather(*(lives(rank) for rank in range(3)))
    async with training.client("reader") as reader:
        training.verify((await (await reader.parameters(name)).pull())["table"])
