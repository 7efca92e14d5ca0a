"""Data sets in the scheduler's machine: what is asked, what is answered, what is refused, what survives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psdist import errors
from psdist.types import DATA_EPOCHS_MAX, RANGES_MAX, DataPosition, DatasetSpec
from psdist.wire.limits import DATASETS_MAX, LEASES_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import DataLease, DatasetRecord, Member
from psdist_scheduler.run_store import SqliteStore
from tests.support.scheduler_driver import Driver, caller

SPEC = DatasetSpec("train", 100, 10, data_epochs=2, retries_max=1)


class Desk:
    """A run with two workers and a data set."""

    def __init__(self, spec: DatasetSpec = SPEC) -> None:
        self.driver = Driver()
        (self.first, self.session), (self.second, self.other_session) = self.driver.join(), self.driver.join()
        assert isinstance(self.ask(ev.OpenDataset, self.first, spec), ef.DatasetStanding)

    def ask(self, kind: Any, member: Member, *values: Any, **named: Any) -> Any:
        """A request's answer, or how it was refused."""
        call = self.driver.number()
        self.driver.on(kind(call, caller(member), *values, **named))
        return self.driver.state(call)

    def lease(self, member: Member, done: tuple[int, ...] = (), held: tuple[int, ...] = ()) -> Any:
        """Asks for a range."""
        return self.ask(ev.LeaseRange, member, "train", done, held=held)

    @property
    def standing(self) -> ef.DatasetStanding:
        """Return the position of the data set."""
        (standing,) = self.driver.cluster.datasets.standings
        return standing

    def kill(self) -> None:
        """The first worker's session breaks."""
        self.driver.on(ev.SessionClosed(self.session, "its session broke"))


def test_a_change_of_data_alone_makes_no_epoch() -> None:
    desk = Desk()
    epoch = desk.driver.cluster.epoch
    given = desk.lease(desk.first)
    assert desk.driver.cluster.epoch == epoch
    assert list(desk.driver.stored.datasets[0].leases) == [given.lease]
    desk.kill()
    assert desk.driver.cluster.epoch == epoch + 1
    assert not desk.driver.stored.datasets[0].leases


def test_the_next_data_epoch_begins_while_the_last_range_of_this_one_is_out() -> None:
    desk = Desk()
    slow = desk.lease(desk.second)
    held: tuple[int, ...] = ()
    for _ in range(10):
        given = desk.lease(desk.first, held)
        held = (given.lease.lease_id,)
    assert (given.data_epoch, given.range) == (1, 0)
    assert desk.standing.position == DataPosition(0, ((1, 9),))
    desk.lease(desk.first, held)
    assert desk.standing.position == DataPosition(0, ((1, 10),))
    desk.lease(desk.second, (slow.lease.lease_id,))
    assert desk.standing.position == DataPosition(1, ((0, 1),))


def test_at_the_end_nobody_waits_for_those_who_still_hold_ranges() -> None:
    desk = Desk(replace(SPEC, size=20, data_epochs=1))
    slow, fast = desk.lease(desk.first), desk.lease(desk.second)
    assert desk.lease(desk.second, (fast.lease.lease_id,)).lease is None
    assert desk.standing.leased == 1
    desk.kill()
    again = desk.lease(desk.second)
    assert (again.lease.place, again.lease.attempt, again.repeated_ranges) == (slow.lease.place, 1, 1)
    assert desk.lease(desk.second, (again.lease.lease_id,)).lease is None
    assert desk.standing.position == DataPosition(1, (), 1, 0)
    assert "data set 'train' is finished: 1 ranges handed out again, 0 given up" in desk.driver.notes


def test_a_range_is_given_up_when_its_workers_died_too_often() -> None:
    desk = Desk()
    for attempt in range(2):
        assert desk.lease(desk.first).lease.attempt == attempt
        desk.kill()
        desk.first, desk.session = desk.driver.join()
    assert desk.lease(desk.first).lease.place == 1
    assert desk.standing.position == DataPosition(0, ((0, 1),), 1, 1)
    assert "data set 'train': 1 range of worker-0 given up, after 2 workers were lost with each" in desk.driver.notes


def test_who_did_not_hear_of_its_lease_is_given_it_again() -> None:
    desk = Desk()
    lost = desk.lease(desk.first)
    assert desk.lease(desk.first).lease == lost.lease
    known = (lost.lease.lease_id,)
    assert desk.lease(desk.first, held=known).lease.place == 1
    assert desk.lease(desk.first, held=known).lease.place == 1
    # The same for what was reported as done together with it.
    assert desk.lease(desk.first, done=known).lease.place == 1
    assert desk.lease(desk.first, done=known).lease.place == 1
    assert desk.standing.position == DataPosition(0, ((0, 1),))


def test_the_word_of_an_earlier_life_does_not_count() -> None:
    desk = Desk()
    given = desk.lease(desk.first)
    desk.kill()
    assert isinstance(desk.lease(desk.first, (given.lease.lease_id,)), errors.FencedError)
    again = desk.lease(desk.second)
    assert again.lease.place == given.lease.place
    desk.first, _ = desk.driver.join()
    assert isinstance(desk.lease(desk.first, (again.lease.lease_id,)), errors.FencedError)
    assert isinstance(desk.lease(desk.first, (given.lease.lease_id,)), ef.RangeGiven)
    assert desk.standing.position == DataPosition(0, (), 1, 0)


def test_holders_keep_their_leases_over_a_restart_of_the_scheduler() -> None:
    desk = Desk()
    first, second = desk.lease(desk.first), desk.lease(desk.second)
    desk.driver = Driver(desk.driver.stored, now=desk.driver.now)
    session = desk.driver.open(desk.first)
    assert desk.lease(desk.first, (first.lease.lease_id,)).lease.place == 2
    for _ in range(32):
        desk.driver.beat(session)
        desk.driver.tick(1.0)
    assert second.lease not in desk.driver.stored.datasets[0].leases, "who does not come back keeps nothing"
    assert desk.lease(desk.first, (3,)).lease.place == second.lease.place


def test_limits() -> None:
    desk = Desk(replace(SPEC, size=1000))
    held = tuple(desk.lease(desk.first, held=tuple(range(1, n + 1))).lease.lease_id for n in range(LEASES_MAX))
    assert isinstance(desk.lease(desk.first, held=held), errors.LimitExceededError)
    assert isinstance(desk.lease(desk.first, held[:1], held[1:]), ef.RangeGiven)
    for number in range(DATASETS_MAX - 1):
        assert isinstance(desk.ask(ev.OpenDataset, desk.first, replace(SPEC, name=f"d{number}")), ef.DatasetStanding)
    assert isinstance(desk.ask(ev.OpenDataset, desk.first, replace(SPEC, name="more")), errors.LimitExceededError)
    with pytest.raises(errors.LimitExceededError, match="use a larger range_size"):
        DatasetSpec("train", RANGES_MAX + 1, 1)


def test_refusals() -> None:
    desk = Desk()
    assert isinstance(desk.ask(ev.LeaseRange, desk.first, "test"), errors.UnknownDatasetError)
    refused = desk.ask(ev.OpenDataset, desk.second, replace(SPEC, seed=4))
    assert isinstance(refused, errors.SettingsMismatchError) and "seed is 4, not 0" in str(refused)
    never = desk.ask(ev.EndRanges, desk.first, "train", (1,))
    assert isinstance(never, errors.InvalidArgumentError) and "never given" in str(never)
    for position in (DataPosition(3), DataPosition(2, ((0, 1),)), DataPosition(0, ((3, 1), (2, 1)))):
        assert isinstance(desk.ask(ev.SetPosition, desk.first, "train", position), errors.InvalidArgumentError)
    call = desk.driver.number()
    desk.driver.on(ev.GetPosition(call, "another", "train"))
    assert isinstance(desk.driver.state(call), errors.WrongRunError)


def test_data_that_goes_on_for_ever() -> None:
    desk = Desk(replace(SPEC, data_epochs=0))
    far = DataPosition(DATA_EPOCHS_MAX - 1, ((0, 9),))
    assert isinstance(desk.ask(ev.SetPosition, desk.first, "train", far), ef.Done)
    given = desk.lease(desk.first)
    assert (given.data_epoch, given.range) == (DATA_EPOCHS_MAX - 1, 9)


def test_the_store_keeps_data_sets(tmp_path: Path) -> None:
    leases = (DataLease(4, 7, "worker-1", 2, 1), DataLease(9, 12, "worker-0", 1))
    record = DatasetRecord(SPEC, ((3, 5), (13, 20)), leases, ((3, 2),), repeated=2, failed=1, given=9)
    store = SqliteStore(tmp_path / "s", "run")
    store.write(
        ef.Persist(1, datasets=(DatasetRecord(SPEC, ((0, 20),)), replace(record, spec=replace(SPEC, name="b"))))
    )
    store.write(ef.Persist(1, datasets=(record,)))
    store.close()
    store = SqliteStore(tmp_path / "s", "run")
    stored = store.load()
    assert stored is not None and stored.epoch == 1
    assert stored.datasets == (record, replace(record, spec=replace(SPEC, name="b")))
    store.close()
