"""What a client does for snapshots: marks and its next pushes, asking for one, and going back to one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from client_fakes import ELEMENTS, Break, Setup, flat, gradient, waits_for

import psdist
from psdist import errors
from psdist.client.pushes import Pushes
from psdist.client.session import Request, Session
from psdist.consistency import ASP, BSP
from psdist.v1 import scheduler_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="session")
MARK, END = {"mark": pb.SnapshotCommand.Mark()}, {"end": pb.SnapshotCommand.End()}


@pytest_asyncio.fixture(loop_scope="session")
async def setup() -> AsyncIterator[Setup]:
    setup = await Setup().start(consistency=psdist.ASP())
    yield setup
    await setup.stop()


async def marked(setup: Setup, attempt: int) -> dict[str, int]:
    """The answer to the Mark of ``attempt``."""
    setup.scheduler.command(attempt, **MARK)
    report = await setup.scheduler.reports.get()
    assert report.attempt == attempt
    return dict(report.marked.next)


def marks(setup: Setup) -> list[list[int]]:
    """By server, the marks of all pushes that came."""
    return [[header.mark for header in server.headers] for server in setup.servers]


def saved(unchanged: bool = False) -> Any:
    committed = pb.SnapshotInfo(
        directory="000000000005-1-7-abcdef", sequence=3, steps={"p": 5}, bytes=800, seconds=0.5, reason="on demand"
    )
    return pb.SaveSnapshotResponse(committed=committed, unchanged=unchanged)


# --- the pure part ----------------------------------------------------------------------------------------------------


def answer(request: Request, version: int) -> None:
    for index in sorted(request.pending):
        request.answer(index, version)


async def test_a_push_keeps_its_mark_until_it_is_answered() -> None:
    pushes, session = Pushes(), Session(2, ASP())
    pushes.enter("p", session)
    assert pushes.next() == {"p": 0} and not session.unfinished
    push = session.begin_push()
    assert session.send(pushes.mark) == 0
    assert pushes.answer(7) == {"p": 1}
    assert session.send(pushes.mark) == 0 and session.unfinished
    answer(push, 1)
    session.end_push(push, seen=False)
    assert pushes.next() == {"p": 1} == pushes.answer(7)
    assert session.send(pushes.mark) == 7
    # Asked again about the same attempt, the answer is the same; a newer one asks anew, an older one comes late.
    assert pushes.answer(7) == {"p": 1} and pushes.answer(8) == {"p": 2} and pushes.answer(7) is None


async def test_an_attempt_that_is_over_is_not_told_again() -> None:
    pushes = Pushes()
    pushes.answer(7)
    pushes.end(6)
    assert pushes.unheard == (7, {})
    pushes.end(7)
    assert pushes.unheard is None and pushes.answer(7) is None
    pushes.answer(8)
    pushes.begin_life()
    assert pushes.unheard is None and pushes.mark == 0


async def test_a_step_that_the_others_made_alone_is_not_unfinished() -> None:
    session = Session(1, BSP(backup_workers=1))
    session.send(0)
    pull = session.begin_pull()
    answer(pull, 4)
    session.end_pull(pull)
    assert (session.step, session.next, session.unfinished) == (4, 4, False)


# --- marks ------------------------------------------------------------------------------------------------------------


async def test_a_mark_is_answered_at_once_and_rides_on_later_pushes(setup: Setup) -> None:
    await setup.weights.push(gradient())
    assert await marked(setup, 7) == {"p": 1}
    await setup.weights.push(gradient())
    await setup.weights.push_pull(gradient())
    setup.scheduler.command(7, **END)
    assert await marked(setup, 8) == {"p": 3}
    await setup.weights.push(gradient())
    assert marks(setup) == [[0, 7, 7, 8]] * 2


@pytest.mark.parametrize("buckets", [False, True])
async def test_a_push_under_way_counts_as_made_and_stays_unmarked(setup: Setup, buckets: bool) -> None:
    hang = asyncio.Event()
    setup.servers[0].breaks = [Break(0, hang=hang)]
    grads = gradient()
    if buckets:
        bucket = await setup.weights.push_pull_async({"v": grads["v"]})
    else:
        call = asyncio.create_task(setup.weights.push_pull(grads))
    await setup.servers[0].hanging.wait()
    assert await marked(setup, 7) == {"p": 1}
    hang.set()
    if buckets:
        other = await setup.weights.push_pull_async({"w": grads["w"]})
        await asyncio.gather(bucket.wait(), other.wait())
    else:
        await call
    await setup.weights.push(gradient())
    sent = [sorted({(header.step, header.mark) for header in server.headers}) for server in setup.servers]
    assert sent == [[(0, 0), (1, 7)]] * 2
    assert len(setup.servers[0].headers) > 2, "nothing was sent again"


async def test_a_session_that_broke_tells_the_same_answer_again(setup: Setup) -> None:
    await setup.weights.push(gradient())
    assert await marked(setup, 7) == {"p": 1}
    await setup.weights.push(gradient())
    setup.scheduler.hello.clear()
    setup.scheduler.news.put_nowait(errors.ServerUnreachableError("the session broke"))
    await setup.scheduler.hello.wait()
    report = await setup.scheduler.reports.get()
    assert (report.attempt, dict(report.marked.next)) == (7, {"p": 1})


async def test_a_new_life_is_unmarked_and_has_the_parameters_that_it_takes_part_in(setup: Setup) -> None:
    assert await marked(setup, 7) == {"p": 0}
    setup.expel(first_step=0)
    await setup.expelled()
    assert await marked(setup, 8) == {}
    setup.scheduler.command(8, **END)
    await setup.weights.push(gradient())  # dropped
    assert await marked(setup, 9) == {"p": 0}
    await setup.weights.push(gradient())
    assert marks(setup) == [[9]] * 2


# --- asking for one ---------------------------------------------------------------------------------------------------


async def test_a_snapshot_holds_what_was_pushed(setup: Setup) -> None:
    await setup.weights.push(gradient())
    call = asyncio.create_task(setup.client.snapshot())
    await waits_for(setup.client, "for nobody in particular")
    push = asyncio.create_task(setup.weights.push(gradient()))
    setup.scheduler.save_answers.put_nowait(saved())
    info = await call
    await push
    [request] = setup.scheduler.saves
    assert (request.worker_id, request.incarnation, dict(request.next)) == ("worker-0", 1, {"p": 1})
    assert (info.directory, info.sequence, info.steps) == ("000000000005-1-7-abcdef", 3, {"p": 5})
    assert (info.bytes, info.reason, info.unchanged) == (800, "on demand", False)
    setup.scheduler.save_answers.put_nowait(saved(unchanged=True))
    assert (await setup.client.snapshot()).unchanged


async def test_pushes_wait_until_the_snapshot_is_taken(setup: Setup) -> None:
    call = asyncio.create_task(setup.client.snapshot())
    await waits_for(setup.client, "for nobody in particular")
    push = asyncio.create_task(setup.weights.push(gradient()))
    pull = asyncio.create_task(setup.weights.pull())
    assert await marked(setup, 7) == {"p": 0}  # a round trip later
    assert not push.done() and not pull.done() and marks(setup) == [[], []]
    setup.scheduler.save_answers.put_nowait(saved())
    await asyncio.gather(call, push, pull)


@pytest.mark.parametrize(
    "error", [errors.NoStorageError("no storage"), errors.SnapshotFailedError("disk full"), errors.StorageError("x")]
)
@pytest.mark.parametrize("wait", [True, False])
async def test_a_refusal_is_raised_and_training_goes_on(setup: Setup, error: errors.PsdistError, wait: bool) -> None:
    setup.scheduler.save_answers.put_nowait(error)
    with pytest.raises(type(error), match=error.message):
        await setup.client.snapshot(wait)
    await setup.weights.push(gradient())


async def test_a_snapshot_that_nobody_waits_for(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psdist")
    assert await setup.client.snapshot(wait=False) is None
    await setup.weights.push(gradient())
    [request] = setup.scheduler.saves
    assert (request.worker_id, request.run_id, dict(request.next)) == ("", "fake-run", {})
    setup.scheduler.save_answers.put_nowait(saved())
    await asyncio.gather(*setup.client._saving)
    assert "snapshot 000000000005-1-7-abcdef is committed" in caplog.text
    await setup.client.snapshot(wait=False)
    setup.scheduler.save_answers.put_nowait(errors.SnapshotFailedError("disk full"))
    await asyncio.gather(*setup.client._saving, return_exceptions=True)
    assert "no snapshot was taken: disk full" in caplog.text


async def test_a_snapshot_that_does_not_come_in_time(setup: Setup) -> None:
    with pytest.raises(errors.WaitTimeoutError, match=r"within 0\.2 s"):
        await setup.client.snapshot(timeout=0.2)
    await setup.weights.push(gradient())


async def test_a_snapshot_says_that_this_life_ended_meanwhile(setup: Setup) -> None:
    call = asyncio.create_task(setup.client.snapshot())
    await waits_for(setup.client, "for nobody in particular")
    setup.expel(first_step=0)
    await setup.expelled()
    setup.scheduler.save_answers.put_nowait(errors.FencedError("incarnation 1 was silent"))
    with pytest.raises(errors.FencedError, match=r"no snapshot is known to be taken: .* Call it again"):
        await call
    setup.scheduler.save_answers.put_nowait(saved())
    assert (await setup.client.snapshot()).sequence == 3
    assert [(request.incarnation, dict(request.next)) for request in setup.scheduler.saves] == [
        (1, {"p": 0}),
        (2, {"p": 0}),
    ]


async def test_a_step_or_push_that_is_not_complete_must_be_completed(setup: Setup) -> None:
    grads = gradient()
    bucket = await setup.weights.push_pull_async({"v": grads["v"]})
    with pytest.raises(errors.InvalidArgumentError, match=r"begun in buckets and misses w"):
        await setup.client.snapshot()
    other = await setup.weights.push_pull_async({"w": grads["w"]})
    await asyncio.gather(bucket.wait(), other.wait())
    setup.servers[1].breaks = [Break(0, errors.InternalError("broken on purpose"))]
    with pytest.raises(errors.InternalError):
        await setup.weights.push(grads)
    with pytest.raises(errors.InvalidArgumentError, match=r"push 1 of 'p' failed, .*push its gradient again"):
        await setup.client.snapshot()
    assert not setup.scheduler.saves
    await setup.weights.push(grads)
    setup.scheduler.save_answers.put_nowait(saved())
    await setup.client.snapshot()
    assert dict(setup.scheduler.saves[0].next) == {"p": 2}


# --- going back to one ------------------------------------------------------------------------------------------------


def roll_back(setup: Setup, step: int, until: int) -> None:
    """The run goes back to the snapshot of ``step``."""
    for server in setup.servers:
        server.versions, server.taken = dict.fromkeys(server.versions, step), set()
        server.fenced = setup.scheduler.incarnation + 1
    scheduler = setup.scheduler
    scheduler.fenced, scheduler.first_step = scheduler.incarnation + 1, step
    scheduler.restored, scheduler.generation = "000000000002-1-1-abcdef", scheduler.generation + 1
    scheduler.epoch += 1
    scheduler.hello.clear()
    lost = pb.SessionResponse.RolledBack.Lost(parameters="p", until=until, **{"from": step})
    text = "server-1 is lost with the only copy of shard 1; the run goes on from snapshot 000000000002-1-1-abcdef."
    news = pb.SessionResponse.RolledBack(directory=scheduler.restored, lost=[lost], text=text)
    scheduler.news.put_nowait(pb.SessionResponse(rolled_back=news))


async def test_a_run_that_goes_back_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    setup = await Setup().start()
    try:
        for _ in range(5):
            await setup.weights.push_pull(gradient())
        assert setup.weights.restored == "" and setup.weights.statistics().rolled_back == 0
        hang = asyncio.Event()
        setup.servers[1].breaks = [Break(0, hang=hang)]
        call = asyncio.create_task(setup.weights.push_pull(gradient()))
        await setup.servers[1].hanging.wait()
        roll_back(setup, 2, until=6)
        assert len(flat(await call)) == ELEMENTS
        assert (setup.weights.step, setup.weights.first_step, setup.weights.version) == (2, 2, 2)
        statistics = setup.weights.statistics()
        assert (statistics.dropped, statistics.rolled_back) == (1, 1)
        assert setup.weights.restored == "000000000002-1-1-abcdef"
        [told] = [record.getMessage() for record in caplog.records if "Lost: " in record.getMessage()]
        assert told.endswith("000000000002-1-1-abcdef. Lost: steps 2 to 5 of 'p'")
        hang.set()
        await setup.weights.push_pull(gradient())
        assert setup.weights.step == 3 and setup.scheduler.commits == 1
    finally:
        await setup.stop()


async def test_one_that_does_not_rejoin_is_told_why() -> None:
    setup = await Setup().start()
    await setup.client.close()
    try:
        setup.client = await psdist.AsyncClient(setup.scheduler.address, rank=3, rejoin=False).connect()
        await setup.scheduler.hello.wait()
        weights = await setup.client.parameters("p")
        roll_back(setup, 2, until=3)
        with pytest.raises(errors.FencedError, match="the run went back to a snapshot: server-1 is lost"):
            while True:
                await weights.pull()
    finally:
        await setup.stop()
