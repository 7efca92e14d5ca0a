"""Pushes through broken streams, stale routes and lost servers: each slice exactly once, or soon a typed error."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import errors
from psdist.client.transport import delivery
from psdist.wire import limits
from tests.support.client_fakes import ELEMENTS, Break, FakeServer, Setup, Start, flat, gradient, waits_for


@pytest.mark.parametrize("method", ["push", "push_pull"])
@pytest.mark.parametrize("answers", [0, 1, 2])
@pytest.mark.parametrize("lose_answer", [False, True])
async def test_a_broken_stream_applies_each_slice_once(
    setup: Setup, method: str, answers: int, lose_answer: bool
) -> None:
    weights = setup.weights
    setup.servers[0].breaks = [Break(answers, lose_answer=lose_answer), Break(0, lose_answer=lose_answer)]
    await getattr(weights, method)(gradient())
    assert flat(await weights.pull()) == [1.0] * ELEMENTS
    assert weights.step == 1
    assert {header.step for header in setup.servers[0].headers} == {0}
    assert weights.statistics().resent > 0
    assert (weights.statistics().ignored > 0) == lose_answer
    # Answered slices are not sent again.
    first = [index for step, index in setup.servers[0].requests][:answers]
    assert all(setup.servers[0].requests.count((0, index)) == 1 for index in first)


async def test_stale_routes_are_planned_anew(setup: Setup) -> None:
    weights = setup.weights
    setup.servers[0].breaks = [Break(1, errors.StaleEpochError("epoch 3 is over"))]
    moving = setup.servers[0]

    async def move() -> None:
        await moving.pushed.wait()
        for index in (2, 4):
            setup.servers[1].weights[index] = moving.weights[index].copy()
            setup.servers[1].versions[index] = moving.versions[index]
        setup.scheduler.shards = ["server-0", "server-1", "server-1", "server-1", "server-1", "server-1"]
        setup.scheduler.publish()

    _, values = await asyncio.gather(move(), weights.push_pull(gradient()))
    assert flat(values) == [1.0] * ELEMENTS
    assert {index for _, index in setup.servers[1].requests} >= {2, 4}
    assert setup.servers[1].headers[-1].identity.epoch == setup.scheduler.epoch


@pytest.mark.parametrize("method", ["push", "push_pull"])
@pytest.mark.parametrize("lose_answer", [False, True])
@pytest.mark.parametrize("news", ["loss", "map", "both"])
async def test_a_backup_takes_over_in_the_middle_of_a_push(
    setup: Setup, method: str, lose_answer: bool, news: str
) -> None:
    weights = setup.weights
    dying, successor = setup.servers[1], setup.servers[0]
    dying.breaks = [Break(1, hang=asyncio.Event(), lose_answer=lose_answer)]
    call = asyncio.create_task(getattr(weights, method)(gradient()))
    await dying.hanging.wait()
    if news != "map":
        setup.scheduler.lose(dying)
        await waits_for(setup.client, "for a new primary of shard 1 of 'p' in place of server-1 (lost: its proc")
    if news != "loss":
        setup.scheduler.servers.remove(dying)
        setup.scheduler.publish()
        await waits_for(setup.client, "for a new primary of shard 1 of 'p' in place of server-1 (lost: ")
    assert not call.done()
    setup.scheduler.promote(dying, successor)
    await call
    assert flat(await weights.pull()) == [1.0] * ELEMENTS
    assert weights.step == 1
    # The same number to the new primary, and only for slices that the old one had not answered.
    assert [header.step for header in successor.headers] == [0, 0]
    # Both calls to it may write concurrently, and the old one's answer for slice 1 may have been under way.
    sent = sorted(index for _, index in successor.requests)
    assert sent in ([0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert weights.statistics().ignored == lose_answer + (1 in sent)
    assert weights.statistics().resent == len(sent) - 3


async def test_a_backup_that_dies_in_its_turn_is_followed(setup: Setup) -> None:
    weights = setup.weights
    first, second = setup.servers
    second.breaks = [Break(1, hang=asyncio.Event())]
    call = asyncio.create_task(weights.push_pull(gradient()))
    await second.hanging.wait()
    third = await FakeServer("server-2").start()
    setup.servers.append(third)
    setup.scheduler.servers.append(third)
    first.breaks = [Break(1, hang=asyncio.Event())]
    setup.scheduler.promote(second, first)
    await first.hanging.wait()
    setup.scheduler.promote(first, third)
    assert flat(await call) == [1.0] * ELEMENTS
    # The map may arrive while the first slices are already routed again: then they arrive in two requests. Slices that
    # were answered before their server died are not sent again.
    assert {step for step, _ in third.requests} == {0} and len(third.weights) == 6


async def test_a_server_without_news_is_tried_again_and_the_wait_says_why(setup: Setup) -> None:
    weights = setup.weights
    setup.servers[1].breaks = [Break(1)] * 3
    call = asyncio.create_task(weights.push_pull(gradient()))
    await waits_for(setup.client, f"for server-1 ({setup.servers[1].address}) to be reachable again, for step 0 of 'p'")
    assert flat(await call) == [1.0] * ELEMENTS


async def test_the_wait_names_the_cause_that_the_probe_found(setup: Setup) -> None:
    """gRPC reports a refused certificate as "Socket closed". The probe makes a handshake of its own."""
    weights = setup.weights
    remedy = "its certificate is not of a CA in ca.pem: give both sides the same CA"

    async def probe(address: str) -> None:
        if setup.servers[1].breaks:
            raise errors.TlsHandshakeError(remedy)

    setup.client.session.reachability.call = probe
    setup.servers[1].breaks = [Break(0)] * 3
    call = asyncio.create_task(weights.push_pull(gradient()))
    async with asyncio.timeout(50):
        await waits_for(setup.client, remedy)
    assert flat(await call) == [1.0] * ELEMENTS


async def test_a_server_that_came_back_empty_is_not_asked(setup: Setup) -> None:
    weights = setup.weights
    setup.servers[1].incarnation = 2
    setup.scheduler.lives["server-1"] = 1  # the shard's primary
    setup.scheduler.publish()
    await setup.heard()
    call = asyncio.create_task(weights.push(gradient()))
    await waits_for(setup.client, "for a new primary of shard 1 of 'p' in place of server-1")
    setup.scheduler.promote(setup.servers[1], setup.servers[0])
    await call
    assert not setup.servers[1].headers


@pytest.mark.parametrize("news", ["news", "map"])
async def test_a_lost_shard_ends_the_call_at_once(setup: Setup, news: str) -> None:
    weights = setup.weights
    setup.servers[1].breaks = [Break(1, hang=asyncio.Event())]
    call = asyncio.create_task(weights.push_pull(gradient()))
    await setup.servers[1].hanging.wait()
    setup.scheduler.lose(setup.servers[1])
    words = "shard 1 of 'p' is lost: server-1, which held it, is gone"
    if news == "news":
        words = "steps since 7 are lost; restore"
        setup.scheduler.lose_shards(words)
    else:
        setup.scheduler.servers.remove(setup.servers[1])
        setup.scheduler.lost = True
        setup.scheduler.publish()
    with pytest.raises(errors.ServerLostError, match=words):
        await call
    assert weights.step == 0
    with pytest.raises(errors.ServerLostError, match=words):
        await weights.pull()


async def test_initial_values_go_to_the_heir_of_a_server_that_is_lost(connected: Setup) -> None:
    setup, release = connected, asyncio.Event()
    dying, successor = setup.servers[1], setup.servers[0]
    successor.installing = release
    creating = asyncio.create_task(setup.create())
    await dying.installed.wait()
    dying.weights.clear()  # the only server that had them
    setup.scheduler.promote(dying, successor)
    await setup.heard()
    release.set()
    weights = await creating
    assert sorted(successor.weights) == list(range(6)) and setup.scheduler.commits == 1
    assert flat(await weights.push_pull(gradient())) == [1.0] * ELEMENTS


@pytest.mark.parametrize(
    "error", [errors.NotMemberError("out"), errors.FutureStepError("step 0"), errors.InvalidArgumentError("no")]
)
async def test_what_a_server_refuses_is_raised_and_the_step_stays(setup: Setup, error: errors.PsdistError) -> None:
    weights = setup.weights
    setup.servers[0].breaks = [Break(1, error)]
    with pytest.raises(type(error), match=error.message):
        await weights.push_pull(gradient())
    assert weights.step == 0
    assert flat(await weights.push_pull(gradient())) == [1.0] * ELEMENTS
    assert weights.step == 1


async def test_a_refusal_is_found_also_where_it_is_hidden_at_first(setup: Setup) -> None:
    weights = setup.weights
    setup.servers[0].breaks = [Break(0, errors.NotMemberError("out"), abrupt=True) for _ in range(100)]
    with pytest.raises(errors.NotMemberError, match="out"):
        await weights.push_pull(gradient())
    assert weights.step == 0


async def test_a_cancelled_push_goes_on_under_the_same_step(setup: Setup) -> None:
    weights = setup.weights
    setup.servers[0].breaks = [Break(1, hang=asyncio.Event())]
    call = asyncio.create_task(weights.push_pull(gradient()))
    await setup.servers[0].hanging.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert weights.step == 0
    assert flat(await weights.push_pull(gradient())) == [1.0] * ELEMENTS


async def test_without_rejoin_a_fenced_session_ends_calls_under_way_and_to_come(start: Start) -> None:
    setup = await start(client={"rejoin": False})
    weights = setup.weights
    setup.servers[0].breaks = [Break(0, hang=asyncio.Event())]
    call = asyncio.create_task(weights.push_pull(gradient()))
    await setup.servers[0].hanging.wait()
    setup.scheduler.session_error = errors.FencedError("incarnation 1 was replaced")
    setup.scheduler.news.put_nowait(errors.FencedError("incarnation 1 was replaced"))
    with pytest.raises(errors.FencedError, match="replaced"):
        await call
    with pytest.raises(errors.FencedError, match="replaced"):
        await weights.pull()


async def test_a_dead_scheduler_does_not_disturb_pushes(setup: Setup) -> None:
    weights = setup.weights
    port = int(setup.scheduler.address.rpartition(":")[2])
    await setup.scheduler.stop()
    setup.servers[0].breaks = [Break(1)]
    assert flat(await weights.push_pull(gradient())) == [1.0] * ELEMENTS
    setup.scheduler.hello.clear()
    await setup.scheduler.start(port)
    await setup.scheduler.hello.wait()
    assert len(setup.scheduler.registrations) == 1  # The session came back without another registration.
    assert flat(await weights.push_pull(gradient())) == [2.0] * ELEMENTS


async def test_request_timeout_says_what_was_waited_for(start: Start) -> None:
    setup = await start(client={"request_timeout": 0.2})
    weights = setup.weights
    setup.servers[1].breaks = [Break(0, hang=asyncio.Event())]
    with pytest.raises(errors.WaitTimeoutError, match=r"step 0 of 'p' took longer than request_timeout=0.2 s.*server-"):
        await weights.push(gradient())
    assert weights.step == 0
    setup.servers[1].breaks = [Break(0, hang=asyncio.Event())]
    setup.servers[1].says = "for worker-1 (rank 1) to push step 0"
    with pytest.raises(errors.WaitTimeoutError, match=r"waiting for worker-1 \(rank 1\) to push step 0"):
        await weights.push(gradient())


async def test_non_finite_gradients_abstain_where_so_declared(start: Start) -> None:
    setup = await start(non_finite="skip", compression="float16")
    weights = setup.weights
    assert flat(await weights.push_pull(gradient(1e6))) == [0.0] * ELEMENTS
    assert all(server.headers[0].abstain for server in setup.servers)
    assert (weights.step, weights.statistics().abstained) == (1, 1)


@pytest.mark.parametrize(
    ("consistency", "norm", "sent"),
    [(psdist.BSP(), 1.0, 0.0), (psdist.ASP(), 1.0, np.sqrt(ELEMENTS)), (psdist.ASP(), 0.0, 0.0)],
)
async def test_the_norm_goes_along_where_servers_need_it(
    start: Start, consistency: object, norm: float, sent: float
) -> None:
    setup = await start(consistency=consistency, optimizer=psdist.optim.SGD(max_grad_norm=norm))
    await setup.weights.push(gradient())
    assert [server.headers[0].grad_norm for server in setup.servers] == [pytest.approx(sent)] * 2


async def test_calls_of_several_tasks_take_turns(setup: Setup) -> None:
    weights = setup.weights
    await asyncio.gather(*(weights.push(gradient()) for _ in range(5)))
    assert flat(await weights.pull()) == [5.0] * ELEMENTS


async def test_out_is_written_in_place(setup: Setup) -> None:
    weights = setup.weights
    out = gradient(np.nan)
    values = await weights.push_pull(gradient(), out=out)
    assert values["w"] is out["w"] and flat(out) == [1.0] * ELEMENTS
    with pytest.raises(errors.ShapeMismatchError):
        await weights.pull(out=out | {"w": np.empty(3, np.float32)})


async def test_waits_that_last_are_told(
    setup: Setup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPORT_WAIT_SECONDS", 0.05)
    weights = setup.weights
    answer = asyncio.Event()
    setup.servers[0].breaks = [Break(0, hang=answer)]
    told = asyncio.Event()
    handler = logging.Handler()
    handler.emit = lambda record: told.set() if record.levelno >= logging.WARNING else None
    logging.getLogger("psdist").addHandler(handler)
    try:
        call = asyncio.create_task(weights.push(gradient()))
        await told.wait()
        answer.set()
        await call
    finally:
        logging.getLogger("psdist").removeHandler(handler)
    assert "waiting 0 s for server-0 (127.0.0.1:" in caplog.text
    assert "to answer step 0 of 'p'" in caplog.text


async def test_the_same_name_gives_the_same_handle(setup: Setup) -> None:
    weights = setup.weights
    assert await setup.create() is weights
    with pytest.raises(errors.SettingsMismatchError, match="optimizer"):
        await setup.create(optimizer=psdist.optim.Adam())
    with pytest.raises(errors.LayoutMismatchError, match="'w' has shape"):
        await setup.create(gradient() | {"w": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"compression": "gzip"}, errors.UnknownCodecError, "'gzip'"),
        ({"pull_dtype": "int8"}, errors.DTypeMismatchError, "'int8'"),
        ({"non_finite": "hope"}, errors.InvalidArgumentError, "'hope'"),
        ({"slice_elements": -1}, errors.InvalidArgumentError, "slice_elements=-1"),
        ({"consistency": "bsp"}, errors.InvalidArgumentError, "psdist.BSP"),
        ({"optimizer": "adam"}, errors.InvalidArgumentError, "psdist.optim"),
        ({"optimizer": None}, errors.InvalidArgumentError, "without an optimizer"),
        ({"name": "no blanks"}, errors.InvalidNameError, "no blanks"),
        ({"init": None}, errors.InvalidArgumentError, "without init"),
    ],
)
async def test_bad_settings_reach_nobody(
    connected: Setup, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    good = {"name": "p", "init": {"w": np.zeros(3, np.float32)}, "optimizer": psdist.optim.SGD()}
    with pytest.raises(error, match=words):
        await connected.client.parameters(**(good | arguments))
    assert connected.scheduler.created is None


async def test_closing_leaves_and_closes_once(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    weights = setup.weights
    await setup.client.close()
    assert setup.scheduler.left and not caplog.records
    await setup.client.close()
    assert "closed" in repr(setup.client)
    for call in (weights.pull(), setup.client.barrier(), setup.client.connect()):
        with pytest.raises(errors.ClosedError, match="closed"):
            await call


@pytest.mark.parametrize("method", ["push", "push_pull"])
async def test_a_server_that_denies_the_parameters_is_asked_again(
    setup: Setup, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that it asks again. The server follows a scheduler that was started with an older record, which the session
    finds out."""
    monkeypatch.setattr(delivery, "_NEWER_MAP_SECONDS", 0.01)
    weights = setup.weights
    denial = errors.UnknownParametersError("server-0 holds nothing of parameters 'p'")
    setup.servers[0].breaks = [Break(0, denial), Break(1, denial)]
    await getattr(weights, method)(gradient())
    assert flat(await weights.pull()) == [1.0] * ELEMENTS
    setup.servers[0].breaks = [Break(0, denial) for _ in range(100)]
    with pytest.raises(errors.UnknownParametersError):
        await getattr(weights, method)(gradient())
    assert len(setup.servers[0].breaks) == 100 - delivery._DENIALS, "believed while the scheduler is heard"
