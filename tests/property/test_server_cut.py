"""Snapshot cuts in SSP and ASP under any interleaving of pushes, marks, updates, copies and writes.

The oracle counts one by one: the copy of a slice must contain every push before the cut exactly once, and nothing
else. Every push is applied exactly once in the end, whether or not the attempt succeeded.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psdist.consistency import ASP
from psdist.types import ParametersMember
from psdist_server.core.cut_state import CopyBudget, CutState
from psdist_server.core.role_changes import make_shard
from psdist_server.core.shard import Apply, CutArmed, CutEnded, Effect, Reply, SliceApplied, SliceCut, SlicePushed

SLICES, WORKERS = 2, 2
#: Push of a worker.
Push = tuple[int, int]


class Server(RuleBasedStateMachine):
    """One shard, workers that push, and snapshot attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.members = [ParametersMember(f"worker-{rank}", 1, rank) for rank in range(WORKERS)]
        self.shard = make_shard(range(SLICES), self.members, ASP(), False)
        self.tokens = count(1)
        self.pushed: dict[int, SlicePushed] = {}
        #: Number and mark of each worker's push, and its unsent slices.
        self.number, self.mark = [0] * WORKERS, [0] * WORKERS
        self.unsent = [set(range(SLICES)) for _ in range(WORKERS)]
        self.unanswered = [set(range(SLICES)) for _ in range(WORKERS)]
        #: Mark that each worker received last.
        self.heard = [0] * WORKERS
        self.content: list[Counter[Push]] = [Counter() for _ in range(SLICES)]
        #: Requested updates, and those that wait for the cut.
        self.asked: dict[int, Apply] = {}
        self.attempt = 0
        self.cut: CutState | None = None
        self.budget = CopyBudget(1)
        self.following: dict[int, int] = {}
        self.copies: dict[int, Counter[Push]] = {}

    # --- the service --------------------------------------------------------------------------------------------------

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                assert effect.index not in self.asked
                self.asked[effect.index] = effect
            elif isinstance(effect, Reply):
                event = self.pushed[effect.token]
                worker = int(event.worker_id[-1])
                assert self.content[event.index][worker, event.step] == 1, "answered before it was applied"
                if event.step == self.number[worker]:
                    self.unanswered[worker].discard(event.index)

    def push(self, worker: int, index: int) -> None:
        event = SlicePushed(
            next(self.tokens), index, f"worker-{worker}", 1, self.number[worker], mark=self.mark[worker]
        )
        self.pushed[event.token] = event
        self.unsent[worker].discard(index)
        self.carry_out(self.shard.on(event))

    def look(self, indices: list[int]) -> None:
        for index in indices:
            if self.cut is not None and self.cut.check(index, self.shard.record(index)):
                self.carry_out(self.shard.on(SliceCut(index)))

    @rule(worker=st.integers(0, WORKERS - 1), data=st.data())
    def push_some(self, worker: int, data: st.DataObject) -> None:
        """Send some unsent slices, or a repetition; start the next push once all slices of this one are answered."""
        if not self.unanswered[worker]:
            self.number[worker] += 1
            self.mark[worker] = self.heard[worker]
            self.unsent[worker], self.unanswered[worker] = set(range(SLICES)), set(range(SLICES))
        left = sorted(self.unsent[worker]) or list(range(SLICES))
        for index in left[: data.draw(st.integers(1, len(left)))]:
            self.push(worker, index)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        for index in data.draw(st.lists(st.sampled_from(sorted(self.asked)), min_size=1, unique=True)):
            self.update_one(index)

    def update_one(self, index: int) -> None:
        if self.cut is not None and self.cut.blocks_update(index):
            return
        if self.cut is not None and not self.cut.is_safe(index):
            self.cut.copy_for_update(index)
            self.copy(index)
        at_cut = self.cut is not None and index in self.cut.versions
        assert not at_cut or index in self.copies, "a slice of the snapshot was changed before it was copied"
        effect = self.asked.pop(index)
        ((worker_id, _),) = effect.contributors
        assert effect.sequence is not None
        self.content[index][int(worker_id[-1]), effect.sequence] += 1
        effects = self.shard.on(SliceApplied(index))
        self.look([index])
        self.carry_out(effects)

    def copy(self, index: int) -> None:
        assert self.cut is not None
        assert index not in self.copies, "copied twice"
        self.copies[index] = Counter(self.content[index])
        wanted = {(worker, number) for worker, following in self.following.items() for number in range(following)}
        assert self.copies[index] == Counter(wanted), "a copy differs from the slice at the cut"
        self.cut.copy_finished(index)

    # --- an attempt ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.cut is None)
    @rule()
    def prepare(self) -> None:
        self.attempt += 1
        self.cut, self.following, self.copies = CutState(None, dict.fromkeys(range(SLICES), 1), self.budget), {}, {}
        self.carry_out(self.shard.on(CutArmed(self.attempt)))

    @precondition(lambda self: self.cut is not None and len(self.following) < WORKERS)
    @rule(data=st.data())
    def mark_worker(self, data: st.DataObject) -> None:
        """Mark a worker. A push in progress counts as before the mark, even if no slice of it was sent."""
        for worker in set(data.draw(st.sampled_from([[0], [1], [0, 1]]))) - self.following.keys():
            self.heard[worker] = self.attempt
            self.following[worker] = self.number[worker] + 1

    @precondition(lambda self: self.cut is not None and len(self.following) == WORKERS and not self.cut.following)
    @rule()
    def agree(self) -> None:
        assert self.cut is not None
        self.cut.agree({(f"worker-{worker}", 1): number for worker, number in self.following.items()})
        self.look([index for index in range(SLICES) if index not in self.asked])

    @precondition(lambda self: self.cut is not None and self.cut.versions)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        assert self.cut is not None
        index = data.draw(st.sampled_from(sorted(self.cut.versions)))
        if self.cut.needs_copy(index):
            self.cut.copy_for_writer(index)
            self.copy(index)
        if index in self.cut.copied:
            self.cut.written(index)

    @precondition(lambda self: self.cut is not None)
    @rule(anyway=st.integers(0, 9))
    def end(self, anyway: int) -> None:
        assert self.cut is not None
        if not anyway or self.cut.done >= set(range(SLICES)):
            self.cut.drop(range(SLICES))
            self.cut = None
            self.carry_out(self.shard.on(CutEnded()))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def is_sound(self) -> None:
        self.shard.validate()
        if self.cut is not None:
            self.cut.validate()
        assert self.budget.used <= self.budget.limit
        assert self.cut is not None or self.budget.used == 0

    @invariant()
    def nothing_is_applied_twice(self) -> None:
        assert all(number == 1 for content in self.content for number in content.values())

    def teardown(self) -> None:
        """Release everything that is held back. Every push completes then."""
        if self.cut is not None:
            self.end(0)
        for worker in range(WORKERS):
            for index in sorted(self.unsent[worker]):
                self.push(worker, index)
        while self.asked:
            self.drain()
        assert all(not left for left in self.unanswered), "a push was lost"

    def drain(self) -> None:
        index = min(self.asked)
        effect = self.asked.pop(index)
        assert effect.sequence is not None
        self.content[index][int(effect.contributors[0][0][-1]), effect.sequence] += 1
        self.carry_out(self.shard.on(SliceApplied(index)))


TestServer = Server.TestCase
TestServer.settings = settings(stateful_step_count=60)
