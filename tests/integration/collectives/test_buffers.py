"""Registered buffers of three workers of this process: the same bytes as ordinary arrays, and what ends them."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from psdist.collectives.core.host_memory import HostMoves
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.host_sharing import HostSharing
from psdist.errors import ClosedError, CollectiveMismatchError, InvalidArgumentError, WorkerLostError
from psdist.link.arenas import GradientArena
from psdist.v1 import worker_pb2 as pb
from tests.support.collective_run import SIZE, Run, arrays

#: Several pieces, and not a multiple of one.
COUNT = 1_000_003


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for memory wait until something else happens."""
    monkeypatch.setattr("psdist.collectives.host_sharing.MAP_SECONDS", 3600.0)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By first step of a rank's call through memory: True if it reads contributions in place."""
    seen, advance = list[bool](), HostMoves.advance

    def noted(moves: HostMoves, step: int) -> None:
        if step == moves.first:
            seen.append(moves.is_in_place)
        advance(moves, step)

    monkeypatch.setattr(HostMoves, "advance", noted)
    return seen


async def filled(run: Run, dtype: Any = np.float32) -> tuple[list[Any], list[Any]]:
    """Return buffers with random numbers, and ordinary copies of them."""
    given = arrays(COUNT, dtype)
    buffers = await run.all(lambda group: group.allocate_buffer(COUNT, dtype))
    for buffer, one in zip(buffers, given, strict=True):
        assert not buffer.view(np.uint8).any()
        buffer[:] = one
    return buffers, given


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64])
async def test_results_are_those_of_ordinary_arrays(run: Run, in_place: list[bool], dtype: Any) -> None:
    buffers, given = await filled(run, dtype)
    for op in ("sum", "max"):
        wanted = await run.all(lambda g, op=op: g.all_reduce(given[g.rank], op))
        in_place.clear()
        apart = await run.all(lambda g, op=op: g.all_reduce(buffers[g.rank], op))
        assert [one.tobytes() for one in apart] == [one.tobytes() for one in wanted]
        assert [one.tobytes() for one in buffers] == [one.tobytes() for one in given]
        assert in_place == [True] * SIZE
    results = await run.all(lambda g: g.all_reduce(buffers[g.rank][5:-1], out=buffers[g.rank][5:-1]))
    wanted = await run.all(lambda g: g.all_reduce(given[g.rank][5:-1]))
    assert [one.tobytes() for one in results] == [one.tobytes() for one in wanted]
    assert in_place[SIZE:] == [True] * SIZE + [False] * SIZE


async def test_arrays_at_different_positions_are_reduced_as_ordinary_ones(run: Run, in_place: list[bool]) -> None:
    buffers, given = await filled(run)
    starts = [0, 0, 7]
    parts = [buffer[start : start + 900_000] for buffer, start in zip(buffers, starts, strict=True)]
    wanted = sum(one[start : start + 900_000] for one, start in zip(given, starts, strict=True))
    in_place.clear()
    for one in await run.all(lambda g: g.all_reduce(parts[g.rank])):
        assert one.tobytes() == wanted.tobytes()
    del buffers[1], parts[1]  # A rank that has lost its buffer gives an ordinary array.
    for one in await run.all(lambda g: g.all_reduce(given[1] if g.rank == 1 else buffers[g.rank // 2])):
        assert one.tobytes() == (given[0] + given[1] + given[2]).tobytes()
    assert in_place == [False] * 2 * SIZE


async def test_script_may_write_to_its_buffer_as_soon_as_its_call_has_ended(run: Run) -> None:
    buffers, _ = await filled(run)

    async def steps(group: AsyncWorkerGroup) -> None:
        buffer = buffers[group.rank]
        for number in range(20):
            buffer[:] = number + group.rank
            await group.all_reduce(buffer, out=buffer)
            assert (buffer == SIZE * number + 3).all()

    assert await run.all(steps) == [None] * SIZE


async def test_other_groups_and_later_ones_take_a_buffer_as_an_ordinary_array(run: Run, in_place: list[bool]) -> None:
    buffers, given = await filled(run)
    wanted = (given[0] + given[1] + given[2]).tobytes()
    others = [one.new_group(range(SIZE)) for one in run.workers]
    await run.all(lambda g: g.close())
    run.groups = others
    in_place.clear()
    for _ in range(2):
        assert [one.tobytes() for one in await run.all(lambda g: g.all_reduce(buffers[g.rank]))] == [wanted] * SIZE
    assert not any(in_place)


async def test_calls_wait_until_a_buffer_was_allocated(run: Run) -> None:
    async def both(group: AsyncWorkerGroup) -> Any:
        return await asyncio.gather(group.allocate_buffer(COUNT), group.all_reduce(np.ones(3)), group.barrier())

    for buffer, total, _ in await run.all(both):
        assert buffer.size == COUNT and (total == SIZE).all()


async def test_ranks_that_want_different_buffers_get_an_error(run: Run) -> None:
    for error in await run.all(lambda g: g.allocate_buffer(COUNT + g.rank // 2)):
        assert isinstance(error, CollectiveMismatchError) and "allocate_buffer" in error.message


async def test_without_room_at_one_rank_the_buffer_is_ordinary_at_all(
    run: Run, monkeypatch: pytest.MonkeyPatch, in_place: list[bool]
) -> None:
    create, calls = GradientArena.create, list[int]()

    def refuse_once(elements: int, dtype: str) -> GradientArena:
        calls.append(elements)
        if calls.count(COUNT) == 2 and elements == COUNT:
            raise OSError(28, "No space left on device")
        return create(elements, dtype)

    monkeypatch.setattr(GradientArena, "create", refuse_once)
    buffers, given = await filled(run)
    assert calls.count(COUNT) >= 2, "the others need not allocate once they hear of it"
    for one in await run.all(lambda g: g.all_reduce(buffers[g.rank], out=buffers[g.rank])):
        assert one.tobytes() == (given[0] + given[1] + given[2]).tobytes()
    assert not any(in_place)


async def test_more_buffers_than_the_limit_are_ordinary(
    run: Run, monkeypatch: pytest.MonkeyPatch, in_place: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psdist.collectives.host_sharing.BUFFERS_MAX", 1)
    caplog.set_level("INFO", "psdist")
    first, _ = await filled(run)
    second, _ = await filled(run)
    assert "of at most 1" in caplog.text
    for buffers in (second, first):
        in_place.clear()
        await run.all(lambda g, buffers=buffers: g.all_reduce(buffers[g.rank]))
    assert in_place == [True] * SIZE
    del first, buffers
    await filled(run)  # There is room again.
    assert caplog.text.count("of at most 1") == SIZE


async def test_offer_of_an_unexpected_buffer_is_refused(run: Run) -> None:
    buffers, _ = await filled(run)
    route = run.groups[0]._runner.route
    route.on_offer(1, pb.GroupMemory(buffer=1, name="late"))  # Of a rank that was too late for the buffer.
    with pytest.raises(InvalidArgumentError, match="offers buffer 7, and 1 is the last one"):
        route.on_offer(1, pb.GroupMemory(buffer=7, name="early"))
    assert len(buffers) == SIZE


async def test_rank_that_ends_while_others_allocate_ends_the_call(
    run: Run, monkeypatch: pytest.MonkeyPatch, endless: None
) -> None:
    start = HostSharing.start

    def leaving(sharing: HostSharing) -> None:
        if sharing._rank == 2 and sharing._number:
            run.groups[2]._runner.end(ClosedError("rank 2 closed the group"))
        else:
            start(sharing)

    monkeypatch.setattr(HostSharing, "start", leaving)
    for error in await run.all(lambda g: g.allocate_buffer(COUNT)):
        assert isinstance(error, ClosedError | WorkerLostError)


async def test_cancelled_allocation_ends_the_group(run: Run, monkeypatch: pytest.MonkeyPatch, endless: None) -> None:
    start, begun = HostSharing.start, asyncio.Event()

    def stuck(sharing: HostSharing) -> None:
        if sharing._rank == 2 and sharing._number:
            begun.set()  # Nobody gets an offer of this rank.
        else:
            start(sharing)

    monkeypatch.setattr(HostSharing, "start", stuck)
    allocating = [asyncio.ensure_future(group.allocate_buffer(COUNT)) for group in run.groups]
    await begun.wait()
    allocating[2].cancel()
    ended = await asyncio.gather(*allocating, return_exceptions=True)
    assert isinstance(ended[2], asyncio.CancelledError)
    assert all(isinstance(error, ClosedError) for error in ended[:2])
