"""Shard machines under any interleaving: repeated pushes, slow kernels, expelled and returning workers.

The oracle counts contributions: each is recorded when an ``Apply`` uses it. At the end each must have been used
exactly once (0 is lost, 2 is applied twice), every token answered at most once, and every payload used or released. A
copy that receives each update like a replica has the machine's own record of every idle slice.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.types import ParametersMember
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.role_changes import make_shard
from psdist_server.core.shard import (
    Apply,
    Effect,
    Forget,
    JoinProposed,
    MembersChanged,
    RefuseSlice,
    Reply,
    SliceApplied,
    SlicePushed,
    SliceRecord,
)

SLICES = 3
WORKERS = 3
STALENESS = 1


class Cluster(RuleBasedStateMachine):
    """One shard, and workers that push step after step, each slice when the machine allows it."""

    consistency: Consistency = BSP()

    def __init__(self) -> None:
        super().__init__()
        self.members = {rank: ParametersMember(f"worker-{rank}", 1, rank) for rank in range(WORKERS)}
        #: Ranks that are expelled.
        self.expelled: set[int] = set()
        self.shard = make_shard(range(SLICES), self.members.values(), self.consistency, False)
        self.tokens = count()
        self.pushed: dict[int, SlicePushed] = {}
        self.producers: dict[int, tuple[str, int]] = {}
        self.used: Counter[tuple[tuple[str, int], int, int]] = Counter()
        self.answered: Counter[int] = Counter()
        self.step = dict.fromkeys(range(WORKERS), 0)
        self.sent: dict[int, set[int]] = {rank: set() for rank in range(WORKERS)}
        self.acknowledged: dict[int, set[int]] = {rank: set() for rank in range(WORKERS)}
        self.applying: dict[int, Apply] = {}
        self.held: set[int] = set()
        self.copy = {index: SliceRecord() for index in range(SLICES)}

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Apply(index, step, parts):
                    assert index not in self.applying, "two updates of one slice at the same time"
                    assert step == self.shard.slices[index].version
                    self.applying[index] = effect
                    self.use(index, step, parts)
                case Reply(token, index, _, ignored):
                    self.answer(token, index, ignored)
                case RefuseSlice(_, error):
                    raise AssertionError(error)
                case Forget(token):
                    self.held.remove(token)

    def use(self, index: int, step: int, parts: tuple[int, ...]) -> None:
        events = [self.pushed[token] for token in parts]
        ranks = [int(event.worker_id[-1]) for event in events]
        assert ranks == sorted(ranks), "not in rank order"
        for event in events:
            assert event.index == index
            self.used[self.producers[event.token], event.step, index] += 1
            if isinstance(self.consistency, BSP):
                assert event.step == step

    def answer(self, token: int, index: int, ignored: bool) -> None:
        self.answered[token] += 1
        assert self.answered[token] == 1, "answered twice"
        event = self.pushed[token]
        producer = self.producers[token]
        assert self.used[producer, event.step, index] == 1, "acknowledged what was not applied"
        rank = int(event.worker_id[-1])
        if (producer, event.step) == (self.members[rank].producer, self.step[rank]):
            self.acknowledged[rank].add(index)
        if len(self.acknowledged[rank]) == SLICES:
            self.step[rank] += 1
            self.sent[rank], self.acknowledged[rank] = set(), set()

    def push(self, rank: int, index: int) -> None:
        if isinstance(self.shard, BspShard) and self.shard.slices[index].step < self.step[rank]:
            return  # A joining worker pulls first, and that waits.
        token, member = next(self.tokens), self.members[rank]
        event = SlicePushed(token, index, member.worker_id, member.incarnation, self.step[rank])
        self.pushed[token], self.producers[token] = event, member.producer
        self.held.add(token)
        self.sent[rank].add(index)
        self.carry_out(self.shard.on(event))

    @rule(rank=st.integers(0, WORKERS - 1), index=st.integers(0, SLICES - 1))
    def push_or_repeat(self, rank: int, index: int) -> None:
        if rank not in self.expelled:
            self.push(rank, index)

    @precondition(lambda self: self.applying)
    @rule(data=st.data())
    def finish_an_update(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.applying))))

    def finish(self, index: int) -> None:
        effect = self.applying.pop(index)
        self.held -= set(effect.parts)
        self.copy[index].advance(effect.contributors, effect.sequence)
        self.carry_out(self.shard.on(SliceApplied(index)))

    @precondition(lambda self: not isinstance(self.consistency, BSP))
    @rule(rank=st.integers(0, WORKERS - 1))
    def die_and_come_back(self, rank: int) -> None:
        self.begin_anew(rank, self.shard.step_next)
        self.change_members()

    def begin_anew(self, rank: int, first_step: int) -> None:
        """Let the worker take part again without its earlier pushes."""
        old = self.members[rank]
        self.expelled.discard(rank)
        self.members[rank] = ParametersMember(old.worker_id, old.incarnation + 1, rank, first_step)
        self.step[rank] = first_step if isinstance(self.consistency, BSP) else 0
        self.sent[rank], self.acknowledged[rank] = set(), set()

    def change_members(self) -> None:
        live = tuple(member for rank, member in self.members.items() if rank not in self.expelled)
        departed = () if isinstance(self.consistency, BSP) else tuple(self.members[rank] for rank in self.expelled)
        self.carry_out(self.shard.on(MembersChanged(live, departed)))

    @rule(rank=st.integers(0, WORKERS - 1))
    def expel(self, rank: int) -> None:
        if rank not in self.expelled:
            self.expelled.add(rank)
            self.change_members()

    @precondition(lambda self: self.expelled)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self.rejoin(data.draw(st.sampled_from(sorted(self.expelled))))

    def rejoin(self, rank: int) -> None:
        """Return an expelled worker. It continues its push if allowed, else starts later, in BSP at an agreed step."""
        old, step = self.members[rank], self.step[rank]
        again = replace(
            old,
            incarnation=old.incarnation + 1,
            first_step=step if isinstance(self.consistency, BSP) else self.shard.step_next,
            origin=old.producer[1],
            first_push=step,
        )
        if isinstance(self.consistency, BSP):
            if not self.shard.admits(again):
                self.begin_anew(rank, self.shard.step_next + 1)
                again = self.members[rank]
            self.carry_out(self.shard.on(JoinProposed(again)))
        self.expelled.discard(rank)
        self.members[rank] = again
        self.change_members()

    @invariant()
    def machine_is_sound(self) -> None:
        self.shard.validate()

    @invariant()
    def a_copy_has_the_same_record(self) -> None:
        producers = {member.producer for member in self.members.values()}
        for index in self.copy.keys() - self.applying.keys():
            known = deepcopy(self.copy[index])
            known.producers = {key: number for key, number in known.producers.items() if key in producers}
            assert self.shard.record(index) == known

    @invariant()
    def nothing_is_applied_twice(self) -> None:
        assert max(self.used.values(), default=1) == 1

    @invariant()
    def ssp_bound_holds(self) -> None:
        if isinstance(self.consistency, SSP) and all(member.incarnation == 1 for member in self.members.values()):
            assert max(self.step.values()) - min(self.step.values()) <= STALENESS + 1

    def teardown(self) -> None:
        """Complete everything that was started. Then nothing may be missing."""
        for rank in sorted(self.expelled):
            self.rejoin(rank)
        for _ in range(400):
            clocks = self.clocks()
            for rank in range(WORKERS):
                if clocks[rank] == min(clocks.values()):
                    for index in sorted(set(range(SLICES)) - self.acknowledged[rank]):
                        self.push(rank, index)
            for index in sorted(self.applying):
                self.finish(index)
            if not self.applying and len(set(self.clocks().values())) == 1 and not any(self.sent.values()):
                assert not self.held, f"payloads that nobody will use: {self.held}"
                return
        raise AssertionError(f"no progress: {self.step}, {self.clocks()}, waiting {self.shard}")

    def clocks(self) -> dict[int, int]:
        """Return the clocks that the shard compares, by rank: a returned worker counts its pushes from a new clock."""
        if isinstance(self.shard, BspShard):
            return self.step
        return {rank: member.first_step + self.step[rank] - member.first_push for rank, member in self.members.items()}


class BspCluster(Cluster):
    consistency = BSP()


class SspCluster(Cluster):
    consistency = SSP(STALENESS)


class AspCluster(Cluster):
    consistency = ASP()


SETTINGS = settings(stateful_step_count=60)
TestBsp = BspCluster.TestCase
TestBsp.settings = SETTINGS
TestSsp = SspCluster.TestCase
TestSsp.settings = SETTINGS
TestAsp = AspCluster.TestCase
TestAsp.settings = SETTINGS
