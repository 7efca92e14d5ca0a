"""Simulated network: connections between nodes and the streams on them, with every kind of failure.

It carries bytes and knows nothing of psdist. A connection behaves like TCP: bytes arrive late, in order per stream, or
the connection breaks; each end learns of that in its own time. Streams of one connection overtake each other. The
``nemesis`` asks for faults: partitions in one or both directions (silence, until keepalive gives the connection up),
slow links, broken connections, dead processes (their kernel resets the connection) and dead hosts (silence).

In addition, the fraction ``Faults.cut`` of all streams breaks spontaneously, in the shapes of Ray's chaos tests: the
request is lost, the answer is lost, or the caller sees a failure while the request is still in flight and its repeat
overtakes it.

The ends of a stream are in ``rpc``.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.simulation.loop import Node, SimLoop

#: Seconds (drawn from this range) after which both ends give up a silent path.
KEEPALIVE = (2.0, 4.0)
#: Time limit for connecting to a host that does not answer.
CONNECT_SECONDS = 0.5


@dataclass
class Faults:
    """Spontaneous faults, and the speed of everything else.

    delay: least and most seconds of a message.
    slow: fraction of messages that take up to ``slow_seconds`` longer.
    cut: fraction of calls that break at one of their first messages.
    """

    delay: tuple[float, float] = (0.0005, 0.005)
    slow: float = 0.0
    slow_seconds: float = 0.1
    cut: float = 0.0


class Service(Protocol):
    """Listener at an address: accepts a stream and returns its server-side end."""

    def __call__(self, stream: Stream, method: str, metadata: tuple[tuple[str, Any], ...]) -> End: ...


class End(Protocol):
    """One end of a stream."""

    def receive(self, kind: str, value: Any) -> None:
        """Handle a message that arrived."""

    def broken(self, reason: str) -> None:
        """Handle the end of the stream: nothing arrives any more, in either direction."""


class Stream:
    """One call on a connection. ends: the client's and the server's."""

    __slots__ = ("connection", "cut_after", "cut_shape", "ends", "last", "lost", "method", "over", "under_way")

    def __init__(self, connection: Connection, client: End, method: str) -> None:
        self.connection = connection
        self.method = method
        self.ends: list[End | None] = [client, None]
        #: Arrival time of the last message, by receiving side.
        self.last = [0.0, 0.0]
        #: Messages in flight, in order, by receiving side; each arrival takes the first.
        self.under_way: tuple[deque[tuple[str, Any]], deque[tuple[str, Any]]] = (deque(), deque())
        #: True if nothing arrives at this side any more, by side.
        self.lost = [False, False]
        self.over = [False, False]
        self.cut_shape = ""
        self.cut_after = 0


class Connection:
    """Connection between two nodes."""

    __slots__ = ("address", "nodes", "open", "stalled", "streams")

    def __init__(self, client: Node, server: Node, address: str) -> None:
        self.nodes = (client, server)
        self.address = address
        #: True while the connection is up, as seen by each side.
        self.open = [True, True]
        self.streams: dict[Stream, None] = {}
        #: Streams with messages held up by a blocked path, once per message, by receiving side.
        self.stalled: tuple[list[Stream], list[Stream]] = ([], [])


class Network:
    """All connections of a run."""

    def __init__(self, loop: SimLoop, rng: random.Random, faults: Faults) -> None:
        self.loop = loop
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._listening: dict[str, tuple[Node, Service]] = {}
        self._connections: dict[Connection, None] = {}
        #: Blocked paths, with the time at which each was blocked.
        self._blocked: dict[tuple[str, str], float] = {}
        #: Number of cuts that block each path together.
        self._blocks: Counter[tuple[str, str]] = Counter()
        #: Nodes whose host died with them.
        self._silent: set[Node] = set()
        self._slow: dict[str, float] = {}
        #: Extra seconds for messages from one node to another.
        self._late: dict[tuple[str, str], float] = {}
        #: True if a stream of this method, between nodes of these names, may be cut.
        self.may_cut: Callable[[str, str, str], bool] = lambda client, server, method: True

    # --- for the ends of streams --------------------------------------------------------------------------------------

    def listen(self, address: str, node: Node, service: Service) -> None:
        """Serve ``address`` from ``node``."""
        self._listening[address] = (node, service)

    def connect(self, client: Node, address: str, told: Callable[[Connection | str], None]) -> None:
        """Connect to ``address`` and pass the connection, or the reason of a failure, to ``told``."""
        there = self._listening.get(address)
        delay = 2 * self._delay(client.name, there[0].name if there else "")
        if there is None or (there[0].dead and there[0] not in self._silent):
            self._later(delay, client, told, f"connection to {address} refused")
        elif there[0].paused or there[0].dead or self._is_cut(client.name, there[0].name):
            self._later(CONNECT_SECONDS * self._rng.uniform(0.5, 1.0), client, told, f"{address} does not answer")
        else:
            connection = Connection(client, there[0], address)
            self._connections[connection] = None
            self._later(delay, client, told, connection)

    def probe(self, client: Node, address: str, told: Callable[[str], None]) -> None:
        """Probe ``address`` and pass the result to ``told``. The kernel of a paused process accepts the connection."""
        there = self._listening.get(address)
        delay = 2 * self._delay(client.name, there[0].name if there else "")
        if there is None or (there[0].dead and there[0] not in self._silent):
            self._later(delay, client, told, "refused")
        elif there[0].dead or self._is_cut(client.name, there[0].name):
            self._later(CONNECT_SECONDS, client, told, "silent")
        else:
            self._later(delay, client, told, "accepted")

    def open(self, connection: Connection, client: End, method: str) -> Stream:
        """Return a new stream. The call begins when ``send`` sends "open"."""
        stream = Stream(connection, client, method)
        connection.streams[stream] = None
        if self._rng.random() < self.faults.cut and self.may_cut(
            connection.nodes[0].name, connection.nodes[1].name, method
        ):
            stream.cut_shape = self._rng.choice(("request", "response", "flight"))
            stream.cut_after = self._rng.randrange(4)
        return stream

    def send(self, stream: Stream, to: int, kind: str, value: Any) -> None:
        """Send a message to side ``to`` (1 is the server)."""
        connection = stream.connection
        if not connection.open[1 - to] or stream.lost[to]:
            return
        if stream.cut_shape and self._cuts(stream, to):
            self._cut(stream)
            if stream.lost[to]:
                return
        nodes = connection.nodes
        arrival = self.loop.time() + self._delay(nodes[1 - to].name, nodes[to].name)
        if arrival <= stream.last[to]:
            arrival = stream.last[to] + 1e-6
        stream.last[to] = arrival
        stream.under_way[to].append((kind, value))
        self._at(arrival, self._arrive, stream, to)

    def end(self, stream: Stream, side: int) -> None:
        """Release the stream on this side."""
        stream.over[side] = True
        if all(stream.over):
            stream.connection.streams.pop(stream, None)

    # --- for the nemesis ----------------------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Block everything from ``source`` to ``target`` from now on."""
        self._blocks[source, target] += 1
        if (source, target) not in self._blocked:
            self._blocked[source, target] = self.loop.time()
            self.watch_silence(source, target)

    def heal(self) -> None:
        """Make all paths free and fast again, and deliver the messages held up by them."""
        self._blocked.clear()
        self._blocks.clear()
        self._slow.clear()
        self._late.clear()
        self._release()

    def unblock(self, source: str, target: str) -> None:
        """Remove one cut of a path. Removing the last one delivers the messages held up by the path."""
        self._blocks[source, target] -= 1
        if self._blocks[source, target] <= 0:
            self._blocked.pop((source, target), None)
            self._release()

    def _release(self) -> None:
        for connection in list(self._connections):
            for to in (0, 1):
                nodes, stalled = connection.nodes, connection.stalled[to]
                if stalled and (nodes[1 - to].name, nodes[to].name) not in self._blocked:
                    again, stalled[:] = list(stalled), []
                    for stream in again:
                        self._send_again(stream, to)

    def _send_again(self, stream: Stream, to: int) -> None:
        """Retransmit an unacknowledged message, as TCP does."""
        arrival = max(self.loop.time() + self._rng.uniform(0.0, 0.2), stream.last[to] + 1e-6)
        stream.last[to] = arrival
        self._at(arrival, self._arrive, stream, to)

    def slow_down(self, name: str, seconds: float) -> None:
        """Delay everything that ``name`` sends or receives by ``seconds``."""
        self._slow[name] = seconds

    def delay_path(self, source: str, target: str, seconds: float) -> None:
        """Delay messages from ``source`` to ``target`` by ``seconds``, keeping their order. 0 removes the delay."""
        self._late[source, target] = seconds

    def watch_silence(self, one: str, other: str) -> None:
        """Break connections between these two nodes (``*``: any) that are still silent after the keepalive time."""
        for connection in list(self._connections):
            names = {node.name for node in connection.nodes}
            if one in names and (other == "*" or other in names):
                for side in (0, 1):
                    now = self.loop.time()
                    self._at(now + self._rng.uniform(*KEEPALIVE), self._check_silence, connection, side, now)

    def break_some(self, names: tuple[str, ...], fraction: float) -> int:
        """Break a fraction of the connections with both ends among ``names``. Returns the number of broken ones."""
        broken = 0
        for connection in list(self._connections):
            if all(node.name in names for node in connection.nodes) and self._rng.random() < fraction:
                self.break_connection(connection, "connection reset")
                broken += 1
        return broken

    def process_died(self, node: Node, *, silent: bool) -> None:
        """Kill ``node``: its kernel resets the connections or, if ``silent``, its host died with it."""
        if silent:
            self._silent.add(node)
        for connection in list(self._connections):
            if node in connection.nodes:
                side = connection.nodes.index(node)
                connection.open[side] = False
                if silent:
                    when = self._rng.uniform(*KEEPALIVE)
                    self._at(self.loop.time() + when, self._side_broken, connection, 1 - side, "keepalive timed out")
                else:
                    self._at(self._soon(node, connection.nodes[1 - side]), self._reset, connection, 1 - side)

    def break_connection(self, connection: Connection, reason: str) -> None:
        """Break a connection. Each end learns of it in its own time."""
        for side in (0, 1):
            when = self._soon(connection.nodes[1 - side], connection.nodes[side])
            self._at(when, self._side_broken, connection, side, reason)

    # --- inner --------------------------------------------------------------------------------------------------------

    def _is_cut(self, one: str, other: str) -> bool:
        return (one, other) in self._blocked or (other, one) in self._blocked

    def _delay(self, source: str, target: str) -> float:
        low, high = self.faults.delay
        delay = low + (high - low) * self._rng.random()
        if self.faults.slow and self._rng.random() < self.faults.slow:
            delay += self.faults.slow_seconds * self._rng.random()
        if self._slow:
            delay += self._slow.get(source, 0.0) + self._slow.get(target, 0.0)
        if self._late:
            delay += self._late.get((source, target), 0.0)
        return delay

    def _soon(self, source: Node, target: Node) -> float:
        return self.loop.time() + self._delay(source.name, target.name)

    def _at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        self.loop.call_at(when, callback, *args, context=self.loop.world.context)

    def _later(self, delay: float, node: Node, told: Callable[..., None], *args: Any) -> None:
        self._at(self.loop.time() + delay, self.loop.call_on, node, told, *args)

    def _arrive(self, stream: Stream, to: int) -> None:
        connection = stream.connection
        source, target = connection.nodes[1 - to], connection.nodes[to]
        if not connection.open[to] or stream.lost[to] or target.dead:
            return
        if connection.stalled[to] or (self._blocked and (source.name, target.name) in self._blocked):
            self.counts["stalled"] += 1
            connection.stalled[to].append(stream)
            return
        kind, value = stream.under_way[to].popleft()
        data = value if isinstance(value, bytes) else b""
        self.loop.trace(f"{source.name}>{target.name} {stream.method} {kind}", data)
        self.loop.call_on(target, self._deliver, stream, to, kind, value)

    def _deliver(self, stream: Stream, to: int, kind: str, value: Any) -> None:
        """Deliver a message. Runs in the receiving node."""
        end = stream.ends[to]
        if kind == "open":
            address = stream.connection.address
            _, service = self._listening[address]
            stream.ends[1] = service(stream, stream.method, value)
        elif end is not None:
            end.receive(kind, value)

    def _cuts(self, stream: Stream, to: int) -> bool:
        wanted = 0 if stream.cut_shape == "response" else 1
        if to != wanted:
            return False
        stream.cut_after -= 1
        return stream.cut_after < 0

    def _cut(self, stream: Stream) -> None:
        """Break the stream in the shape that was drawn for it."""
        shape, stream.cut_shape = stream.cut_shape, ""
        self.counts[f"cut: {shape}"] += 1
        client, server = stream.connection.nodes
        stream.lost[0] = True
        self._at(self._soon(server, client), self._end_broken, stream, 0)
        later = self._soon(client, server) + (self._rng.uniform(0.0, 0.5) if shape == "flight" else 0.0)
        stream.lost[1] = shape == "request"
        self._at(later, self._end_broken, stream, 1)

    def _end_broken(self, stream: Stream, side: int) -> None:
        node = stream.connection.nodes[side]
        if not stream.over[side] and not node.dead:
            stream.lost[side] = True
            self.loop.trace(f"{node.name} {stream.method} broken")
            self.loop.call_on(node, self._tell_broken, stream, side, "stream reset")

    def _tell_broken(self, stream: Stream, side: int, reason: str) -> None:
        end = stream.ends[side]
        stream.lost[side] = True
        if end is not None and not stream.over[side]:
            end.broken(reason)
        self.end(stream, side)

    def _reset(self, connection: Connection, side: int) -> None:
        """Answer for the kernel of a dead process, if the path is free."""
        one, other = connection.nodes
        if self._is_cut(one.name, other.name):
            when = self.loop.time() + self._rng.uniform(*KEEPALIVE)
            self._at(when, self._side_broken, connection, side, "keepalive timed out")
        else:
            self._side_broken(connection, side, "connection reset by peer")

    def _check_silence(self, connection: Connection, side: int, since: float) -> None:
        mine, other = connection.nodes[side], connection.nodes[1 - side]
        if mine.dead or not (other.dead or self._was_cut(mine, other, since)):
            return
        if mine.paused:  # It will check when it resumes.
            self._at(self.loop.time() + KEEPALIVE[0], self._check_silence, connection, side, since)
            return
        self.counts["keepalive"] += 1
        self._side_broken(connection, side, "keepalive timed out")
        self._at(self._soon(mine, other), self._reset, connection, 1 - side)

    def _was_cut(self, mine: Node, other: Node, since: float) -> bool:
        """True if nothing arrived from ``other``, or nothing from ``mine`` arrived there, since ``since``."""
        paths = ((mine.name, other.name), (other.name, mine.name))
        starts = [self._blocked[path] for path in paths if path in self._blocked]
        if other.paused and not other.answers_pings:
            starts.append(other.paused_since)
        return any(start <= since for start in starts)

    def _side_broken(self, connection: Connection, side: int, reason: str) -> None:
        if not connection.open[side]:
            return
        connection.open[side] = False
        if not any(connection.open):
            self._connections.pop(connection, None)
        node = connection.nodes[side]
        if not node.dead:
            self.loop.trace(f"{node.name} connection broken")
            for stream in list(connection.streams):
                self.loop.call_on(node, self._tell_broken, stream, side, reason)
