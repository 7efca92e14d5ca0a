"""Tests of the simulation's own parts: the loop, the network and the calls, without psdist on top."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.simulation import rpc
from tests.simulation.loop import Deadlock, Failed, SimLoop, TooLong
from tests.simulation.network import Faults, Network

ADDRESS = "10.0.0.9:1"


def make_loop(seed: int = 0) -> SimLoop:
    return SimLoop(random.Random(seed), 1e-5)


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_time_is_virtual_and_ordered() -> None:
    loop, seen = make_loop(), list[float]()

    async def main() -> None:
        begun = loop.time()
        for seconds in (50.0, 0.5):
            await loop.after(seconds)
            seen.append(loop.time() - begun)

    loop.run(main(), 100.0)
    assert seen == [pytest.approx(50.0, abs=0.01), pytest.approx(50.5, abs=0.01)]


def test_a_crash_runs_no_finally_and_a_timer_of_the_dead_is_dropped() -> None:
    loop, seen = make_loop(), list[str]()

    async def work() -> None:
        try:
            seen.append("begun")
            await loop.after(1.0)
            seen.append("over")
        finally:
            seen.append("finally")

    async def main() -> None:
        node = loop.node("a", "a")
        loop.start(node, work())
        await loop.after(0.5)
        loop.crash(node)
        await loop.after(2.0)

    loop.run(main(), 10.0)
    assert seen == ["begun"]


def test_a_paused_node_goes_on_where_it_stood() -> None:
    loop, seen = make_loop(), list[float]()

    async def work() -> None:
        await loop.after(1.0)
        seen.append(loop.time() - begun)

    async def main() -> None:
        node = loop.node("a", "a")
        loop.start(node, work())
        await loop.after(0.5)
        loop.pause(node)
        await loop.after(4.5)
        assert not seen
        loop.resume(node)
        await loop.after(0.1)

    begun = loop.time()
    loop.run(main(), 10.0)
    assert seen == [pytest.approx(5.0, abs=0.01)]


def test_what_belongs_to_a_node_follows_its_context() -> None:
    loop, seen = make_loop(), list[str]()

    async def inner() -> None:
        seen.append(loop.current().name)

    async def outer() -> None:
        await asyncio.create_task(inner())
        loop.call_later(0.1, lambda: seen.append(loop.current().name))

    async def main() -> None:
        await loop.start(loop.node("a", "a"), outer())
        await loop.after(0.2)
        seen.append(loop.current().name)

    loop.run(main(), 1.0)
    assert seen == ["a", "a", "world"]


def test_waiting_for_ever_is_a_deadlock_and_waiting_long_is_too_long() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        make_loop().run(forever(), 1.0)
    loop = make_loop()
    with pytest.raises(TooLong):
        loop.run(loop.after(5.0), 1.0)


def test_an_error_that_nobody_catches_fails_the_run() -> None:
    loop = make_loop()

    async def main() -> None:
        loop.call_later(0.1, lambda: 1 // 0)
        await loop.after(1.0)

    with pytest.raises(Failed, match="ZeroDivisionError"):
        loop.run(main(), 10.0)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_an_error_at_the_very_end_fails_the_run_where_nobody_waits_for_it(is_waited_for: bool) -> None:
    loop = make_loop()
    tasks = []

    async def fail() -> None:
        raise ValueError

    async def wait(task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])
        with suppress(ValueError):
            task.result()

    async def main() -> None:
        tasks.append(task := loop.create_task(fail()))
        if is_waited_for:
            tasks.append(loop.create_task(wait(task)))

    loop.run(main(), 10.0)
    loop.close()
    assert len(loop.failures) == (not is_waited_for)


def test_the_seed_decides_the_order_of_nodes_and_nothing_else() -> None:
    def order(seed: int) -> str:
        loop, seen = make_loop(seed), list[str]()

        async def work(name: str) -> None:
            for _ in range(4):
                seen.append(name)
                await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.gather(*(loop.start(loop.node(name, name), work(name)) for name in "abc"))

        loop.run(main(), 1.0)
        return "".join(seen)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(20)}) > 10


def test_threads_are_inline() -> None:
    loop = make_loop()

    async def main() -> int:
        return await asyncio.to_thread(max, 3, 4)

    assert loop.run(main(), 1.0) == 4


# --- calls ------------------------------------------------------------------------------------------------------------


class Pair:
    """Client and server that echoes everything, with a record of the calls that the server saw."""

    def __init__(self, faults: Faults | None = None, seed: int = 0) -> None:
        self.loop = make_loop(seed)
        self.network = Network(self.loop, random.Random(seed), faults or Faults())
        self.client = self.loop.node("client", "c")
        self.server = self.loop.node("server", "s")
        self.seen: list[Any] = []
        handlers = {
            "Echo": grpc.unary_unary_rpc_method_handler(self._echo),
            "Stream": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        rpc.serve(self.network, ADDRESS, self.server, grpc.method_handlers_generic_handler("S", handlers))

    async def _echo(self, data: bytes, context: Any) -> bytes:
        self.seen.append(data)
        if data == b"no":
            await context.abort(grpc.StatusCode.NOT_FOUND, "none", (("k", b"v"),))
        return data

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async for data in requests:
                self.seen.append(data)
                yield data
            self.seen.append("end")
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    def run(self, work: Any, seconds: float = 60.0) -> Any:
        """Run ``work(channel)`` in the client's node."""

        async def main() -> Any:
            return await self.loop.start(self.client, begin())

        async def begin() -> Any:
            return await work(rpc.SimChannel(self.network, ADDRESS))

        return self.loop.run(main(), seconds)


def test_unary_calls_and_their_errors() -> None:
    async def work(channel: rpc.SimChannel) -> list[Any]:
        call = channel.unary_unary("/S/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"no")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/S/Other")(b"")
        return [await call(b"yes"), refused.value, unknown.value.code()]

    answer, refused, unknown = Pair().run(work)
    assert answer == b"yes"
    assert (refused.code(), refused.details()) == (grpc.StatusCode.NOT_FOUND, "none")
    assert list(refused.trailing_metadata()) == [("k", b"v")]
    assert unknown is grpc.StatusCode.UNIMPLEMENTED


def test_a_stream_keeps_its_order() -> None:
    async def work(channel: rpc.SimChannel) -> list[bytes]:
        call = channel.stream_stream("/S/Stream")()
        for number in range(20):
            await call.write(b"%d" % number)
        await call.done_writing()
        return [data async for data in call]

    assert Pair(Faults(delay=(0.0, 1.0))).run(work) == [b"%d" % number for number in range(20)]


def test_a_cancelled_call_ends_its_handler_and_raises_cancelled() -> None:
    pair = Pair()

    async def work(channel: rpc.SimChannel) -> None:
        call = channel.stream_stream("/S/Stream")()
        await call.write(b"a")
        assert await call.read() == b"a"
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"b")
        await pair.loop.after(1.0)

    pair.run(work)
    # The reader may see the end of the stream before the handler learns of its cancellation, as in grpc.aio.
    assert (pair.seen[0] == b"a" and "cancelled" in pair.seen) or pair.seen == [b"a", "end"]


def test_a_killed_server_is_unavailable_at_once_and_a_dead_host_after_keepalive() -> None:
    def seconds(silent: bool) -> float:
        pair = Pair()

        async def work(channel: rpc.SimChannel) -> float:
            call = channel.stream_stream("/S/Stream")()
            await call.write(b"a")
            await call.read()
            pair.loop.crash(pair.server)
            pair.network.process_died(pair.server, silent=silent)
            begun = pair.loop.time()
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await call.read()
            assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
            return pair.loop.time() - begun

        taken: float = pair.run(work)
        return taken

    assert seconds(silent=False) < 0.1
    assert 1.9 < seconds(silent=True) < 4.1


def test_a_short_partition_delays_and_a_long_one_breaks() -> None:
    def after(seconds: float) -> Any:
        pair = Pair()

        async def work(channel: rpc.SimChannel) -> Any:
            call = channel.stream_stream("/S/Stream")()
            await call.write(b"a")
            await call.read()
            pair.network.block("client", "server")
            pair.loop.call_later(seconds, pair.network.unblock, "client", "server")
            await call.write(b"b")
            try:
                return await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code()

        return pair.run(work)

    assert after(1.0) == b"b"
    assert after(10.0) is grpc.StatusCode.UNAVAILABLE


def test_a_partition_that_ends_does_not_turn_the_order_of_a_stream() -> None:
    """Check that messages in flight when the path is free again arrive after the retransmitted ones."""

    async def work(channel: rpc.SimChannel) -> list[bytes]:
        call = channel.stream_stream("/S/Stream")()
        pair.loop.call_later(0.2, pair.network.block, "client", "server")
        pair.loop.call_later(0.3, pair.network.unblock, "client", "server")
        for number in range(200):
            await pair.loop.after(0.002)
            await call.write(b"%d" % number)
        await call.done_writing()
        return [data async for data in call]

    pair = Pair(Faults(delay=(0.01, 0.02)))
    assert pair.run(work) == [b"%d" % number for number in range(200)]
    assert pair.network.counts["stalled"]


def test_a_deadline_is_kept() -> None:
    pair = Pair()

    async def work(channel: rpc.SimChannel) -> Any:
        pair.loop.pause(pair.server)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await channel.unary_unary("/S/Echo")(b"", timeout=0.2)
        return late.value.code()

    assert pair.run(work) is grpc.StatusCode.DEADLINE_EXCEEDED


def test_cut_calls_are_lost_before_and_after_they_were_done() -> None:
    """Check that some of the failed calls were carried out, and others were not."""
    failed_done = failed_undone = 0
    for seed in range(60):
        pair = Pair(Faults(cut=1.0), seed)

        async def work(channel: rpc.SimChannel, pair: Pair = pair) -> str:
            try:
                await channel.unary_unary("/S/Echo")(b"x")
            except grpc.aio.AioRpcError:
                await pair.loop.after(1.0)
                return "failed"
            return "done"

        if pair.run(work) == "failed":
            failed_done += bool(pair.seen)
            failed_undone += not pair.seen
    assert failed_done > 5
    assert failed_undone > 5


def test_a_refused_connection_fails_calls_until_its_pause_is_over() -> None:
    pair = Pair()

    async def work(channel: rpc.SimChannel) -> list[bool]:
        pair.loop.crash(pair.server)
        pair.network.process_died(pair.server, silent=False)
        with pytest.raises(grpc.aio.AioRpcError, match="refused"):
            await channel.unary_unary("/S/Echo")(b"")
        pair.server.dead = False
        outcomes = []
        for _ in range(2):
            try:
                await channel.unary_unary("/S/Echo")(b"")
                outcomes.append(True)
            except grpc.aio.AioRpcError:
                outcomes.append(False)
            await pair.loop.after(0.5)
        return outcomes

    assert pair.run(work) == [False, True]
