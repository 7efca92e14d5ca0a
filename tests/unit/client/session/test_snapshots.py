"""Snapshots in the client: marks and next pushes, requests for a snapshot, and rollback to one."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import errors
from psdist.client.core.push_sequence import MarkAnswer, PendingRequest, PushSequence, SnapshotMarks
from psdist.client.session import worker_state
from psdist.client.session.worker_state import OWN, SnapshotParticipant
from psdist.consistency import ASP, BSP
from psdist.data.samples import BATCHES
from psdist.v1 import scheduler_pb2 as pb
from tests.support.client_fakes import ELEMENTS, Break, Setup, Start, flat, gradient, waits_for

MARK, END = {"mark": pb.SnapshotCommand.Mark()}, {"end": pb.SnapshotCommand.End()}


@pytest.fixture
async def setup(start: Start) -> Setup:
    return await start(consistency=psdist.ASP())


async def marked(setup: Setup, attempt: int) -> dict[str, int]:
    """Return the answer to the Mark of ``attempt``."""
    setup.scheduler.command(attempt, **MARK)
    report = await setup.scheduler.reports.get()
    assert report.attempt == attempt
    return dict(report.marked.next)


def marks(setup: Setup) -> list[list[int]]:
    """Return the marks of all pushes that arrived, by server."""
    return [[header.mark for header in server.headers] for server in setup.servers]


def saved(unchanged: bool = False) -> Any:
    committed = pb.SnapshotInfo(
        directory="000000000005-1-7-abcdef", sequence=3, steps={"p": 5}, bytes=800, seconds=0.5, reason="on demand"
    )
    return pb.SaveSnapshotResponse(committed=committed, unchanged=unchanged)


# --- the pure part ----------------------------------------------------------------------------------------------------


def answer(request: PendingRequest, version: int) -> None:
    for index in sorted(request.pending):
        request.answer(index, version)


async def test_a_push_keeps_its_mark_until_it_is_answered() -> None:
    pushes, session = SnapshotMarks(), PushSequence(2, ASP())
    pushes.enter("p", session)
    assert pushes.next() == {"p": 0} and not session.unfinished
    push = session.begin_push()
    assert session.send(pushes.mark) == 0
    assert pushes.answer(7) == MarkAnswer({"p": 1}, {})
    assert session.send(pushes.mark) == 0 and session.unfinished
    answer(push, 1)
    session.end_push(push, seen=False)
    assert pushes.next() == {"p": 1}
    assert session.send(pushes.mark) == 7
    # A repeated question about the same attempt gets the same answer; a newer attempt is asked again, an older one is
    # late.
    assert pushes.answer(7) == MarkAnswer({"p": 1}, {})
    assert pushes.answer(8, lambda: {"p": 2}) == MarkAnswer({"p": 2}, {"p": 2}) and pushes.answer(7) is None


async def test_an_attempt_that_is_over_is_not_told_again() -> None:
    pushes = SnapshotMarks()
    pushes.answer(7)
    pushes.end(6)
    assert pushes.pending_answer == (7, MarkAnswer({}, {}))
    pushes.end(7)
    assert pushes.pending_answer is None and pushes.answer(7) is None


async def test_the_next_incarnation_has_marks_of_its_own() -> None:
    nobody: Any = None
    participant = SnapshotParticipant(nobody, nobody, lambda _: None)
    before = participant.marks
    before.answer(8)
    before.dropped = 2
    participant.start_incarnation()
    marks = participant.marks
    assert marks is not before and marks.pending_answer is None and (marks.mark, marks.dropped) == (0, 2)


async def test_a_step_that_the_others_made_alone_is_not_unfinished() -> None:
    session = PushSequence(1, BSP(backup_workers=1))
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
    assert await marked(setup, 7) == {"p": 0}  # one round trip later
    assert not push.done() and not pull.done() and marks(setup) == [[], []]
    setup.scheduler.save_answers.put_nowait(saved())
    await asyncio.gather(call, push, pull)


@pytest.mark.parametrize(
    "error", [errors.NoStorageError("no storage"), errors.SnapshotFailedError("disk full"), errors.StorageError("x")]
)
@pytest.mark.parametrize("method", ["snapshot", "request_snapshot"])
async def test_a_refusal_is_raised_and_training_goes_on(setup: Setup, error: errors.PsdistError, method: str) -> None:
    setup.scheduler.save_answers.put_nowait(error)
    with pytest.raises(type(error), match=error.message):
        await getattr(setup.client, method)()
    await setup.weights.push(gradient())


async def test_a_snapshot_that_nobody_waits_for(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psdist")
    await setup.client.request_snapshot()
    await setup.weights.push(gradient())
    [request] = setup.scheduler.saves
    assert (request.worker_id, request.run_id, dict(request.next)) == ("", "fake-run", {})
    setup.scheduler.save_answers.put_nowait(saved())
    await asyncio.gather(*setup.client.snapshots.under_way)
    assert "snapshot 000000000005-1-7-abcdef is committed" in caplog.text
    await setup.client.request_snapshot()
    setup.scheduler.save_answers.put_nowait(errors.SnapshotFailedError("disk full"))
    await asyncio.gather(*setup.client.snapshots.under_way, return_exceptions=True)
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


@pytest.mark.parametrize("consistency", [psdist.BSP(), psdist.SSP(2), psdist.ASP()])
async def test_a_gradient_of_the_lost_course_is_dropped(
    start: Start, consistency: psdist.consistency.Consistency
) -> None:
    """Check the drop if a call other than the push, here one that returns no weights, is the first to see the
    rollback."""
    setup = await start(consistency=consistency)
    await setup.weights.push_pull(gradient())
    setup.roll_back(0, until=1)
    await setup.scheduler.hello.wait()
    await setup.weights.gradient_buffers()
    assert setup.weights.statistics().rolled_back == 1
    await setup.weights.push_pull(gradient())
    assert (setup.weights.statistics().dropped, setup.weights.step) == (1, 0)
    await setup.weights.push_pull(gradient())
    assert (setup.weights.statistics().dropped, setup.weights.step) == (1, 1)
    setup.roll_back(0, until=1)
    await setup.scheduler.hello.wait()
    await setup.weights.gradient_buffers()
    await setup.weights.pull()
    await setup.weights.push(gradient())
    assert setup.weights.statistics().dropped == 1, "its weights were new"


async def test_a_run_that_goes_back_is_followed(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    setup = await start()
    for _ in range(5):
        await setup.weights.push_pull(gradient())
    assert setup.weights.restored is None and setup.weights.statistics().rolled_back == 0
    hang = asyncio.Event()
    setup.servers[1].breaks = [Break(0, hang=hang)]
    call = asyncio.create_task(setup.weights.push_pull(gradient()))
    await setup.servers[1].hanging.wait()
    setup.roll_back(2, until=4)  # The scheduler is behind.
    assert len(flat(await call)) == ELEMENTS
    assert (setup.weights.step, setup.weights.first_step, setup.weights.version) == (2, 2, 2)
    statistics = setup.weights.statistics()
    assert (statistics.dropped, statistics.rolled_back) == (1, 1)
    assert setup.weights.restored == "000000000002-1-1-abcdef"
    [told] = [record.getMessage() for record in caplog.records if "Lost: " in record.getMessage()]
    assert told.endswith("resumes from snapshot 000000000002-1-1-abcdef. Lost: steps 2 to 4 of 'p'")
    [told] = [record.getMessage() for record in caplog.records if "was dropped" in record.getMessage()]
    assert told.startswith("step 5 of 'p' was dropped: the run went back to snapshot 000000000002-1-1-abcdef; this")
    hang.set()
    await setup.weights.push_pull(gradient())
    assert setup.weights.step == 3 and setup.scheduler.commits == 1


async def test_one_that_does_not_rejoin_is_told_why(start: Start) -> None:
    setup = await start(client={"rejoin": False})
    setup.roll_back(2, until=3)
    with pytest.raises(errors.FencedError, match="the run went back to snapshot 000000000002-1-1-abcdef"):
        while True:
            await setup.weights.pull()


# --- worker state -----------------------------------------------------------------------------------------------------


async def test_a_state_is_handed_in_and_given_back(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    setup = await start()
    scheduler, given = setup.scheduler, []
    residual = {"rest": np.zeros(300_000), "count": np.zeros(1, np.int64)}
    await setup.weights.keep_state(lambda: residual, given.append)
    assert (await scheduler.reports.get()).keeps.parameters == ["p"] and not given
    for number in range(3):
        residual["rest"] += 0.5
        residual["count"] += 1
        await setup.weights.push(gradient())
        if number == 0:
            scheduler.command(7, mark=pb.SnapshotCommand.Mark(steps={"p": 2}))
            report = await scheduler.reports.get()
            assert dict(report.marked.keeps) == {"p": 1}
    header, data = await scheduler.states.get()
    assert (header.attempt, header.parameters, header.next, header.length) == (7, "p", 2, len(data))
    scheduler.state = data
    setup.roll_back(2, until=3)
    await setup.weights.push_pull(gradient())
    [state] = given
    assert state["rest"].tolist() == [1.0] * 300_000 and state["count"].tolist() == [2]
    assert state["rest"].dtype == np.float64
    # States that broke on the way are rejected.
    scheduler.state = data[:-1] + b"x"
    with pytest.raises(errors.InternalError, match="not the one that was handed in"):
        await setup.weights.keep_state(lambda: residual, given.append)
    with pytest.raises(errors.InvalidArgumentError, match="'rest' in the state of 'p' is list"):
        scheduler.state = b""
        await setup.weights.keep_state(lambda: {"rest": [1]}, given.append)
    scheduler.save_answers.put_nowait(saved())
    await setup.client.close()
    [request] = scheduler.saves
    assert (request.reason, request.worker_id, dict(request.next)) == ("at the end", "worker-0", {"p": 2})


async def test_the_scheduler_is_told_of_a_state_that_does_not_come(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the report after any kind of failure: the scheduler would wait for the state."""

    def refuse(state: Any) -> bytes:
        raise OSError("no room")

    monkeypatch.setattr(worker_state, "_to_bytes", refuse)
    setup = await start()
    await setup.weights.keep_state(lambda: {"rest": np.zeros(1)}, lambda state: None)
    assert (await setup.scheduler.reports.get()).keeps.parameters == ["p"]
    setup.scheduler.command(7, mark=pb.SnapshotCommand.Mark(steps={"p": 0}))
    assert (await setup.scheduler.reports.get()).HasField("marked")
    report = await setup.scheduler.reports.get()
    assert report.attempt == 7 and "cannot be handed in: OSError: no room" in str(report.failed)
    assert "the state of 'p' cannot be handed in" in caplog.text


async def test_a_state_has_numbers_that_a_file_can_have(start: Start) -> None:
    setup = await start()
    for array in (np.zeros(1, np.longdouble), np.zeros(1, complex), np.array(["text"])):
        with pytest.raises(errors.InvalidArgumentError, match="numbers of at most 8 bytes"):
            await setup.weights.keep_state(lambda array=array: {"rest": array}, lambda state: None)


@pytest.mark.parametrize("how", ["refused", "no storage", "failed script", "scheduler gone"])
async def test_a_client_leaves_though_what_it_keeps_is_not_saved(
    start: Start, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that a failed script waits for 3 s, and others as long as it takes."""
    setup = await start()
    await setup.weights.keep_state(dict, lambda state: None)
    requests = setup.client.snapshots
    assert requests is not None and requests.needs_last
    if how == "scheduler gone":
        closing = asyncio.create_task(setup.client.close())
        await waits_for(setup.client, "for nobody in particular")
        await setup.scheduler.stop()
        await closing
    elif how == "failed script":
        await setup.client.close("failed")
    else:
        refusal = errors.NoStorageError if how == "no storage" else errors.SnapshotFailedError
        setup.scheduler.save_answers.put_nowait(refusal("no"))
    await setup.client.close()
    assert not requests.needs_last
    assert len(setup.scheduler.saves) == 1
    assert ("in no snapshot at the end" in caplog.text) == (how != "no storage")


async def test_a_rollback_is_not_forgotten_where_the_worker_is_expelled_while_its_state_is_fetched(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[object] = []
    await setup.weights.keep_state(dict, restored.append)
    await setup.weights.push_pull(gradient())
    part, scheduler = setup.weights.participation, setup.scheduler
    scheduler.restored, scheduler.generation = "000000000002-1-1-abcdef", scheduler.generation + 1

    async def expelled() -> dict[str, np.ndarray]:
        raise errors.FencedError("silent")

    mine = setup.client.session.membership.registration
    with monkeypatch.context() as patch:
        patch.setattr(part, "state", expelled)
        with pytest.raises(errors.FencedError, match="silent"):
            await part.start_incarnation(mine)
    await part.start_incarnation(mine)
    assert len(restored) == 1 and part.generation == scheduler.generation


async def test_what_psdist_keeps_lies_beside_the_users_state(start: Start) -> None:
    setup = await start()
    weights, scheduler = setup.weights, setup.scheduler
    own, users = list[dict[str, np.ndarray]](), list[dict[str, np.ndarray]]()
    part = weights.participation
    await part.keep_state(lambda: {"rest": np.ones(3)}, own.append, prefix=OWN)
    await weights.keep_state(lambda: {"rest": np.zeros(2)}, users.append)
    scheduler.command(7, mark=pb.SnapshotCommand.Mark(steps={"p": 0}))
    _, scheduler.state = await scheduler.states.get()
    setup.roll_back(2, until=3)
    await weights.push_pull(gradient())
    assert [state["rest"].tolist() for state in own] == [[1.0] * 3]
    assert [{name: a.tolist() for name, a in state.items()} for state in users] == [{"rest": [0.0] * 2}]
    await weights.keep_state(lambda: {}, users.append)  # Also in a run that resumes from it.
    assert len(users) == 2 and list(users[1]) == ["rest"] and users[1]["rest"].size == 2
    for name in ("psdist.rest", f"{BATCHES}batches.taken"):
        with pytest.raises(errors.InvalidArgumentError, match=f"'{name}' in the state of 'p' begins with"):
            await weights.keep_state(lambda name=name: {name: np.zeros(2)}, users.append)


async def test_who_joins_a_training_under_way_is_given_no_state(start: Start) -> None:
    setup = await start()
    setup.scheduler.restored, setup.scheduler.state = "000000000002-1-1-abcdef", b"not read"
    setup.expel(first_step=5)
    await setup.expelled()
    await setup.weights.push_pull(gradient())
    await setup.weights.keep_state(dict, lambda state: pytest.fail("given a state"))
    assert setup.weights.restored == "000000000002-1-1-abcdef"
