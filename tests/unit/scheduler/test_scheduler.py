"""The driver of the machine: registrations that arrive together, and the order of answers and durable writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from psdist.errors import DuplicateMemberError, PsdistError
from psdist.wire.limits import PROTOCOL_VERSION
from psdist_scheduler import scheduler as driver
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_state import ClusterSettings, EventRecord
from psdist_scheduler.run_store import Store
from psdist_scheduler.scheduler import Scheduler


class HeldStore(Store):
    """A disk that is slow on purpose: a write waits until it is released."""

    def __init__(self) -> None:
        self.written: list[ef.Persist] = []
        self.writing = threading.Semaphore(0)
        self.may_write = threading.Semaphore(0)

    def write(self, changes: ef.Persist) -> None:
        self.writing.release()
        assert self.may_write.acquire(timeout=60)
        self.written.append(changes)

    async def begin(self) -> None:
        """Returns when the next write has begun."""
        assert await asyncio.to_thread(self.writing.acquire, timeout=60)

    def go_on(self, writes: int = 1) -> None:
        """Lets so many writes end."""
        self.may_write.release(writes)


class HeldEvents(HeldStore):
    """A store that writes events when it may."""

    keeps_events = True

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[EventRecord] = []
        self.may_store = threading.Event()

    def write_events(self, records: Sequence[EventRecord]) -> None:
        assert self.may_store.wait(60)
        self.stored += records


@asynccontextmanager
async def running(store: HeldStore | None = None) -> AsyncIterator[tuple[Scheduler, HeldStore]]:
    """A scheduler whose first epoch is durable."""
    store = store or HeldStore()
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


async def register(scheduler: Scheduler, rank: int) -> ef.Registered | PsdistError:
    """Registers a worker. Returns its answer."""
    with scheduler.calls.call() as (number, outbox):
        scheduler.post(ev.Register(number, PROTOCOL_VERSION, "", "worker", rank=rank))
        try:
            value = await outbox.take()
        except PsdistError as error:
            return error
    assert isinstance(value, ef.Registered)
    return value


async def test_events_are_shown_once_they_are_stored() -> None:
    """A scheduler that restarts would give the numbers of others to its own events, and followers would miss these."""
    store = HeldEvents()
    async with running(store) as (scheduler, _):
        joining = asyncio.create_task(register(scheduler, 0))
        await store.begin()
        store.go_on()
        await joining
        gone, shown = (asyncio.create_task(scheduler.events_after(0, 10)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()  # A follower that leaves does not cancel the write.
        await asyncio.gather(gone, return_exceptions=True)
        assert not shown.done() and not store.stored
        store.may_store.set()
        assert await shown == store.stored == scheduler.history.newest(10) != []


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
        assert [type(answer) for answer in answers] == [ef.Registered] * 4 + [DuplicateMemberError]
        assert scheduler.calls.map.epoch == epoch + 1
        assert [member.rank for member in store.written[-1].members] == [1, 2, 3, 4]


async def test_who_is_gone_before_it_is_registered_harms_nobody() -> None:
    async with running() as (scheduler, store):
        gone, stays = (asyncio.create_task(register(scheduler, rank)) for rank in (0, 1))
        await asyncio.sleep(0)
        gone.cancel()
        store.go_on(2)
        assert isinstance(await stays, ef.Registered)
        assert [worker.rank for worker in scheduler.cluster.members.workers] == [1]


async def test_registrations_of_a_large_run_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_EPOCH_SECONDS_PER_MEMBER", 3600.0)
    monkeypatch.setattr(driver, "_LONGEST_PAUSE_SECONDS", 3600.0)
    async with running() as (scheduler, store):
        store.go_on(1000)
        first = await register(scheduler, 0)
        assert isinstance(first, ef.Registered)
        with scheduler.calls.call() as (number, _):
            scheduler.post(ev.SessionOpened(number, first.member.member_id, first.member.incarnation))
            assert isinstance(await register(scheduler, 1), ef.Registered), "nobody was told of another one before"
            epoch = scheduler.cluster.epoch
            others = []
            for rank in (2, 3):
                others.append(asyncio.create_task(register(scheduler, rank)))
                await asyncio.sleep(0)
                await scheduler.events_after(0, 1)  # A turn of the task that carries out effects.
            scheduler.post(ev.Tick())
            assert not any(task.done() for task in others) and scheduler.cluster.epoch == epoch
            scheduler._admit_workers()
            assert all(isinstance(answer, ef.Registered) for answer in await asyncio.gather(*others))
            assert scheduler.cluster.epoch == epoch + 1
