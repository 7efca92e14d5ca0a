"""SSP and ASP over real gRPC: the bound holds, is reached, and no push is lost or applied twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from psdist import ASP, BSP, SSP, AsyncClient, AsyncParameters, optim
from psdist.consistency import Consistency
from psdist.launcher.embedded import EmbeddedCluster
from tests.support.clients import connected

#: One slot per push: a push adds 1 in its slot, so at the end 0 is lost and 2 is applied twice.
WORKERS, PUSHES = 2, 30


@pytest.fixture
async def clients(cluster: EmbeddedCluster) -> AsyncIterator[list[AsyncClient]]:
    async with connected(cluster, *["auto"] * WORKERS) as clients:
        yield clients


async def counters(clients: list[AsyncClient], name: str, consistency: Consistency) -> list[AsyncParameters]:
    """Create parameters in which SGD with lr 1 counts pushes: the gradient of a push is -1 in its slot."""
    init = {"slots": np.zeros((WORKERS, PUSHES, 50), np.float32)}
    optimizer = optim.SGD(lr=1.0)
    return await asyncio.gather(
        *(
            client.parameters(name, init=init, optimizer=optimizer, consistency=consistency, slice_elements=256)
            for client in clients
        )
    )


def one_hot(rank: int, push: int) -> dict[str, np.ndarray]:
    gradient = np.zeros((WORKERS, PUSHES, 50), np.float32)
    gradient[rank, push] = -1
    return {"slots": gradient}


@pytest.mark.parametrize("bound", [0, 1, 3])
async def test_ssp_never_lets_a_worker_run_further_ahead_than_its_bound(clients: list[AsyncClient], bound: int) -> None:
    fast, slow = await counters(clients, f"ssp-{bound}", SSP(bound))
    begun = 0  # Pushes that the slow worker has started: the servers cannot have more of them.
    leads = []

    async def run_fast() -> None:
        for push in range(PUSHES):
            await fast.push_pull(one_hot(0, push))
            leads.append(push + 1 - begun)

    async def run_slow() -> None:
        nonlocal begun
        for push in range(PUSHES):
            for _ in range(8):  # The cause of its slowness.
                await slow.pull()
            begun += 1
            await slow.push_pull(one_hot(1, push))

    await asyncio.gather(run_fast(), run_slow())
    assert max(leads) == bound
    assert (await fast.pull())["slots"].tobytes() == np.ones((WORKERS, PUSHES, 50), np.float32).tobytes()


@pytest.mark.parametrize("consistency", [ASP(), SSP(2)], ids=["asp", "ssp"])
async def test_every_push_is_applied_exactly_once(clients: list[AsyncClient], consistency: Consistency) -> None:
    handles = await counters(clients, f"once-{consistency}"[:8].replace("(", "-"), consistency)

    async def run(rank: int) -> None:
        for push in range(PUSHES):
            await handles[rank].push_pull(one_hot(rank, push))

    await asyncio.gather(*(run(rank) for rank in range(WORKERS)))
    slots = (await handles[0].pull())["slots"]
    assert slots.tobytes() == np.ones_like(slots).tobytes()
    assert handles[0].version > PUSHES


async def test_bsp_backup_worker_does_not_hold_the_others(clients: list[AsyncClient]) -> None:
    first, second = await counters(clients, "backup", BSP(backup_workers=1))
    for push in range(3):
        await first.push_pull(one_hot(0, push))
    # The second worker is late: its contribution is dropped and it gets the current weights.
    values = await second.push_pull(one_hot(1, 0))
    assert values["slots"][1].sum() == 0
    assert values["slots"][0, :3].min() == 1
    assert second.step == 3
