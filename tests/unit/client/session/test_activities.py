"""Waits of a script: their reports, and that the scheduler's message ends exactly one wait.

First ``Activities`` alone, then a client and a fake scheduler, which receives waits in heartbeats.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import errors
from psdist.client.core.push_sequence import PushSequence, SnapshotMarks
from psdist.client.session.waits import Activities, GroupCalls
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import status
from tests.support.client_fakes import Break, Setup, Start, gradient, waits_for

STEP = pb.Activity.Step(parameters="p", step=4)
CIRCLE = errors.MutualWaitError("worker-0 waits for worker-1, which waits for worker-0")


class Worker:
    """Worker with one parameter set, whose script calls from one thread."""

    def __init__(self) -> None:
        self.session = PushSequence(1, psdist.BSP())
        pushes = SnapshotMarks()
        pushes.enter("p", self.session)
        self.group_calls = GroupCalls()
        self.activities = Activities(lambda: pushes, self.group_calls)
        self.activities.is_alone = lambda: True
        self.waits = asyncio.Event()
        self.end = asyncio.Event()

    async def wait(self) -> str:
        """Call that waits for others to push."""
        with self.activities.waits(limited=False, step=STEP):
            self.waits.set()
            await self.end.wait()
        return "released"

    async def begin(self) -> asyncio.Task[str]:
        """Start the call, which waits."""
        task = asyncio.create_task(self.wait())
        await self.waits.wait()
        return task


async def test_a_wait_is_reported_as_long_as_it_lasts() -> None:
    worker = Worker()
    before = worker.activities.report()
    assert before == pb.Activity(next={"p": 0})
    task = await worker.begin()
    during = worker.activities.report()
    assert during == pb.Activity(sequence=during.sequence, next={"p": 0}, step=STEP)
    worker.end.set()
    assert await task == "released"
    after = worker.activities.report()
    assert after.WhichOneof("waits_for") is None
    # Of two waits that arrive by different calls, the later one counts.
    assert before.sequence < during.sequence < after.sequence


async def test_each_report_says_how_far_its_worker_is() -> None:
    worker = Worker()
    with worker.activities.waits(limited=False, step=STEP) as wait:
        assert wait.activity.next == {"p": 0}
        worker.session.send(0)
        assert worker.activities.report().next == {"p": 1}
        worker.session.partial = True
        assert worker.activities.report().next == {"p": 0}


@pytest.mark.parametrize(("limited", "alone"), [(True, True), (False, False)])
async def test_what_may_end_by_itself_is_no_wait(limited: bool, alone: bool) -> None:
    worker = Worker()
    worker.activities.is_alone = lambda: alone
    with worker.activities.waits(limited=limited, step=STEP) as wait:
        for activity in (wait.activity, worker.activities.report()):
            assert activity.WhichOneof("waits_for") is None and activity.next == {"p": 0}


async def test_a_mutual_wait_ends_the_call() -> None:
    worker = Worker()
    task = await worker.begin()
    for _ in range(2):  # The message may arrive twice.
        worker.activities.on_mutual_wait(worker.activities.report().sequence, CIRCLE)
    with pytest.raises(errors.MutualWaitError) as raised:
        await task
    assert raised.value is CIRCLE
    # The next one is another wait.
    again = Worker()
    again.activities = worker.activities
    task = await again.begin()
    again.end.set()
    assert await task == "released"


async def test_word_of_another_wait_ends_nothing() -> None:
    worker = Worker()
    worker.activities.on_mutual_wait(0, CIRCLE)
    task = await worker.begin()
    sequence = worker.activities.report().sequence
    for other in (sequence - 1, sequence + 1):
        worker.activities.on_mutual_wait(other, CIRCLE)
    worker.end.set()
    assert await task == "released"
    worker.activities.on_mutual_wait(sequence, CIRCLE)
    assert await worker.wait() == "released"


async def test_who_is_cancelled_as_well_is_cancelled() -> None:
    worker = Worker()
    task = await worker.begin()
    worker.activities.on_mutual_wait(worker.activities.report().sequence, CIRCLE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_another_error_of_the_call_is_the_calls() -> None:
    worker = Worker()

    async def fails() -> None:
        with worker.activities.waits(limited=False, step=STEP):
            worker.waits.set()
            try:
                await worker.end.wait()
            except asyncio.CancelledError:
                raise errors.ServerLostError("lost") from None

    task = asyncio.create_task(fails())
    await worker.waits.wait()
    worker.activities.on_mutual_wait(worker.activities.report().sequence, CIRCLE)
    with pytest.raises(errors.ServerLostError, match="lost"):
        await task


async def test_an_older_wait_that_ends_does_not_end_the_newer_one() -> None:
    """Check that a step in buckets is still waited for while another call of the script starts."""
    worker = Worker()
    first = worker.activities.waits(limited=False, step=STEP)
    second = worker.activities.waits(limited=False, call=True)
    with second:
        with first:
            worker.activities.began(second)
        assert worker.activities.report().call


class GroupCall:
    """Call of a group that waits for another worker."""

    def __init__(self, number: int = 0) -> None:
        self.wanted: pb.Activity.GroupCall | None = pb.Activity.GroupCall(group=b"g", number=number)
        self.error: errors.PsdistError | None = None

    def need(self) -> pb.Activity.GroupCall | None:
        return self.wanted

    def fail(self, error: errors.PsdistError) -> None:
        self.error = error


async def test_the_call_of_a_group_that_the_script_waits_for_is_reported() -> None:
    worker = Worker()
    calls, task = worker.group_calls, asyncio.current_task()
    before = worker.activities.report()
    entered, call = calls.enter(), GroupCall()
    assert entered is task and calls.enter() is None, "a call that makes another one is one call"
    waiting = calls.begin_wait(call)
    assert worker.activities.report().WhichOneof("waits_for") is None, "the script does something else"
    calls.is_awaited = lambda one: one is task
    during = worker.activities.report()
    assert during.group == call.wanted and during.sequence > before.sequence
    assert worker.activities.report() == during
    worker.activities.is_alone = lambda: False
    assert worker.activities.report().WhichOneof("waits_for") is None
    worker.activities.is_alone = lambda: True
    worker.activities.on_mutual_wait(during.sequence, CIRCLE)
    assert call.error is None, "a wait that was interrupted is another one"
    worker.activities.on_mutual_wait(worker.activities.report().sequence, CIRCLE)
    assert call.error is CIRCLE
    call.wanted = None
    assert worker.activities.report().WhichOneof("waits_for") is None
    calls.end_wait(waiting)
    calls.leave(entered)
    calls.leave(None)
    assert not calls.acts


@pytest.mark.parametrize("is_refused", [True, False], ids=["call", "step"])
async def test_a_deadlock_ends_the_groups_of_other_workers_before_the_wait(is_refused: bool) -> None:
    worker, circle, ended = Worker(), errors.MutualWaitError("a circle", group_0="0a", group_1="0b"), []
    worker.group_calls.end = lambda names, error: ended.append((names, error))

    async def call() -> None:
        with worker.activities.waits(limited=False, call=True):
            worker.waits.set()
            await worker.end.wait()
            raise circle

    waiting = asyncio.create_task(call())
    await worker.waits.wait()
    if is_refused:
        worker.end.set()
    else:
        worker.activities.on_mutual_wait(worker.activities.report().sequence, circle)
        assert ended, "the group ends before the script continues"
    with pytest.raises(errors.MutualWaitError):
        await waiting
    assert {frozenset(names) for names, _ in ended} == {frozenset({"0a", "0b"})}


async def test_calls_in_tasks_of_the_awaited_one_are_reported() -> None:
    worker = Worker()
    calls, release, need, waiting = worker.group_calls, asyncio.Event(), GroupCall(), asyncio.Semaphore(0)

    async def call(awaited: GroupCall) -> None:
        entered = calls.enter()
        task = calls.begin_wait(awaited)
        waiting.release()
        await release.wait()
        calls.end_wait(task)
        calls.leave(entered)

    async def several() -> None:
        complete = GroupCall()
        complete.wanted = None
        with calls.preparing():
            made = asyncio.gather(call(complete), call(need))
        await made

    before = asyncio.create_task(call(GroupCall(1)))
    task: asyncio.Task[None] = asyncio.create_task(several())
    calls.is_awaited = lambda one: one is task
    await asyncio.sleep(0)
    assert calls.acts and worker.activities.report().WhichOneof("waits_for") is None, "its tasks have not begun"
    for _ in range(3):
        await waiting.acquire()
    await asyncio.sleep(0)
    assert worker.activities.report().group == need.wanted
    release.set()
    await asyncio.gather(before, task)
    assert not calls.acts and calls.awaited() is None


# --- with a scheduler -------------------------------------------------------------------------------------------------


@pytest.fixture
def make(start: Start) -> Start:
    """Start clients whose scripts make their calls from one thread."""

    async def make(**settings: Any) -> Setup:
        setup = await start(**settings)
        setup.client.report_waits(lambda: True)
        return setup

    return make


async def heard(setup: Setup, kind: str | None, push: int = 0) -> pb.Activity:
    """Return the scheduler's next report of a wait of this kind, by a worker at this push of "p". An earlier call that
    took long may have been reported as well."""
    while True:
        activity = await setup.scheduler.activities.get()
        if activity.WhichOneof("waits_for") == kind and activity.next.get("p", 0) >= push:
            return activity


def tell(setup: Setup, activity: pb.Activity) -> None:
    """Let the scheduler report that this wait will not end."""
    news = pb.MutualWait(sequence=activity.sequence, error=status.to_detail(CIRCLE))
    setup.scheduler.news.put_nowait(pb.SessionResponse(mutual_wait=news))


@pytest.mark.parametrize("call", ["push", "push_pull", "bucket"])
async def test_a_step_is_told_and_ends_by_a_typed_error(make: Start, call: str) -> None:
    setup = await make()
    await setup.weights.push(gradient())
    setup.servers[1].breaks = [Break(0, hang=asyncio.Event())]
    if call == "bucket":
        task = asyncio.ensure_future((await setup.weights.push_pull_async(gradient())).wait())
    else:
        task = asyncio.create_task(getattr(setup.weights, call)(gradient()))
    await setup.servers[1].hanging.wait()
    activity = await heard(setup, "step", push=2)
    assert (activity.step.parameters, activity.step.step, dict(activity.next)) == ("p", 1, {"p": 2})
    tell(setup, activity)
    with pytest.raises(errors.MutualWaitError, match="worker-0 waits for worker-1, which waits for worker-0"):
        await task
    assert (await heard(setup, None)).sequence > activity.sequence


async def test_a_pull_waits_for_the_steps_before(make: Start) -> None:
    setup = await make()
    await setup.weights.push(gradient())
    setup.servers[1].pulling = asyncio.Event()
    task = asyncio.create_task(setup.weights.pull())
    activity = await heard(setup, "step", push=1)
    assert (activity.step.step, dict(activity.next)) == (0, {"p": 1})
    setup.servers[1].pulling.set()
    await task


async def test_in_ssp_the_slowest_clock_is_waited_for(make: Start) -> None:
    setup = await make(consistency=psdist.SSP(2))
    for _ in range(3):
        await setup.weights.push(gradient())
    setup.servers[1].pulling = asyncio.Event()
    task = asyncio.create_task(setup.weights.pull())
    activity = await heard(setup, "clock", push=3)
    # Its clock is 3: it may read while no member is more than 2 behind.
    assert (activity.clock.parameters, activity.clock.step, dict(activity.next)) == ("p", 1, {"p": 3})
    setup.servers[1].pulling.set()
    await task


async def test_a_barrier_ends_by_a_typed_error(make: Start) -> None:
    setup = await make()
    task = asyncio.create_task(setup.client.barrier("b"))
    activity = await heard(setup, "call")
    assert setup.scheduler.barriers[0].activity == activity
    tell(setup, activity)
    with pytest.raises(errors.MutualWaitError):
        await task
    # Nothing of it is left: the next call is the same arrival.
    setup.scheduler.barrier.set()
    await setup.client.barrier("b")
    assert [request.passed for request in setup.scheduler.barriers] == [0, 0]


async def test_asynchronous_pushes_and_limited_calls_wait_for_nobody(make: Start) -> None:
    setup = await make(consistency=psdist.ASP())
    setup.servers[1].breaks = [Break(0, hang=asyncio.Event())]
    task = asyncio.create_task(setup.weights.push_pull(gradient()))
    await setup.servers[1].hanging.wait()
    limited = asyncio.create_task(setup.client.barrier("b", timeout=600))
    await waits_for(setup.client, "for nobody in particular")
    while not setup.scheduler.activities.empty():
        setup.scheduler.activities.get_nowait()
    assert (await setup.scheduler.activities.get()).WhichOneof("waits_for") is None
    for call in (task, limited):
        call.cancel()
    await asyncio.gather(task, limited, return_exceptions=True)


async def test_creation_is_a_call_that_all_make(make: Start) -> None:
    setup = await make()
    creating = asyncio.Event()
    setup.servers[0].installing, setup.scheduler.created = creating, None
    task = asyncio.create_task(setup.client.parameters("q", {"w": np.ones(5, np.float32)}, psdist.optim.SGD()))
    assert (await heard(setup, "call")).call
    creating.set()
    await task


@pytest.mark.parametrize("buckets", [True, False])
async def test_a_worker_that_joined_waits_for_the_step_before_its_first(make: Start, buckets: bool) -> None:
    setup = await make()
    await setup.weights.push(gradient())
    setup.expel(7)
    await setup.expelled()
    await setup.weights.push(gradient())  # Dropped: the others have continued.
    assert setup.weights.step == 7
    setup.servers[1].pulling = asyncio.Event()
    push = setup.weights.push_pull_async if buckets else setup.weights.push
    task = asyncio.ensure_future(push(gradient()))
    activity = await heard(setup, "step", push=7)
    assert (activity.step.step, dict(activity.next)) == (6, {"p": 7})
    setup.servers[1].pulling.set()
    await task
