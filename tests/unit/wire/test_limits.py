"""Each limit of ``psdist.wire.limits`` on the memory that peers can use is enforced, with a typed error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from psdist import errors
from psdist.consistency import BSP
from psdist.optim import SGD
from psdist.security.tls import Credentials
from psdist.types import ParametersSpec
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import channels, convert, limits, status
from psdist.wire.limits import BARRIER_NAMES_MAX
from psdist_scheduler import conversions
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import member_admission, parameter_sets
from psdist_scheduler.decide.cluster_events import EnterRendezvous
from psdist_scheduler.decide.cluster_state import BarrierRecord
from psdist_scheduler.run_store import SqliteStore
from tests.support.scheduler_driver import Driver, caller

ECHO = "/test.Test/Echo"


# --- memory of the scheduler ------------------------------------------------------------------------------------------


def layout(*shapes: list[int]) -> common_pb2.Layout:
    named = enumerate(shapes)
    return common_pb2.Layout(
        tensors=[common_pb2.Tensor(name=f"t{i}", shape=shape, dtype=common_pb2.DTYPE_FLOAT32) for i, shape in named]
    )


def test_layouts() -> None:
    for message, words in [
        (layout([limits.ELEMENTS_MAX + 1]), str(limits.ELEMENTS_MAX)),
        (layout([limits.ELEMENTS_MAX], [1]), str(limits.ELEMENTS_MAX)),
        (layout([1] * (limits.DIMENSIONS_MAX + 1)), str(limits.DIMENSIONS_MAX)),
        (layout([(1 << 64) - 1] * limits.DIMENSIONS_MAX), str(limits.ELEMENTS_MAX)),
    ]:
        with pytest.raises(errors.LimitExceededError, match=words):
            convert.layout_from_proto(message)


def test_large_messages_are_not_kept() -> None:
    """Check that settings and shards are kept in their original form, except those that a peer made large."""
    spec = ParametersSpec("p", SGD(0.1), BSP())
    shard = common_pb2.Shard(primary=common_pb2.Replica(server_id="server-0"))
    unknown = b"\xfa\x7f" + b"\x80\x80\x04" + bytes(1 << 16)  # Field 2047: bytes, which are passed on unchanged.
    for size, number in ((0, 1), (len(unknown), 0)):
        convert._spec_from_bytes.cache_clear()
        convert._shard_from_bytes.cache_clear()
        message = convert.spec_to_proto(spec)
        message.MergeFromString(unknown[:size])
        entry = common_pb2.ParametersEntry(spec=message, shards=[shard])
        entry.shards[0].MergeFromString(unknown[:size])
        assert convert.entry_from_proto(entry).spec == spec
        assert convert._spec_from_bytes.cache_info().currsize == number
        assert convert._shard_from_bytes.cache_info().currsize == number


def test_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSORS_MAX", 2)
    convert.layout_from_proto(layout([1], [1]))
    with pytest.raises(errors.LimitExceededError, match="3 tensors are more than the limit of 2"):
        convert.layout_from_proto(layout([1], [1], [1]))


def test_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_admission, "MEMBERS_MAX", 2)
    driver = Driver()
    driver.register("server")
    driver.register()
    for role in ("worker", "server"):
        with pytest.raises(errors.LimitExceededError, match="2 members"):
            driver.register(role)


def test_ids_that_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_admission, "KNOWN_IDS_MAX", 1)
    driver = Driver()
    first, session = driver.join(member_id="one")
    driver.on(ev.SessionClosed(session, "its session broke"))
    with pytest.raises(errors.LimitExceededError, match="1 ids"):
        driver.register(member_id="two")
    assert driver.register(member_id="one").incarnation == first.incarnation + 1


def test_worlds() -> None:
    driver = Driver()
    with pytest.raises(errors.LimitExceededError, match=f"{limits.WORLD_MAX + 1} workers"):
        driver.register(world_size=limits.WORLD_MAX + 1)
    call = driver.number()
    driver.on(EnterRendezvous(call, "", "agent", "host", limits.WORLD_MAX + 1, 1, 1))
    assert isinstance(driver.state(call), errors.LimitExceededError)


def test_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_sets, "PARAMETERS_MAX", 1)
    driver = Driver()
    driver.join("server")
    worker, _ = driver.join()
    driver.create(worker, name="one")
    call = driver.create(worker, name="two")
    assert isinstance(driver.state(call), errors.LimitExceededError)
    # A wait for something that does not exist is remembered as well.
    call = driver.ask(ev.Describe, worker, "three")
    assert isinstance(driver.state(call), errors.LimitExceededError)


# --- what workers say of themselves -----------------------------------------------------------------------------------

NEXT = {str(number): number for number in range(limits.PARAMETERS_MAX)}
TOO_MANY = NEXT | {"more": 0}


def on_session(**said: Any) -> Any:
    """Return the session event of a member's message."""
    return conversions.session_event(1, pb.SessionRequest(**said))


def reports(numbers: dict[str, int]) -> list[Any]:
    """Return functions that convert each message in which a worker reports its progress."""
    told = pb.Activity(sequence=1, next=numbers, call=True)
    return [
        lambda: on_session(heartbeat=pb.SessionRequest.Heartbeat(activity=told)),
        lambda: conversions.REQUESTS["Barrier"](1, pb.BarrierRequest(name="b", activity=told)),
        lambda: conversions.make_event(ev.Create, 1, pb.CreateParametersRequest(activity=told), spec=0, layout=0),
        lambda: on_session(stop=pb.StopReport(number=1, holding=True, next=numbers)),
    ]


def test_workers_with_equal_gradients() -> None:
    ids = [f"worker-{rank}" for rank in range(limits.MEMBERS_MAX)]
    event = on_session(equal_contributions=pb.SessionRequest.EqualContributions(parameters="w", worker_ids=ids))
    assert event.worker_ids == tuple(ids)
    with pytest.raises(errors.LimitExceededError):
        on_session(equal_contributions=pb.SessionRequest.EqualContributions(worker_ids=[*ids, "more"]))


def test_next_pushes() -> None:
    for allowed, refused in zip(reports(NEXT), reports(TOO_MANY), strict=True):
        assert str(limits.PARAMETERS_MAX - 1) in repr(allowed())
        with pytest.raises(errors.LimitExceededError, match=f"{limits.PARAMETERS_MAX + 1} parameters .* limit of"):
            refused()
    # If it does not hold, the report is ignored.
    assert on_session(stop=pb.StopReport(stopping=True, next=TOO_MANY)).next is None


def test_workers_that_a_server_hears() -> None:
    """Check that reports beyond the limit are dropped, and the other workers stay alive."""
    heard = [
        common_pb2.WorkerIncarnation(worker_id=f"w{number}", incarnation=1) for number in range(limits.MEMBERS_MAX + 1)
    ]
    event = on_session(heartbeat=pb.SessionRequest.Heartbeat(heard=heard))
    assert event.heard == tuple((one.worker_id, one.incarnation, 0.0) for one in heard[:-1])


def test_barrier_names() -> None:
    for name in ["", "a b", "x" * 257, "a\x00b", "b\n"]:
        driver = Driver(workers_min=2)
        worker, _ = driver.join()
        before, call = driver.stored, driver.number()
        driver.on(ev.EnterBarrier(call, caller(worker), name, 1, 0))
        assert isinstance(driver.state(call), errors.InvalidNameError)
        assert driver.stored == before and not list(driver.cluster.barriers.arrivals)


def test_numbers_of_arrivals(tmp_path: Path) -> None:
    """Check a number that the store cannot hold: it would end the scheduler."""
    for numbers in [
        {"origin": 2},
        {"origin": (1 << 64) - 1},
        {"origin": 1, "passed": limits.BARRIERS_PASSED_MAX},
        {"origin": 1, "passed": (1 << 64) - 1, "withdraw": True},
    ]:
        driver = Driver()
        worker, _ = driver.join()
        before, call = driver.stored, driver.number()
        driver.on(ev.EnterBarrier(call, caller(worker), "b", **numbers))
        assert isinstance(driver.state(call), errors.InvalidArgumentError)
        assert driver.stored == before and not list(driver.cluster.barriers.arrivals)
        last = driver.number()
        driver.on(ev.EnterBarrier(last, caller(worker), "b", 1, limits.BARRIERS_PASSED_MAX - 1))
        assert driver.state(last) == ef.Done()
        store = SqliteStore(tmp_path / "s", "run")
        store.write(ef.Persist(1, barriers=driver.stored.barriers))
        loaded = store.load()
        assert loaded is not None and loaded.barriers == driver.stored.barriers != ()
        store.close()


def test_names_in_activities() -> None:
    """Check the names of activities, which are kept as long as the worker lives."""
    for activity in [
        pb.Activity(next={"n" * 257: 1}),
        pb.Activity(next={"p": 1}, step=pb.Activity.Step(parameters="n" * 257)),
        pb.Activity(next={"p": 1}, clock=pb.Activity.Step(parameters="a b")),
        pb.Activity(next={"p": 1}, partial=["q"]),
        pb.Activity(next={"p": 1}, partial=["p", "p"]),
    ]:
        with pytest.raises((errors.InvalidNameError, errors.InvalidArgumentError)):
            on_session(heartbeat=pb.SessionRequest.Heartbeat(activity=activity))
        with pytest.raises((errors.InvalidNameError, errors.InvalidArgumentError)):
            conversions.REQUESTS["Barrier"](1, pb.BarrierRequest(name="b", activity=activity))


def test_barriers_that_are_kept(tmp_path: Path) -> None:
    """Check barriers of a script that gives each step's barrier a name of its own."""
    store = SqliteStore(tmp_path / "s", "run")
    for number in range(2 * BARRIER_NAMES_MAX):
        records = [BarrierRecord(worker, f"b{number}", 1, 1) for worker in ("worker-0", "worker-1")]
        store.write(ef.Persist(number + 1, barriers=tuple(records)))
    loaded = store.load()
    assert loaded is not None
    for worker in ("worker-0", "worker-1"):
        names = [record.name for record in loaded.barriers if record.worker_id == worker]
        assert names == [f"b{number}" for number in range(BARRIER_NAMES_MAX, 2 * BARRIER_NAMES_MAX)]
    store.close()


# --- limits of the transport ------------------------------------------------------------------------------------------


async def _echo(data: bytes, context: object) -> bytes:
    return data


class Transport:
    """Server that echoes requests; ``held`` calls of Hold wait until they are cancelled."""

    def __init__(self, message_bytes: int) -> None:
        self.server = channels.make_server(Credentials(), message_bytes)
        methods = {
            "Echo": grpc.unary_unary_rpc_method_handler(_echo),
            "Hold": grpc.unary_unary_rpc_method_handler(self._hold),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", methods),))
        self.address = f"127.0.0.1:{channels.bind(self.server, '127.0.0.1', 0, Credentials())}"
        self.held = 0
        self.changed = asyncio.Event()

    async def _hold(self, data: bytes, context: object) -> bytes:
        self.held += 1
        self.changed.set()
        await asyncio.Event().wait()
        return data


@pytest.fixture
async def transport(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    made: list[Transport] = []

    async def make(message_bytes: int = limits.DATA_MESSAGE_BYTES, **changes: int) -> Transport:
        for name, value in changes.items():
            monkeypatch.setattr(limits, name, value)
        made.append(Transport(message_bytes))
        await made[-1].server.start()
        return made[-1]

    yield make
    for item in made:
        await item.server.stop(None)


async def _refusal(call: Any) -> errors.PsdistError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return status.from_call(caught.value, "peer")


async def test_messages_both_ways(transport: Any) -> None:
    server = await transport()
    size = limits.DATA_MESSAGE_BYTES
    async with (
        channels.open_channel(server.address, Credentials()) as small,
        channels.open_channel(server.address, Credentials(), 2 * size) as large,
    ):
        assert len(await large.unary_unary(ECHO)(bytes(size))) == size
        assert isinstance(await _refusal(large.unary_unary(ECHO)(bytes(size + 1))), errors.LimitExceededError)
        assert isinstance(await _refusal(small.unary_unary(ECHO)(bytes(size + 1))), errors.LimitExceededError)


async def test_calls_at_a_time(transport: Any) -> None:
    server = await transport(CONCURRENT_CALLS_MAX=3)
    async with (
        channels.open_channel(server.address, Credentials()) as one,
        channels.open_channel(server.address, Credentials()) as other,
    ):
        held = [one.unary_unary("/test.Test/Hold")(b"") for _ in range(3)]
        while server.held < 3:
            server.changed.clear()
            await server.changed.wait()
        assert isinstance(await _refusal(other.unary_unary(ECHO)(b"")), errors.LimitExceededError)
        for call in held:
            call.cancel()


async def test_connections(transport: Any) -> None:
    server = await transport(CONNECTIONS_MAX=3)
    host, port = server.address.split(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
    for reader, _ in opened:
        assert await reader.read(1), "the server begins with its settings"
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b"", "one connection more is closed immediately"
    for _, each in (*opened, (None, writer)):
        each.close()
