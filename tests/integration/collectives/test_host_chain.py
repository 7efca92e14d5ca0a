"""All-reduces along a chain of two hosts with two workers each. All workers are in this process, and a test tells them
where they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from psdist import AsyncClient
from psdist.collectives import data_route
from psdist.collectives.data_route import HostChain, hosts_of
from psdist.collectives.host_sharing import are_on_one_host
from psdist.errors import WorkerLostError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.types import WorkerEntry
from tests.support.collective_run import Run

SIZE = 4
#: Three blocks, and not a multiple of one.
LARGE = 1_300_003


@pytest.fixture
async def run(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr(data_route, "hosts_of", lambda members: [range(2), range(2, 4)] if len(members) == SIZE else [])
    monkeypatch.setattr(data_route, "are_on_one_host", lambda members: len(members) == 2 and are_on_one_host(members))
    clients = [AsyncClient(cluster.address, cluster.token, rank=rank) for rank in range(SIZE)]
    for client in clients:
        await client.connect()
    run = Run(clients, SIZE)
    await run.all(lambda group: group.barrier())
    yield run
    for client in clients:
        await client.close()


def arrays(count: int, dtype: Any) -> list[Any]:
    return [(np.random.default_rng(rank).standard_normal(count) * 9).astype(dtype) for rank in range(SIZE)]


class CountedReductions:
    """Counts the all-reduces along the chain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        reduce = HostChain.all_reduce

        async def counted(chain: HostChain, plan: Any) -> None:
            self.calls += 1
            await reduce(chain, plan)

        monkeypatch.setattr(HostChain, "all_reduce", counted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.complex64])
@pytest.mark.parametrize("op", ["sum", "product", "avg"])
async def test_bytes_are_those_of_rank_order(run: Run, dtype: Any, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if op == "avg" and dtype == np.int16:
        return
    counted, given = CountedReductions(monkeypatch), arrays(LARGE, dtype)
    function = np.multiply if op == "product" else np.add
    wanted = function(function(function(given[0], given[1]), given[2]), given[3])
    wanted = (np.true_divide(wanted, SIZE) if op == "avg" else wanted).astype(dtype)
    for _ in range(2):
        for one in await run.all(lambda g: g.all_reduce(given[g.rank], op)):
            assert one.tobytes() == wanted.tobytes()
    for one in await run.all(lambda g: g.all_reduce(given[g.rank], op, out=given[g.rank])):
        assert one.tobytes() == wanted.tobytes()
    assert counted.calls == 3 * SIZE


async def test_sums_of_16_bit_floats_are_rounded_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, given = CountedReductions(monkeypatch), arrays(LARGE, ml_dtypes.bfloat16)
    wanted = sum(one.astype(np.float32) for one in given).astype(ml_dtypes.bfloat16)
    for one in await run.all(lambda g: g.all_reduce(given[g.rank])):
        assert one.tobytes() == wanted.tobytes()
    for one in await run.all(lambda g: g.all_reduce(given[g.rank], "max")):
        assert one.tobytes() == np.maximum.reduce(given).tobytes()
    assert counted.calls == SIZE


async def test_lost_rank_is_named_at_all_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reduce, hangs = HostChain.all_reduce, asyncio.Event()

    async def reduce_but_for_one(chain: HostChain, plan: Any) -> None:
        if (chain._host, chain._index) == (1, 1):
            hangs.set()
            await asyncio.Event().wait()
        await reduce(chain, plan)

    monkeypatch.setattr(HostChain, "all_reduce", reduce_but_for_one)
    calls = [asyncio.ensure_future(group.all_reduce(np.ones(LARGE))) for group in run.groups]
    await hangs.wait()
    await run.clients[3].close()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, WorkerLostError) and error.details["rank"] == "3" for error in ended[:3]), ended
    assert all(group.has_ended for group in run.groups[:3])


def test_chain_needs_equal_numbers_in_the_order_of_hosts() -> None:
    for hosts, wanted in [
        ("aabb", [range(2), range(2, 4)]),
        ("aaabbbccc", [range(3), range(3, 6), range(6, 9)]),
        ("abab", []),
        ("aab", []),
        ("aaab", []),
        ("abcd", []),
        ("aaaa", []),
        ("", []),
    ]:
        members = [WorkerEntry(f"worker-{rank}", 1, rank, f"{host}:1") for rank, host in enumerate(hosts)]
        assert hosts_of(members) == wanted
