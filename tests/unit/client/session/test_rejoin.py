"""A client that was expelled while it lives: it rejoins by itself. Pushes of that time are finished if the scheduler
lets them continue; else they are dropped and reported. They never count twice."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket

import numpy as np
import pytest

import psdist
from psdist import errors
from psdist.v1 import scheduler_pb2 as pb
from tests.support.client_fakes import ELEMENTS, Break, Setup, Start, flat, gradient, waits_for


@pytest.mark.parametrize("who", ["session", "server", "server in the middle"])
@pytest.mark.parametrize("method", ["push", "push_pull"])
async def test_a_push_under_way_is_dropped(
    setup: Setup, method: str, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    await setup.weights.push_pull(gradient())
    hang = asyncio.Event()
    # Servers report a worker whose call had started before as no member.
    error = errors.NotMemberError("worker-0 takes no part") if who == "server in the middle" else None
    setup.servers[1].breaks = [Break(0, error, hang=hang)]
    call = asyncio.create_task(getattr(setup.weights, method)(gradient()))
    await setup.servers[1].hanging.wait()
    while (1, 0) not in setup.servers[0].requests:  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)
    if who != "session":  # the server learns of it before the client does, and says so
        setup.servers[1].fenced = setup.scheduler.fenced = 2
        hang.set()
        await waits_for(setup.client, "for the scheduler at 127.0.0.1:")
    setup.expel(first_step=5)
    values = await call
    # Slices that arrived at one server count; nothing is sent again in the next life.
    assert [step for step, _ in setup.servers[1].requests if step] == []
    if method == "push_pull":
        assert flat(values)[:8] == [2.0] * 4 + [1.0] * 4
    assert (setup.weights.step, setup.weights.first_step) == (5, 5)
    statistics = setup.weights.statistics()
    assert (statistics.dropped, statistics.pushes) == (1, 1)
    [told] = [record.getMessage() for record in caplog.records if "was dropped" in record.getMessage()]
    assert told.startswith("step 1 of 'p' was dropped: incarnation 1 ")
    assert re.search(r"this process sent no sign of life for up to \d+\.\d s", told), told
    assert told.endswith("this worker takes part again from step 5")
    # Training continues.
    await setup.weights.push_pull(gradient())
    assert setup.servers[1].headers[-1].step == 5
    assert setup.servers[1].identities[-1].incarnation == setup.client.incarnation == 2
    assert setup.scheduler.commits == 1  # its initial values are no longer needed


@pytest.mark.parametrize("consistency", [psdist.BSP(), psdist.ASP()])
@pytest.mark.parametrize("method", ["push", "push_pull"])
async def test_a_push_under_way_is_finished(
    start: Start, method: str, consistency: psdist.consistency.Consistency
) -> None:
    setup = await start(consistency=consistency)
    await setup.weights.push_pull(gradient())
    setup.servers[1].breaks = [Break(1, hang=asyncio.Event())]
    call = asyncio.create_task(getattr(setup.weights, method)(gradient(2.0)))
    await setup.servers[1].hanging.wait()
    setup.scheduler.resumes = True
    setup.scheduler.expel()
    await call
    # All sent slices are sent again under the same number, and count once.
    assert setup.scheduler.resume_pushes[-1] == pb.ResumePush(origin=1, number=1)
    assert {header.step for header in setup.servers[1].headers[1:]} == {1}
    assert setup.servers[1].identities[-1].incarnation == 2
    assert flat(await setup.weights.pull()) == [3.0] * ELEMENTS
    statistics = setup.weights.statistics()
    assert (statistics.dropped, statistics.resumed, statistics.pushes, setup.weights.step) == (0, 1, 2, 2)
    # Its pushes started in the first incarnation, whichever it is in.
    setup.scheduler.expel()
    await setup.expelled()
    await setup.weights.push(gradient())
    assert setup.scheduler.resume_pushes[-1] == pb.ResumePush(origin=1, number=2)


@pytest.mark.parametrize("method", ["push", "push_pull"])
async def test_a_push_that_all_slices_have_is_not_made_again_as_the_next(setup: Setup, method: str) -> None:
    """Check a push whose answers were lost. The worker never pulled, so it does not know the version of the servers."""
    await setup.weights.push(gradient())
    for server in setup.servers:
        server.breaks = [Break(0, lose_answer=True, hang=asyncio.Event())]
    call = asyncio.create_task(getattr(setup.weights, method)(gradient(2.0)))
    for server in setup.servers:
        await server.hanging.wait()
        for index in server.weights.keys() - {index for step, index in server.taken if step == 1}:
            server.taken.add((1, index))
            server.weights[index] += 2.0
            server.versions[index] += 1
    setup.scheduler.resumes = True
    setup.scheduler.expel()
    await call
    assert flat(await setup.weights.pull()) == [3.0] * ELEMENTS and setup.weights.step == 2


async def test_a_gradient_computed_while_expelled_is_pushed_where_it_goes_on(setup: Setup) -> None:
    setup.scheduler.resumes = True
    await setup.weights.push_pull(gradient())
    setup.scheduler.expel()
    await setup.expelled()
    assert flat(await setup.weights.push_pull(gradient())) == [2.0] * ELEMENTS
    assert (setup.weights.step, setup.weights.statistics().dropped) == (2, 0)


async def test_buckets_under_way_are_finished(setup: Setup) -> None:
    grads = gradient()
    for server in setup.servers:
        server.breaks = [Break(0, hang=asyncio.Event())]
    first = await setup.weights.push_pull_async({"v": grads["v"]})
    await setup.servers[0].hanging.wait()
    setup.scheduler.resumes = True
    setup.scheduler.expel()
    await setup.expelled()
    second = await setup.weights.push_pull_async({"w": grads["w"]})
    assert (await first)["v"].tolist() == [1.0] * 8
    assert (await second)["w"].tolist() == [1.0] * 14
    assert (setup.weights.step, setup.weights.statistics().dropped) == (1, 0)
    assert {header.step for server in setup.servers for header in server.headers} == {0}
    assert flat(await setup.weights.push_pull(grads)) == [2.0] * ELEMENTS


@pytest.mark.parametrize("consistency", [psdist.BSP(), psdist.ASP()])
async def test_under_another_rank_only_asynchronous_pushes_go_on(
    start: Start, consistency: psdist.consistency.Consistency
) -> None:
    setup = await start(consistency=consistency)
    setup.scheduler.resumes = True
    setup.scheduler.register_errors = [errors.DuplicateMemberError("taken", member_id="worker-7", host="x", pid=1)]
    setup.expel(first_step=3)
    await setup.expelled()
    await setup.weights.push(gradient())
    goes_on = not isinstance(consistency, psdist.BSP)
    assert (setup.scheduler.resume_pushes[-1].origin, setup.weights.statistics().dropped) == (goes_on, not goes_on)


@pytest.mark.parametrize("on_drop", ["warn", "raise", "ignore"])
async def test_dropped_pushes_are_told_or_raised(start: Start, on_drop: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psdist")
    setup = await start(on_drop=on_drop)
    raised = []
    for number in range(1, 8):
        setup.expel(first_step=5 * number)
        await setup.expelled()
        try:
            await setup.weights.push(gradient())
        except errors.PushDroppedError as error:
            raised.append((number, error.message))
        if number == 4:
            await setup.weights.push(gradient())  # A later drop is not part of the same row.
    assert [number for number, _ in raised] == {"warn": [3, 7], "raise": [*range(1, 8)], "ignore": []}[on_drop]
    told = [r.levelno for r in caplog.records if "was dropped: incarnation" in r.getMessage()]
    assert told == {"warn": [logging.WARNING] * 5, "raise": [], "ignore": [logging.INFO] * 7}[on_drop]
    if on_drop == "warn":
        assert "So were the 2 before it" in raised[0][1] and "--worker-timeout" in raised[0][1]
    assert setup.weights.statistics().dropped == 7


async def test_an_unknown_on_drop_is_refused(setup: Setup) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="on_drop='never' is unknown: use one of warn, raise, ignore"):
        await setup.client.parameters("q", {"w": np.ones(5, np.float32)}, psdist.optim.SGD(), on_drop="never")


async def test_weights_from_before_a_drop_stay_outdated_when_the_worker_rejoins_again(setup: Setup) -> None:
    part = setup.weights.participation
    await setup.weights.push_pull(gradient())
    setup.expel(first_step=5)
    await setup.expelled()
    await part.follow_rejoin()
    assert part.is_outdated and setup.weights.step == 5
    setup.scheduler.resumes = True
    setup.scheduler.expel()
    await setup.expelled()
    await part.follow_rejoin()
    assert part.incarnation == 3 and part.is_outdated, "the script has not received new weights"
    await setup.weights.pull()
    assert not part.is_outdated


async def test_a_pull_under_way_begins_again_and_mixes_no_versions(setup: Setup) -> None:
    setup.servers[1].pulling = asyncio.Event()
    call = asyncio.create_task(setup.weights.pull())
    while not setup.servers[1].identities:  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)
    for server in setup.servers:
        for index in server.weights:
            server.weights[index] += 4.0
    setup.expel(first_step=4)
    await setup.expelled()
    setup.servers[1].pulling.set()
    assert flat(await call) == [4.0] * ELEMENTS
    assert setup.weights.version == 4 and setup.weights.statistics().dropped == 0


async def test_a_reader_goes_on(setup: Setup) -> None:
    await setup.client.close()
    setup.client = await psdist.AsyncClient(setup.scheduler.address).connect()
    reader = await setup.client.parameters("p")
    setup.expel(first_step=2)
    await setup.expelled()
    assert flat(await reader.pull()) == [0.0] * ELEMENTS
    assert reader.version == 2


async def test_asynchronous_pushes_count_from_0_again(start: Start) -> None:
    setup = await start(consistency=psdist.ASP())
    for _ in range(3):
        await setup.weights.push(gradient())
    setup.expel(first_step=0)
    await setup.expelled()
    await setup.weights.push(gradient())
    assert setup.weights.statistics().dropped == 1
    for server in setup.servers:
        server.taken.clear()
    assert flat(await setup.weights.push_pull(gradient())) == [4.0] * ELEMENTS
    assert [header.step for header in setup.servers[0].headers] == [0, 1, 2, 0]


async def test_buckets_under_way_fail_and_the_next_call_begins_a_step(setup: Setup) -> None:
    grads = gradient()
    setup.servers[0].breaks = [Break(0, hang=asyncio.Event())]
    setup.servers[1].breaks = [Break(0, hang=asyncio.Event())]
    bucket = await setup.weights.push_pull_async({"v": grads["v"]})
    await setup.servers[0].hanging.wait()
    setup.expel(first_step=6)
    with pytest.raises(errors.FencedError, match=r"step 0 was dropped, with all of its buckets: .*was silent"):
        await bucket
    buckets = [await setup.weights.push_pull_async({name: grads[name]}) for name in ("v", "w")]
    assert (await buckets[0])["v"].tolist() == [1.0] * 8
    assert (await buckets[1])["w"].tolist() == [1.0] * 14
    assert {header.step for header in setup.servers[0].headers[1:]} == {6}
    assert setup.weights.statistics().dropped == 1


@pytest.mark.parametrize("call", ["push_pull_async", "push_pull", "pull"])
async def test_a_step_in_buckets_is_not_dropped_silently(setup: Setup, call: str) -> None:
    grads = gradient()
    bucket = await setup.weights.push_pull_async({"v": grads["v"]})
    setup.expel(first_step=6)
    await setup.expelled()
    arguments = {"push_pull_async": ({"w": grads["w"]},), "push_pull": (grads,), "pull": ()}[call]
    with pytest.raises(errors.FencedError, match=r"step 0 was dropped.*Begin the next one"):
        await getattr(setup.weights, call)(*arguments)
    if not bucket.error:  # it was answered before
        with pytest.raises(errors.InvalidArgumentError, match="not valid any more"):
            await bucket
    assert setup.weights.statistics().dropped == 1
    assert flat(await setup.weights.push_pull(grads))[:8] in ([1.0] * 8, [2.0] * 8)
    assert setup.weights.step == 7


async def test_a_barrier_under_way_is_waited_at_again(setup: Setup) -> None:
    call = asyncio.create_task(setup.client.barrier("b"))
    while not setup.scheduler.barriers:  # noqa: ASYNC110 - yields, and no more
        await asyncio.sleep(0)
    setup.expel(first_step=0)
    await setup.expelled()
    setup.scheduler.barrier.set()
    await call
    await setup.client.barrier("b")
    first, again, second = setup.scheduler.barriers
    # The same arrival by its number, in whichever incarnation it is made.
    assert [(r.incarnation, r.origin, r.passed) for r in (first, again, second)] == [(1, 1, 0), (2, 1, 0), (2, 1, 1)]


async def test_creation_is_begun_again(setup: Setup) -> None:
    setup.scheduler.created = None
    release = asyncio.Event()
    setup.servers[0].installing = release
    creating = asyncio.create_task(setup.client.parameters("q", {"w": np.ones(5, np.float32)}, psdist.optim.SGD()))
    await setup.servers[0].hanging.wait()  # The map that it was created with has arrived: there will be another one.
    setup.expel(first_step=0)
    setup.scheduler.forgets = "q"
    await setup.expelled()
    release.set()
    # Problems of another set (the fake has one at a time) are raised by the next call of that set.
    assert (await (await creating).pull())["w"].tolist() == [1.0] * 5


async def test_handles_rejoin_before_another_set_is_created(setup: Setup) -> None:
    """Check that all handles rejoin first. Otherwise this worker would start the new set, and the others would train
    the old one without it."""
    setup.expel(first_step=7)
    await setup.expelled()
    assert setup.weights.participation.incarnation == 1, "it has made no call since"
    setup.scheduler.forgets = "q"
    await setup.client.parameters("q", {"w": np.ones(5, np.float32)}, psdist.optim.SGD())
    assert (setup.weights.participation.incarnation, setup.weights.first_step) == (2, 7)


@pytest.mark.parametrize(
    "error",
    [
        errors.DuplicateMemberError("taken", member_id="worker-0", host="elsewhere", pid=1),
        errors.WrongRunError("another run"),
        errors.UnauthenticatedError("no"),
    ],
)
async def test_who_is_not_taken_back_is_out(setup: Setup, error: errors.PsdistError) -> None:
    setup.scheduler.register_errors = [error]
    setup.expel(first_step=0)
    for _ in range(2):
        with pytest.raises(type(error), match=error.message):
            await setup.weights.push_pull(gradient())
    with pytest.raises(type(error), match=error.message):
        await setup.client.barrier()
    assert setup.client.incarnation == 1


@pytest.mark.parametrize("holder", ["own half life", "another has the rank"])
async def test_a_refusal_that_passes_is_waited_for(setup: Setup, holder: str) -> None:
    mine = {"member_id": "worker-0", "host": socket.gethostname(), "pid": os.getpid()}
    details = mine if holder == "own half life" else {"member_id": "worker-7", "host": "elsewhere", "pid": 1}
    setup.scheduler.register_errors = [errors.DuplicateMemberError("taken", **details)]
    setup.expel(first_step=0)
    await setup.expelled()
    request = setup.scheduler.registrations[-1]
    assert request.member_id == "worker-0" and request.HasField("rank") == (holder == "own half life")
    await setup.weights.push_pull(gradient())


async def test_a_scheduler_that_is_gone_meanwhile_is_waited_for(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psdist")
    port = int(setup.scheduler.address.rpartition(":")[2])
    await setup.scheduler.stop()
    setup.scheduler.fenced = 2
    for server in setup.servers:
        server.fenced = 2
    call = asyncio.create_task(setup.weights.push_pull(gradient()))
    await waits_for(setup.client, "to take worker-0 back")
    await setup.scheduler.start(port)
    assert flat(await call) == [0.0] * ELEMENTS
    assert setup.weights.statistics().dropped == 1


async def test_expelled_again_while_taking_part_again(setup: Setup) -> None:
    setup.expel(first_step=3)
    await setup.expelled()
    setup.scheduler.fenced = 3  # the session does not know yet
    call = asyncio.create_task(setup.weights.push_pull(gradient()))
    await waits_for(setup.client, "to take worker-0 back")
    setup.expel(first_step=9)
    await call
    assert setup.weights.first_step == 9 and setup.client.incarnation == 3
