"""Driver for the scheduler's machine: posts events, checks every invariant after each, records answers to calls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from psdist.consistency import BSP, Consistency
from psdist.errors import PsdistError
from psdist.optim import SGD
from psdist.types import ClusterMap, Layout, ParametersSpec, TensorSpec
from psdist.wire.limits import PROTOCOL_VERSION
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_state import (
    ClusterSettings,
    Member,
    Node,
    ParametersRecord,
    ProbeResult,
    RestorePoint,
    StoredState,
)
from psdist_scheduler.decide.snapshot_events import History

LAYOUT = Layout((TensorSpec("w", (100, 100)), TensorSpec("b", (100,))))


def spec(name: str = "mlp", consistency: Consistency | None = None, **settings: Any) -> ParametersSpec:
    """Return settings of parameters."""
    optimizer = settings.pop("optimizer", SGD(lr=0.1))
    return ParametersSpec(name, optimizer, consistency or BSP(), **settings)


class Driver:
    """Cluster under test. ``told[call]`` is the answer to a call, ``errors[call]`` its error."""

    def __init__(
        self, stored: StoredState | None = None, now: float = 100.0, history: History | None = None, **settings: Any
    ) -> None:
        self.now = now
        self.settings = ClusterSettings("run", **settings)
        self.cluster = Cluster(self.settings, stored, now, history)
        self.told: dict[int, list[Any]] = defaultdict(list)
        self.errors: dict[int, PsdistError] = {}
        self.closed: list[int] = []
        self.lost: list[ef.MemberLost] = []
        self.shards_lost: list[ef.ShardsLost] = []
        self.run_ended = 0
        self.notes: list[str] = []
        #: Kinds of the notes.
        self.kinds: list[ef.EventKind] = []
        self.map = ClusterMap("run", 0)
        self.attached: list[int] = []
        #: Sessions of servers that were asked whether they have uploaded values. True if all confirm immediately.
        self.checks: list[tuple[int, ef.CheckValues]] = []
        self.has_values = True
        #: Result of connections to servers' ports; None leaves the machine without an answer.
        self.probed: ProbeResult | None = "refused"
        self._probes: list[ef.Probe] = []
        self._next = 0
        self._members: dict[str, Member] = {m.member_id: m for m in (stored.members if stored else ())}
        self._parameters: dict[str, ParametersRecord] = {}
        for record in stored.parameters if stored else ():
            self._parameters[record.entry.spec.name] = record
        self._servers_wanted = stored.servers_wanted if stored else 0
        self._base = stored.base if stored else RestorePoint()
        self._schedulers = stored.schedulers if stored else ()
        self._run_lost = stored.run_lost if stored else ""
        self._ends = stored.ends if stored else ()
        self._nodes: dict[str, Node] = {n.agent_id: n for n in (stored.nodes if stored else ())}
        self._barriers = {(r.worker_id, r.name): r for r in (stored.barriers if stored else ())}
        self._datasets = {record.spec.name: record for record in (stored.datasets if stored else ())}
        self._carry_out(self.cluster.start(now))

    # --- events -------------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return the number of a call."""
        self._next += 1
        return self._next

    def on(self, event: ev.Event) -> None:
        """Post one event."""
        self.on_all(event)

    def on_all(self, *events: ev.Event) -> None:
        """Post events that arrived together."""
        before = self.cluster.epoch
        effects = self.cluster.on_all(events, self.now)
        self.cluster.validate()
        persists = [effect for effect in effects if isinstance(effect, ef.Persist)]
        assert len(persists) <= 1, "several changes together"
        assert not persists or effects[0] is persists[0], "something happens before it is durable"
        published = [effect for effect in effects if isinstance(effect, ef.Publish)]
        shown = [effect.epoch for effect in persists if not _is_about_data_alone(effect)]
        assert len(shown) == self.cluster.epoch - before <= 1, "an epoch that is not durable, or no epoch for a change"
        assert [effect.map.epoch for effect in published] == shown
        self._carry_out(effects)
        while self.has_values and self.checks:
            self.answer_check()
        while self._probes:
            probe = self._probes.pop(0)
            if self.probed is not None:
                self.on(ev.Probed(probe.member_id, probe.incarnation, self.probed))

    def tick(self, seconds: float = 0.25) -> None:
        """Advance the time in steps of one tick."""
        step = self.cluster.settings.tick_seconds
        for _ in range(round(seconds / step)):
            self.now += step
            self.on(ev.Tick())

    def tick_and_beat(self, seconds: float, *sessions: int) -> None:
        """Advance the time, with a heartbeat of these sessions per tick."""
        for _ in range(round(seconds / self.cluster.settings.tick_seconds)):
            self.tick()
            self.beat(*sessions)

    def register(self, role: Any = "worker", **fields: Any) -> Member:
        """Register a member. Raises the error of a refusal."""
        call = self.number()
        if role == "server":
            fields.setdefault("address", f"127.0.0.1:{call}")
        self.on(
            ev.Register(
                call, fields.pop("protocol_version", PROTOCOL_VERSION), fields.pop("run_id", ""), role, **fields
            )
        )
        if call in self.errors:
            raise self.errors[call]
        member: Member = self.told[call][-1].member
        return member

    def open(self, member: Member) -> int:
        """Open a member's session and return its call. Raises the error of a refusal."""
        call = self.number()
        self.on(ev.SessionOpened(call, member.member_id, member.incarnation))
        if call in self.errors:
            raise self.errors[call]
        return call

    def join(self, role: Any = "worker", **fields: Any) -> tuple[Member, int]:
        """Register a member and open its session."""
        member = self.register(role, **fields)
        return member, self.open(member)

    def create(
        self, member: Member, layout: Layout = LAYOUT, resume: ev.ResumePush | None = None, **settings: Any
    ) -> int:
        """Call CreateParameters."""
        call = self.number()
        self.on(ev.Create(call, caller(member), spec(**settings), layout, resume))
        return call

    def ask(self, kind: Any, member: Member, name: str = "mlp") -> int:
        """Call Describe, Commit or EnterBarrier."""
        call = self.number()
        self.on(kind(call, caller(member), name, *((self.map.epoch,) if kind is ev.CommitParameters else ())))
        return call

    def beat(self, *sessions: int) -> None:
        """Send heartbeats."""
        for session in sessions:
            self.on(ev.Heartbeat(session, self.map.epoch))

    def answer_check(self, installed: int = 1 << 30) -> None:
        """Let the first server that was asked report how many slices it has values for."""
        session, check = self.checks.pop(0)
        self.on(ev.ValuesAnswered(session, check.number, installed))

    def fill(self) -> None:
        """Let primaries complete all fillings, until none is left."""
        while due := [
            (entry.spec.name, number, shard, replica)
            for entry in self.map.parameters
            for number, shard in enumerate(entry.shards)
            for replica in shard.filling[:1]
        ]:
            for name, number, shard, replica in due:
                session = self.cluster.members.sessions.call_of(shard.primary.server_id)
                self.on(ev.ReplicaFilled(session, name, number, shard.term, replica, shard.fill_of(replica)))
            self.hear()

    def hear(self) -> None:
        """Let all servers report the newest map, and process the consequences."""
        self.beat(*(self.cluster.members.sessions.call_of(server.server_id) for server in self.map.servers))
        self.on(ev.Tick())

    def state(self, call: int) -> Any:
        """Return the last answer to a call, or its error."""
        return self.errors.get(call) or (self.told[call][-1] if self.told[call] else None)

    # --- effects ------------------------------------------------------------------------------------------------------

    @property
    def stored(self) -> StoredState:
        """Return the content of a store."""
        return StoredState(
            "run",
            self.map.epoch,
            tuple(self._members.values()),
            tuple(self._parameters.values()),
            tuple(self._nodes.values()),
            datasets=tuple(self._datasets.values()),
            servers_wanted=self._servers_wanted,
            base=self._base,
            barriers=tuple(self._barriers.values()),
            schedulers=self._schedulers,
            run_lost=self._run_lost,
            ends=self._ends,
        )

    def _carry_out(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            match effect:
                case ef.Persist():
                    self._members |= {m.member_id: m for m in effect.members}
                    self._parameters = {n: r for n, r in self._parameters.items() if n not in effect.forgotten}
                    self._base = effect.base or self._base
                    self._schedulers = effect.schedulers or self._schedulers
                    self._run_lost = effect.run_lost or self._run_lost
                    self._ends = self._ends if effect.ends is None else effect.ends
                    self._parameters |= {r.entry.spec.name: r for r in effect.parameters}
                    self._nodes |= {n.agent_id: n for n in effect.nodes}
                    self._barriers |= {(r.worker_id, r.name): r for r in effect.barriers}
                    self._datasets |= {r.spec.name: r for r in effect.datasets}
                    if effect.servers_wanted is not None:
                        self._servers_wanted = effect.servers_wanted
                case ef.Publish(cluster):
                    assert cluster.epoch > self.map.epoch
                    self.map = cluster
                case ef.Attach(call):
                    self.attached.append(call)
                case ef.Broadcast(ef.ShardsLost() as news):
                    self.shards_lost.append(news)
                case ef.Broadcast(ef.RunEnded()):
                    self.run_ended += 1
                case ef.Broadcast(ef.MemberLost() as news):
                    self.lost.append(news)
                case ef.Answer(call, ef.CheckValues() as check):
                    self.checks.append((call, check))
                case ef.Answer(call, value):
                    assert call not in self.errors, "an answer after the end"
                    self.told[call].append(value)
                case ef.Refuse(call, error):
                    self.errors[call] = error
                case ef.Close(call):
                    self.closed.append(call)
                case ef.Probe():
                    self._probes.append(effect)
                case ef.LogEvent():
                    self.notes.append(effect.text)
                    self.kinds.append(effect.kind)


def _is_about_data_alone(change: ef.Persist) -> bool:
    return replace(change, datasets=(), barriers=(), run_lost="", ends=None) == ef.Persist(change.epoch)


def caller(member: Member) -> ev.Caller:
    """Return the member's own identification."""
    return ev.Caller("run", member.member_id, member.incarnation)
