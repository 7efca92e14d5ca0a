"""Two workers with a group in this process, and a third one whose links are driven by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np

from psdist.client.session.membership import WorkerMembership
from psdist.client.session.waits import WaitTracker
from psdist.collectives.core import plans
from psdist.collectives.core.machine import COLLECTIVES, CallLane
from psdist.collectives.group_runner import GroupRunner
from psdist.collectives.mesh import Mesh
from psdist.errors import ClosedError, PsdistError
from psdist.link.arenas import GradientArena
from psdist.link.peer_links import PeerListener
from psdist.security.tls import Credentials
from psdist.types import ClusterMap, WorkerEntry
from psdist.v1 import scheduler_pb2
from psdist.v1 import worker_pb2 as pb
from psdist.v1.common_pb2 import WorkerEntry as WorkerMessage
from psdist.wire import convert, limits
from tests.support.frame_socket import PATIENCE_SECONDS, FrameSocket, offered

TOKEN = "secret"
#: Elements of the memory that a worker shares with another.
ARENA = limits.SHARED_PARTS * limits.PART_BYTES // 4
WORKERS = 3


class Worker:
    """One worker of the run: its port, its links, and its groups."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.waits = WaitTracker()
        self.listener = PeerListener(Credentials(TOKEN))
        self.membership = WorkerMembership("scheduler", self.waits, rejoins=False)

    async def listen(self) -> WorkerEntry:
        """Open the port. Returns this worker's entry in the map."""
        await self.listener.open_towards("127.0.0.1:1", spans_hosts=False)
        return WorkerEntry(f"worker-{self.rank}", 1, self.rank, self.listener.address)

    def join(self, cluster: ClusterMap) -> None:
        """Enter the run."""
        response = scheduler_pb2.RegisterResponse(
            run_id="run", member_id=f"worker-{self.rank}", incarnation=1, rank=self.rank,
            world_size=WORKERS, map=convert.map_to_proto(cluster),
        )  # fmt: skip
        self.membership.start_incarnation(response)
        self.mesh = Mesh(self.membership, self.listener, self.listener.credentials)
        self.mesh.shares = False

    def group(self, ranks: list[int]) -> GroupRunner:
        """Make a group."""
        runner = GroupRunner(self.mesh, self.waits, ranks, ranks.index(self.rank))
        self.mesh.add(runner)
        return runner

    def close(self) -> None:
        """End all links."""
        self.mesh.close(ClosedError("the test is over"))
        self.listener.close()


class PeerBench:
    """Workers 0 and 1 with a group of both, and the port of worker 2, which the test plays."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self._pair = [worker.group([0, 1]) for worker in workers]
        #: Group of workers 0 and 2, at worker 0.
        self.group = workers[0].group([0, 2])
        self.closers: list[Any] = []

    async def reduce(self) -> None:
        """Make a call of workers 0 and 1, and check its result."""
        arrays = [np.arange(5, dtype=np.float32) for _ in self._pair]
        results = []
        for rank, (group, array) in enumerate(zip(self._pair, arrays, strict=True)):
            plan = plans.all_reduce(rank, 2, array, array, "sum")
            results.append(group.result(group.start(COLLECTIVES, plan), "all_reduce", PATIENCE_SECONDS))
        await asyncio.gather(*results)
        assert all(np.array_equal(array, 2 * np.arange(5)) for array in arrays)

    async def received(self, array: np.ndarray) -> None:
        """Receive an array of worker 2 at worker 0."""
        lane = CallLane(1, 0, 0)
        await self.group.result(self.group.start(lane, plans.receive(array, 1)), "recv", PATIENCE_SECONDS)


@asynccontextmanager
async def opened_peers() -> AsyncIterator[PeerBench]:
    """Start the workers."""
    workers = [Worker(rank) for rank in range(WORKERS)]
    cluster = ClusterMap("run", 1, (), tuple([await worker.listen() for worker in workers]))
    for worker in workers[:2]:
        worker.join(cluster)
    bench = PeerBench(workers[:2])
    try:
        yield bench
    finally:
        for close in reversed(bench.closers):
            close()
        for worker in workers[:2]:
            worker.close()
        workers[2].listener.close()


class PeerChannel:
    """Link of worker 2 to worker 0, with frames on its connection."""

    name: ClassVar[str] = "tcp"
    is_framed = True

    def __init__(self, bench: PeerBench, token: str = TOKEN) -> None:
        self.bench = bench
        self._token = token
        self.connection: FrameSocket | None = None

    @property
    def socket(self) -> FrameSocket:
        """The connection, once it is open."""
        assert self.connection is not None
        return self.connection

    async def dial(self, **changes: Any) -> None:
        """Connect and say hello."""
        listener = self.bench.workers[0].listener
        self.connection = await FrameSocket.dial(listener.port)
        self.bench.closers.append(self.connection.close)
        receiver = WorkerMessage(worker_id="worker-0", incarnation=1, address=listener.address)
        sender = WorkerMessage(worker_id="worker-2", incarnation=1)
        given = {"token": self._token, "run_id": "run", "sender": sender, "receiver": receiver} | changes
        await self.send_raw(self.framed(pb.PeerFrame(hello=pb.PeerHello(**given))))

    async def open(self) -> None:
        """Open the link."""
        await self.dial()
        assert (await self.receive()).welcome

    def framed(self, message: pb.PeerFrame | bytes, payload: bytes = b"") -> bytes:
        """Return the bytes of a frame."""
        return self.socket.framed(message, payload)

    async def send_raw(self, data: bytes) -> None:
        """Send bytes."""
        await self.socket.send(data)

    async def receive(self) -> pb.PeerFrame:
        """Return the next answer."""
        header, _ = await self.socket.frame()
        return pb.PeerFrame.FromString(header)

    def lane(self, source: int = 1, number: int = 0) -> pb.CollectiveLane:
        """Return a lane between workers 2 and 0: that of messages from 2 to 0 (rank 1 to rank 0 of their group)."""
        return pb.CollectiveLane(group=self.bench.group.key, source=source, number=number)

    def call(self, payload: bytes, number: int = 0) -> pb.PeerFrame:
        """Return the announcement of a message, whose data is this payload."""
        return pb.PeerFrame(
            call=pb.CollectiveCall(
                lane=self.lane(number=number), kind="send", dtype="float32", root=-1, gives=len(payload)
            )
        )

    async def send_array(self, values: np.ndarray, number: int = 0) -> None:
        """Send an array to worker 0."""
        data = values.tobytes()
        await self.send_raw(self.framed(self.call(data, number), data))

    async def end(self) -> Exception | None:
        """Wait for the end of the link. Returns the error that the next call of the group has, which has used it."""
        await self.socket.until_closed()
        try:
            await self.bench.received(np.zeros(5, np.float32))
        except PsdistError as error:
            return error
        return None

    async def cut(self) -> None:
        """Close the connection."""
        self.socket.close()


class ShmPeerChannel(PeerChannel):
    """Link that shares memory, in which large payloads lie."""

    name = "shm"

    async def open(self) -> None:
        await super().open()
        self.arena = GradientArena.create(ARENA, "float32")
        with offered(self.arena.fd) as offer:
            await self.send_raw(self.framed(pb.PeerFrame(offer=offer.name)))
            (await offer.taken()).close()
            assert (await self.receive()).taken == self.arena.nonce

    async def send_array(self, values: np.ndarray, number: int = 0) -> None:
        data = values.view(np.uint8)
        place = self.arena.flat.view(np.uint8).reshape(limits.SHARED_PARTS, -1)[3]
        place[: data.size] = data
        frame = self.call(values.tobytes(), number)
        frame.shared.CopyFrom(pb.SharedPayload(place=3, size=data.size))
        await self.send_raw(self.framed(frame))
        while not (answer := await self.receive()).released:
            pass
        assert answer.released == 4


PEERS: tuple[type[PeerChannel], ...] = (PeerChannel, ShmPeerChannel)
