"""The driver of the machine: registrations that arrive together, and the order of answers and durable writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psdist.errors import DuplicateMemberError, PsdistError
from psdist.wire.limits import PROTOCOL_VERSION
from psdist_scheduler.cluster import Cluster
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.cluster_state import ClusterSettings
from psdist_scheduler.scheduler import Scheduler
from psdist_scheduler.sqlite_store import Store


class HeldStore(Store):
    """A disk that is slow on purpose: a write waits until it is released."""

    def __init__(self) -> None:
        self.written: list[ev.Persist] = []
        self.writing = threading.Semaphore(0)
        self.may_write = threading.Semaphore(0)

    def write(self, changes: ev.Persist) -> None:
        self.writing.release()
        assert self.may_write.acquire(timeout=60)
        self.written.append(changes)

    async def begin(self) -> None:
        """Returns when the next write has begun."""
        assert await asyncio.to_thread(self.writing.acquire, timeout=60)

    def go_on(self, writes: int = 1) -> None:
        """Lets so many writes end."""
        self.may_write.release(writes)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Scheduler, HeldStore]]:
    """A scheduler whose first epoch is durable."""
    store = HeldStore()
    scheduler = Scheduler(Cluster(ClusterSettings("run"), None, asyncio.get_running_loop().time()), store)
    task = asyncio.create_task(scheduler.run())
    await store.begin()
    store.go_on()
    try:
        yield scheduler, store
    finally:
        store.go_on(1000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        scheduler.stop()
        scheduler.close()


async def register(scheduler: Scheduler, rank: int) -> ev.Registered | PsdistError:
    """Registers a worker. Returns its answer."""
    with scheduler.calls.call() as (number, outbox):
        scheduler.post(ev.Register(number, PROTOCOL_VERSION, "", "worker", rank=rank))
        try:
            value = await outbox.take()
        except PsdistError as error:
            return error
    assert isinstance(value, ev.Registered)
    return value


async def test_registrations_that_come_while_one_is_written_share_the_next_epoch() -> None:
    async with running() as (scheduler, store):
        first = asyncio.create_task(register(scheduler, 0))
        await store.begin()
        epoch = scheduler.cluster.epoch
        others = [asyncio.create_task(register(scheduler, rank)) for rank in (1, 2, 3, 4, 3)]
        await asyncio.sleep(0)
        store.go_on()
        await first
        await store.begin()
        assert scheduler.cluster.epoch == epoch + 1
        assert not any(task.done() for task in others[:4]), "an answer before its epoch was durable"
        assert scheduler.calls.map.epoch == epoch, "a map before its epoch was durable"
        store.go_on()
        answers = await asyncio.gather(*others)
        assert [type(answer) for answer in answers] == [ev.Registered] * 4 + [DuplicateMemberError]
        assert scheduler.calls.map.epoch == epoch + 1
        assert [member.rank for member in store.written[-1].members] == [1, 2, 3, 4]


async def test_who_is_gone_before_it_is_registered_harms_nobody() -> None:
    async with running() as (scheduler, store):
        gone, stays = (asyncio.create_task(register(scheduler, rank)) for rank in (0, 1))
        await asyncio.sleep(0)
        gone.cancel()
        store.go_on(2)
        assert isinstance(await stays, ev.Registered)
