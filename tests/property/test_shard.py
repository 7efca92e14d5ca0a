"""Shard machines under any interleaving: pushes repeated, kernels slow, workers leaving and coming back.

The oracle is one-hot counting: every contribution is noted when an ``Apply`` uses it, so at the end each must have
been used once (0 is lost, 2 is applied twice), every token answered at most once, and every payload used or forgotten.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.types import ParametersMember
from psdist_server.events import Apply, Effect, Forget, MembersChanged, Refuse, Reply, SliceApplied, SlicePushed
from psdist_server.shard import make_shard

SLICES = 3
WORKERS = 3
STALENESS = 1


class Cluster(RuleBasedStateMachine):
    """One shard, and workers that push step after step, each slice when the machine says so."""

    consistency: Consistency = BSP()

    def __init__(self) -> None:
        super().__init__()
        self.members = {rank: ParametersMember(f"worker-{rank}", 1, rank) for rank in range(WORKERS)}
        self.shard = make_shard(range(SLICES), self.members.values(), self.consistency, False)
        self.tokens = count()
        self.pushed: dict[int, SlicePushed] = {}
        self.used: Counter[tuple[str, int, int, int]] = Counter()
        self.answered: Counter[int] = Counter()
        self.step = dict.fromkeys(range(WORKERS), 0)
        self.sent: dict[int, set[int]] = {rank: set() for rank in range(WORKERS)}
        self.acknowledged: dict[int, set[int]] = {rank: set() for rank in range(WORKERS)}
        self.applying: dict[int, Apply] = {}
        self.held: set[int] = set()

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Apply(index, step, parts):
                    assert index not in self.applying, "two updates of one slice at once"
                    assert step == self.shard.slices[index].version
                    self.applying[index] = effect
                    self.use(index, step, parts)
                case Reply(token, index, _, ignored):
                    self.answer(token, index, ignored)
                case Refuse(_, error):
                    raise AssertionError(error)
                case Forget(token):
                    self.held.remove(token)

    def use(self, index: int, step: int, parts: tuple[int, ...]) -> None:
        events = [self.pushed[token] for token in parts]
        ranks = [int(event.worker_id[-1]) for event in events]
        assert ranks == sorted(ranks), "not in rank order"
        for event in events:
            assert event.index == index
            self.used[event.worker_id, event.incarnation, event.step, index] += 1
            if isinstance(self.consistency, BSP):
                assert event.step == step

    def answer(self, token: int, index: int, ignored: bool) -> None:
        self.answered[token] += 1
        assert self.answered[token] == 1, "answered twice"
        event = self.pushed[token]
        life = (event.worker_id, event.incarnation, event.step, index)
        assert self.used[life] == 1, "acknowledged what was not applied"
        rank = int(event.worker_id[-1])
        if (event.incarnation, event.step) == (self.members[rank].incarnation, self.step[rank]):
            self.acknowledged[rank].add(index)
        if len(self.acknowledged[rank]) == SLICES:
            self.step[rank] += 1
            self.sent[rank], self.acknowledged[rank] = set(), set()

    def push(self, rank: int, index: int) -> None:
        token, member = next(self.tokens), self.members[rank]
        event = SlicePushed(token, index, member.worker_id, member.incarnation, self.step[rank])
        self.pushed[token] = event
        self.held.add(token)
        self.sent[rank].add(index)
        self.carry_out(self.shard.on(event))

    @rule(rank=st.integers(0, WORKERS - 1), index=st.integers(0, SLICES - 1))
    def push_or_repeat(self, rank: int, index: int) -> None:
        self.push(rank, index)

    @precondition(lambda self: self.applying)
    @rule(data=st.data())
    def finish_an_update(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.applying)))
        self.held -= set(self.applying.pop(index).parts)
        self.carry_out(self.shard.on(SliceApplied(index)))

    @precondition(lambda self: not isinstance(self.consistency, BSP))
    @rule(rank=st.integers(0, WORKERS - 1))
    def die_and_come_back(self, rank: int) -> None:
        old = self.members[rank]
        self.members[rank] = ParametersMember(old.worker_id, old.incarnation + 1, rank, self.shard.step_next)
        self.step[rank], self.sent[rank], self.acknowledged[rank] = 0, set(), set()
        self.carry_out(self.shard.on(MembersChanged(tuple(self.members.values()))))

    @invariant()
    def machine_is_sound(self) -> None:
        self.shard.validate()

    @invariant()
    def nothing_is_applied_twice(self) -> None:
        assert max(self.used.values(), default=1) == 1

    @invariant()
    def ssp_bound_holds(self) -> None:
        if isinstance(self.consistency, SSP) and all(member.incarnation == 1 for member in self.members.values()):
            assert max(self.step.values()) - min(self.step.values()) <= STALENESS + 1

    def teardown(self) -> None:
        """Heal: whatever was begun is finished, and then nothing may be missing."""
        for _ in range(200):
            lagging = min(self.step.values())
            for rank in range(WORKERS):
                if self.step[rank] == lagging:
                    for index in sorted(set(range(SLICES)) - self.acknowledged[rank]):
                        self.push(rank, index)
            for index in sorted(self.applying):
                self.held -= set(self.applying.pop(index).parts)
                self.carry_out(self.shard.on(SliceApplied(index)))
            if not self.applying and len(set(self.step.values())) == 1 and not any(self.sent.values()):
                assert not self.held, f"payloads that nobody will use: {self.held}"
                return
        raise AssertionError(f"no progress: {self.step}, waiting {self.shard}")


class BspCluster(Cluster):
    consistency = BSP()


class SspCluster(Cluster):
    consistency = SSP(STALENESS)


class AspCluster(Cluster):
    consistency = ASP()


SETTINGS = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestBsp = BspCluster.TestCase
TestBsp.settings = SETTINGS
TestSsp = SspCluster.TestCase
TestSsp.settings = SETTINGS
TestAsp = AspCluster.TestCase
TestAsp.settings = SETTINGS
