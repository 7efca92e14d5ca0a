"""Weights that went elsewhere stay until nobody can be reading them in place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from psdist import BSP, optim
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.store import slice_reads
from psdist_server.store.slice_reads import ShmReaders

SLICE = 4096


@dataclass
class Reader:
    epoch: int


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Iterator[DenseParameters]:
    monkeypatch.setattr(slice_reads, "RECLAIM_SECONDS", 0.0)
    spec = ParametersSpec("p", optim.SGD(lr=1.0), BSP(), slice_elements=SLICE)
    dense = DenseParameters(ParametersEntry(spec=spec, total=2 * SLICE, shards=(Shard(Replica("server-0", 1)),)))
    dense.hold([0, 1])
    for index in (0, 1):
        dense.install(index, np.ones(SLICE, np.float32))
    yield dense
    dense.close()


async def turns() -> None:
    """Lets what is due be done, several times."""
    for _ in range(5):
        await asyncio.wait({asyncio.ensure_future(asyncio.sleep(0))})


async def test_weights_stay_until_every_reader_called_by_the_map_by_which_they_went(dense: DenseParameters) -> None:
    mine = ShmReaders(dense)
    first, second = Reader(4), Reader(5)
    mine.add(first)
    mine.add(second)
    mine.release([1], epoch=5)
    await turns()
    assert (dense.weights.array == 1.0).all() and dense.held == {0}
    first.epoch = 5
    await turns()
    assert (dense.weights.array[:SLICE] == 1.0).all() and not dense.weights.array[SLICE:].any()


async def test_a_slice_that_came_back_and_went_again_stays_for_its_later_readers(dense: DenseParameters) -> None:
    mine = ShmReaders(dense)
    mine.release([1], epoch=5)
    dense.hold([1])
    mine.add(last := Reader(6))
    mine.release([1], epoch=7)
    await turns()
    assert (dense.weights.array == 1.0).all()
    mine.remove(last)
    await turns()
    assert not dense.weights.array[SLICE:].any()
