"""Behaviour of shared memory alone: arenas, their exchange, their content and their return."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import inspect
import os
from typing import Any

import numpy as np
import pytest

from psdist.compression.kernel_runtime import Kernel
from psdist.errors import InvalidArgumentError, SharingUnavailableError
from psdist.link.arenas import GradientArena
from psdist.v1 import common_pb2 as cpb
from psdist.wire import limits
from tests.support.frame_socket import PATIENCE_SECONDS
from tests.support.server_bench import COUNT, INITIAL, STEPPED, TOTAL, ServerBench
from tests.support.worker_channels import ShmWorker


async def still_serves(bench: ServerBench) -> None:
    channel = await ShmWorker.opened(bench)
    assert np.array_equal(await channel.say(channel.push(0)), STEPPED)


async def test_weights_and_versions_are_in_the_servers_arena(bench: ServerBench) -> None:
    await bench.create()
    channel = await ShmWorker.opened(bench)
    assert channel.weights is not None
    assert np.array_equal(channel.values(), INITIAL)
    await channel.send(request := channel.push(0))
    response, _ = await channel._response(request.call_id)
    # One number stands for all slices, and none for zeros.
    assert (list(response.answers.versions), list(response.answers.staleness)) == ([1], [])
    assert np.array_equal(channel.values(), STEPPED)
    assert channel.weights.sequence.tolist() == [2] * COUNT


async def test_a_frame_reaches_its_kernel_in_at_most_fifteen_calls(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.create()
    channel, run, depths = await ShmWorker.opened(bench), Kernel.__call__, list[int]()

    def noted(kernel: Kernel, *arguments: Any) -> Any:
        names = [one.frame.f_code.co_qualname for one in inspect.stack(context=0)]
        depths.append(names.index("FrameConnection.buffer_updated") + 1)
        return run(kernel, *arguments)

    monkeypatch.setattr(Kernel, "__call__", noted)
    assert np.array_equal(await channel.say(channel.push(0)), STEPPED)
    assert len(depths) == COUNT and max(depths) <= 15


async def test_a_refused_call_leaves_the_arena_as_it_is(bench: ServerBench) -> None:
    await bench.create()
    channel = await ShmWorker.opened(bench)
    for request, text in (
        (channel.push(0, dtype=cpb.DTYPE_FLOAT16), "the gradient arena holds float32, not float16"),
        (channel.push(0, codec=cpb.CODEC_SEGMENTS), "a gradient arena holds elements, not segments"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            await channel.say(request)
    assert np.array_equal(channel.values(), INITIAL)


async def test_who_only_reads_needs_no_room_for_gradients(bench: ServerBench) -> None:
    await bench.create()
    channel = ShmWorker(bench)
    channel.arena = GradientArena.create(0, "float32")
    await channel.attach(dtype=cpb.DTYPE_UNSPECIFIED)
    await channel.begin(request := channel.pull())
    assert [one.version for one in await channel.answers(request)] == [0] * COUNT
    await channel.begin(request := channel.push(0))
    with pytest.raises(InvalidArgumentError, match="holds nothing"):
        await channel.answers(request)
    assert np.array_equal(channel.values(), INITIAL)


async def test_the_first_request_attaches(bench: ServerBench) -> None:
    await bench.create()
    channel = ShmWorker(bench)
    with pytest.raises(InvalidArgumentError, match="must be attach"):
        await channel.ask(channel.push(0))
    with pytest.raises(InvalidArgumentError, match="not a valid"):
        await ShmWorker(bench).ask(b"\xff\xff")
    await still_serves(bench)


async def test_answers_that_are_not_read_stop_the_server_from_reading(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a worker that asks for much before it reads: it gets all answers, and costs no memory meanwhile."""
    monkeypatch.setattr(limits, "SHARED_ROUNDS_MAX", 1 << 30)
    await bench.create()
    channel = await ShmWorker.opened(bench)
    requests = [channel.pull() for _ in range(20_000)]
    sending = asyncio.create_task(channel.send_raw(b"".join(map(channel.framed, requests))))
    for _ in range(20):
        await bench.turn()
    assert not sending.done()
    for request in requests:
        assert len(await channel.next_answers(request)) == COUNT
    await sending


# --- the exchange of arenas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "psdist-x", "../dev/null", "psdist-" + "0" * 32])
async def test_a_socket_that_is_none(bench: ServerBench, name: str) -> None:
    await bench.create()
    with pytest.raises(SharingUnavailableError):
        await ShmWorker(bench).attach(socket=name)
    await still_serves(bench)


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("size", "seals", "reason"),
    [
        (GradientArena.size(TOTAL, "float32"), 0, "seals"),
        (4096, SEALS, "has 4096 bytes, but needs 8192"),
        (1 << 20, SEALS, "has 1048576 bytes"),
    ],
    ids=["unsealed", "too small", "too large"],
)
async def test_an_arena_that_could_be_truncated_is_refused(
    bench: ServerBench, size: int, seals: int, reason: str
) -> None:
    await bench.create()
    fd = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, b"psdist-gradients" + bytes(16), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(SharingUnavailableError, match=reason):
            await ShmWorker(bench).attach(fd)
    finally:
        os.close(fd)
    await still_serves(bench)


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_arenas_are_given_back(bench: ServerBench) -> None:
    def mapped() -> list[str]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return [line.split()[4] for line in maps if "memfd:psdist-gradients" in line]

    others = set(mapped())  # An earlier test's, which may end at any time.

    def held() -> int:
        return sum(inode not in others for inode in mapped())

    await bench.create()
    channel = await ShmWorker.opened(bench)
    await channel.say(channel.push(0))
    assert held() == 2  # Here the worker and the server are one process.
    await channel.leave()
    channel.forget()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while held() > 1:  # That of the worker, which has no elements now.
            await bench.turn()
