"""The simulated network: connections between nodes, and the streams on them, with everything that can go wrong.

It carries bytes and knows nothing of psdist. A connection is what TCP gives: bytes arrive late, in order per stream,
or the connection breaks; both ends learn of that at times of their own. Streams of one connection overtake each other.
Faults are asked for by the ``nemesis``: partitions in one or both directions (silence, until keepalive gives the
connection up), slow links, broken connections, dead processes (their kernel says so) and dead hosts (silence).
Besides, ``Faults.cut`` of all streams break by themselves, in the shapes of Ray's chaos: the request is lost, the
answer is lost, or the caller is told of a failure while the request is still on its way, and overtaken by its repeat.

Not here: what the ends of a stream do (``rpc``).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.simulation.loop import Node, SimLoop

#: A path that is silent for so long (seconds, drawn) is given up by both ends.
KEEPALIVE = (2.0, 4.0)
#: Connecting to a host that does not answer is given up after so long.
CONNECT_SECONDS = 0.5


@dataclass
class Faults:
    """What goes wrong by itself, and how fast the rest is.

    delay: least and most seconds of a message. slow: fraction of messages that take ``slow_seconds`` longer.
    cut: fraction of calls that break at one of their first messages.
    """

    delay: tuple[float, float] = (0.0005, 0.005)
    slow: float = 0.0
    slow_seconds: float = 0.1
    cut: float = 0.0


class Service(Protocol):
    """What listens at an address: accepts a stream and returns its end there."""

    def __call__(self, stream: Stream, method: str, metadata: tuple[tuple[str, Any], ...]) -> End: ...


class End(Protocol):
    """One end of a stream."""

    def receive(self, kind: str, value: Any) -> None:
        """Something arrived."""

    def broken(self, reason: str) -> None:
        """Nothing more will arrive, and nothing that is sent."""


class Stream:
    """One call on a connection; ``ends`` are the client's and the server's."""

    __slots__ = ("connection", "cut_after", "cut_shape", "ends", "last", "lost", "method", "over", "under_way")

    def __init__(self, connection: Connection, client: End, method: str) -> None:
        self.connection = connection
        self.method = method
        self.ends: list[End | None] = [client, None]
        #: Arrival of the last message, by the side that it goes to.
        self.last = [0.0, 0.0]
        #: Messages that were sent, in order: whenever something arrives, it is the first of them.
        self.under_way: tuple[deque[tuple[str, Any]], deque[tuple[str, Any]]] = (deque(), deque())
        #: Nothing arrives at this side any more.
        self.lost = [False, False]
        self.over = [False, False]
        self.cut_shape = ""
        self.cut_after = 0


class Connection:
    """What two nodes have between them."""

    __slots__ = ("address", "nodes", "open", "stalled", "streams")

    def __init__(self, client: Node, server: Node, address: str) -> None:
        self.nodes = (client, server)
        self.address = address
        #: Whether each side thinks that it stands.
        self.open = [True, True]
        self.streams: dict[Stream, None] = {}
        #: Streams of which something waits for a blocked path to be free, once for each message, by the side that it
        #: goes to.
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
        #: Paths that nothing passes, by when that began.
        self._blocked: dict[tuple[str, str], float] = {}
        #: Cuts that lie on a blocked path at the same time.
        self._blocks: Counter[tuple[str, str]] = Counter()
        #: Nodes whose host died with them.
        self._silent: set[Node] = set()
        self._slow: dict[str, float] = {}
        #: Seconds by which messages from one node to another come later.
        self._late: dict[tuple[str, str], float] = {}
        #: Whether a stream of this method, between nodes of these names, may be cut.
        self.may_cut: Callable[[str, str, str], bool] = lambda client, server, method: True

    # --- what ends use ------------------------------------------------------------------------------------------------

    def listen(self, address: str, node: Node, service: Service) -> None:
        """``node`` answers at ``address``."""
        self._listening[address] = (node, service)

    def connect(self, client: Node, address: str, told: Callable[[Connection | str], None]) -> None:
        """Tells a connection, or why there is none."""
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
        """Tells what a connection to ``address`` meets: the kernel of a process that stands still accepts it."""
        there = self._listening.get(address)
        delay = 2 * self._delay(client.name, there[0].name if there else "")
        if there is None or (there[0].dead and there[0] not in self._silent):
            self._later(delay, client, told, "refused")
        elif there[0].dead or self._is_cut(client.name, there[0].name):
            self._later(CONNECT_SECONDS, client, told, "silent")
        else:
            self._later(delay, client, told, "accepted")

    def open(self, connection: Connection, client: End, method: str) -> Stream:
        """A stream; ``send`` of an "open" begins it."""
        stream = Stream(connection, client, method)
        connection.streams[stream] = None
        if self._rng.random() < self.faults.cut and self.may_cut(
            connection.nodes[0].name, connection.nodes[1].name, method
        ):
            stream.cut_shape = self._rng.choice(("request", "response", "flight"))
            stream.cut_after = self._rng.randrange(4)
        return stream

    def send(self, stream: Stream, to: int, kind: str, value: Any) -> None:
        """Sends to side ``to`` (1 is the server)."""
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
        """This side is done with the stream."""
        stream.over[side] = True
        if all(stream.over):
            stream.connection.streams.pop(stream, None)

    # --- what the nemesis uses ----------------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """From now on nothing of ``source`` reaches ``target``."""
        self._blocks[source, target] += 1
        if (source, target) not in self._blocked:
            self._blocked[source, target] = self.loop.time()
            self.watch_silence(source, target)

    def heal(self) -> None:
        """All paths are free and fast again; what waited for them arrives."""
        self._blocked.clear()
        self._blocks.clear()
        self._slow.clear()
        self._late.clear()
        self._release()

    def unblock(self, source: str, target: str) -> None:
        """One cut is over. After the last one, what waited for the path arrives."""
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
        """TCP sends what was not acknowledged."""
        arrival = max(self.loop.time() + self._rng.uniform(0.0, 0.2), stream.last[to] + 1e-6)
        stream.last[to] = arrival
        self._at(arrival, self._arrive, stream, to)

    def slow_down(self, name: str, seconds: float) -> None:
        """All that ``name`` sends or gets takes so much longer."""
        self._slow[name] = seconds

    def delay_path(self, source: str, target: str, seconds: float) -> None:
        """Messages from ``source`` to ``target`` take so much longer, in their order. 0: no longer."""
        self._late[source, target] = seconds

    def watch_silence(self, one: str, other: str) -> None:
        """Connections between these two (``*``: anybody) that are still silent after the keepalive time break."""
        for connection in list(self._connections):
            names = {node.name for node in connection.nodes}
            if one in names and (other == "*" or other in names):
                for side in (0, 1):
                    now = self.loop.time()
                    self._at(now + self._rng.uniform(*KEEPALIVE), self._check_silence, connection, side, now)

    def break_some(self, names: tuple[str, ...], fraction: float) -> int:
        """Breaks connections of which both ends are among ``names``; how many."""
        broken = 0
        for connection in list(self._connections):
            if all(node.name in names for node in connection.nodes) and self._rng.random() < fraction:
                self.break_connection(connection, "connection reset")
                broken += 1
        return broken

    def process_died(self, node: Node, *, silent: bool) -> None:
        """``node`` was killed: its kernel says so, or (``silent``) its host died with it."""
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
        """Both ends learn of it, each at its time."""
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
        """Runs in the node that it is for."""
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
        """The stream breaks, in the shape that was drawn for it."""
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
        """The kernel of a dead process answers, if the path is free."""
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
        if mine.paused:  # It will look when it goes on.
            self._at(self.loop.time() + KEEPALIVE[0], self._check_silence, connection, side, since)
            return
        self.counts["keepalive"] += 1
        self._side_broken(connection, side, "keepalive timed out")
        self._at(self._soon(mine, other), self._reset, connection, 1 - side)

    def _was_cut(self, mine: Node, other: Node, since: float) -> bool:
        """Whether nothing of ``other`` arrived, or nothing of ``mine`` there, in all the time."""
        paths = ((mine.name, other.name), (other.name, mine.name))
        starts = [self._blocked[path] for path in paths if path in self._blocked]
        if other.paused:
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
