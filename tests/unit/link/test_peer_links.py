"""Links between workers: who is accepted, and when memory is released. Sockets are on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from psdist.errors import PeerUnreachableError, PsdistError, WrongRunError
from psdist.link.arenas import GradientArena
from psdist.link.peer_links import ARENA, PeerLink, PeerListener, SharedPlaces, check_hello
from psdist.security.roles import Role
from psdist.security.tls import Credentials
from psdist.security.tokens import Audience, audience_key, create, present
from psdist.v1 import worker_pb2 as pb
from psdist.v1.common_pb2 import WorkerEntry
from psdist.wire import limits
from tests.support.link_ends import PeerConsumer, peer_hello

FRAME = pb.PeerFrame(call=pb.CollectiveCall(kind="barrier")).SerializeToString()


@pytest.fixture
async def listener() -> AsyncIterator[PeerListener]:
    listener = PeerListener(Credentials("secret"))
    await listener.open_towards("127.0.0.1:1", spans_hosts=False)
    yield listener
    listener.close()


class Dialed:
    """A link, and the error that ended it."""

    def __init__(self, said: pb.PeerHello) -> None:
        self.ended: asyncio.Future[PsdistError] = asyncio.get_running_loop().create_future()
        self.link = PeerLink(said, None, self.ended.set_result, shares=False)


async def test_a_link_that_is_quicker_than_the_registration_waits_for_it() -> None:
    """Check that a worker without a key holds links, and keeps those alone that prove themselves by it."""
    listener = PeerListener(Credentials(create("secret", Role.WORKER)))
    await listener.open_towards("127.0.0.1:1", spans_hosts=False)
    try:
        proof = present(create("secret", Role.WORKER, 4_000_000_000), Audience.WORKER)
        good, wrong = Dialed(peer_hello(listener, proof, 1)), Dialed(peer_hello(listener, "wrong", 2))
        reader = Dialed(peer_hello(listener, present(create("secret", Role.READER), Audience.WORKER), 3))
        for dialed in (good, wrong, reader):
            dialed.link.send(FRAME, memoryview(b"x"), lambda: None)
        async with asyncio.timeout(30):
            while len(listener._unchecked) < 3:  # noqa: ASYNC110 - no event announces them
                await asyncio.sleep(0)
        listener.verifier.learn(audience_key("secret", Audience.WORKER))
        listener.registered()
        consumer = PeerConsumer()
        listener.serve(consumer)
        await asyncio.wait_for(consumer.has_arrived.wait(), 30)
        await asyncio.wait_for(asyncio.gather(wrong.ended, reader.ended), 30)
        assert [said.sender.worker_id for said in consumer.hellos] == ["worker-1"]
        assert consumer.hellos[0].token == "" and consumer.received == [b"x"] and not good.ended.done()
        good.link.close()
    finally:
        listener.close()


async def test_frames_arrive_once_the_link_is_used(listener: PeerListener) -> None:
    dialed, sent = Dialed(peer_hello(listener)), asyncio.Event()
    data = np.arange(3_000_000, dtype=np.uint8)
    dialed.link.send(FRAME, data.data, sent.set)
    await asyncio.wait_for(_waiting(listener), 30)
    consumer = PeerConsumer()
    listener.serve(consumer)
    await asyncio.wait_for(consumer.has_arrived.wait(), 30)
    await asyncio.wait_for(sent.wait(), 30)
    assert consumer.received == [data.tobytes()]
    assert consumer.hellos[0].token == "" and consumer.hellos[0].sender.worker_id == "worker-1"
    dialed.link.close()
    await asyncio.wait_for(consumer.has_ended.wait(), 30)
    assert not dialed.ended.done(), "closing is no failure"


async def test_a_host_whose_worker_does_not_accept_a_link_is_not_silent() -> None:
    # Its interpreter may be held by other code for long.
    with socket.create_server(("127.0.0.1", 0)) as busy:
        receiver = WorkerEntry(worker_id="worker-0", incarnation=1, address=f"127.0.0.1:{busy.getsockname()[1]}")
        dialed = Dialed(pb.PeerHello(sender=WorkerEntry(worker_id="worker-1", incarnation=1), receiver=receiver))
        assert dialed.link.is_silent(0.0), "the host has not answered yet"
        async with asyncio.timeout(30):
            while dialed.link.is_silent(0.0):  # noqa: ASYNC110 - no event says that a kernel has acknowledged
                await asyncio.sleep(0)
        assert not dialed.link.is_open
        dialed.link.close()


async def _waiting(listener: PeerListener) -> None:
    while not listener._waiting:  # noqa: ASYNC110 - the links of a listener have no event
        await asyncio.sleep(0)


async def test_a_second_link_of_a_worker_replaces_the_waiting_one(listener: PeerListener) -> None:
    first = Dialed(peer_hello(listener))
    await asyncio.wait_for(_waiting(listener), 30)
    second = Dialed(peer_hello(listener))
    assert "worker-0 closed its link" in (await asyncio.wait_for(first.ended, 30)).message
    second.link.close()


async def test_an_address_that_refuses_is_named() -> None:
    listener = PeerListener(Credentials())
    await listener.open_towards("127.0.0.1:1", spans_hosts=False)
    said = peer_hello(listener)
    listener.close()
    error = await asyncio.wait_for(Dialed(said).ended, 30)
    assert isinstance(error, PeerUnreachableError) and f"worker-0 at {said.receiver.address}" in error.message


@pytest.fixture
async def schedulers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Listen as a scheduler on an address; this host's own one is 127.0.0.3. Returns the address on loopback."""
    monkeypatch.setattr("psdist.addresses.own_address", lambda: "127.0.0.3")
    monkeypatch.setattr("psdist.addresses.is_loopback", lambda host: host != "127.0.0.3")
    servers: list[asyncio.Server] = []

    async def listen(host: str) -> str:
        servers.append(await asyncio.start_server(lambda reader, writer: writer.close(), host))
        return f"127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield listen
    for server in servers:
        server.close()


async def test_no_port_is_open_beyond_loopback_without_a_token(schedulers: Callable[[str], Awaitable[str]]) -> None:
    address = await schedulers("0.0.0.0")
    for credentials in (Credentials(), Credentials("secret")):  # A token in plaintext needs ``insecure``.
        listener = PeerListener(credentials)
        await listener.open_towards(address, spans_hosts=True)
        assert listener.address == "" and listener.port == 0


@pytest.mark.parametrize(("host", "own"), [("0.0.0.0", "127.0.0.3:"), ("127.0.0.1", "127.0.0.1:")])
async def test_workers_of_a_scheduler_on_loopback_listen_there(
    schedulers: Callable[[str], Awaitable[str]], host: str, own: str
) -> None:
    listener = PeerListener(Credentials("secret", insecure=True))
    with pytest.raises(OSError, match="no scheduler answers"):
        await listener.open_towards("127.0.0.1:1", spans_hosts=True)
    await listener.open_towards(f"127.0.0.1:1,{await schedulers(host)}", spans_hosts=True)
    assert listener.address.startswith(own)
    listener.close()


def test_a_link_means_one_incarnation_of_one_worker_of_one_run() -> None:
    said = peer_hello(PeerListener(Credentials()))
    check_hello(said, "run", "worker-0", 1)
    with pytest.raises(WrongRunError, match="of run 'run', and this is run 'other'"):
        check_hello(said, "other", "worker-0", 1)
    for worker_id, incarnation in (("worker-0", 2), ("worker-1", 1)):
        with pytest.raises(PeerUnreachableError, match=f"incarnation 1, and this is {worker_id} in incarnation"):
            check_hello(said, "run", worker_id, incarnation)


async def test_frames_of_a_caller_that_gave_up_are_not_sent(listener: PeerListener) -> None:
    consumer, owner = PeerConsumer(), object()
    listener.serve(consumer)
    dialed = Dialed(peer_hello(listener))
    dialed.link.send(FRAME, memoryview(b"dropped"), None, owner)
    dialed.link.send(FRAME, memoryview(b"kept"))
    dialed.link.drop(owner)
    await asyncio.wait_for(consumer.has_arrived.wait(), 30)
    assert consumer.received == [b"kept"]
    dialed.link.close()


async def test_giving_up_in_the_middle_of_a_frame_ends_the_link(listener: PeerListener) -> None:
    consumer, owner = PeerConsumer(), object()
    listener.serve(consumer)
    dialed = Dialed(peer_hello(listener))
    dialed.link.send(FRAME, memoryview(b"first"))
    await asyncio.wait_for(consumer.has_arrived.wait(), 30)
    assert consumer.connection is not None
    consumer.connection.hold()
    dialed.link.send(FRAME, memoryview(bytearray(11 << 20)), None, owner)
    dialed.link.drop(owner)
    assert "a call ended while its data was sent" in (await asyncio.wait_for(dialed.ended, 30)).message


async def test_a_place_of_shared_memory_is_released_once() -> None:
    places = SharedPlaces(GradientArena.create(*ARENA))
    headers = [pb.PeerFrame.FromString(await places.put(memoryview(bytes(20_000)))) for _ in range(2)]
    assert {header.shared.place for header in headers} == {2, 3} and headers[0].shared.size == 20_000
    places.release(3)
    for place in (3, 0, 99):
        with pytest.raises(PeerUnreachableError, match=f"released place {place} of shared memory"):
            places.release(place)


async def test_a_full_arena_waits_for_a_place() -> None:
    places = SharedPlaces(GradientArena.create(*ARENA))
    for _ in range(limits.SHARED_PARTS):
        await places.put(memoryview(b"."))
    waiting = asyncio.ensure_future(places.put(memoryview(b".")))
    await asyncio.sleep(0)
    assert not waiting.done()
    places.release(1)
    assert pb.PeerFrame.FromString(await waiting).shared.place == 1
