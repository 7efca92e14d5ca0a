"""The scheduler's machine and its storage under any order of events.

Servers are lost; workers come, go and use data; the storage commits, fails, or loses its answers; the scheduler
restarts. Placed parameters always begin from the newest snapshot that the storage has at that moment, and nothing is
permanently lost once it has one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psdist.errors import PsdistError
from psdist.types import DatasetSpec
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_state import Member
from psdist_scheduler.decide.losses import PATIENCE_SECONDS
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import SnapshotDriver, commit_of

SERVERS = 2
WORKERS = 2
MEMBERS = (*(f"server-{number}" for number in range(SERVERS)), *(f"worker-{rank}" for rank in range(WORKERS)))
DATA = DatasetSpec("train", size=100, range_size=10, shuffle=False)
Outcome = Literal["done", "refused", "answer lost", "request lost"]
OUTCOMES: tuple[Outcome, ...] = ("done", "refused", "answer lost", "request lost")


class Storage:
    """Content of the storage, and the part that the current scheduler does not know of."""

    def __init__(self) -> None:
        self.found: dict[int, sn.CommitFound] = {}
        self.unsure: set[int] = set()

    @property
    def newest(self) -> str:
        return self.found[max(self.found)].commit.directory if self.found else ""

    def history(self, base: str = "") -> sn.History:
        numbers = sorted(self.found, reverse=True)
        wanted = [f for f in self.found.values() if f.commit.directory == base]
        return sn.History(
            tuple(self.found[number].commit for number in numbers),
            max(numbers, default=0),
            self.found[numbers[0]] if numbers else None,
            base=wanted[0] if wanted else None,
        )

    def create(self, work: sn.WriteCommit) -> sn.Committed:
        number = work.sequence
        while number in self.found:
            assert number in self.unsure, "the scheduler takes a number again"
            number += 1
        commit = commit_of(work.manifest, number)
        self.found[number] = sn.CommitFound(commit, work.manifest)
        return sn.Committed(work.attempt, commit, work.manifest)


class Run(RuleBasedStateMachine):
    """Run that only chance disturbs."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = Storage()
        self.d = SnapshotDriver(workers_min=WORKERS, servers_min=SERVERS, history=sn.History())
        self.d.storing = False
        self.placed: tuple[int, str] | None = None
        #: Time at which the storage received its pending work.
        self.since: float | None = None
        for number in range(SERVERS):
            self.d.join("server", member_id=f"server-{number}")
        for _ in range(WORKERS):
            self.come()
        (uploader,) = [w for w in self.d.cluster.members.workers if w.rank == 0]
        self.d.ask(ev.CommitParameters, uploader)
        self.train_and_save(1, "done")
        assert self.storage.found

    def look(self) -> None:
        """Answer everything except the storage's work, and check that parameters are placed from the right snapshot."""
        self.d.go_on()
        entry = self.d.map.entry("mlp")
        if entry is not None and (entry.generation, "") != self.placed:
            begun, base = self.placed, entry.restore.directory if entry.restore is not None else ""
            self.placed = (entry.generation, "")
            if begun is not None:
                assert base == self.storage.newest, f"begun from {base!r}, not from {self.storage.newest!r}"
        if not self.d.works:
            self.since = None
        elif self.since is None:
            self.since = self.d.now

    # --- training -----------------------------------------------------------------------------------------------------

    @rule(steps=st.integers(0, 2), outcome=st.none() | st.sampled_from(OUTCOMES))
    def train_and_save(self, steps: int, outcome: Outcome | None) -> None:
        """Train and save.

        outcome: result of the storage's work; None if it comes later.
        """
        entry = self.d.map.entry("mlp")
        if entry is not None and entry.ready:
            start = entry.members[0].first_step if entry.members else 0
            self.d.versions["mlp"] = max(self.d.versions.get("mlp", 0), start) + steps
            self.d.beat_versions()
        self.d.save()
        self.look()
        while outcome is not None and self.d.works:
            self.the_storage_does(outcome)

    @rule(rank=st.integers(0, WORKERS - 1))
    def use_data(self, rank: int) -> None:
        worker = self.worker(rank)
        if worker is not None and worker.live:
            self.d.on(ev.OpenDataset(self.d.number(), caller(worker), DATA))
            self.d.on(ev.LeaseRange(self.d.number(), caller(worker), "train", now=(("mlp", 0),)))

    # --- members ------------------------------------------------------------------------------------------------------

    def worker(self, rank: int) -> Member | None:
        return self.d.cluster.members.get(f"worker-{rank}")

    def come(self) -> None:
        """Start new incarnations of missing workers, and let all request the parameters."""
        for rank in range(WORKERS):
            worker = self.worker(rank)
            if worker is None or not worker.live:
                worker, _ = self.d.join(member_id=f"worker-{rank}")
            entry = self.d.map.entry("mlp")
            known = entry is not None and worker.member_id in [member.worker_id for member in entry.members]
            if not known:
                self.d.create(worker)

    @rule()
    def all_come(self) -> None:
        """Replace all missing processes by new ones."""
        for number in range(SERVERS):
            if not self.d.cluster.members.sessions.call_of(f"server-{number}"):
                with suppress(PsdistError):  # Its place is taken for now.
                    self.d.join("server", member_id=f"server-{number}")
        self.come()
        self.look()

    @rule(member_id=st.sampled_from(MEMBERS))
    def lose(self, member_id: str) -> None:
        if session := self.d.cluster.members.sessions.call_of(member_id):
            self.d.on(ev.SessionClosed(session, "its session broke"))
            self.look()

    @rule(number=st.integers(0, SERVERS - 1))
    def a_server_was_only_cut_off(self, number: int) -> None:
        member = self.d.cluster.members.get(f"server-{number}")
        if member is not None and member.live and not self.d.cluster.members.sessions.call_of(member.member_id):
            self.d.open(member)
            self.look()

    # --- the storage --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.d.works)
    @rule(outcome=st.sampled_from(OUTCOMES))
    def the_storage_does(self, outcome: Outcome) -> None:
        self.work(self.d.works.pop(0), outcome)
        self.since = None
        self.look()

    def work(self, work: Any, outcome: Outcome) -> None:
        match work:
            case sn.WriteCommit():
                self.commit(work, outcome)
            case sn.ReadHistory(base):
                known = outcome in ("done", "answer lost")
                self.d.on(sn.HistoryRead(self.storage.history(base) if known else None))
            case sn.Prune(commits):
                for commit in commits:
                    self.storage.found.pop(commit.sequence, None)
                self.d.on(sn.Pruned(tuple(commit.sequence for commit in commits)))

    def commit(self, work: sn.WriteCommit, outcome: Outcome) -> None:
        if outcome == "refused":
            self.d.on(sn.CommitFailed(work.attempt, "refused"))
            return
        if outcome == "request lost":
            self.storage.unsure.add(work.sequence)
            self.d.on(sn.CommitFailed(work.attempt, "no answer", unsure=True))
            return
        if work.sequence in self.storage.found:  # As ``snapshot_io`` does.
            self.d.on(sn.HistoryRead(self.storage.history()))
        committed = self.storage.create(work)
        if outcome == "done":
            self.d.on(committed)
        else:
            self.storage.unsure.add(committed.commit.sequence)
            self.d.on(sn.CommitFailed(work.attempt, "no answer", unsure=True))

    # --- time and the scheduler ---------------------------------------------------------------------------------------

    @rule(ticks=st.integers(1, 20))
    def time_passes(self, ticks: int) -> None:
        """Advance the time. The storage is never slower than the run's timeout."""
        for _ in range(ticks):
            while self.since is not None and self.d.now - self.since > PATIENCE_SECONDS / 4:
                self.the_storage_does("done")
            self.d.beat(*self.d.cluster.members.sessions.by_call)
            self.d.tick()
            self.look()

    @rule(created=st.booleans(), read=st.booleans())
    def the_scheduler_is_started_again(self, created: bool, read: bool) -> None:
        """Restart the scheduler.

        created: True if the commit that it had sent arrives.
        read: True if the storage can be read immediately.
        """
        under_way = next((work for work in self.d.works if isinstance(work, sn.WriteCommit)), None)
        if created and under_way is not None and under_way.sequence not in self.storage.found:
            self.storage.create(under_way)
        self.storage.unsure.clear()
        old, restore = self.d, self.d.stored.base.restore
        base = restore.directory if restore is not None else ""
        history = self.storage.history(base) if read else None
        self.d = SnapshotDriver(old.stored, old.now, history=history, workers_min=WORKERS, servers_min=SERVERS)
        self.d.storing, self.d.versions = False, dict(old.versions)
        self.since = None
        for member in (*old.cluster.members.servers, *old.cluster.members.workers):
            if old.cluster.members.sessions.call_of(member.member_id) and self.is_there(member):
                self.d.open(member)
        self.look()

    def is_there(self, member: Member) -> bool:
        return self.d.cluster.members.is_live(member.member_id, member.incarnation)

    @invariant()
    def nothing_is_lost_for_good(self) -> None:
        assert not (self.storage.found and self.d.shards_lost), self.d.shards_lost


class TestRun(Run.TestCase):
    settings = settings(stateful_step_count=60)
