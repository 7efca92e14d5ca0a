"""The scheduler's machine under random events: invariants hold after each, and nothing is told that is not durable.

Besides ``Cluster.validate`` this keeps a model of its own, of what was ever granted (incarnations, first steps,
epochs), so that a machine that forgets is caught as well as one that contradicts itself.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from psdist.consistency import ASP, BSP
from psdist.optim import SGD
from psdist.types import ClusterMap, Layout, ParametersSpec, TensorSpec
from psdist.wire.limits import PROTOCOL_VERSION
from psdist_scheduler import events as ev
from psdist_scheduler.cluster import Cluster
from psdist_scheduler.records import ClusterSettings, Member, Stored

LAYOUTS = (Layout((TensorSpec("w", (50, 999)),)), Layout((TensorSpec("w", (50, 998)),)), Layout(()))
SETTINGS = ClusterSettings("run", workers_min=2, servers_min=1)
NAMES = ("bsp", "asp")


class Scheduling(RuleBasedStateMachine):
    """Members come, go, fall silent, ask and answer; the scheduler itself is restarted now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.calls = 0
        self.kept = Stored("run", 0)
        self.durable: dict[str, Any] = {"members": {}, "parameters": {}, "nodes": {}}
        self.incarnations: dict[str, int] = {}
        self.waiting: dict[int, ev.Event] = {}
        self.ended: set[int] = set()
        self.sessions: list[int] = []
        self.proposals: list[tuple[int, ev.JoinProposal]] = []
        self.map = ClusterMap("run", 0)
        self.granted_steps: dict[tuple[str, str, int], int] = {}
        self.restart()

    # --- members ------------------------------------------------------------------------------------------------------

    @rule(
        role=st.sampled_from(("worker", "worker", "server")),
        rank=st.none() | st.integers(0, 3),
        world=st.integers(0, 4),
    )
    def register(self, role: Any, rank: int | None, world: int) -> None:
        rank = rank if role == "worker" else None
        address = "127.0.0.1:1" if role == "server" else ""
        call = self._call()
        self._post(ev.Register(call, PROTOCOL_VERSION, "run", role, "", rank, world, address))

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def open_session(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self._live()))
        call = self._call()
        self._post(ev.SessionOpened(call, member.member_id, member.incarnation))
        if call not in self.ended:
            self.sessions.append(call)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        self._post(ev.SessionClosed(data.draw(st.sampled_from(self.sessions)), "its session broke"))

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self._live()))
        self._post(ev.Leave(self._call(), _caller(member)))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), version=st.integers(0, 50))
    def heartbeat(self, data: st.DataObject, version: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self._post(ev.Heartbeat(session, self.map.epoch, (("bsp", version), ("none", 1))))

    @rule(keep=st.booleans(), ticks=st.integers(1, 12))
    def time_passes(self, keep: bool, ticks: int) -> None:
        for _ in range(ticks):
            for session in self.sessions if keep else ():
                self._post(ev.Heartbeat(session))
            self.now += self.cluster.tick_seconds
            self._post(ev.Tick())

    @rule()
    def scheduler_stands_still(self) -> None:
        live = self._live()
        self.now += 60
        self._post(ev.Tick())
        assert self._live() == live, "members were expelled for the scheduler's own silence"

    # --- requests -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self._live())
    @rule(data=st.data(), name=st.sampled_from(NAMES), layout=st.sampled_from((0, 0, 0, 1, 2)))
    def create(self, data: st.DataObject, name: str, layout: int) -> None:
        member = data.draw(st.sampled_from(self._live()))
        spec = ParametersSpec(name, SGD(lr=0.1), BSP() if name == "bsp" else ASP())
        self._post(ev.Create(self._call(), _caller(member), spec, LAYOUTS[layout]))

    @precondition(lambda self: self._live())
    @rule(name=st.sampled_from(NAMES))
    def all_create(self, name: str) -> None:
        spec = ParametersSpec(name, SGD(lr=0.1), BSP() if name == "bsp" else ASP())
        for member in self._live():
            self._post(ev.Create(self._call(), _caller(member), spec, LAYOUTS[0]))

    @precondition(lambda self: self._live())
    @rule(data=st.data(), kind=st.sampled_from((ev.Describe, ev.Commit, ev.EnterBarrier)), name=st.sampled_from(NAMES))
    def ask(self, data: st.DataObject, kind: Any, name: str) -> None:
        member = data.draw(st.sampled_from(self._live()))
        self._post(kind(self._call(), _caller(member), name))

    @rule(name=st.sampled_from(NAMES))
    def all_commit(self, name: str) -> None:
        for member in self._live():
            self._post(ev.Commit(self._call(), _caller(member), name))

    @rule(agent=st.sampled_from(("a", "b", "c", "worker-0")), processes=st.integers(0, 2))
    def rendezvous(self, agent: str, processes: int) -> None:
        self._post(ev.EnterRendezvous(self._call(), "run", agent, "host", processes, 1, 3))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def end_call(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[call]
        self._post(ev.CallEnded(call))

    @precondition(lambda self: self.proposals)
    @rule(data=st.data(), accepted=st.booleans(), version=st.integers(0, 100))
    def answer_proposal(self, data: st.DataObject, accepted: bool, version: int) -> None:
        session, proposal = data.draw(st.sampled_from(self.proposals[-4:]))
        self._post(ev.JoinAnswered(session, proposal.proposal_id, accepted, version))

    @rule(name=st.sampled_from(NAMES), late=st.booleans())
    def train(self, name: str, late: bool) -> None:
        """The straight way to ready parameters, and perhaps a worker that comes late: rare by chance alone."""
        for role, wanted in (("server", 1), ("worker", 2)):
            while sum(member.role == role for member in self._live()) < wanted:
                self.register(role, None, 0)
        self.all_open()
        self.all_create(name)
        self.all_commit(name)
        if late:
            self.register("worker", None, 0)
            self.all_open()
            self.all_create(name)

    @rule()
    def all_open(self) -> None:
        for member in self._live():
            if not self.cluster.members.session_of(member.member_id):
                call = self._call()
                self._post(ev.SessionOpened(call, member.member_id, member.incarnation))
                self.sessions.append(call)

    @rule()
    def all_accept(self) -> None:
        for session, proposal in self.proposals[-4:]:
            self._post(ev.JoinAnswered(session, proposal.proposal_id, True, 0))

    @rule()
    def restart(self) -> None:
        """Only what was made durable is left."""
        kept = {name: tuple(items.values()) for name, items in self.durable.items()}
        self.cluster = Cluster(SETTINGS, Stored("run", self.map.epoch, **kept), self.now)
        self.sessions.clear()
        self.waiting.clear()
        before = self.map
        self._carry_out(self.cluster.start(self.now))
        assert (self.map.servers, self.map.workers) == (before.servers, before.workers)
        assert self.map.parameters == before.parameters

    # --- model --------------------------------------------------------------------------------------------------------

    def _call(self) -> int:
        self.calls += 1
        return self.calls

    def _live(self) -> list[Member]:
        return [member for member in self.cluster.members.all if member.live]

    def _post(self, event: ev.Event) -> None:
        before = (self.cluster.epoch, self.cluster.map)
        effects = self.cluster.on(event, self.now)
        self.cluster.validate()
        if isinstance(event, ev.Create | ev.Describe | ev.EnterBarrier | ev.EnterRendezvous):
            self.waiting[event.call] = event
        refused = [effect for effect in effects if isinstance(effect, ev.Refuse)]
        if len(effects) == 1 and refused:
            assert (self.cluster.epoch, self.cluster.map) == before, "a refused request changed something"
        assert (self.cluster.epoch == before[0]) == (not any(isinstance(e, ev.Persist) for e in effects))
        if self.cluster.epoch == before[0]:
            assert self.cluster.map == before[1], "the map changed without a new epoch"
        self._carry_out(effects)
        assert self.map == self.cluster.map, "the published map is not the machine's"

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for position, effect in enumerate(effects):
            match effect:
                case ev.Persist():
                    assert position == 0 and effect.epoch > self.map.epoch
                    self.durable["members"] |= {m.member_id: m for m in effect.members}
                    self.durable["parameters"] |= {r.entry.spec.name: r for r in effect.parameters}
                    self.durable["nodes"] |= {n.agent_id: n for n in effect.nodes}
                case ev.Publish(cluster):
                    self._check_map(cluster)
                    self.map = cluster
                case ev.Answer(call, value):
                    self._answered(call, value)
                case ev.Refuse(call, _):
                    self._end(call)
                case ev.Close(call):
                    self._end(call)

    def _answered(self, call: int, value: Any) -> None:
        assert call not in self.ended, "an answer to a call that was over"
        if isinstance(value, ev.JoinProposal):
            self.proposals.append((call, value))
        elif isinstance(value, ev.Registered):
            member = value.member
            assert member.incarnation == self.incarnations.get(member.member_id, 0) + 1
            self.incarnations[member.member_id] = member.incarnation
            assert self.durable["members"][member.member_id] == member, "registered, and not durable"
        elif not isinstance(value, ev.Waiting | ev.Upload | ev.JoinWithdrawn):
            self._end(call)

    def _end(self, call: int) -> None:
        self.ended.add(call)
        self.waiting.pop(call, None)
        if call in self.sessions:
            self.sessions.remove(call)

    def _check_map(self, cluster: ClusterMap) -> None:
        """All of the map is durable; placed parameters stay placed, ready ones ready, first steps as granted."""
        kept = {record.entry.spec.name: record.entry for record in self.durable["parameters"].values()}
        assert kept == {entry.spec.name: entry for entry in cluster.parameters}
        live = {member.member_id: member.incarnation for member in self.durable["members"].values() if member.live}
        assert live == {w.worker_id: w.incarnation for w in cluster.workers} | {
            s.server_id: s.incarnation for s in cluster.servers
        }
        for old in self.map.parameters:
            new = cluster.entry(old.spec.name)
            assert new is not None
            assert (new.shards, new.spec, new.layout_digest) == (old.shards, old.spec, old.layout_digest)
            assert new.ready or not old.ready
        for entry in cluster.parameters:
            for m in entry.members:
                key = (entry.spec.name, m.worker_id, m.incarnation)
                assert self.granted_steps.setdefault(key, m.first_step) == m.first_step


def _caller(member: Member) -> ev.Caller:
    return ev.Caller("run", member.member_id, member.incarnation)


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
