"""The scheduler's process, driven by the generated stubs alone: real gRPC, real files, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from psdist import errors, map_difference
from psdist.v1 import common_pb2 as common
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, convert, limits, status
from tests.support.channels import open_channel

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKEN = "secret"
STATE = pb.CreateParametersResponse
SPEC = common.ParametersSpec(
    name="mlp",
    optimizer=common.Optimizer(
        kind="sgd",
        values={"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": 0},
    ),
    consistency=common.Consistency(kind="bsp"),
)
LAYOUT = common.Layout(tensors=[common.Tensor(name="w", shape=[300, 300], dtype=common.DTYPE_FLOAT32)])


class Process:
    """``python -m psdist_scheduler`` and its output."""

    def __init__(self, process: asyncio.subprocess.Process, file: Path) -> None:
        self.process = process
        self.file = file

    @property
    def address(self) -> str:
        """Return the address at which it listens."""
        return self.file.read_text().strip()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End it. Returns its status and its log."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        _, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, err.decode()


Start = Callable[..., Awaitable[Process]]


@pytest_asyncio.fixture(loop_scope="session")
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Factory that starts schedulers, and ends those that are left."""
    started: list[Process] = []

    async def one(*flags: str, wait: bool = True, token: str = TOKEN, **options: Any) -> Process:
        file = tmp_path / f"address-{len(started)}"
        command = [sys.executable, "-m", "psdist_scheduler", "--address-file", str(file), *flags]
        environment = os.environ | {"PSDIST_TOKEN": token}
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stderr=asyncio.subprocess.PIPE, **options
        )
        started.append(Process(process, file))
        if wait:
            await _listening(process)
        return started[-1]

    yield one
    for process in started:
        await process.end(signal.SIGKILL)


async def _listening(process: asyncio.subprocess.Process) -> None:
    """Read the log up to the line that says that the scheduler listens; its address file exists by then."""
    assert process.stderr is not None
    lines = []
    while b"listening at" not in (line := await process.stderr.readline()):
        lines.append(line.decode())
        assert line, f"the scheduler ended: {''.join(lines)}"


#: Only one server may listen at an address.
_ports = itertools.count(1)


class Peer:
    """A channel to the scheduler with the token, and one member's session."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self.channel = open_channel(address, limits.CONTROL_MESSAGE_BYTES)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.metadata = auth.metadata(token)
        self.member = pb.RegisterResponse()
        self.session: Any = None

    async def register(self, role: pb.Role = pb.ROLE_WORKER, **fields: Any) -> pb.RegisterResponse:
        """Register and open the session."""
        if role == pb.ROLE_SERVER:
            fields.setdefault("address", f"127.0.0.1:{next(_ports)}")
        request = pb.RegisterRequest(protocol_version=limits.PROTOCOL_VERSION, role=role, host="box", pid=7, **fields)
        self.member = await self.stub.Register(request, metadata=self.metadata)
        await self.open()
        return self.member

    async def say(self, **event: Any) -> None:
        """Send one message on the session."""
        await self.session.write(pb.SessionRequest(**event))

    async def open(self, **says: bool) -> common.ClusterMap:
        """Open the session and return the map that comes first."""
        hello = pb.SessionRequest.Hello(member_id=self.member.member_id, incarnation=self.member.incarnation, **says)
        self.session = self.stub.Session(metadata=self.metadata)
        await self.session.write(pb.SessionRequest(hello=hello))
        return await self.read_map()

    async def read(self, kind: str) -> Any:
        """Read the next command of this kind."""
        async for response in self.session:
            if response.WhichOneof("command") == kind:
                return getattr(response, kind)
        raise AssertionError(f"the session ended before a {kind} came")

    async def read_map(self, condition: Callable[[common.ClusterMap], bool] = lambda _: True) -> common.ClusterMap:
        """Return the next map for which the condition holds."""
        while not condition(cluster := await self.read("map")):
            pass
        return cluster

    def create(self, layout: common.Layout = LAYOUT) -> Any:
        """Call CreateParameters."""
        request = pb.CreateParametersRequest(
            worker_id=self.member.member_id, incarnation=self.member.incarnation, spec=SPEC, layout=layout
        )
        return self.stub.CreateParameters(request, metadata=self.metadata)

    async def ask(self, method: str, request: Any) -> Any:
        """Make a call with one answer."""
        return await getattr(self.stub, method)(request, metadata=self.metadata)

    async def status(self) -> pb.GetStatusResponse:
        """Return the status report."""
        return await self.ask("GetStatus", pb.GetStatusRequest())


@pytest_asyncio.fixture(loop_scope="session")
async def peer() -> AsyncIterator[Callable[..., Peer]]:
    """Factory of peers; closes their channels."""
    made: list[Peer] = []

    def one(process: Process, **options: Any) -> Peer:
        made.append(Peer(process.address, **options))
        return made[-1]

    yield one
    for item in made:
        await item.channel.close()


async def until(call: Any, state: int) -> pb.CreateParametersResponse:
    """Return the first answer with this state."""
    async for response in call:
        if response.state == state:
            return response
    raise AssertionError(f"the call ended before state {state}")


async def commit(uploader: Peer, primaries: list[Peer], epoch: int = 0) -> int:
    """Commit uploaded values that all primaries report to have stored. Returns the epoch that shows it."""
    request = pb.CommitParametersRequest(
        worker_id=uploader.member.member_id, incarnation=1, parameters="mlp", epoch=epoch
    )
    answer = asyncio.ensure_future(uploader.ask("CommitParameters", request))
    for primary in primaries:
        check = await primary.read("check_values")
        assert check.parameters == "mlp"
        await primary.say(values_answer=pb.SessionRequest.ValuesAnswer(number=check.number, installed=1 << 20))
    return int((await answer).epoch)


async def refusal(awaitable: Awaitable[Any]) -> errors.PsdistError:
    """Return the error that a call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return status.from_call(caught.value, "scheduler")


async def first(call: Any) -> Any:
    """Return the first answer of a stream."""
    return await anext(aiter(call))


# --- the life of a run ------------------------------------------------------------------------------------------------


async def test_a_run_from_registration_to_a_restarted_scheduler(start: Start, peer: Any, tmp_path: Path) -> None:
    flags = ("--store", str(tmp_path / "s"), "--run-id", "digits", "--min-servers", "2", "--min-workers", "2")
    process = await start(*flags)
    servers, workers = [peer(process) for _ in range(2)], [peer(process) for _ in range(2)]
    assert [(await s.register(pb.ROLE_SERVER)).member_id for s in servers] == ["server-0", "server-1"]
    await workers[0].register(world_size=2, rank=0)
    first_call = workers[0].create()
    waiting = await first(first_call)
    assert waiting.waiting_for == "for 1 of 2 workers to register"
    assert (await workers[0].status()).phase == "waiting for 1 of 2 workers to register"
    assert (await workers[1].register(world_size=2)).rank == 1
    second_call = workers[1].create()
    upload = await until(first_call, STATE.STATE_UPLOAD)
    assert sorted({shard.primary.server_id for shard in upload.map.parameters[0].shards}) == ["server-0", "server-1"]
    barrier = workers[0].stub.Barrier(
        pb.BarrierRequest(worker_id="worker-0", incarnation=1, name="go"), metadata=workers[0].metadata
    )
    assert "worker-1" in (await first(barrier)).waiting_for
    epoch = await commit(workers[0], servers)
    for call in (first_call, second_call):
        ready = await until(call, STATE.STATE_READY)
        assert ready.map.epoch >= epoch and ready.map.parameters[0].ready
    assert (await servers[0].read_map(lambda m: m.epoch >= epoch)).parameters[0].ready

    await process.end(signal.SIGKILL)
    again = await start(*flags)
    back = [peer(again) for _ in range(4)]
    for old, new in zip([*servers, *workers], back, strict=True):
        new.member = old.member
        cluster = await new.open()
        assert cluster.epoch == epoch + 1
        assert cluster.parameters[0].ready
    report = await back[0].status()
    assert report.phase == "training 'mlp' at a version that no server has reported yet"
    assert [(m.member_id, m.state, m.incarnation) for m in report.members if m.role == pb.ROLE_WORKER] == [
        ("worker-0", "live", 1),
        ("worker-1", "live", 1),
    ]
    assert (await first(back[2].create())).state == STATE.STATE_READY
    code, _ = await again.end()
    assert code == 0
    assert not again.file.exists()


async def test_an_idle_scheduler_ends_after_its_servers_and_forgets_the_run(
    start: Start, peer: Any, tmp_path: Path
) -> None:
    """Check that the run's state is deleted. Otherwise the next run would get ranks after those of members that are
    gone."""
    flags = ("--store", str(tmp_path / "s"), "--run-id", "digits")
    process = await start(*flags, "--idle-timeout", "0.2")
    server, worker = peer(process), peer(process)
    await server.register(pb.ROLE_SERVER)
    await worker.register()
    await worker.ask("Leave", pb.LeaveRequest(member_id="worker-0", incarnation=1, reason="done"))
    await server.read("run_ended")
    assert process.process.returncode is None
    await server.ask("Leave", pb.LeaveRequest(member_id="server-0", incarnation=1, reason="stopped"))
    await process.process.wait()
    code, log = await process.end()
    assert code == 0 and "--idle-timeout" in log
    assert os.listdir(tmp_path) == []


async def test_a_signal_while_servers_end_keeps_the_store(start: Start, peer: Any, tmp_path: Path) -> None:
    """Check a server that has not left: it continues when the scheduler is back."""
    process = await start("--store", str(tmp_path / "s"), "--idle-timeout", "0.2")
    server, worker = peer(process), peer(process)
    await server.register(pb.ROLE_SERVER)
    await worker.register()
    await worker.ask("Leave", pb.LeaveRequest(member_id="worker-0", incarnation=1, reason="done"))
    await server.read("run_ended")
    assert (await process.end())[0] == 0
    assert (tmp_path / "s").exists()


async def test_a_scheduler_that_is_told_to_end_forgets_a_run_that_all_have_left(
    start: Start, peer: Any, tmp_path: Path
) -> None:
    """Check that state is kept while one member has not left."""
    for leaves in (False, True):
        process = await start("--store", str(store := tmp_path / f"store-{leaves}"))
        server = peer(process)
        incarnation = (await server.register(pb.ROLE_SERVER)).incarnation
        if leaves:
            await server.ask("Leave", pb.LeaveRequest(member_id=server.member.member_id, incarnation=incarnation))
        assert (await process.end())[0] == 0
        assert store.exists() != leaves


async def test_members_that_take_differences_and_members_that_do_not(start: Start, peer: Any) -> None:
    """Check that a peer that does not mention differences, like an earlier release, is sent whole maps. Each session
    starts with one."""
    process = await start()
    old, new, other = peer(process), peer(process), peer(process)
    await old.register()
    await new.register()
    for _ in range(2):
        first = await new.open(takes_differences=True)
        epoch = first.epoch
        joined = await other.register()
        whole = await old.read_map(lambda cluster, epoch=epoch: cluster.epoch > epoch)
        change = await new.read("map_difference")
        assert (change.base, change.epoch) == (epoch, whole.epoch)
        assert [worker.worker_id for worker in change.workers] == [joined.member_id]
        followed = map_difference.apply(convert.map_from_proto(first), convert.difference_from_proto(change))
        assert followed == convert.map_from_proto(whole)
        await other.ask("Leave", pb.LeaveRequest(member_id=joined.member_id, incarnation=joined.incarnation))
        gone = await new.read("map_difference")
        assert (gone.base, list(gone.workers_gone), list(gone.workers)) == (change.epoch, [joined.member_id], [])
        await old.read_map(lambda cluster, epoch=gone.epoch: cluster.epoch == epoch)


async def test_losses_are_news_and_leaving_is_none(start: Start, peer: Any) -> None:
    process = await start("--worker-timeout", "3")
    watcher, silent, broken, polite = (peer(process) for _ in range(4))
    for member in (watcher, silent, broken, polite):
        await member.register()
    beat = pb.SessionRequest(heartbeat=pb.SessionRequest.Heartbeat(epoch=1, waiting_for=["for nothing"]))
    ended = asyncio.Event()

    async def live() -> None:
        while not ended.is_set():
            await watcher.session.write(beat)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.1)

    beating = asyncio.create_task(live())
    leave = pb.LeaveRequest(member_id=polite.member.member_id, incarnation=1, reason="finished")
    await polite.ask("Leave", leave)
    await broken.channel.close()
    async for response in watcher.stub.WatchEvents(pb.WatchEventsRequest(follow=True), metadata=watcher.metadata):
        if any("its process answers pings" in event.text for event in response.events):
            break
    silent.session.cancel()
    reasons = {}
    for _ in range(2):
        lost = await watcher.read("member_lost")
        reasons[lost.member_id] = lost.reason
    assert reasons[broken.member.member_id] == "its session broke"
    assert "silent for" in reasons[silent.member.member_id]
    assert (await refusal(silent.open())).code == "fenced"
    states = {m.member_id: m for m in (await watcher.status()).members}
    assert [states[f"worker-{n}"].state for n in range(4)] == ["live", "lost", "lost", "left"]
    assert list(states["worker-0"].waiting_for) == ["for nothing"]
    ended.set()
    await beating


@pytest.mark.long  # A problem has to last for 10 s before it is an event.
async def test_a_problem_is_in_the_status_and_then_in_the_history(start: Start, peer: Any) -> None:
    worker = peer(await start())
    await worker.register()
    ended = asyncio.Event()

    async def train() -> None:
        beat = pb.SessionRequest.Heartbeat(epoch=1)
        while not ended.is_set():
            beat.totals.compute_seconds += 0.1
            beat.totals.abstained += 1
            await worker.say(heartbeat=beat)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.1)

    training = asyncio.create_task(train())
    async for response in worker.stub.WatchEvents(pb.WatchEventsRequest(follow=True), metadata=worker.metadata):
        if found := [event for event in response.events if event.kind == "problem"]:
            break
    assert found[0].warning and "gradients of worker worker-0 were left out" in found[0].text
    (problem,) = (await worker.status()).problems
    assert (problem.who, problem.kind) == ("worker-0", "not_finite") and "they held NaN or Inf" in problem.text
    ended.set()
    await training


async def test_agents_meet_and_readers_describe(start: Start, peer: Any) -> None:
    process = await start()
    one, two = peer(process), peer(process)
    requests = [
        pb.RendezvousRequest(agent_id=name, processes=2, nodes_min=2, nodes_max=2, host=name) for name in ("a", "b")
    ]
    waiting = one.stub.Rendezvous(requests[0], metadata=one.metadata)
    assert (await first(waiting)).waiting_for == "for 1 of 2 nodes to join the rendezvous"
    formed = await first(two.stub.Rendezvous(requests[1], metadata=two.metadata))
    assert (formed.formed, formed.node_rank, formed.first_rank, formed.world_size) == (True, 1, 2, 4)
    await one.register()
    describe = pb.DescribeParametersRequest(worker_id="worker-0", incarnation=1, parameters="mlp")
    described = one.stub.DescribeParameters(describe, metadata=one.metadata)
    assert "server" in (await first(described)).waiting_for
    await two.register(pb.ROLE_SERVER)
    three = peer(process)
    await three.register()
    await until(three.create(), STATE.STATE_UPLOAD)
    await commit(three, [two])
    async for response in described:
        last = response
    assert last.layout == LAYOUT
    assert last.spec.slice_elements > 0 and last.map.parameters[0].ready


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_a_session_is_refused_while_it_is_written_to(start: Start, peer: Any) -> None:
    """A second hello, while the first map is on its way: gRPC can lose the status of a call that ends in a write."""
    process = await start("--min-workers", "20")
    for _ in range(100):
        member = peer(process)
        fields = {"protocol_version": limits.PROTOCOL_VERSION, "role": pb.ROLE_WORKER, "host": "box", "pid": 7}
        mine = await member.stub.Register(pb.RegisterRequest(**fields), metadata=member.metadata)
        hello = pb.SessionRequest.Hello(member_id=mine.member_id, incarnation=mine.incarnation)
        session = member.stub.Session(metadata=member.metadata)
        for _ in range(2):
            await session.write(pb.SessionRequest(hello=hello))
        async with asyncio.timeout(20):
            error = await refusal(_read_all(session))
        assert isinstance(error, errors.InvalidArgumentError), error
    assert (await process.end())[0] == 0


async def _read_all(session: Any) -> None:
    async for _ in session:
        pass


# --- the process ------------------------------------------------------------------------------------------------------


async def test_a_second_scheduler_on_the_same_store_is_refused(start: Start, tmp_path: Path) -> None:
    await start("--store", str(tmp_path / "s"))
    second = await start("--store", str(tmp_path / "s"), wait=False)
    _, err = await second.process.communicate()
    assert second.process.returncode == 69
    assert b"in use by another scheduler" in err


async def test_a_taken_port_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start("--port", str(port), wait=False)
        _, err = await process.process.communicate()
    assert process.process.returncode == 69
    assert f"127.0.0.1:{port}" in err.decode() and "--port" in err.decode()
    assert "Traceback" not in err.decode()


async def test_the_end_of_the_lifeline_ends_it(start: Start) -> None:
    read, write = os.pipe()
    process = await start("--lifeline-fd", str(read), pass_fds=(read,))
    os.close(read)
    os.close(write)
    _, err = await process.process.communicate()
    assert process.process.returncode == 0, err
