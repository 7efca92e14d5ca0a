"""Fixtures of the client's tests: clients of a fake scheduler and two fake servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.support.client_fakes import FakeScheduler, Setup, Start, leave


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start clients with settings of their own. They leave without the snapshot for saved state."""
    setups: list[Setup] = []

    async def start(init: dict[str, np.ndarray] | None = None, **settings: object) -> Setup:
        setups.append(Setup())
        return await setups[-1].start(init, **settings)

    yield start
    for setup in setups:
        await leave(setup.client)
        await setup.stop()


@pytest.fixture
async def setup(start: Start) -> Setup:
    """Start a client whose parameters have no settings of their own."""
    return await start()


@pytest.fixture
async def connected() -> AsyncIterator[Setup]:
    """Connect a client that has no parameters yet."""
    setup = await Setup().connect()
    yield setup
    await setup.stop()


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    """Start a scheduler without servers."""
    scheduler = await FakeScheduler([]).start()
    yield scheduler
    await scheduler.stop()
