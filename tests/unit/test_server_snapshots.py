"""A server's part in snapshots: what is in the files, while training goes on, and what comes back from them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from psdist.consistency import ASP
from psdist.snapshots.reader import read_slice, verify
from tests.unit.server_driver import Driver, Floats, answered, entry_of, memory

TOTAL = 50_000
RNG = np.random.default_rng(1)


@pytest.fixture
async def driver() -> AsyncIterator[Driver]:
    made = Driver(memory())
    yield made
    await made.close()


def noise() -> Floats:
    return RNG.standard_normal(TOTAL).astype(np.float32)


async def test_what_was_trained_meanwhile_is_not_in_the_snapshot(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    await driver.train(entry, 0, noise())
    wanted = driver.arrays()
    driver.prepare(1, {"p": 1})
    prepared = (await driver.report()).prepared
    assert prepared.accepted and dict(prepared.steps_next) == {"p": 1}
    driver.cut(1)
    for step in range(1, 4):
        await driver.train(entry, step, noise())
    files = await driver.written(3)
    driver.end(1)
    assert driver.arrays() != wanted
    manifest, _ = await driver.commit([entry], files)
    await verify(driver.storage, manifest)
    for index, arrays in wanted.items():
        read = await read_slice(driver.storage, manifest, manifest.parameters[0], index)
        assert [array.tobytes() for array in read] == arrays
    assert {version for file in files for version in file.versions} == {1}


async def test_values_come_back_on_another_number_of_shards(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    for step in range(3):
        await driver.train(entry, step, noise())
    driver.prepare(1, {"p": 3})
    driver.cut(1)
    assert (await driver.report()).prepared.accepted
    wanted = driver.arrays()
    _, restore = await driver.commit([entry], await driver.written(3))
    gradient = noise()
    await driver.train(entry, 3, gradient)
    after = driver.arrays()
    other = Driver(driver.storage)
    loading = replace(entry_of(shards=5), restore=restore)
    loading = replace(loading, members=(replace(loading.members[0], first_step=3),))
    await other.follow(loading)
    await loaded(other, 5)
    assert other.arrays() == wanted
    ready = replace(loading, ready=True)
    await other.follow(ready)
    await other.train(ready, 3, gradient)
    assert other.arrays() == after
    await other.close()


async def loaded(driver: Driver, shards: int) -> None:
    """Waits until all shards are loaded."""
    import asyncio

    changed = asyncio.Event()
    driver.host.report = changed.set
    async with asyncio.timeout(60):
        while len(driver.host.reports()) < shards:
            await changed.wait()
            changed.clear()
