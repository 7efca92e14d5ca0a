"""Leases under any order of requests, shutdowns, deaths, restarts and positions: no range is skipped or counted twice.

A model records for each place which incarnation of a worker holds it, how often it was reported done, and how many of
its holders were lost. All answers of the machine (positions, counts, attempts) must follow from that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.data import DistributedSampler, RangeOrder
from psdist.errors import PsdistError
from psdist.types import DataPosition, DatasetSpec
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import Member
from tests.support.scheduler_driver import Driver, caller

NAME = "train"


class Leasing:
    """Workers lease, use, return, die and come back; the scheduler restarts, positions are read and set."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        size, range_size, epochs, retries = (rng.randint(*b) for b in ((1, 12), (1, 4), (1, 3), (0, 2)))
        self.spec = DatasetSpec(NAME, size, range_size, data_epochs=epochs, retries_max=retries)
        self.driver = Driver()
        self.workers: list[Member] = []
        self.sessions: dict[str, int] = {}
        #: By lease id: incarnation of the holder, place, attempt.
        self.out: dict[int, tuple[Member, int, int]] = {}
        self.ended: list[int] = []
        self.kept: list[tuple[DataPosition, set[int]]] = []
        self._begin(set(), 0, 0)
        self.worker()
        assert isinstance(self._ask(ev.OpenDataset, self.workers[0], self.spec), ef.DatasetStanding)

    def step(self) -> None:
        """Do one thing."""
        steps: dict[Callable[[], None], float] = {
            self.lease: 12,
            self.end: 6,
            self.worker: 3,
            self.die: 2,
            self.restart: 1,
            self.read_position: 2,
        }
        steps |= {self.set_position: 0.5, self.report_what_is_not_held: 2, self.speak_for_an_earlier_life: 1}
        self.rng.choices(list(steps), list(steps.values()))[0]()

    def _begin(self, over: set[int], repeated: int, failed: int) -> None:
        self.over = over
        self.done: Counter[int] = Counter()
        self.deaths: Counter[int] = Counter()
        self.repeated, self.failed = repeated, failed

    # --- workers ------------------------------------------------------------------------------------------------------

    def worker(self) -> None:
        if len(self.workers) == 4:
            return
        member, session = self.driver.join()
        self.workers.append(member)
        self.sessions[member.member_id] = session

    def die(self) -> None:
        if len(self.workers) < 2:
            return
        member = self.rng.choice(self.workers)
        self.workers.remove(member)
        session = self.sessions.pop(member.member_id)
        for lease_id, (holder, place, attempt) in list(self.out.items()):
            if holder == member:
                self._lose(lease_id, place, attempt)
        if self.rng.random() < 0.3:
            self._ask(ev.Leave, member)
        else:
            self.driver.on(ev.SessionClosed(session, "its session broke"))

    def _lose(self, lease_id: int, place: int, attempt: int) -> None:
        del self.out[lease_id]
        self.ended.append(lease_id)
        self.deaths[place] += 1
        if self.deaths[place] > self.spec.retries_max:
            self.failed += 1
            self.over.add(place)

    # --- ranges -------------------------------------------------------------------------------------------------------

    def lease(self) -> None:
        """Request a range.

        done: the worker has used the range that it holds.
        forgets: the worker never received its newest lease.
        """
        member = self.rng.choice(self.workers)
        done, forgets = self.rng.random() < 0.6, self.rng.random() < 0.4
        mine = [lease_id for lease_id, (holder, _, _) in self.out.items() if holder == member]
        lost = mine[-1:] if forgets and not done else []
        known = tuple(lease_id for lease_id in mine if lease_id not in lost)
        given = self._ask(ev.LeaseRange, member, NAME, known if done else (), held=() if done else known)
        if done:
            self._finish(known)
        assert isinstance(given, ef.RangeGiven)
        if given.lease is None:
            assert not lost
            assert len(self.over) + len(self.out) == self.spec.places, "the end, with ranges left"
        elif lost:
            assert given.lease.lease_id == lost[0], "a lease that its holder does not know of"
        else:
            self._given(member, given)
        assert (given.repeated_ranges, given.failed_ranges) == (self.repeated, self.failed)

    def _given(self, member: Member, given: ef.RangeGiven) -> None:
        lease = given.lease
        assert lease is not None
        taken = self.over | {place for _, place, _ in self.out.values()}
        assert lease.place == min(set(range(self.spec.places)) - taken), "not the lowest that is free"
        assert divmod(lease.place, self.spec.ranges) == (given.data_epoch, given.range)
        assert lease.lease_id not in self.ended and lease.lease_id not in self.out
        assert lease.attempt == self.deaths[lease.place]
        self.repeated += lease.attempt > 0
        self.out[lease.lease_id] = (member, lease.place, lease.attempt)

    def _finish(self, ids: tuple[int, ...]) -> None:
        for lease_id in ids:
            _, place, _ = self.out.pop(lease_id)
            self.ended.append(lease_id)
            self.done[place] += 1
            self.over.add(place)

    def end(self) -> None:
        if not self.out:
            return
        lease_id, used, in_part = self.rng.choice(sorted(self.out)), self.rng.random() < 0.5, self.rng.random() < 0.5
        member, _, attempt = self.out[lease_id]
        done, returned = ((lease_id,), ()) if used else ((), (lease_id,))
        for _ in range(2):  # A report may arrive twice.
            end = self._ask(ev.EndRanges, member, NAME, done, returned=returned, used=returned * in_part)
            assert isinstance(end, ef.Done)
        if used:
            self._finish(done)
        else:
            del self.out[lease_id]
            self.ended.append(lease_id)
            self.repeated += in_part - (attempt > 0)

    def report_what_is_not_held(self) -> None:
        """Reports of others' leases are rejected. Reports of leases that ended, or never existed, change nothing."""
        if not self.out and not self.ended:
            return
        member = self.rng.choice(self.workers)
        lease_id = self.rng.choice([*self.out, *self.ended, max([*self.out, *self.ended]) + 1])
        if lease_id in self.out and self.out[lease_id][0] == member:
            return
        answer = self._ask(ev.EndRanges, member, NAME, (lease_id,))
        assert isinstance(answer, ef.Done if lease_id in self.ended else PsdistError)

    def speak_for_an_earlier_life(self) -> None:
        if not self.out:
            return
        member, _, _ = self.out[self.rng.choice(sorted(self.out))]
        stale = ev.Caller("run", member.member_id, member.incarnation - 1)
        call = self.driver.number()
        self.driver.on(ev.EndRanges(call, stale, NAME, tuple(self.out)))
        assert isinstance(self.driver.state(call), PsdistError)

    # --- scheduler and positions --------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Restart with durable state only. Known workers keep their leases until the grace period ends."""
        self.driver = Driver(self.driver.stored, now=self.driver.now)
        self.sessions = {member.member_id: self.driver.open(member) for member in self.workers}

    def read_position(self) -> None:
        standing = self._standing()
        assert (standing.spec, standing.leased) == (self.spec, len(self.out))
        self.kept.append((standing.position, set(self.over)))

    def set_position(self) -> None:
        if not self.kept:
            return
        position, over = self.rng.choice(self.kept)
        assert isinstance(self._ask(ev.SetPosition, self.workers[0], NAME, position), ef.Done)
        self.ended += self.out
        self.out.clear()
        self._begin(set(over), position.repeated_ranges, position.failed_ranges)

    def finish(self) -> None:
        """Let all other workers die; one worker uses the remaining ranges."""
        while len(self.workers) > 1:
            member = self.workers.pop()
            for lease_id, (holder, place, attempt) in list(self.out.items()):
                if holder == member:
                    self._lose(lease_id, place, attempt)
            self.driver.on(ev.SessionClosed(self.sessions[member.member_id], "its session broke"))
        held = tuple(self.out)
        while (given := self._ask(ev.LeaseRange, self.workers[0], NAME, held)).lease is not None:
            self._finish(held)
            self._given(self.workers[0], given)
            held = (given.lease.lease_id,)
        self._finish(held)
        assert self.over == set(range(self.spec.places)), "a range was left out"
        assert all(self.done[place] == 1 for place in self.done), "a range was done twice"
        end = self._standing().position
        assert end == DataPosition(self.spec.data_epochs, (), self.repeated, self.failed)

    # --- inner --------------------------------------------------------------------------------------------------------

    def _ask(self, kind: Any, member: Member, *values: Any, **named: Any) -> Any:
        call = self.driver.number()
        self.driver.on(kind(call, caller(member), *values, **named))
        return self.driver.state(call)

    def _standing(self) -> ef.DatasetStanding:
        call = self.driver.number()
        self.driver.on(ev.GetPosition(call, "", NAME))
        standing = self.driver.state(call)
        assert isinstance(standing, ef.DatasetStanding)
        self._check(standing.position)
        return standing

    def _check(self, position: DataPosition) -> None:
        """Check that a position lists exactly the finished ranges, in its unique shortest form."""
        base = position.data_epoch * self.spec.ranges
        over = set(range(base))
        for first, count in position.done:
            over |= set(range(base + first, base + first + count))
        assert over == self.over
        ends = [first + count for first, count in position.done]
        assert all(count > 0 for _, count in position.done)
        assert all(end < first for end, (first, _) in zip(ends, position.done[1:], strict=False))
        assert (
            position.data_epoch == self.spec.data_epochs
            or not position.done
            or ends[0] < self.spec.ranges
            or (position.done[0][0] > 0)
        )


@pytest.mark.parametrize("seed", range(8))
def test_no_range_is_left_out_or_counted_twice(seed: int) -> None:
    for number in range(40):
        leasing = Leasing(random.Random(f"{seed}.{number}"))
        for _ in range(leasing.rng.randint(5, 80)):
            leasing.step()
        leasing.finish()


@given(
    size=st.integers(1, 200),
    range_size=st.integers(1, 60),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    data_epoch=st.integers(0, 5),
)
def test_ranges_are_stretches_of_the_order_that_a_sampler_deals(
    size: int, range_size: int, shuffle: bool, seed: int, data_epoch: int
) -> None:
    spec = DatasetSpec(NAME, size, range_size, shuffle, seed)
    order = RangeOrder(spec)
    ranges = [order.indices(data_epoch, number).tolist() for number in range(spec.ranges)]
    assert all(len(indices) == range_size for indices in ranges[:-1]) and 1 <= len(ranges[-1]) <= range_size
    sampler = DistributedSampler(size, 1, 0, shuffle, seed)
    sampler.set_epoch(data_epoch)
    assert [index for indices in ranges for index in indices] == list(sampler)
