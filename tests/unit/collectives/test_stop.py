"""Calls of a worker whose run is being stopped: another worker that leaves first is no loss that the script sees.

A fake scheduler stops the worker. The test is the other worker of its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import psdist
from psdist.collectives.core.machine import needed_ranks
from psdist.collectives.forming import GroupFormer
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.group_runner import GroupRunner
from psdist.collectives.workers import AsyncCollectives
from psdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    LateWorkerError,
    PeerUnreachableError,
    PsdistError,
    WaitTimeoutError,
    WorkerLeftError,
    WorkerLostError,
)
from psdist.types import WorkerEntry
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import status
from tests.support.client_fakes import FakeScheduler

Call = Callable[[AsyncWorkerGroup], Coroutine[Any, Any, Any]]

CALLS: dict[str, Call] = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "allocate_buffer": lambda group: group.allocate_buffer(3),
    "barrier": lambda group: group.barrier(),
    "broadcast": lambda group: group.broadcast(np.ones(3), 1),
    "recv": lambda group: group.recv(np.ones(3), 1),
    "recv_any": lambda group: group.recv_any(np.ones(3)),
}
ERRORS: tuple[PsdistError, ...] = (
    ClosedError("rank 1 gave up all_reduce"),
    WorkerLostError("rank 1 is gone", rank=1),
    PeerUnreachableError("worker-1 accepts no links"),
    WaitTimeoutError("rank 1 has not called barrier"),
)


JOINS: dict[str, Callable[[AsyncCollectives], Coroutine[Any, Any, AsyncWorkerGroup]]] = {
    "join_group": lambda collectives: collectives.join_group("g", size=2, timeout=0.05),
    "enter_group of absent members": lambda collectives: collectives.enter_group(
        "g", 1, [collectives.identity, ("worker-1", 1)], timeout=0.05
    ),
    "enter_group": lambda collectives: collectives.enter_group("g", 1, [collectives.identity, ("worker-2", 1)]),
}


class Scheduler(FakeScheduler):
    """Scheduler whose groups never form. The map has a worker that accepts no links."""

    #: Error of requests to form a group.
    forms: PsdistError | None = None

    async def FormGroup(self, request: pb.FormGroupRequest, context: Any) -> pb.FormGroupResponse:
        if self.forms is not None:
            await status.abort(context, self.forms)
        return pb.FormGroupResponse(waiting_for="for 1 of 2 workers")

    def map(self) -> common_pb2.ClusterMap:
        found = super().map()
        found.workers.append(common_pb2.WorkerEntry(worker_id="worker-2", incarnation=1, rank=2, address="127.0.0.1:1"))
        return found


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    scheduler = Scheduler([])
    await scheduler.start()
    yield scheduler
    await scheduler.stop()


@pytest.fixture
async def client(scheduler: FakeScheduler) -> AsyncIterator[psdist.AsyncClient]:
    client = await psdist.AsyncClient(scheduler.address).connect()
    yield client
    await client.close()


def group_of(client: psdist.AsyncClient) -> AsyncWorkerGroup:
    """Return rank 0 of a group of two, whose frames go nowhere."""
    link = SimpleNamespace(send=lambda *_: None)
    mesh: Any = SimpleNamespace(link=lambda _: link, drop=lambda _: None)
    session = client._opened()
    runner = GroupRunner(mesh, session.waits, [0, 1], 0)
    runner.open(b"group", [WorkerEntry("worker-0", 1, 0, "a:1"), WorkerEntry("worker-1", 1, 1, "a:2")])
    former = GroupFormer(session, mesh)
    return AsyncWorkerGroup(former, former.start(runner, 0))


async def hold(scheduler: FakeScheduler, number: int = 1) -> None:
    """Tell the worker that all stop together, and wait for its report."""
    scheduler.news.put_nowait(pb.SessionResponse(stop=pb.StopCommand(number=number, hold=True)))
    assert (await scheduler.stops.get()).holding


async def waits(call: asyncio.Task[Any]) -> bool:
    """True if the call does not end without another event."""
    for _ in range(20):
        await asyncio.sleep(0)
    return not call.done()


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_outlasts_a_worker_that_leaves_first(
    name: str, scheduler: FakeScheduler, client: psdist.AsyncClient
) -> None:
    group = group_of(client)
    call = asyncio.create_task(CALLS[name](group))
    while name != "recv_any" and not needed_ranks(group._runner._machine):  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)
    await hold(scheduler)
    group._runner.abandon(ClosedError("rank 1 gave up all_reduce"))
    assert group.has_ended and await waits(call)
    later = asyncio.create_task(CALLS[name](group))
    assert await waits(later)
    for task in (call, later):  # As the handler of SIGTERM does when this worker may leave.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_each_error_that_a_leaving_worker_can_cause_is_outlasted(
    error: PsdistError, scheduler: FakeScheduler, client: psdist.AsyncClient
) -> None:
    group = group_of(client)
    group._runner.abandon(error)
    with pytest.raises(type(error)):  # The run is not being stopped.
        await group.barrier()
    await hold(scheduler)
    call = asyncio.create_task(group.barrier())
    assert await waits(call)
    await client.close()
    with pytest.raises(type(error)):  # Nobody cancels it, and it ends nevertheless.
        await call


async def outlasting(join: Coroutine[Any, Any, Any], collectives: AsyncCollectives) -> asyncio.Task[Any]:
    """Start a join, and return it once it has failed and waits for the end of its worker."""
    session, failed = collectives._session, asyncio.Event()
    outlast = session.outlast_stop

    async def outlast_stop() -> None:
        failed.set()
        await outlast()

    session.outlast_stop = outlast_stop
    task, failing = asyncio.create_task(join), asyncio.create_task(failed.wait())
    await asyncio.wait([task, failing], return_when=asyncio.FIRST_COMPLETED)
    failing.cancel()
    assert failed.is_set() and await waits(task)
    return task


@pytest.mark.parametrize("name", JOINS)
async def test_a_join_outlasts_workers_that_leave_first(
    name: str, scheduler: Scheduler, client: psdist.AsyncClient
) -> None:
    collectives = AsyncCollectives(client._opened())
    with pytest.raises((WaitTimeoutError, WorkerLostError)):  # The run is not being stopped.
        await JOINS[name](collectives)
    await hold(scheduler)
    join = await outlasting(JOINS[name](collectives), collectives)
    join.cancel()
    with pytest.raises(asyncio.CancelledError):
        await join


@pytest.mark.parametrize("error", [LateWorkerError("completed"), WorkerLeftError("worker-1 ended")], ids=repr)
async def test_a_join_that_lacks_those_that_left_first_is_outlasted(
    error: PsdistError, scheduler: Scheduler, client: psdist.AsyncClient
) -> None:
    collectives, scheduler.forms = AsyncCollectives(client._opened()), error
    with pytest.raises(type(error)):
        await collectives.join_group("g", size=2)
    await hold(scheduler)
    join = await outlasting(collectives.join_group("g", size=2), collectives)
    await client.close()
    with pytest.raises(type(error)):
        await join


async def test_a_call_that_differs_is_an_error_also_in_the_end(
    scheduler: FakeScheduler, client: psdist.AsyncClient
) -> None:
    group = group_of(client)
    await hold(scheduler)
    group._runner.abandon(CollectiveMismatchError("rank 0 calls barrier, and rank 1 all_reduce"))
    with pytest.raises(CollectiveMismatchError):
        await group.barrier()


async def test_a_barrier_is_not_passed_because_others_leave(
    scheduler: FakeScheduler, client: psdist.AsyncClient
) -> None:
    call = asyncio.create_task(client.barrier("b"))
    while not scheduler.barriers:  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)
    await hold(scheduler)
    scheduler.barrier.set()
    await hold(scheduler, 2)  # It has received the answer of the barrier, too.
    assert await waits(call)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
