"""Draining servers, the wanted numbers of servers and workers, and the ranks of worker agents. Pure.

A drained server is marked durably, and ``shard_placement`` moves everything away from it. ``Scaling`` holds the calls
that wait for that, and the numbers by which launchers start and stop servers and workers. A drain continues after its
caller is gone.

In a ``Rendezvous`` agents get ranks by arrival, in rounds. The first round closes when ``nodes_max`` agents have come,
or when ``nodes_min`` have and no more come during the grace period. Later rounds work the same way, and their ranks
follow those already given. An agent that asks again gets the same ranks. If all places are taken, an agent takes over
the place of a node of its own host whose workers are gone, or of another one whose workers have been gone for a while:
that machine was lost.

Invariants: No two nodes share a rank. An agent waits in at most one call. A call that ended waits nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from psdist.errors import InvalidArgumentError, LimitExceededError, ServerLostError
from psdist.types import Replica, Shard, check_name
from psdist.wire.limits import MEMBERS_MAX, WORLD_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import EnterRendezvous
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member, Node, name_some
from psdist_scheduler.decide.effects import Answer, Effect, Formed, LogEvent, Wait, refuse_older
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry
from psdist_scheduler.decide.waits import WaitingCalls


@dataclass(slots=True)
class _Drain:
    """A call that waits until a server holds nothing."""

    server: Replica
    total: int


@dataclass(slots=True)
class Scaling:
    """Drains in progress, and the launchers that watch."""

    _settings: ClusterSettings
    _registry: Registry
    _members: Membership
    _rendezvous: Rendezvous
    _calls: WaitingCalls
    _drains: dict[int, _Drain] = field(default_factory=dict)
    #: News last sent to each watching call.
    _watchers: dict[int, ef.ScaleNews | None] = field(default_factory=dict)

    def drain(self, event: ev.Drain) -> list[ef.Effect]:
        """Start to move everything away from a server. Raises InvalidArgumentError."""
        member = self._members.get(event.server_id)
        if member is None or member.role != "server" or not member.live:
            there = name_some([server.member_id for server in self._members.servers]) or "none"
            raise InvalidArgumentError(f"no live server {event.server_id!r:.80}: these are live: {there}")
        held, others = len(self._held(member)), [server for server in self._members.staying if server != member]
        if held and not others and self._members.workers:
            raise InvalidArgumentError(
                f"{member} holds {held} shards and there is no other server to take them: start another one first",
                server_id=member.member_id,
            )
        # Servers that hold nothing are marked too, so that nothing is placed on a server about to be stopped.
        self._drains[event.call] = _Drain(member.replica, held)
        return self._mark([member])

    def scale(self, event: ev.Scale) -> list[ef.Effect]:
        """Set the wanted number of servers or workers. Raises InvalidArgumentError and LimitExceededError."""
        if bool(event.servers) == bool(event.workers):
            raise InvalidArgumentError(
                f"{event.servers} servers and {event.workers} workers: name one number, at least 1, and leave the other"
            )
        if event.workers:
            return self._scale_workers(event)
        least = self._settings.replicas
        if event.servers < least:
            raise InvalidArgumentError(
                f"{event.servers} servers are too few: each shard has {least} copies, each on a server of its own, so "
                f"{least} is the least"
            )
        if event.servers > MEMBERS_MAX:
            raise LimitExceededError(f"{event.servers} servers are more than the limit of {MEMBERS_MAX}")
        there = sorted(self._members.staying, key=_by_number)
        surplus = there[event.servers :]
        self._members.demand.want_servers(event.servers)
        missing = max(0, event.servers - len(there))
        drained = tuple(server.member_id for server in surplus)
        answer = ef.Answer(event.call, ef.Scaled(len(there), drained, missing, len(self._watchers)))
        return [
            ef.LogEvent(f"{event.servers} servers are wanted, {len(there)} are live", kind="scale"),
            *self._mark(surplus),
            answer,
        ]

    def _scale_workers(self, event: ev.Scale) -> list[ef.Effect]:
        """Only launchers know which workers are theirs, so they choose which to stop."""
        if event.workers > MEMBERS_MAX:
            raise LimitExceededError(f"{event.workers} workers are more than the limit of {MEMBERS_MAX}")
        there = len(self._members.workers)
        self._want_workers(event.workers)
        missing = max(0, event.workers - there)
        return [
            ef.LogEvent(f"{event.workers} workers are wanted, {there} are live", kind="scale"),
            ef.Answer(event.call, ef.Scaled(len(self._members.staying), (), missing, len(self._watchers), there)),
        ]

    def _want_workers(self, workers: int) -> None:
        """Reserve ranks: the scheduler learns of a rank that a launcher gave away only when its worker registers."""
        self._members.demand.want_workers(workers, max(self._members.next_rank, self._rendezvous.world_size))

    def watch(self, event: ev.WatchScale) -> list[ef.Effect]:
        """Add a launcher that watches the wanted numbers."""
        if not self._members.demand.workers_wanted:
            self._want_workers(min(event.workers_wanted, MEMBERS_MAX))
        self._watchers[event.call] = None
        return []

    def end_call(self, call: int) -> None:
        self._drains.pop(call, None)
        self._watchers.pop(call, None)

    def progress(self, now: float) -> list[ef.Effect]:
        """Return news for the calls that drain and watch."""
        effects: list[ef.Effect] = []
        for call, drain in list(self._drains.items()):
            effects += self._advance_drain(call, drain, now)
        draining = {server.member_id: self._held(server) for server in self._members.servers if server.draining}
        stop = tuple(server for server, held in draining.items() if not held)
        wanted, lost = self._members.demand, self._registry.lost_text
        news = ef.ScaleNews(
            wanted.servers_wanted, tuple(draining), stop, lost, wanted.workers_wanted, wanted.first_rank
        )
        for call, told in self._watchers.items():
            if told != news:
                self._watchers[call] = news
                effects.append(ef.Answer(call, news))
        return effects

    def waits(self) -> Iterator[ef.Wait]:
        """Yield the waits of drains. Their callers are notified by ``progress``."""
        for server in self._members.servers:
            if server.draining and (left := len(self._held(server))):
                yield f"drain {server}", [], self._text(server, left)

    def _mark(self, servers: list[Member]) -> list[ef.Effect]:
        fresh = [server for server in servers if not server.draining]
        for server in fresh:
            self._members.drain(server.member_id)
        return [
            ef.LogEvent(f"draining {server}: {len(self._held(server))} shards to move", kind="scale")
            for server in fresh
        ]

    def _advance_drain(self, call: int, drain: _Drain, now: float) -> list[ef.Effect]:
        server = self._members.get(drain.server.server_id)
        if server is None or not self._members.has(drain.server):
            del self._drains[call]
            if any(s.lost and s.primary == drain.server for entry in self._registry.entries for s in entry.shards):
                return [ef.Refuse(call, ServerLostError(f"{drain.server} was lost before all was moved away from it"))]
            return [ef.Answer(call, ef.Drained(drain.total))]
        left = len(self._held(server, worth=True))
        if not left or not (self._members.workers or self._members.staying):
            del self._drains[call]
            return [
                ef.Answer(call, ef.Drained(drain.total)),
                ef.LogEvent(f"{server} is drained and may be stopped", kind="scale"),
            ]
        return self._calls.tell(call, ef.Draining(self._text(server, left), left, max(left, drain.total)), now)

    def _text(self, server: Member, left: int) -> str:
        if not self._members.staying:
            return f"for another server to register, which can take {left} shards of {server}"
        return f"for {left} shards to be moved from {server} to other servers"

    def _held(self, server: Member, worth: bool = False) -> list[Shard]:
        """Return the shards that a server holds or gets a copy of.

        worth: True to omit values that nobody is left to upload.
        """
        return [
            shard
            for entry in self._registry.entries
            if not worth or entry.ready or self._members.workers
            for shard in entry.shards
            if not shard.lost and server.replica in shard.replicas
        ]


def _by_number(server: Member) -> tuple[int, str]:
    """Sort key that puts server-10 after server-9."""
    return len(server.member_id), server.member_id


# --- rendezvous of worker agents --------------------------------------------------------------------------------------


class Rendezvous:
    """Nodes that have their ranks, and agents that wait for theirs.

    nodes: in the order in which they were formed.
    vacant_seconds: time after which the place of a node without workers is given to another agent.
    """

    def __init__(self, nodes: tuple[Node, ...], grace_seconds: float, vacant_seconds: float, now: float) -> None:
        # A node that took over a place came later, with the same ranks.
        self._nodes = {node.agent_id: node for node in {node.first_rank: node for node in nodes}.values()}
        self._grace = grace_seconds
        self._vacant = vacant_seconds
        #: Time since which an agent's workers are gone, or since it has its place.
        self._empty_since: dict[str, float] = {}
        #: True if workers of all nodes came, and all of them have completed their work.
        self._is_done = False
        #: Agents that took over a node's place and whose workers have not come yet.
        self._starting: set[str] = set()
        self._waiting: dict[str, EnterRendezvous] = {}
        self._last_arrival = now
        #: Nodes formed since ``take_changes``.
        self.changed: list[Node] = []

    def enter(self, event: EnterRendezvous, now: float) -> list[Effect]:
        """Process an agent's request for ranks. Raises InvalidArgumentError and LimitExceededError."""
        if event.agent_id in self._nodes:
            return [self._formed(event.call, self._nodes[event.agent_id])]
        self._check(event)
        if len(self._nodes) + len(self._others(event)) >= event.nodes_max:
            return self._take_over(event, now)
        older = self._waiting.get(event.agent_id)
        self._waiting[event.agent_id] = event
        if older is not None:
            return [refuse_older(older.call, event.agent_id)]
        self._last_arrival = now
        return []

    def update_presence(self, came: Iterable[int], live: Iterable[int], done: Iterable[int], now: float) -> None:
        """Record the ranks that ever registered (``came``), those that are live, and those whose work is done."""
        owners = {rank: node.agent_id for node in self._nodes.values() for rank in range(node.first_rank, _end(node))}
        live, done = set(live), set(done)
        self._is_done = owners.keys() <= done - live
        empty = {owners.get(rank) for rank in came} - {owners.get(rank) for rank in live | done}
        self._empty_since = {agent: self._empty_since.get(agent, now) for agent in empty if agent is not None}
        self._starting &= self._empty_since.keys()

    def end_call(self, call: int) -> None:
        for agent_id in [agent_id for agent_id, event in self._waiting.items() if event.call == call]:
            del self._waiting[agent_id]

    def progress(self, now: float, ranks_used: int = 0) -> list[Effect]:
        """Form a round if it is time. ranks_used: workers without an agent have lower ranks."""
        if not self._waiting or self._missing(now):
            return []
        round_ = list(self._waiting.values())
        self._waiting.clear()
        for event in round_:
            self._give_ranks(event, max(self.world_size, ranks_used))
        nodes = [self._nodes[event.agent_id] for event in round_]
        note = LogEvent(f"rendezvous formed: {len(self._nodes)} nodes, {self.world_size} ranks", kind="join")
        return [*(self._formed(event.call, node) for event, node in zip(round_, nodes, strict=True)), note]

    def take_changes(self) -> tuple[Node, ...]:
        """Return the nodes formed since the previous call."""
        changed, self.changed = self.changed, []
        return tuple(changed)

    def waits(self, now: float) -> Iterator[Wait]:
        if self._waiting:
            yield "rendezvous", [event.call for event in self._waiting.values()], self._missing(now)

    def validate(self) -> None:
        ranks = [rank for node in self._nodes.values() for rank in range(node.first_rank, _end(node))]
        assert len(set(ranks)) == len(ranks), f"ranks were given twice: {ranks}"
        assert not self._waiting.keys() & self._nodes.keys(), "an agent waits that has its ranks"

    def shortage(self, ranks: Iterable[int]) -> str:
        """Return why an elastic run with workers of these ranks is paused, as text that begins with "for".

        Empty if the run is not paused or not elastic, or has no nodes. A node is present while one of its workers is. A
        worker without an agent counts as a node.
        """
        first = min(self._nodes.values(), key=lambda node: node.node_rank, default=None)
        if first is None or first.nodes_min == first.nodes_max:
            return ""
        nodes = self._nodes.values()
        owners = {rank: node.first_rank for node in nodes for rank in range(node.first_rank, _end(node))}
        missing = first.nodes_min - len({owners.get(rank, rank) for rank in ranks})
        if missing <= 0:
            return ""
        return f"for {missing} of {first.nodes_min} nodes to come back, which the run needs to continue"

    @property
    def world_size(self) -> int:
        """The rank after the last one given."""
        return max(map(_end, self._nodes.values()), default=0)

    def _missing(self, now: float) -> str:
        first = next(iter(self._waiting.values()))
        there = len(self._nodes) + len(self._waiting)
        if there >= first.nodes_max:
            return ""
        if there < first.nodes_min:
            lacking = first.nodes_min - there
            return f"for {lacking} of {first.nodes_min} nodes to join the rendezvous"
        if now - self._last_arrival < self._grace:
            return f"for more nodes: {there} of at most {first.nodes_max} have come (join grace {self._grace:g} s)"
        return ""

    def _check(self, event: EnterRendezvous) -> None:
        check_name(event.agent_id, "agent id")
        if event.processes < 1 or not 1 <= event.nodes_min <= event.nodes_max:
            raise InvalidArgumentError(
                f"processes={event.processes}, nodes={event.nodes_min}:{event.nodes_max} are invalid: use 1 or more "
                "processes, and at least one node with MIN <= MAX"
            )
        others = self._others(event)
        agents: list[Node | EnterRendezvous] = [*self._nodes.values(), *others]
        for other in agents:
            if (other.nodes_min, other.nodes_max) != (event.nodes_min, event.nodes_max):
                raise InvalidArgumentError(
                    f"--nnodes {event.nodes_min}:{event.nodes_max} differs from the {other.nodes_min}:"
                    f"{other.nodes_max} of agent {other.agent_id!r}: all agents must say the same"
                )
        world = self.world_size + sum(other.processes for other in others) + event.processes
        if world > WORLD_MAX:
            raise LimitExceededError(f"a world of {world} workers is larger than the limit of {WORLD_MAX}")

    def _others(self, event: EnterRendezvous) -> list[EnterRendezvous]:
        """Return the other agents that wait."""
        return [other for other in self._waiting.values() if other.agent_id != event.agent_id]

    def _take_over(self, event: EnterRendezvous, now: float) -> list[Effect]:
        """Give an agent the place of a node whose workers are gone. Raises LimitExceededError if there is none."""
        empty = [(since, self._nodes[agent]) for agent, since in self._empty_since.items()]
        empty.sort(key=lambda pair: (pair[0], pair[1].node_rank))
        fitting = [(since, node) for since, node in empty if node.processes == event.processes]
        fitting.sort(key=lambda pair: not self._is_again(event, pair[1]))
        if not fitting or (now - fitting[0][0] < self._vacant and not self._is_again(event, fitting[0][1])):
            raise LimitExceededError(
                f"{event.nodes_max} of {event.nodes_max} nodes have joined already{self._hint(empty, fitting, now)}",
                nodes_max=event.nodes_max,
            )
        left = fitting[0][1]
        node = replace(left, agent_id=event.agent_id, host=event.host, master_address=event.master_address)
        del self._nodes[left.agent_id], self._empty_since[left.agent_id]
        self._nodes[node.agent_id] = node
        # Its workers take a while to start.
        self._empty_since[node.agent_id] = now
        self._starting.add(node.agent_id)
        self.changed.append(node)
        where = "restarted" if left.host == node.host else f"on {node.host} now"
        text = f"node {node.node_rank}, whose workers on {left.host} are gone, is {where}"
        return [self._formed(event.call, node), LogEvent(text)]

    def _is_again(self, event: EnterRendezvous, node: Node) -> bool:
        """Return True if the agent seems to be that of a node without workers, restarted on the same host."""
        return node.host == event.host and node.agent_id not in self._starting

    def _hint(self, empty: list[tuple[float, Node]], fitting: list[tuple[float, Node]], now: float) -> str:
        """Return the remedy for an agent that has no place."""
        if fitting:
            since, node = fitting[0]
            return (
                f": the workers of node {node.node_rank} are gone, but may come back. Its place is free in "
                f"{self._vacant - (now - since):.0f} s: start this agent again then"
            )
        if empty:
            node = empty[0][1]
            return (
                f": the workers of node {node.node_rank} are gone, and it had {node.processes}: start this agent with "
                f"--nproc-per-node {node.processes} to take its place"
            )
        if self._is_done:
            return ", and all of their workers have completed the run: train again under another --run-id"
        return ". Their number cannot be raised while the run lasts: start it with a larger --nnodes"

    def _give_ranks(self, event: EnterRendezvous, first_rank: int) -> None:
        node = Node(
            agent_id=event.agent_id,
            host=event.host,
            processes=event.processes,
            node_rank=len(self._nodes),
            first_rank=first_rank,
            nodes_min=event.nodes_min,
            nodes_max=event.nodes_max,
            master_address=event.master_address,
        )
        self._nodes[event.agent_id] = node
        self.changed.append(node)

    def _formed(self, call: int, node: Node) -> Answer:
        first = min(self._nodes.values(), key=lambda node: node.first_rank)
        return Answer(call, Formed(node, len(self._nodes), self.world_size, first.master_address))


def _end(node: Node) -> int:
    """Return the rank after the node's last one."""
    return node.first_rank + node.processes
