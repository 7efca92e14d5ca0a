"""Large calls through memory that three workers of this process share, and what happens if it cannot be shared."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from psdist.collectives import frames
from psdist.collectives.core.host_memory import HostMoves
from psdist.collectives.core.machine import SendPart
from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import ClosedError, InternalError, WaitTimeoutError
from psdist.link import processes
from psdist.link.arenas import GradientArena
from tests.support.collective_run import SIZE, Run, arrays

#: Several pieces, and not a multiple of one.
LARGE = 1_000_003


def has_memory(group: AsyncWorkerGroup) -> bool:
    return group._runner._machine.route is not None


async def share(run: Run) -> None:
    """Make large calls until all ranks share memory."""
    async with asyncio.timeout(60):
        while not all(map(has_memory, run.groups)):
            for one in await run.all(lambda group: group.all_reduce(np.ones(LARGE, np.int32))):
                assert (one == SIZE).all()


def sums(given: list[Any]) -> Any:
    return (given[0] + given[1] + given[2]).tobytes()


async def test_all_calls_give_the_bytes_that_links_give(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await share(run)
    encode, effects = frames.encode, list[Any]()

    def kept(group: bytes, effect: Any) -> bytes:
        effects.append(effect)
        return encode(group, effect)

    monkeypatch.setattr(frames, "encode", kept)
    given, rows = arrays(LARGE), [one[: 3 * 90_000].reshape(3, -1) for one in arrays(LARGE)]
    wanted = [one.tobytes() for one in given]
    outs = [np.empty_like(one) for one in given]
    assert [one.tobytes() for one in await run.all(lambda g: g.all_reduce(given[g.rank]))] == [sums(given)] * SIZE
    for rank, one in enumerate(await run.all(lambda g: g.reduce_scatter(rows[g.rank]))):
        assert one.tobytes() == sums([row[rank] for row in rows])
    for one in await run.all(lambda g: g.all_gather(given[g.rank])):
        assert [row.tobytes() for row in one] == wanted
    for one in await run.all(lambda g: g.broadcast(given[g.rank], 2)):
        assert one.tobytes() == wanted[2]
    assert (await run.all(lambda g: g.reduce(given[g.rank], 1)))[1].tobytes() == sums(given)
    assert [row.tobytes() for row in (await run.all(lambda g: g.gather(given[g.rank], 1)))[1]] == wanted
    await run.all(
        lambda g: g.scatter(rows[0] if g.rank == 0 else None, 0, out=None if g.rank == 0 else outs[g.rank][:90_000])
    )
    assert outs[2][:90_000].tobytes() == rows[0][2].tobytes()
    for rank, one in enumerate(await run.all(lambda g: g.all_to_all(rows[g.rank]))):
        assert [row.tobytes() for row in one] == [row[rank].tobytes() for row in rows]
    assert not any(isinstance(effect, SendPart) for effect in effects)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.complex128, np.int8, np.bool_])
async def test_results_in_place_of_all_dtypes(run: Run, dtype: Any) -> None:
    await share(run)
    given = arrays(LARGE, dtype)
    small = np.dtype(dtype).itemsize == 2
    wanted = sums([one.astype(np.float32) for one in given] if small else given)
    wanted = np.frombuffer(wanted, np.float32).astype(dtype).tobytes() if small else wanted
    for one in await run.all(lambda g: g.all_reduce(given[g.rank], out=given[g.rank])):
        assert one.tobytes() == wanted


async def test_strided_and_empty_arrays_and_small_ones_in_between(run: Run) -> None:
    await share(run)
    strided = [np.asfortranarray(one[:900_000].reshape(900, 1000)) for one in arrays(LARGE)]
    for _ in range(3):
        for one in await run.all(lambda g: g.all_reduce(strided[g.rank], out=strided[g.rank])):
            assert one is strided[0] or one.flags.f_contiguous
        assert [one.shape for one in await run.all(lambda g: g.all_reduce(np.ones((0, 4))))] == [(0, 4)] * SIZE
        assert [one[()] for one in await run.all(lambda g: g.all_reduce(1))] == [SIZE] * SIZE
    assert strided[0].tobytes() == strided[2].tobytes()


async def test_all_gathers_and_reductions_follow_one_another(run: Run) -> None:
    await share(run)
    for number in range(20):
        calls = [group.all_reduce(np.full(40_000 + number, number + group.rank)) for group in run.groups]
        calls += [group.all_gather(np.full(9_000, group.rank)) for group in run.groups]
        ended = await asyncio.gather(*calls)
        assert all((one == SIZE * number + 3).all() for one in ended[:SIZE])
        assert all((one == np.arange(SIZE)[:, None]).all() for one in ended[SIZE:])


class FrozenRank:
    """Stops rank 2 in the middle of its movement, until ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()
        advance = HostMoves.advance

        def slow(moves: HostMoves, step: int) -> None:
            if moves._memory.rank == 2 and step == moves.first + 1:
                self.reached.set()
                self.go.wait()
            advance(moves, step)

        monkeypatch.setattr(HostMoves, "advance", slow)


async def test_time_limit_names_the_frozen_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await share(run)
    frozen = FrozenRank(monkeypatch)
    threading.Timer(2.0, frozen.go.set).start()  # The others end before; the rank itself stops once it runs again.
    error, *_ = await run.all(lambda g: g.all_reduce(np.ones(LARGE), timeout=0.5 if g.rank == 0 else None))
    assert isinstance(error, WaitTimeoutError) and "for rank 2 to exchange the data" in error.message
    assert all(group.has_ended for group in run.groups)


async def test_memory_of_a_cancelled_call_is_the_callers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await share(run)
    frozen = FrozenRank(monkeypatch)
    given = [np.ones(4 * LARGE) for _ in range(SIZE)]
    calls = [asyncio.ensure_future(group.all_reduce(given[group.rank], out=given[group.rank])) for group in run.groups]
    await asyncio.to_thread(frozen.reached.wait)
    mover = run.groups[2]._runner.route._mover
    assert mover is not None
    threading.Timer(0.5, frozen.go.set).start()  # The movement continues after the call was cancelled.
    calls[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[2]
    given[2][:] = 7
    ended = await asyncio.gather(*calls[:2], return_exceptions=True)
    assert all(isinstance(error, ClosedError) for error in ended)
    await asyncio.to_thread(mover._is_idle.wait)
    assert (given[2] == 7).all()


async def test_failed_movement_ends_the_call_at_all_ranks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await share(run)

    def fail(moves: HostMoves, step: int) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(HostMoves, "advance", fail)
    for error in await run.all(lambda g: g.all_reduce(np.ones(LARGE))):
        assert isinstance(error, InternalError)


async def test_rank_that_closes_after_its_last_call_leaves_its_memory(run: Run) -> None:
    await share(run)

    async def last(group: AsyncWorkerGroup) -> Any:
        total = await group.all_reduce(np.full(LARGE, 1 << group.rank))
        await group.close()
        return total

    assert [(one == 7).all() for one in await run.all(last)] == [True] * SIZE


async def calls_work(run: Run) -> None:
    given = arrays(LARGE)
    for _ in range(3):
        assert [one.tobytes() for one in await run.all(lambda g: g.all_reduce(given[g.rank]))] == [sums(given)] * SIZE
    assert not all(map(has_memory, run.groups))


async def test_without_room_for_memory_calls_use_the_links(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> GradientArena:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(GradientArena, "create", refuse)
    caplog.set_level("INFO", "psdist")
    await calls_work(run)
    assert "shares no memory with its group: no room in shared memory" in caplog.text


async def test_without_a_common_directory_calls_use_the_links(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "DIRECTORY", tmp_path / "absent")
    await calls_work(run)


async def test_memory_of_another_process_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psdist.collectives.host_sharing.take_arena", _other_arena)
    caplog.set_level("INFO", "psdist")
    await calls_work(run)
    assert "its nonce is another one" in caplog.text


async def _other_arena(name: str, elements: int, dtype: str, *, prefault: bool) -> tuple[GradientArena, Any]:
    fd, connected = await processes.receive_file(name)
    os.close(fd)
    return GradientArena.create(elements, dtype), connected
