"""Scheduler and servers that misbehave on command, written from the stubs alone.

They show the client's handling of breaks, refusals and losses, which real programs produce only by chance. The fake
server adds every gradient to its weights (w += g), so that a push applied twice or never shows in the sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

import psdist
from psdist import errors
from psdist.client.core.routing import Route
from psdist.client.session.membership import ClusterView
from psdist.client.transport.transport import RequestIdentity
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.security.tls import Credentials
from psdist.types import ClusterMap, ParametersEntry, ParametersSpec, Replica, ServerEntry, Shard
from psdist.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, server_pb2, server_pb2_grpc
from psdist.wire import channels, convert, status

RUN, SLICE = "fake-run", 4
ELEMENTS = 22


@dataclass
class Break:
    """Failure of a server in one of its next streams of pushes.

    The stream breaks after ``answers`` slices with ``error`` (None: the transport's own UNAVAILABLE). Unanswered
    slices are not applied, or applied with ``lose_answer``.
    """

    answers: int = 0
    error: errors.PsdistError | None = None
    lose_answer: bool = False
    #: End the stream while the client may still be writing: grpc.aio then often hides the error (grpc issue 36066).
    abrupt: bool = False
    #: Stop answering until the event is set, instead of failing.
    hang: asyncio.Event | None = None


class FakeServer(server_pb2_grpc.ServerServiceServicer):
    """Server that stores the received slices. Plans in ``breaks`` are used up, one per stream."""

    async def GetStatistics(self, request: Any, context: Any) -> server_pb2.GetStatisticsResponse:
        return server_pb2.GetStatisticsResponse()

    def __init__(self, name: str, incarnation: int = 1) -> None:
        #: Wait reported before any answer to a Push.
        self.says = ""
        self.name, self.incarnation = name, incarnation
        self.weights: dict[int, np.ndarray] = {}
        self.versions: dict[int, int] = {}
        self.taken: set[tuple[int, int]] = set()
        self.breaks: list[Break] = []
        self.headers: list[server_pb2.PushHeader] = []
        self.requests: list[tuple[int, int]] = []
        self.payloads: list[tuple[int, int, bytes]] = []
        self.identities: list[Any] = []
        #: The worker's first incarnation that is not expelled.
        self.fenced = 0
        self.hanging = asyncio.Event()
        self.pushed = asyncio.Event()
        self.installed = asyncio.Event()
        #: Initial values are accepted once this is set.
        self.installing: asyncio.Event | None = None
        #: Pulls are answered once this is set.
        self.pulling: asyncio.Event | None = None
        self.address = ""
        self._server = channels.make_server(Credentials())

    async def start(self) -> FakeServer:
        server_pb2_grpc.add_ServerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{channels.bind(self._server, '127.0.0.1', 0, Credentials())}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Install(self, requests: AsyncIterator[Any], context: Any) -> server_pb2.InstallResponse:
        count = 0
        if self.installing is not None:
            self.hanging.set()
            await self.installing.wait()
        async for request in requests:
            self.weights[request.slice] = np.frombuffer(request.payload, np.float32).copy()
            self.versions[request.slice] = 0
            count += 1
        self.installed.set()
        return server_pb2.InstallResponse(slices=count)

    async def PushPull(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for index, ignored in self._taking(requests, context):
            yield server_pb2.PushPullResponse(
                slice=index, version=self.versions[index], ignored=ignored, payload=self.weights[index].tobytes()
            )

    async def Push(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        if self.says:
            yield server_pb2.PushResponse(waiting_for=self.says)
        async for index, ignored in self._taking(requests, context):
            yield server_pb2.PushResponse(slice=index, version=self.versions[index], ignored=ignored)

    async def Pull(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._check(request.identity, context)
        if self.pulling is not None:
            await self.pulling.wait()
            await self._check(request.identity, context)
        for index in request.slices:
            yield server_pb2.PullResponse(
                slice=index, version=self.versions[index], payload=self.weights[index].tobytes()
            )

    async def _taking(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[tuple[int, bool]]:
        plan = self.breaks.pop(0) if self.breaks else None
        step = answers = 0
        async for request in requests:
            if request.HasField("header"):
                self.headers.append(request.header)
                self.pushed.set()
                step = request.header.step
                await self._check(request.header.identity, context)
            if plan is not None and answers >= plan.answers and not plan.lose_answer:
                await self._break(plan, context, requests)
            self.requests.append((step, request.slice))
            self.payloads.append((step, request.slice, request.payload))
            ignored = (step, request.slice) in self.taken
            if not ignored:
                self.taken.add((step, request.slice))
                if request.payload and self.headers[-1].codec == common_pb2.CODEC_SEGMENTS:
                    from psdist.compression.segments import accumulate

                    accumulate(request.payload, self.weights[request.slice])
                elif request.payload:
                    dtype = NUMPY_DTYPES[convert.dtype_from_proto(self.headers[-1].dtype)]
                    self.weights[request.slice] += np.frombuffer(request.payload, dtype).astype(np.float32)
                self.versions[request.slice] += 1
            if plan is not None and answers >= plan.answers:
                await self._break(plan, context, requests)
            answers += 1
            yield request.slice, ignored

    async def _check(self, identity: Any, context: Any) -> None:
        self.identities.append(identity)
        if identity.incarnation < self.fenced:
            await status.abort(context, errors.FencedError(f"incarnation {identity.incarnation} was expelled"))

    async def _break(self, plan: Break, context: Any, requests: AsyncIterator[Any]) -> None:
        if plan.hang is not None:
            self.hanging.set()
            await plan.hang.wait()
        if plan.error is not None:
            while not plan.abrupt and await anext(requests, None) is not None:
                pass
            await status.abort(context, plan.error)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Scheduler of one worker. ``news`` is sent on its session; the map is rebuilt from ``servers`` and ``shards``."""

    servers: list[FakeServer]
    epoch: int = 1
    shards: list[str] = field(default_factory=list)
    created: Any = None
    layout: Any = None
    session_error: errors.PsdistError | None = None
    sessions: int = 0
    registrations: list[Any] = field(default_factory=list)
    address: str = ""
    left: bool = False
    #: Incarnations of the primaries, if they differ from those of ``servers``.
    lives: dict[str, int] = field(default_factory=dict)
    terms: dict[int, int] = field(default_factory=dict)
    #: True if shards without a live primary are lost.
    lost: bool = False
    commits: int = 0
    #: The worker's last incarnation, and the first that is not expelled.
    incarnation: int = 0
    fenced: int = 0
    #: Errors for the next registrations.
    register_errors: list[errors.PsdistError] = field(default_factory=list)
    first_step: int = 0
    #: Directory of the snapshot that the values came from, and the number of restores.
    restored: str = ""
    generation: int = 0
    #: Parameter set that is recreated at the next request for it.
    forgets: str = ""
    #: Answer to a worker once its parameters are ready.
    notice: str = ""
    ready: bool = True
    #: Worker state that is returned.
    state: bytes = b""

    #: True if an expelled worker may continue its push.
    resumes: bool = False

    def __post_init__(self) -> None:
        #: Pushes that workers asked to continue.
        self.resume_pushes: list[Any] = []
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        self.barriers: list[Any] = []
        self.barrier = asyncio.Event()
        #: Set once the worker has committed its initial values.
        self.committed = asyncio.Event()
        #: True if a withdrawn arrival had already opened its barrier.
        self.had_opened = False
        #: Withdrawals are answered once this is set.
        self.withdrawing: asyncio.Event | None = None
        self.hello = asyncio.Event()
        #: Sessions are accepted once this is set.
        self.accepting: asyncio.Event | None = None
        #: Workers' shutdown reports, and the activities in their heartbeats.
        self.stops: asyncio.Queue[Any] = asyncio.Queue()
        self.activities: asyncio.Queue[Any] = asyncio.Queue()
        #: Workers' words on snapshots, their requests, and the answers.
        self.reports: asyncio.Queue[Any] = asyncio.Queue()
        self.saves: list[Any] = []
        self.save_answers: asyncio.Queue[Any] = asyncio.Queue()
        #: Worker states received: header and file.
        self.states: asyncio.Queue[Any] = asyncio.Queue()
        self._server = channels.make_server(Credentials())

    async def start(self, port: int = 0) -> FakeScheduler:
        self._server = channels.make_server(Credentials())
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{channels.bind(self._server, '127.0.0.1', port, Credentials())}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(None)

    def map(self) -> common_pb2.ClusterMap:
        entries = []
        if self.created is not None:
            total = sum(int(np.prod(t.shape)) for t in self.layout.tensors)
            spec = common_pb2.ParametersSpec()
            spec.CopyFrom(self.created)
            spec.slice_elements = SLICE
            restore = common_pb2.Restore(directory=self.restored) if self.restored else None
            entries.append(
                common_pb2.ParametersEntry(
                    spec=spec,
                    total=total,
                    shards=self._placed(),
                    ready=self.ready,
                    restore=restore,
                    generation=self.generation,
                    members=[common_pb2.ParametersMember(worker_id="worker-0", incarnation=self.incarnation)],
                )
            )
        servers = [
            common_pb2.ServerEntry(server_id=s.name, incarnation=s.incarnation, address=s.address) for s in self.servers
        ]
        live = self.incarnation if self.incarnation >= self.fenced else 0
        workers = [common_pb2.WorkerEntry(worker_id="worker-0", incarnation=live)]
        return common_pb2.ClusterMap(run_id=RUN, epoch=self.epoch, servers=servers, workers=workers, parameters=entries)

    def _placed(self) -> list[common_pb2.Shard]:
        lives = {server.name: server.incarnation for server in self.servers} | self.lives
        return [
            common_pb2.Shard(
                primary=common_pb2.Replica(server_id=name, incarnation=lives.get(name, 1)),
                term=self.terms.get(number, 1),
                lost=self.lost and name not in lives,
            )
            for number, name in enumerate(self.shards)
        ]

    def promote(self, dying: FakeServer, successor: FakeServer) -> None:
        """Remove ``dying`` from the map; ``successor``, with a copy of its slices, becomes primary of its shards."""
        if dying in self.servers:
            self.servers.remove(dying)
        successor.weights |= {
            index: array.copy() for index, array in dying.weights.items() if index not in successor.weights
        }
        successor.versions = dying.versions | successor.versions
        successor.taken |= dying.taken
        for number, name in enumerate(self.shards):
            if name == dying.name:
                self.shards[number], self.terms[number] = successor.name, self.terms.get(number, 1) + 1
        self.publish()

    def lose_shards(self, text: str) -> None:
        """Announce that shards are permanently lost."""
        lost = scheduler_pb2.SessionResponse.ShardsLost(parameters="p", shards=[1], text=text)
        self.news.put_nowait(scheduler_pb2.SessionResponse(shards_lost=lost))

    def publish(self) -> None:
        """Send a new epoch on the session."""
        self.epoch += 1
        self.news.put_nowait(scheduler_pb2.SessionResponse(map=self.map()))

    def publish_difference(self, base: int, epoch: int) -> None:
        """Send a difference that changes nothing but the epoch."""
        change = common_pb2.ClusterMapDifference(base=base, epoch=epoch)
        self.news.put_nowait(scheduler_pb2.SessionResponse(map_difference=change))

    def lose(self, server: FakeServer) -> None:
        """Announce a loss; the map follows separately."""
        lost = scheduler_pb2.SessionResponse.MemberLost(
            member_id=server.name, role=scheduler_pb2.ROLE_SERVER, reason="its process was killed"
        )
        self.news.put_nowait(scheduler_pb2.SessionResponse(member_lost=lost))

    async def Register(self, request: Any, context: Any) -> Any:
        self.registrations.append(request)
        if self.register_errors:
            await status.abort(context, self.register_errors.pop(0))
        self.incarnation += 1
        return scheduler_pb2.RegisterResponse(
            run_id=RUN,
            member_id=request.member_id or "worker-0",
            incarnation=self.incarnation,
            rank=request.rank,
            world_size=1,
            lease_seconds=0.4,
            map=self.map(),
        )

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.sessions += 1
        if self.session_error is not None:
            await status.abort(context, self.session_error)
        hello = (await anext(requests)).hello
        if hello.incarnation < self.fenced:
            await status.abort(context, errors.FencedError(f"incarnation {hello.incarnation} was silent"))
        self.hello.set()
        if self.accepting is not None:
            await self.accepting.wait()
        reading = asyncio.create_task(self._read(requests))
        try:
            yield scheduler_pb2.SessionResponse(map=self.map())
            while True:
                item = await self.news.get()
                if isinstance(item, errors.PsdistError):
                    await status.abort(context, item)
                yield item
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            match request.WhichOneof("event"):
                case "snapshot":
                    self.reports.put_nowait(request.snapshot)
                case "stop":
                    self.stops.put_nowait(request.stop)
                case "heartbeat":
                    self.activities.put_nowait(request.heartbeat.activity)

    def command(self, attempt: int, **kind: Any) -> None:
        """Send a snapshot command on the session."""
        command = scheduler_pb2.SnapshotCommand(attempt=attempt, **kind)
        self.news.put_nowait(scheduler_pb2.SessionResponse(snapshot=command))

    async def SaveSnapshot(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.saves.append(request)
        if self.save_answers.empty():
            yield scheduler_pb2.SaveSnapshotResponse(waiting_for="for nobody in particular")
        item = await self.save_answers.get()
        if isinstance(item, errors.PsdistError):
            await status.abort(context, item)
        yield item

    async def HandInState(self, requests: AsyncIterator[Any], context: Any) -> Any:
        received = [request async for request in requests]
        assert [request.HasField("header") for request in received] == [True, *[False] * (len(received) - 1)]
        self.states.put_nowait((received[0].header, b"".join(request.part for request in received)))
        self.digest = received[0].header.digest
        return scheduler_pb2.HandInStateResponse()

    async def GetState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        digest = self.digest if self.state else b""
        yield scheduler_pb2.GetStateResponse(length=len(self.state), digest=digest, part=self.state[:1000])
        yield scheduler_pb2.GetStateResponse(part=self.state[1000:])

    async def Leave(self, request: Any, context: Any) -> Any:
        self.left = True
        return scheduler_pb2.LeaveResponse()

    async def CreateParameters(self, request: Any, context: Any) -> AsyncIterator[Any]:
        response = scheduler_pb2.CreateParametersResponse
        if self.created is None or request.spec.name == self.forgets:
            self.created, self.layout, self.forgets = request.spec, request.layout, ""
            self.shards = [server.name for server in self.servers]
            yield response(state=response.STATE_WAITING, waiting_for="for nobody in particular")
            self.epoch += 1
            self.ready = False
            self.committed.clear()
            yield response(state=response.STATE_UPLOAD, map=self.map())
            await self.committed.wait()
        self.epoch += 1
        if request.incarnation < self.fenced:
            await status.abort(context, errors.FencedError(f"incarnation {request.incarnation} was silent"))
        self.ready = True
        self.resume_pushes.append(request.resume)
        resumed = self.resumes and request.HasField("resume")
        first_step = request.resume.number if resumed and request.spec.consistency.kind == "bsp" else self.first_step
        ready = response(state=response.STATE_READY, map=self.map(), first_step=first_step, resumed=resumed)
        ready.notice = self.notice
        yield ready

    async def GetClusterMap(self, request: Any, context: Any) -> Any:
        return scheduler_pb2.GetClusterMapResponse(map=self.map())

    async def DescribeParameters(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield scheduler_pb2.DescribeParametersResponse(spec=self.created, layout=self.layout, map=self.map())

    async def Barrier(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.barriers.append(request)
        await self._check(request, context)
        if request.withdraw:
            if self.withdrawing is not None:
                await self.withdrawing.wait()
            await self._check(request, context)
            yield scheduler_pb2.BarrierResponse(released=self.had_opened, withdrawn=not self.had_opened)
            return
        yield scheduler_pb2.BarrierResponse(waiting_for="for nobody in particular")
        await self.barrier.wait()
        await self._check(request, context)
        yield scheduler_pb2.BarrierResponse(released=True)

    async def _check(self, request: Any, context: Any) -> None:
        if request.incarnation < self.fenced:
            await status.abort(context, errors.FencedError(f"incarnation {request.incarnation} was silent"))

    def expel(self, first_step: int = 0) -> None:
        """Expel the worker and end its session. Its next incarnation begins at ``first_step``."""
        self.fenced, self.first_step = self.incarnation + 1, first_step
        self.hello.clear()
        for server in self.servers:
            server.fenced = self.fenced
        self.epoch += 1
        self.news.put_nowait(errors.FencedError(f"incarnation {self.incarnation} was silent"))

    async def CommitParameters(self, request: Any, context: Any) -> Any:
        self.commits += 1
        self.committed.set()
        return scheduler_pb2.CommitParametersResponse(epoch=self.epoch)


class Setup:
    """Client of two fake servers, with its parameters ``p``."""

    def __init__(self) -> None:
        self.servers = [FakeServer("server-0"), FakeServer("server-1")]
        self.scheduler = FakeScheduler(self.servers[:])
        self.client: psdist.AsyncClient
        self.weights: psdist.AsyncParameters

    async def connect(self, **settings: Any) -> Setup:
        """Start the servers and the scheduler, and connect a client with these settings."""
        for server in self.servers:
            await server.start()
        await self.scheduler.start()
        self.client = await psdist.AsyncClient(self.scheduler.address, rank=3, **settings).connect()
        await self.scheduler.hello.wait()
        return self

    async def create(self, init: dict[str, np.ndarray] | None = None, **settings: Any) -> psdist.AsyncParameters:
        """Create the parameters, or get them again."""
        optimizer = settings.pop("optimizer", psdist.optim.SGD())
        self.weights = await self.client.parameters("p", gradient(0.0) if init is None else init, optimizer, **settings)
        return self.weights

    async def start(
        self, init: dict[str, np.ndarray] | None = None, *, client: dict[str, Any] | None = None, **settings: Any
    ) -> Setup:
        """Connect a client with the settings ``client``, and create the parameters."""
        await self.connect(**client or {})
        await self.create(init, **settings)
        return self

    async def heard(self) -> None:
        """Wait until the client has the newest map."""
        view = self.client.session.membership.view
        while view.cluster.epoch < self.scheduler.epoch:
            await view.changed()

    def expel(self, first_step: int) -> None:
        """Expel the worker; the others continue to ``first_step``."""
        for server in self.servers:
            server.versions = dict.fromkeys(server.versions, first_step)
        self.scheduler.expel(first_step)

    async def expelled(self) -> None:
        """Wait until the client has its next incarnation."""
        membership = self.client.session.membership
        while membership.view.fenced is not None or membership.registration.incarnation < self.scheduler.fenced:
            await membership.view.changed()
        await self.scheduler.hello.wait()

    async def stop(self) -> None:
        await self.client.close()
        for server in self.servers:
            await server.stop()
        await self.scheduler.stop()

    def roll_back(self, step: int, until: int) -> None:
        """Roll the run back to the snapshot of ``step``."""
        for server in self.servers:
            server.versions, server.taken = dict.fromkeys(server.versions, step), set()
            server.fenced = self.scheduler.incarnation + 1
        scheduler = self.scheduler
        scheduler.fenced, scheduler.first_step = scheduler.incarnation + 1, step
        scheduler.restored, scheduler.generation = "000000000002-1-1-abcdef", scheduler.generation + 1
        scheduler.ready = False
        scheduler.epoch += 1
        scheduler.hello.clear()
        lost = scheduler_pb2.SessionResponse.RolledBack.Lost(parameters="p", until=until, **{"from": step})
        text = "server-1 is lost with the only copy of shard 1; the run resumes from snapshot 000000000002-1-1-abcdef."
        news = scheduler_pb2.SessionResponse.RolledBack(directory=scheduler.restored, lost=[lost], text=text)
        scheduler.news.put_nowait(scheduler_pb2.SessionResponse(rolled_back=news))


#: Parameters with one shard on ``server-0``, the route to it, and a worker that calls it.
ENTRY = ParametersEntry(
    ParametersSpec("p", psdist.optim.SGD(), psdist.BSP(), slice_elements=4096),
    4096,
    (Shard(Replica("server-0", 1), 1),),
)
ROUTE = Route("server-0", 1, "127.0.0.1:1", 1, (0,))
SENDER = RequestIdentity("run", "worker-0", 1, "p")


def view_of_server() -> ClusterView:
    """Return the view of a worker that has the map with ``ENTRY``."""
    view = ClusterView()
    view.on_map(ClusterMap("run", 1, (ServerEntry("server-0", 1, ROUTE.address),), (), (ENTRY,)))
    return view


async def waits_for(client: psdist.AsyncClient, words: str) -> None:
    """Wait until a call reports this wait."""
    waits = client.session.waits
    while not any(words in wait.reason for wait in waits.open_waits.values()):  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)


def gradient(value: float = 1.0) -> dict[str, np.ndarray]:
    return {"v": np.full(8, value, np.float32), "w": np.full(ELEMENTS - 8, value, np.float32)}


def flat(values: dict[str, np.ndarray]) -> list[float]:
    return np.concatenate([values["v"], values["w"]]).tolist()


Start = Callable[..., Awaitable[Setup]]


async def leave(client: psdist.AsyncClient) -> None:
    """Close a client without the snapshot of its worker state."""
    if client.snapshots is not None:
        client.snapshots.close()
    await client.close()
