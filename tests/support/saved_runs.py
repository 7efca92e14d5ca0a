"""Runs with snapshots at a pure scheduler."""

from __future__ import annotations

from typing import Any

from psdist.types import DataPosition, DatasetSpec
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import Member
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import SnapshotDriver, history_of

DATA = DatasetSpec("train", size=100, range_size=10, shuffle=False)


def saved_run(step: int = 7, workers: int = 1, servers: int = 2, **settings: Any) -> SnapshotDriver:
    """A run with a snapshot at ``step``."""
    given = {name: settings.pop(name) for name in ("consistency", "optimizer") if name in settings}
    d = SnapshotDriver(workers_min=workers, **settings)
    d.begin(servers, workers, **given)
    d.go_on()
    d.train(step)
    d.saved(d.save())
    return d


def resumed(d: SnapshotDriver, **settings: Any) -> SnapshotDriver:
    """A scheduler with an empty store and the storage of ``d``."""
    return SnapshotDriver(None, d.now, history=history_of(d), **settings)


def lose(d: SnapshotDriver, member_id: str) -> None:
    """A member's process dies."""
    d.on(ev.SessionClosed(d.cluster.members.sessions.call_of(member_id), "its session broke"))


def pass_time(d: SnapshotDriver, seconds: float) -> None:
    """Let time pass in which all members with a session are heard, and everybody does its work."""
    for _ in range(round(seconds / d.settings.tick_seconds)):
        d.beat(*d.cluster.members.sessions.by_call)
        d.tick()
        d.go_on()


def rejoin(d: SnapshotDriver, count: int = 1, **settings: Any) -> list[Member]:
    """Workers begin new lives and take part again."""
    workers = [d.join(member_id=f"worker-{rank}")[0] for rank in range(count)]
    for worker in workers:
        d.create(worker, **settings)
    d.go_on()
    return workers


def lease(d: SnapshotDriver, worker: Member, now: int, done: dict[int, int] | None = None) -> ef.RangeGiven:
    """Asks for a range; ``done`` has the next push at which each lease was done."""
    done = done or {}
    at = tuple((("mlp", number),) for number in done.values())
    call = d.number()
    d.on(ev.LeaseRange(call, caller(worker), "train", tuple(done), at, (("mlp", now),)))
    answer: ef.RangeGiven = d.state(call)
    return answer


def position(d: SnapshotDriver) -> DataPosition:
    """Return the position of the data set in the newest snapshot."""
    newest = d.cluster.snapshots.catalog.newest
    (state,) = newest.manifest.datasets
    return state.position


def reading_run(workers: int = 1, **settings: Any) -> tuple[SnapshotDriver, list[Member]]:
    """A run that reads data."""
    d = SnapshotDriver(workers_min=workers, **settings)
    members = d.begin(2, workers)
    d.go_on()
    for worker in members:
        d.on(ev.OpenDataset(d.number(), caller(worker), DATA))
    return d, members
