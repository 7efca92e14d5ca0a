"""Collectives between clients over real links, with a real scheduler: with shared memory, and over TCP alone.

All clients are in this process.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from psdist import AsyncClient
from psdist.collectives import mesh
from psdist.collectives.frames import IncomingLink
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.mesh import Mesh
from psdist.collectives.workers import AsyncCollectives
from psdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    DTypeMismatchError,
    InvalidArgumentError,
    ShapeMismatchError,
    SharingUnavailableError,
    WaitTimeoutError,
    WorkerLeftError,
    WorkerLostError,
)
from psdist.launcher.embedded import EmbeddedCluster
from tests.support.collective_run import SIZE, Run, arrays

#: More than one part, and not a multiple of one.
LARGE = 1_000_003


@pytest.fixture(params=["shm", "tcp"])
async def run(
    cluster: EmbeddedCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Run]:
    monkeypatch.setattr(Mesh, "shares", request.param == "shm")
    clients = [AsyncClient(cluster.address, cluster.token, rank=rank) for rank in range(SIZE)]
    for client in clients:
        await client.connect()
    yield Run(clients)
    for client in clients:
        await client.close()


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE])
async def test_arrays_of_all_sizes(run: Run, count: int) -> None:
    given = arrays(count)
    total = (given[0] + given[1] + given[2]).tobytes()
    assert [one.tobytes() for one in await run.all(lambda group: group.all_reduce(given[group.rank]))] == [total] * SIZE
    for one in await run.all(lambda group: group.all_gather(given[group.rank])):
        assert one.tobytes() == np.stack(given).tobytes()
    for one in await run.all(lambda group: group.broadcast(given[group.rank], 1)):
        assert one.tobytes() == given[1].tobytes()
    for one in given[1:]:
        one[:] = given[0]
    await run.all(lambda group: group.all_reduce(given[group.rank], "max", out=given[group.rank]))
    assert given[0].tobytes() == given[2].tobytes()


async def test_all_calls_of_rows(run: Run) -> None:
    rows = [np.arange(6, dtype=np.int64).reshape(3, 2) + 10 * rank for rank in range(SIZE)]
    assert [one.tolist() for one in await run.all(lambda g: g.reduce_scatter(rows[g.rank]))] == [
        [30, 33], [36, 39], [42, 45],
    ]  # fmt: skip
    assert [one.tolist() for one in await run.all(lambda g: g.all_to_all(rows[g.rank]))][1] == [
        [2, 3],
        [12, 13],
        [22, 23],
    ]
    first, second, third = await run.all(lambda g: g.gather(rows[g.rank][0], 1))
    assert first is third is None and second.tolist() == [[0, 1], [10, 11], [20, 21]]
    outs = [np.zeros(2, np.int64) for _ in range(SIZE)]
    await run.all(lambda g: g.scatter(rows[2] if g.rank == 2 else None, 2, out=outs[g.rank]))
    assert [one.tolist() for one in outs] == rows[2].tolist()
    first, second, third = await run.all(lambda g: g.reduce(rows[g.rank], 0, "min"))
    assert first.tolist() == rows[0].tolist() and second is third is None


async def test_messages_and_uneven_rows(run: Run) -> None:
    first, second, _ = run.groups
    out = np.zeros(3, np.float16)
    await asyncio.gather(first.send(np.ones(3, np.float16), 1, tag=7), second.recv(out, 0, tag=7))
    assert out.tolist() == [1, 1, 1]
    outs = [[np.zeros(source + rank) for source in range(SIZE)] for rank in range(SIZE)]
    await run.all(
        lambda g: g.all_to_all_uneven([np.full(g.rank + to, g.rank) * 1.0 for to in range(SIZE)], outs[g.rank])
    )
    assert [[one.tolist() for one in row] for row in outs][1] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.float64, np.complex64, ml_dtypes.bfloat16])
async def test_dtypes_and_memory_with_gaps(run: Run, dtype: Any) -> None:
    given = arrays(40, dtype)
    outs = [np.zeros((20, 2), dtype)[:, 0] for _ in range(SIZE)]
    await run.all(lambda g: g.all_reduce(given[g.rank][::2], out=outs[g.rank]))
    wanted = given[0][::2].astype(np.float32) if dtype is ml_dtypes.bfloat16 else given[0][::2]
    for other in given[1:]:
        wanted = wanted + other[::2].astype(wanted.dtype)
    assert all(np.array_equal(out, wanted.astype(dtype)) for out in outs)


async def test_groups_overlap_and_have_calls_of_their_own(run: Run) -> None:
    left = [run.workers[rank].new_group([0, 1]) for rank in (0, 1)]
    right = [run.workers[rank].new_group([2, 1]) for rank in (1, 2)]
    alone = run.workers[2].new_group([2])
    # Rank 1 makes the calls of its two groups in another order than its partners start them.
    results = await asyncio.gather(
        right[1].all_reduce(np.ones(LARGE)), left[0].all_reduce(np.ones(LARGE)),
        left[1].all_reduce(np.ones(LARGE)), right[0].all_reduce(np.ones(LARGE)),
        alone.all_reduce(np.ones(3), "avg"),
    )  # fmt: skip
    assert [one[-1] for one in results] == [2, 2, 2, 2, 1] and right[0].rank == 0 and right[0].ranks == (1, 2)
    with pytest.raises(InvalidArgumentError, match=r"rank 0 is not among \[1, 2\]"):
        run.workers[0].new_group([1, 2])
    for wrong in (["0"], [0.5, 1], [0, -1]):
        with pytest.raises(InvalidArgumentError, match="ranks"):
            run.workers[0].new_group(wrong)


async def test_calls_of_a_group_of_one_let_other_tasks_run(run: Run) -> None:
    group, turns = run.workers[0].new_group([0]), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    for _ in range(10):
        await group.barrier()
    counting.cancel()
    assert turns >= 10


async def test_calls_in_progress_are_carried_out_in_order(run: Run) -> None:
    async def many(group: AsyncWorkerGroup) -> list[float]:
        tasks = [asyncio.ensure_future(group.all_reduce(np.full(count, number))) for number, count in enumerate(COUNTS)]
        return [float((await task)[0]) for task in tasks]

    COUNTS = (5, LARGE, 1, 20_000, 3)
    assert await run.all(many) == [[0.0, 3.0, 6.0, 9.0, 12.0]] * SIZE


async def test_messages_of_any_rank(run: Run) -> None:
    small = asyncio.gather(*(run.groups[0].recv_any(np.zeros(1, int), 1) for _ in range(2)))
    sent = asyncio.gather(*(group.send(np.full(1, group.rank), 0, tag=1) for group in run.groups[1:]))
    assert sorted(await small) == [1, 2]
    await sent
    large = asyncio.gather(*(group.send(np.full(LARGE, group.rank), 0) for group in run.groups[1:]))
    out = np.zeros(LARGE, int)
    for _ in range(2):
        assert (out == await run.groups[0].recv_any(out)).all()
    await large


async def test_a_message_of_any_rank_that_never_comes(run: Run) -> None:
    with pytest.raises(
        WaitTimeoutError, match=r"rank 0 reached the timeout of 0\.1 s, waiting for a message with tag 5"
    ):
        await run.groups[0].recv_any(np.zeros(1), 5, timeout=0.1)
    with pytest.raises(WaitTimeoutError, match="rank 0 reached the timeout"):
        await run.groups[1].barrier()
    groups = [one.new_group(range(SIZE)) for one in run.workers]
    await asyncio.gather(*(group.barrier() for group in groups))
    waiting = asyncio.ensure_future(groups[0].recv_any(np.zeros(1)))
    await asyncio.sleep(0)
    await run.clients[2].close()
    with pytest.raises(WorkerLostError, match="rank 2 is gone"):
        await waiting


async def test_a_group_in_another_order(run: Run) -> None:
    order = [2, 0, 1]
    groups = [one.new_group(order, ordered=True) for one in run.workers]
    assert [group.rank for group in groups] == [1, 2, 0]
    found = await asyncio.gather(*(group.all_gather([rank]) for rank, group in enumerate(groups)))
    assert [one.ravel().tolist() for one in found] == [order] * SIZE


async def test_different_calls_are_an_error_at_all_ranks(run: Run) -> None:
    errors = await run.all(lambda g: g.all_reduce(np.ones(3 if g.rank else 4)))
    assert all(isinstance(error, CollectiveMismatchError) for error in errors)
    assert all("shape=(4,)" in str(error) and "shape=(3,)" in str(error) for error in errors)
    run.groups = [one.new_group(range(SIZE)) for one in run.workers]
    assert [one.tolist() for one in await run.all(lambda g: g.all_reduce([1.0]))] == [[3.0]] * SIZE


async def test_a_worker_that_leaves_ends_the_call_at_all_others(run: Run) -> None:
    await run.all(lambda g: g.barrier())
    waiting = asyncio.gather(run.groups[0].barrier(), run.groups[1].barrier(), return_exceptions=True)
    await run.clients[2].close()
    for error in await waiting:
        assert isinstance(error, WorkerLostError) and error.details["rank"] == "2"


async def test_a_worker_that_never_used_collectives_and_leaves(run: Run, cluster: EmbeddedCluster) -> None:
    silent = AsyncClient(cluster.address, cluster.token, rank=SIZE)
    await silent.connect()
    group = run.workers[0].new_group([0, SIZE])
    waiting = asyncio.ensure_future(group.barrier())
    await asyncio.sleep(0)
    await silent.close()
    with pytest.raises(WorkerLostError, match="rank 1 is gone"):
        await waiting


async def test_a_worker_that_has_ended_ends_groups_that_wait_for_it(
    run: Run, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "RETURN_SECONDS", 0.2)
    for _ in range(2):  # Also for a rank that has started again.
        ending = AsyncClient(cluster.address, cluster.token, rank=SIZE)
        await ending.connect()
        await ending.close()
        for client in run.clients[:2]:
            view = client._opened().membership.view
            while any(worker.rank == SIZE for worker in view.cluster.workers):
                await view.changed()
        groups = [run.workers[rank].new_group([0, 1, SIZE]) for rank in (0, 1)]
        for error in await asyncio.gather(*(group.barrier() for group in groups), return_exceptions=True):
            assert isinstance(error, WorkerLeftError) and f"rank {SIZE} ended its script" in str(error)
    group = run.workers[0].new_group([0, SIZE])
    with pytest.raises(WorkerLeftError):
        await group.barrier()
    # Another rank may have made the group in time, and gets the error when it calls.
    late = AsyncClient(cluster.address, cluster.token, rank=SIZE)
    await late.connect()
    collectives = AsyncCollectives(late._opened())
    with pytest.raises(WorkerLeftError):
        await collectives.new_group([0, SIZE]).barrier()
    again = asyncio.ensure_future(run.workers[0].new_group([0, SIZE]).barrier())
    await collectives.new_group([0, SIZE]).barrier()
    await again
    await late.close()


async def test_a_worker_that_starts_again_is_in_the_group(run: Run, cluster: EmbeddedCluster) -> None:
    for _ in range(2):
        client = AsyncClient(cluster.address, cluster.token, rank=SIZE)
        await client.connect()
        waiting = asyncio.ensure_future(run.workers[0].new_group([0, SIZE]).barrier())
        await AsyncCollectives(client._opened()).new_group([0, SIZE]).barrier()
        await waiting
        await client.close()


async def test_a_cancelled_call_ends_the_group(run: Run) -> None:
    call = asyncio.ensure_future(run.groups[0].all_reduce(np.ones(LARGE)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(ClosedError, match="rank 0 gave up all_reduce"):
        await run.groups[1].all_reduce(np.ones(LARGE))


async def test_wrong_arguments(run: Run) -> None:
    group = run.groups[0]
    for call, error, text in (
        (group.all_reduce(["a"]), DTypeMismatchError, "cannot be sent: use one of bool, int8"),
        (group.all_reduce([1], "avg"), DTypeMismatchError, "'avg' has no meaning for int64"),
        (group.all_reduce([1], "mean"), InvalidArgumentError, "'mean' is unknown: use one of sum"),
        (group.all_reduce([1], out=np.zeros(2, int)), ShapeMismatchError, r"out has shape \(2,\) .* shape \(1,\)"),
        (group.broadcast([1], 3), InvalidArgumentError, "rank 3 is not in this group of 3"),
        (group.broadcast([1], 1.0), InvalidArgumentError, "src=1.0 is not a whole number"),
        (group.broadcast(np.ones((1,) * 33)), InvalidArgumentError, "33 dimensions, over 32: reshape it"),
        (group.send([1], 1, tag="a"), InvalidArgumentError, "tag='a' is not a whole number"),
        (group.send([1], 1, tag=2**63), InvalidArgumentError, "tag=9223372036854775808 is out of range"),
        (group.recv([1], 1), InvalidArgumentError, r"out=\[1\] is no array of numpy"),
        (group.all_reduce([1], timeout="1"), InvalidArgumentError, "timeout='1' is out of range"),
        (group.reduce_scatter([1, 2]), ShapeMismatchError, r"shape \(2,\) has no row for each of 3 ranks"),
        (group.scatter(None, 0), InvalidArgumentError, "rank src gives the array"),
        (group.send([1], 0), InvalidArgumentError, "rank 0 is this rank: copy the array"),
        (group.barrier(timeout=0), InvalidArgumentError, "timeout=0 is out of range"),
        (group.recv_any(np.zeros(1), timeout=0), InvalidArgumentError, "timeout=0 is out of range"),
    ):
        with pytest.raises(error, match=text):
            await call
    assert [one.tolist() for one in await run.all(lambda g: g.all_reduce([1], timeout=20.0))] == [[3]] * SIZE


async def test_groups_are_counted_when_they_are_made(run: Run, cluster: EmbeddedCluster) -> None:
    first = run.workers[0].new_group([0, SIZE])
    await first.close()
    second = run.workers[0].new_group([0, SIZE])
    late = AsyncClient(cluster.address, cluster.token, rank=SIZE)
    await late.connect()
    others = AsyncCollectives(late._opened())
    closed = others.new_group([0, SIZE])
    await closed.close()
    again = others.new_group([0, SIZE])
    assert [one.tolist() for one in await asyncio.gather(second.all_reduce([1]), again.all_reduce([1]))] == [[2]] * 2
    await late.close()


@pytest.mark.parametrize("count", [2, LARGE])
async def test_numpy_errors_of_the_script_are_none_of_a_reduction(run: Run, count: int) -> None:
    given = [np.full(count, one) for one in (-np.inf, np.inf, 3e38)]
    with np.errstate(all="raise"), warnings.catch_warnings(action="error"):
        for dtype in (np.float32, np.float16):
            with np.errstate(all="ignore"):
                sent = [one.astype(dtype) for one in given]
            assert all(np.isnan(one).all() for one in await run.all(lambda g, sent=sent: g.all_reduce(sent[g.rank])))
        large = np.full(count, 3e38, np.float32)
        assert all(np.isinf(one).all() for one in await run.all(lambda g: g.all_reduce(large)))


@pytest.mark.parametrize("run", ["shm"], indirect=True)
async def test_parts_travel_in_shared_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, copy = [], IncomingLink._copy_shared
    monkeypatch.setattr(IncomingLink, "_copy_shared", lambda *given: (copied.append(1), copy(*given)))
    given = arrays(LARGE)
    for one in await run.all(lambda group: group.all_reduce(given[group.rank])):
        assert one.tobytes() == (given[0] + given[1] + given[2]).tobytes()
    assert len(copied) >= 2 * SIZE * (SIZE - 1), "contributions and results"


@pytest.mark.parametrize("run", ["shm"], indirect=True)
async def test_without_shared_memory_parts_follow_their_frames(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> Any:
        raise SharingUnavailableError("not here")

    monkeypatch.setattr("psdist.collectives.frames.take_arena", refuse)
    given = arrays(LARGE)
    for one in await run.all(lambda group: group.all_reduce(given[group.rank])):
        assert one.tobytes() == (given[0] + given[1] + given[2]).tobytes()


async def test_the_same_workers_make_another_group_after_a_call_was_given_up_in_the_middle(run: Run) -> None:
    large = np.ones(8 * LARGE)
    await run.all(lambda group: group.barrier())
    calls = [asyncio.ensure_future(group.all_reduce(large)) for group in run.groups]
    while not run.workers[0]._former.mesh._incoming or not any(
        link.receiving for link in run.workers[0]._former.mesh._incoming.values()
    ):
        await asyncio.sleep(0)
        if any(call.done() for call in calls):
            break
    calls[0].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for _ in range(3):
        run.groups = [one.new_group(range(SIZE)) for one in run.workers]
        for one in await run.all(lambda group: group.all_reduce(large)):
            assert one[0] == one[-1] == SIZE
