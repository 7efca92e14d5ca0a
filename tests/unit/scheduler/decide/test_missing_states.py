"""The scheduler's machine where a worker has no state from before the cut, and later cuts may be impossible."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.snapshots.format import WorkerState
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_state import Member
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import DIGEST, SnapshotDriver


class JoinerDriver(SnapshotDriver):
    """Two workers at step 7 that save states of "mlp". The second one takes part from step 9 on, and has none before.

    asked: step of the cut in each request for marks.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        super().__init__()
        self.first, self.joiner = self.begin(workers=2)
        for worker in (self.first, self.joiner):
            self.on(sn.StatesAnnounced(self.cluster.members.sessions.call_of(worker.member_id), ("mlp",)))
        self.train(7)

    def obey(self, session: int, command: Any) -> bool:
        if not isinstance(command, sn.Mark):
            return super().obey(session, command)
        worker = self.cluster.members.get(self.cluster.members.sessions.by_call[session])
        assert worker is not None
        lowest, cut = 9 if worker == self.joiner else 0, dict(command.steps)["mlp"]
        self.asked.append(cut)
        self.on(sn.Marked(session, command.attempt, (("mlp", max(lowest, 7)),), (("mlp", lowest),)))
        if lowest <= cut:
            self._hand_in(worker, command.attempt, cut)
        return True

    def _hand_in(self, worker: Member, attempt: int, before: int) -> None:
        call = self.number()
        self.on(sn.StateOffered(call, caller(worker), attempt, "mlp", before, 100))
        if call not in self.errors:
            place = self.told[call][-1]
            state = WorkerState("mlp", place.rank, before, place.file, 100, DIGEST)
            self.on(sn.StateWritten(attempt, (worker.member_id, worker.incarnation), state))

    @property
    def saved_states(self) -> list[tuple[int, int]]:
        """Rank and next push of each worker's state in the newest snapshot."""
        newest = self.cluster.snapshots.catalog.newest
        assert newest is not None
        return [(state.rank, state.next) for state in newest.manifest.states]


@pytest.mark.parametrize("was_asked", [False, True])
def test_a_waiting_worker_is_served_without_the_state_of_one_that_joins_later(was_asked: bool) -> None:
    """The waiting worker's step is not made before it is answered, so no later cut is possible.

    was_asked: an attempt that nobody waited for has already looked for a cut that suits the joiner.
    """
    driver = JoinerDriver()
    calls = [driver.save()] if was_asked else []
    assert driver.asked == [7, 7, 9, 9][: 4 * was_asked]
    calls.append(driver.save(driver.first, mlp=8))
    driver.train(8)
    for call in calls:
        assert driver.saved(call).steps == {"mlp": 8}
    assert driver.saved_states == [(driver.first.rank, 8)]


def test_the_last_snapshot_is_without_the_state_of_a_worker_that_joins_later() -> None:
    driver = JoinerDriver()
    driver.cluster.snapshots.save_for_the_end({"mlp": 8})
    driver.tick()
    driver.train(8)
    driver.tick()
    driver.go_on()
    assert driver.steps == [{"mlp": 8}] and driver.saved_states == [(driver.first.rank, 8)]


def test_a_snapshot_that_nobody_waits_for_is_taken_where_all_states_exist() -> None:
    driver = JoinerDriver()
    call = driver.save()
    driver.train(9)
    assert driver.saved(call).steps == {"mlp": 9} and len(driver.saved_states) == 2
