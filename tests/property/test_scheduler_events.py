"""The scheduler's machine under random events: invariants hold after each, and all answers are durable.

Besides ``Cluster.validate``, a model records everything ever granted (incarnations, first steps, terms, epochs), so
that a machine that forgets is caught as well as one that contradicts itself. Tested with one copy of each shard and
with two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from psdist.consistency import ASP, BSP
from psdist.optim import SGD
from psdist.types import ClusterMap, Layout, ParametersEntry, ParametersSpec, Replica, Shard, TensorSpec
from psdist.wire.limits import PROTOCOL_VERSION
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member, StoredState

LAYOUTS = (Layout((TensorSpec("w", (50, 999)),)), Layout((TensorSpec("w", (50, 998)),)), Layout(()))
NAMES = ("bsp", "asp")


class Scheduling(RuleBasedStateMachine):
    """Members come, go, fall silent, ask and answer; the scheduler itself restarts now and then."""

    replicas = 1

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.calls = 0
        self.kept = StoredState("run", 0)
        self.settings = ClusterSettings("run", workers_min=2, servers_min=1, replicas=self.replicas)
        self.durable: dict[str, Any] = {"members": {}, "parameters": {}, "nodes": {}}
        self.servers_wanted = 0
        self.primaries: dict[tuple[str, int, int], Replica] = {}
        self.incarnations: dict[str, int] = {}
        self.waiting: dict[int, ev.Event] = {}
        self.ended: set[int] = set()
        self.sessions: list[int] = []
        self.proposals: list[tuple[int, ef.JoinProposal]] = []
        self.checks: list[tuple[int, ef.CheckValues]] = []
        self.probes: list[ef.Probe] = []
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
        call = self._call()
        # Separate addresses: registering at another member's address ends that member's incarnation.
        address = f"127.0.0.1:{call}" if role == "server" else ""
        self._post(ev.Register(call, PROTOCOL_VERSION, "run", role, "", rank, world, address))

    @rule(ranks=st.lists(st.none() | st.integers(0, 3), min_size=2, max_size=4))
    def register_together(self, ranks: list[int | None]) -> None:
        self._post(*(ev.Register(self._call(), PROTOCOL_VERSION, "run", "worker", "", rank) for rank in ranks))

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

    @precondition(lambda self: self.probes)
    @rule(result=st.sampled_from(("refused", "refused", "accepted", "silent")))
    def probed(self, result: Any) -> None:
        probe = self.probes.pop(0)
        self._post(ev.Probed(probe.member_id, probe.incarnation, result))

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
                self._post(ev.Heartbeat(session, self.map.epoch))
            self.now += self.cluster.settings.tick_seconds
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
    @rule(
        data=st.data(),
        kind=st.sampled_from((ev.Describe, ev.CommitParameters, ev.EnterBarrier)),
        name=st.sampled_from(NAMES),
    )
    def ask(self, data: st.DataObject, kind: Any, name: str) -> None:
        member = data.draw(st.sampled_from(self._live()))
        self._post(kind(self._call(), _caller(member), name))

    @rule(name=st.sampled_from(NAMES))
    def all_commit(self, name: str) -> None:
        for member in self._live():
            self._post(ev.CommitParameters(self._call(), _caller(member), name))

    @rule(agent=st.sampled_from(("a", "b", "c", "worker-0")), processes=st.integers(0, 2))
    def rendezvous(self, agent: str, processes: int) -> None:
        self._post(ev.EnterRendezvous(self._call(), "run", agent, "host", processes, 1, 3))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def end_call(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[call]
        self._post(ev.CallEnded(call, refused=data.draw(st.booleans())))

    @precondition(lambda self: self.proposals)
    @rule(data=st.data(), accepted=st.booleans(), version=st.integers(0, 100))
    def answer_proposal(self, data: st.DataObject, accepted: bool, version: int) -> None:
        session, proposal = data.draw(st.sampled_from(self.proposals[-4:]))
        self._post(ev.JoinAnswered(session, proposal.proposal_id, accepted, version))

    @precondition(lambda self: self.checks)
    @rule(data=st.data(), installed=st.sampled_from((0, 1, 1 << 20)))
    def answer_check(self, data: st.DataObject, installed: int) -> None:
        session, check = data.draw(st.sampled_from(self.checks[-4:]))
        self._post(ev.ValuesAnswered(session, check.number, installed))

    @rule()
    def all_have_values(self) -> None:
        for session, check in self.checks:
            self._post(ev.ValuesAnswered(session, check.number, 1 << 20))
        self.checks.clear()

    @rule(name=st.sampled_from(NAMES), late=st.booleans())
    def train(self, name: str, late: bool) -> None:
        """Go straight to ready parameters, with an optional late worker: chance alone rarely does that."""
        for role, wanted in (("server", self.replicas), ("worker", 2)):
            while self.cluster.failed is None and sum(member.role == role for member in self._live()) < wanted:
                self.register(role, None, 0)
        self.all_open()
        self.all_create(name)
        self.all_commit(name)
        self.all_have_values()
        self.fill_all()
        if late:
            self.register("worker", None, 0)
            self.all_open()
            self.all_create(name)

    # --- copies -------------------------------------------------------------------------------------------------------

    def _copies(self, what: str) -> list[tuple[str, int, Shard, Replica]]:
        return [
            (entry.spec.name, number, shard, replica)
            for entry in self.map.parameters
            for number, shard in enumerate(entry.shards)
            for replica in getattr(shard, what)
        ]

    @precondition(lambda self: self._copies("filling"))
    @rule(data=st.data(), late=st.sampled_from((0, 0, 0, 1)))
    def fill(self, data: st.DataObject, late: int) -> None:
        """Let a primary, or the primary of the last term, report a complete copy."""
        name, number, shard, replica = data.draw(st.sampled_from(self._copies("filling")))
        session = self.cluster.members.sessions.call_of(shard.primary.server_id)
        self._post(ev.ReplicaFilled(session, name, number, shard.term - late, replica, shard.fill_of(replica)))

    @rule()
    def fill_all(self) -> None:
        for name, number, shard, replica in self._copies("filling"):
            session = self.cluster.members.sessions.call_of(shard.primary.server_id)
            self._post(ev.ReplicaFilled(session, name, number, shard.term, replica, shard.fill_of(replica)))

    @precondition(lambda self: self._copies("backups") or self._copies("filling"))
    @rule(data=st.data())
    def unreachable(self, data: st.DataObject) -> None:
        copies = self._copies("backups") + self._copies("filling")
        name, number, shard, replica = data.draw(st.sampled_from(copies))
        session = self.cluster.members.sessions.call_of(shard.primary.server_id)
        self._post(ev.ReplicaUnreachable(session, name, number, shard.term, replica, shard.fill_of(replica), "silent"))

    @precondition(lambda self: self.map.servers)
    @rule(data=st.data())
    def kill_server(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(self.map.servers))
        if session := self.cluster.members.sessions.call_of(server.server_id):
            self._post(ev.SessionClosed(session, "its session broke"))

    @precondition(lambda self: self.map.servers)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self._post(ev.Drain(self._call(), "run", data.draw(st.sampled_from(self.map.servers)).server_id))

    @rule(servers=st.integers(0, 4))
    def scale(self, servers: int) -> None:
        self._post(ev.Scale(self._call(), "run", servers))

    @rule()
    def watch(self) -> None:
        self._post(ev.WatchScale(self._call(), "run"))

    @rule()
    def heal(self) -> None:
        """End all faults.

        With enough servers, shards that are not lost then have all copies, and drained servers hold nothing.
        """
        while self.cluster.failed is None and len(self.cluster.members.staying) <= self.replicas:
            self.register("server", None, 0)
        for _ in range(400):
            self.all_open()
            self.fill_all()
            self.time_passes(True, 1)
            if not self._copies("filling") and not self.cluster.members.changed:
                break
        committed = {r.entry.spec.name for r in self.durable["parameters"].values() if r.committed}
        for _ in range(12):
            self.time_passes(True, 1)
            self.fill_all()
        draining = {m.member_id for m in self._live() if m.draining}
        lasts = self.cluster.failed is None and self.cluster.members.staying
        for entry in self.map.parameters if lasts else ():
            for shard in entry.shards:
                if entry.spec.name in committed and not shard.lost:
                    assert not shard.filling and len(shard.backups) == self.replicas - 1, f"not healed: {shard}"
                    assert not draining & {replica.server_id for replica in shard.replicas}, f"not drained: {shard}"

    @rule()
    def all_open(self) -> None:
        for member in self._live():
            if not self.cluster.members.sessions.call_of(member.member_id):
                call = self._call()
                self._post(ev.SessionOpened(call, member.member_id, member.incarnation))
                self.sessions.append(call)

    @rule()
    def all_accept(self) -> None:
        for session, proposal in self.proposals[-4:]:
            self._post(ev.JoinAnswered(session, proposal.proposal_id, True, 0))

    @rule()
    def restart(self) -> None:
        """Restart with durable state only."""
        kept = {name: tuple(items.values()) for name, items in self.durable.items()}
        stored = StoredState("run", self.map.epoch, servers_wanted=self.servers_wanted, **kept)
        self.cluster = Cluster(self.settings, stored, self.now)
        self.sessions.clear()
        self.waiting.clear()
        before = self.map
        self._carry_out(self.cluster.start(self.now))
        assert (self.map.servers, self.map.workers) == (before.servers, before.workers)
        # A pending move resumes immediately; allowed changes of a shard are checked with every map.
        assert [replace(e, shards=()) for e in self.map.parameters] == [
            replace(e, shards=()) for e in before.parameters
        ]

    # --- model --------------------------------------------------------------------------------------------------------

    def _call(self) -> int:
        self.calls += 1
        return self.calls

    def _live(self) -> list[Member]:
        return [member for member in self.cluster.members.all if member.live]

    def _post(self, *events: ev.Event) -> None:
        before = (self.cluster.epoch, self.cluster.map)
        effects = self.cluster.on_all(events, self.now)
        self.cluster.validate()
        assert self.cluster.epoch <= before[0] + 1, "what came together made several epochs"
        waiting = ev.Create | ev.Describe | ev.EnterBarrier | ev.EnterRendezvous | ev.Drain | ev.WatchScale
        self.waiting |= {event.call: event for event in events if isinstance(event, waiting)}
        refused = [effect for effect in effects if isinstance(effect, ef.Refuse)]
        if len(effects) == len(refused) > 0:
            assert (self.cluster.epoch, self.cluster.map) == before, "a refused request changed something"
        assert (self.cluster.epoch == before[0]) == (not any(isinstance(e, ef.Persist) for e in effects))
        if self.cluster.epoch == before[0]:
            assert self.cluster.map == before[1], "the map changed without a new epoch"
        self._carry_out(effects)
        assert self.map == self.cluster.map, "the published map is not the machine's"

    def _carry_out(self, effects: list[ef.Effect]) -> None:
        for position, effect in enumerate(effects):
            match effect:
                case ef.Persist():
                    assert position == 0 and effect.epoch > self.map.epoch
                    self.durable["members"] |= {m.member_id: m for m in effect.members}
                    self.durable["parameters"] |= {r.entry.spec.name: r for r in effect.parameters}
                    self.durable["nodes"] |= {n.agent_id: n for n in effect.nodes}
                    if effect.servers_wanted is not None:
                        self.servers_wanted = effect.servers_wanted
                case ef.Publish(cluster):
                    self._check_map(cluster)
                    self.map = cluster
                case ef.Answer(call, value):
                    self._answered(call, value)
                case ef.Refuse(call, _):
                    self._end(call)
                case ef.Close(call):
                    self._end(call)
                case ef.Probe():
                    self.probes.append(effect)

    def _answered(self, call: int, value: Any) -> None:
        assert call not in self.ended, "an answer to a call that was over"
        if isinstance(value, ef.CheckServer):
            return
        if isinstance(value, ef.JoinProposal):
            self.proposals.append((call, value))
        elif isinstance(value, ef.CheckValues):
            self.checks.append((call, value))
        elif isinstance(value, ef.Registered):
            member = value.member
            assert member.incarnation == self.incarnations.get(member.member_id, 0) + 1
            self.incarnations[member.member_id] = member.incarnation
            assert self.durable["members"][member.member_id] == member, "registered, and not durable"
        elif not isinstance(value, ef.Waiting | ef.Upload | ef.WithdrawJoin | ef.Draining | ef.ScaleNews):
            self._end(call)

    def _end(self, call: int) -> None:
        self.ended.add(call)
        self.waiting.pop(call, None)
        if call in self.sessions:
            self.sessions.remove(call)

    def _check_map(self, cluster: ClusterMap) -> None:
        """Check that the map is durable, and keeps placed parameters, ready ones, and granted first steps."""
        kept = {record.entry.spec.name: record.entry for record in self.durable["parameters"].values()}
        assert kept == {entry.spec.name: entry for entry in cluster.parameters}
        live = {member.member_id: member.incarnation for member in self.durable["members"].values() if member.live}
        assert live == {w.worker_id: w.incarnation for w in cluster.workers} | {
            s.server_id: s.incarnation for s in cluster.servers
        }
        for old in self.map.parameters:
            new = cluster.entry(old.spec.name)
            assert new is not None
            assert (new.spec, new.layout_digest) == (old.spec, old.layout_digest)
            assert new.ready or not old.ready
            assert len(new.shards) == len(old.shards)
            for before, after in zip(old.shards, new.shards, strict=True):
                self._check_shard(before, after, {Replica(s.server_id, s.incarnation) for s in cluster.servers}, old)
        for entry in cluster.parameters:
            for number, shard in enumerate(entry.shards):
                key_of_term = (entry.spec.name, number, shard.term)
                assert self.primaries.setdefault(key_of_term, shard.primary) == shard.primary, "two in one term"
                ids = [replica.server_id for replica in shard.replicas]
                assert len(set(ids)) == len(ids), f"two copies on one server: {shard}"
                homeless = shard.lost or (not entry.ready and shard.replicas == (shard.primary,))
                live = {Replica(s.server_id, s.incarnation) for s in cluster.servers}
                assert homeless or {*shard.replicas} <= live
            for m in entry.members:
                key = (entry.spec.name, m.worker_id, m.incarnation)
                assert self.granted_steps.setdefault(key, m.first_step) == m.first_step

    def _check_shard(self, old: Shard, new: Shard, live: set[Replica], entry: ParametersEntry) -> None:
        """Check the change of a shard from one epoch to the next."""
        assert new.term >= old.term
        assert (new.term == old.term) == (new.primary == old.primary), f"{old} became {new}"
        assert {*new.backups} <= {*old.backups, *old.filling}, f"a backup that was never filled: {old} became {new}"
        if old.lost:
            assert new == old
        elif entry.ready:
            assert new.primary in (old.primary, *old.backups), f"promoted what was not complete: {old} became {new}"
            if new.lost:
                assert old.primary not in live and not {*old.backups} & live, f"lost while a backup lived: {old}"


def _caller(member: Member) -> ev.Caller:
    return ev.Caller("run", member.member_id, member.incarnation)


class Replicating(Scheduling):
    """The same with two copies of each shard."""

    replicas = 2


def test_a_restart_keeps_the_order_of_parameters() -> None:
    """Requested first, placed last: the map and the state after a restart must agree on an order."""
    state = Scheduling()
    state.register(rank=None, role="worker", world=0)
    state.all_create("asp")
    state.train(late=False, name="bsp")
    state.all_create("asp")
    assert [entry.spec.name for entry in state.map.parameters] == ["bsp", "asp"]
    state.restart()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(stateful_step_count=40)
TestReplicating = Replicating.TestCase
TestReplicating.settings = settings(stateful_step_count=50)
