"""Weights that went elsewhere stay until nobody can be reading them in place; which are sent from where they lie."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from psdist import ASP, BSP, optim
from psdist.types import Identity, ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.store import shard_router
from psdist_server.store.rpc_call import Call, SliceAnswer
from psdist_server.store.shard_router import InPlaceReaders, SliceReads
from psdist_server.store.statistics import Counters

SLICE = 4096


class Reader:
    def __init__(self, epoch: int) -> None:
        self.admitted = Identity("run", "worker-0", 1, epoch, "p")

    def fenced(self) -> None:
        raise AssertionError


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Iterator[DenseParameters]:
    monkeypatch.setattr(shard_router, "RECLAIM_SECONDS", 0.0)
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
    mine = InPlaceReaders(dense)
    first, second = Reader(4), Reader(5)
    mine.add(first)
    mine.add(second)
    await mine.release([1], epoch=5)
    await turns()
    assert (dense.weights.array == 1.0).all() and dense.held == {0}
    first.admitted = replace(first.admitted, epoch=5)
    await turns()
    assert (dense.weights.array[:SLICE] == 1.0).all() and not dense.weights.array[SLICE:].any()


async def test_a_slice_that_came_back_and_went_again_stays_for_its_later_readers(dense: DenseParameters) -> None:
    mine = InPlaceReaders(dense)
    await mine.release([1], epoch=5)
    dense.hold([1])
    mine.add(last := Reader(6))
    await mine.release([1], epoch=7)
    await turns()
    assert (dense.weights.array == 1.0).all()
    mine.remove(last)
    await turns()
    assert not dense.weights.array[SLICE:].any()


STILL = BSP()
MOVING: dict[str, dict[str, Any]] = {
    "in an asynchronous mode": {"consistency": ASP()},
    "with backup workers, which are not waited for": {"consistency": BSP(backup_workers=1)},
    "for a reader": {"is_push": False},
    "for a push that was not used": {"ignored": True},
    "of a later version": {"version": 2},
    "in another dtype": {"pull_dtype": "float16"},
}


async def sent_in_place(
    dense: DenseParameters,
    consistency: Any = STILL,
    is_push: bool = True,
    ignored: bool = False,
    version: int = 1,
    pull_dtype: str = "float32",
) -> bool:
    """Return True if the answer to a call, answered at version 1, is not a copy."""
    state = SimpleNamespace(version=version, is_written=False)
    router: Any = SimpleNamespace(get=lambda _: SimpleNamespace(slices={0: state}))
    call = Call(Identity("run", "worker-0", 1, 1, "p"), is_push, wants_weights=True)
    call.wanted.dtype = pull_dtype
    reads = SliceReads(router, dense, Counters(), consistency)
    told, payload, _ = await reads.lasting(SliceAnswer(0, 1, ignored, 0), call)
    assert told == version
    return np.shares_memory(np.frombuffer(payload, np.uint8), dense.weights.array)


async def test_weights_that_stand_still_are_sent_from_where_they_lie(dense: DenseParameters) -> None:
    assert await sent_in_place(dense)


@pytest.mark.parametrize("case", MOVING)
async def test_other_weights_are_copied(dense: DenseParameters, case: str) -> None:
    assert not await sent_in_place(dense, **MOVING[case])
