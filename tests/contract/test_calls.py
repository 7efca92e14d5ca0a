"""Calls of a worker on a channel to a server, the same over each transport: results, order, refusals, cancellation,
waits, newer maps and floods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from psdist import optim
from psdist.consistency import ASP
from psdist.errors import (
    FencedError,
    FutureStepError,
    InvalidArgumentError,
    LimitExceededError,
    NonFiniteGradientError,
    PsdistError,
    StaleEpochError,
    UnauthenticatedError,
    UnknownCodecError,
    UnknownParametersError,
    WrongRunError,
)
from psdist.types import ParametersMember, Replica, Shard
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as pb
from psdist.wire import limits
from tests.contract.conftest import Connect
from tests.support.frame_socket import PATIENCE_SECONDS
from tests.support.server_bench import COUNT, GRADIENT, INITIAL, SLICE, STEPPED, TOTAL, ServerBench, cut, entry
from tests.support.worker_channels import WORKERS, WorkerChannel

#: Transports whose calls share a connection, and those that send payloads slice by slice.
FRAMED = [kind for kind in WORKERS if kind.is_framed]
SENDING = [kind for kind in WORKERS if kind.sends_slices]


def only(kinds: list[type[WorkerChannel]]) -> pytest.MarkDecorator:
    """Run a test over these transports alone."""
    return pytest.mark.parametrize("transport", kinds, ids=lambda kind: kind.name, indirect=True)


async def still_serves(bench: ServerBench, connect: Connect, step: int = 0) -> None:
    """Check that another channel makes a step."""
    before = np.frombuffer(await bench.pull(), np.float32)
    channel = await connect()
    assert np.array_equal(await channel.say(channel.push(step)), before - np.float32(0.5) * GRADIENT)


# --- results ----------------------------------------------------------------------------------------------------------


async def test_a_step(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    assert np.array_equal(await channel.say(channel.pull()), INITIAL)
    await channel.send(request := channel.push(0))
    answers = await channel.answers(request)
    assert [(one.slice, one.version, one.ignored, one.staleness) for one in answers] == [
        (index, 1, False, 0) for index in range(COUNT)
    ]
    assert np.array_equal(np.concatenate([one.weights for one in answers]), STEPPED)
    assert await bench.pull() == STEPPED.tobytes()
    (counted,) = bench.host.statistics().parameters[0].workers
    assert (counted.pushes, counted.push_bytes, counted.pull_bytes) == (COUNT, TOTAL * 4, TOTAL * 4 * 3)


async def test_a_repeated_push_is_told_and_not_used(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    await channel.say(channel.push(0))
    await channel.send(again := channel.push(0))
    assert [(one.ignored, one.version) for one in await channel.answers(again)] == [(True, 1)] * COUNT
    assert await bench.pull() == STEPPED.tobytes()


async def test_a_push_of_some_slices(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    assert np.array_equal(await channel.say(channel.push(0, [2])), STEPPED[2 * SLICE :])
    assert await bench.pull() == np.concatenate([INITIAL[: 2 * SLICE], STEPPED[2 * SLICE :]]).tobytes()


async def test_a_push_that_abstains_has_no_payloads(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    nothing = np.full(TOTAL, np.nan, np.float32)
    await channel.send(request := channel.push(0, abstain=True), nothing)
    answers = await channel.answers(request)
    assert [one.version for one in answers] == [1] * COUNT
    assert np.array_equal(np.concatenate([one.weights for one in answers]), INITIAL)


async def test_a_push_without_weights(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    request = channel.push(0)
    request.push.wants_weights = False
    assert len(await channel.say(request)) == 0
    assert await bench.pull() == STEPPED.tobytes()


async def test_asynchronous_pushes_tell_staleness(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2, consistency=ASP())
    first, second = await connect(), await connect(1)
    await first.say(first.push(0))
    await second.send(request := second.push(0))
    assert {(one.version, one.staleness) for one in await second.answers(request)} == {(2, 1)}


async def test_asynchronous_push_with_clipping_uses_the_norm_of_the_push(bench: ServerBench, connect: Connect) -> None:
    await bench.create(consistency=ASP(), optimizer=optim.SGD(lr=1.0, max_grad_norm=1.0))
    channel = await connect()
    norm = float(np.sqrt(np.sum(GRADIENT.astype(np.float64) ** 2)))
    weights = await channel.say(channel.push(0, grad_norm=norm))
    np.testing.assert_allclose(weights, INITIAL - GRADIENT * np.float32(1.0 / (norm + 1e-6)), rtol=1e-6)
    with pytest.raises(InvalidArgumentError, match="grad_norm"):
        await channel.say(channel.push(1, grad_norm=float("nan")))


# --- order ------------------------------------------------------------------------------------------------------------


async def test_calls_of_one_step_may_be_several_and_end_in_any_order(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2)
    first, second = await connect(), await connect(1)
    early, late = first.push(0, [0, 2]), first.push(0, [1])
    await first.send(early)
    await first.send(late)
    await second.say(second.push(0, [1]))
    assert [one.slice for one in await first.answers(late)] == [1]
    await second.say(second.push(0, [0, 2]))
    assert [one.slice for one in await first.answers(early)] == [0, 2]


async def test_a_pull_waits_for_its_version(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2)
    channels = [await connect(rank) for rank in (0, 1)]
    await channels[0].send(waiting := channels[0].pull(version=1))
    assert np.array_equal(await channels[1].say(channels[1].pull()), INITIAL)
    for channel in channels:
        await channel.send(channel.push(0))
    answers = await channels[0].answers(waiting)
    assert [one.version for one in answers] == [1] * COUNT
    assert np.array_equal(np.concatenate([one.weights for one in answers]), STEPPED)


@only(SENDING)
async def test_a_slice_is_answered_before_the_next_one_comes(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    await channel.begin(request := channel.push(0))
    for index, part in enumerate(cut(GRADIENT)):
        await channel.send_slice(request, index, part.tobytes())
        (answer,) = await channel.next_answers(request)
        assert answer.slice == index and np.array_equal(answer.weights, cut(STEPPED)[index])


# --- refused calls ----------------------------------------------------------------------------------------------------

Change = Callable[[WorkerChannel], pb.ShareRequest]


def renamed(**identity: Any) -> Change:
    return lambda channel: channel.push(0, identity=channel.bench.identity(**identity))


#: Calls and their errors. The last one is for calls on a connection, whose sender is known already.
REFUSED: dict[str, tuple[Change, type[PsdistError], str, type[PsdistError] | None]] = {
    "unknown slice": (lambda c: c.push(0, [0, 3]), InvalidArgumentError, "slice 3 .* is not on this server", None),
    "slice twice": (lambda c: c.push(0, [0, 1, 1]), InvalidArgumentError, "ascending order", None),
    "descending": (lambda c: c.push(0, [1, 0]), InvalidArgumentError, "slice 0 came after slice 1", None),
    "no wire dtype": (lambda c: c.push(0, dtype=cpb.DTYPE_FLOAT64), InvalidArgumentError, "float64", None),
    "codec": (lambda c: c.push(0, codec=77), UnknownCodecError, "77", None),
    "future step": (lambda c: c.push(7), FutureStepError, "step 7", None),
    "another run": (renamed(run_id="other"), WrongRunError, "run 'run'", None),
    "old epoch": (renamed(epoch=1), StaleEpochError, "epoch 1", None),
    "another worker": (renamed(worker_id="worker-9"), FencedError, "worker-9|the worker .* that", InvalidArgumentError),
    "incarnation": (renamed(incarnation=0), FencedError, "incarnation 0|the worker .* that", InvalidArgumentError),
    "parameters": (renamed(parameters="q"), UnknownParametersError, "'q'|the parameters that", InvalidArgumentError),
    "endless name": (
        renamed(parameters="x" * 100_000),
        UnknownParametersError,
        "xxx|the parameters that",
        InvalidArgumentError,
    ),
    "unknown slice pulled": (lambda c: c.pull(slices=[99]), InvalidArgumentError, "slice 99", None),
    "slice pulled twice": (lambda c: c.pull(slices=[1, 1]), InvalidArgumentError, "ascending", None),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_refused_call_changes_nothing_and_the_next_one_is_made(
    bench: ServerBench, connect: Connect, what: str
) -> None:
    await bench.create()
    change, error, text, error_on_connection = REFUSED[what]
    channel = await connect()
    expected = error_on_connection if channel.is_framed and error_on_connection else error
    if (request := change(channel)).HasField("pull"):
        await channel.begin(request)
    elif channel.sends_slices:  # Payloads that were sent before the refusal arrived.
        await channel.begin(request)
        await channel.send_slice(request, request.push.slices[0], cut(GRADIENT)[request.push.slices[0]].tobytes())
        for index in request.push.slices[1:]:
            if not channel.is_framed:
                await channel.send_slice(request, index, cut(GRADIENT)[min(index, 1)].tobytes())
    else:
        await channel.send(request)
    with pytest.raises(expected, match=text):
        await channel.answers(request)
    if what not in ("unknown slice", "slice twice", "descending") or channel.is_framed:
        assert await bench.pull() == INITIAL.tobytes()
    await channel.say(channel.push(0))
    assert await bench.pull() == STEPPED.tobytes()


@only(FRAMED)
async def test_a_call_on_a_connection_names_slices_and_their_versions(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    await channel.begin(request := channel.push(0, []))
    with pytest.raises(InvalidArgumentError, match="must name a slice"):
        await channel.answers(request)
    request = channel.push(0)
    request.push.base_versions.append(0)
    await channel.begin(request)
    with pytest.raises(InvalidArgumentError, match="2 base_versions for 3 slices"):
        await channel.answers(request)
    assert np.array_equal(await channel.say(channel.push(0)), STEPPED)


async def test_a_base_version_of_the_future_is_refused(bench: ServerBench, connect: Connect) -> None:
    await bench.create(consistency=ASP("inverse"))
    channel = await connect()
    request = channel.push(0)
    request.push.base_versions[:] = [9]
    with pytest.raises(InvalidArgumentError, match=r"base_version=9 of slice 0 is in the future: .* at version 0"):
        await channel.say(request)
    assert np.array_equal(await channel.say(channel.push(0)), STEPPED)


async def test_a_gradient_that_is_not_finite_is_refused_and_counted(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    bad = GRADIENT.copy()
    bad[3] = np.nan
    channel = await connect()
    with pytest.raises(NonFiniteGradientError, match="elements 0 to 9"):
        await channel.say(channel.push(0), bad)
    await channel.say(channel.push(0))
    assert bench.host.statistics().parameters[0].workers[0].non_finite == 1


async def test_a_gradient_that_is_not_finite_is_left_out_of_its_step(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2)
    good, bad = await connect(), await connect(1)
    await good.send(request := good.push(0))
    with pytest.raises(NonFiniteGradientError):
        await bad.say(bad.push(0), np.full(TOTAL, np.inf, np.float32))
    await bad.send(bad.push(0, abstain=True))  # Slices that were not taken before the error.
    answers = await good.answers(request)
    assert np.array_equal(np.concatenate([one.weights for one in answers]), STEPPED)


async def test_a_call_whose_later_slice_is_refused_keeps_the_earlier_ones(bench: ServerBench, connect: Connect) -> None:
    """Check that each slice is taken or refused by itself. In a repetition of the push, slices that were taken are
    ignored."""
    await bench.create(consistency=ASP("inverse"))
    channel = await connect()
    request = channel.push(0)
    request.push.base_versions[:] = [0, 9, 0]
    with pytest.raises(InvalidArgumentError, match="base_version=9 of slice 1"):
        await channel.say(request)
    kept = np.concatenate([STEPPED[:SLICE], INITIAL[SLICE : 2 * SLICE]]).tobytes()
    assert (await bench.pull())[: len(kept)] == kept
    await channel.send(again := channel.push(0))
    assert [one.ignored for one in await channel.answers(again)][:2] == [True, False]
    assert await bench.pull() == STEPPED.tobytes()
    assert bench.host.statistics().parameters[0].workers[0].duplicates >= 1


# --- waits and cancellation -------------------------------------------------------------------------------------------


async def test_for_whom_a_call_waits_is_told(
    bench: ServerBench, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAIT_REASON_SECONDS", 0.01)
    await bench.create(workers=2)
    channel = await connect()
    await channel.send(request := channel.push(0))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "worker-1 (rank 1) to push step 0" not in await channel.reason(request):
            pass
    assert "worker-1" in bench.host.statistics().parameters[0].waiting_for[0]
    other = await connect(1)
    await other.send(other.push(0))
    assert [one.version for one in await channel.answers(request)] == [1] * COUNT


async def test_calls_after_a_cancelled_one_go_on(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2)
    channel, other = await connect(), await connect(1)
    given_up = channel.push(0)
    if channel.sends_slices:
        await channel.begin(given_up)
        await channel.send_slice(given_up, 0, cut(GRADIENT)[0].tobytes())
        await bench.holds_payloads()
        await channel.cancel(given_up)
        if channel.is_framed:  # It was on its way when the call was given up.
            await channel.send_slice(given_up, 1, cut(GRADIENT)[1].tobytes())
    else:
        await channel.send(given_up)
        await channel.cancel(given_up)
    await other.send(theirs := other.push(0))
    assert np.array_equal(await channel.say(channel.push(0)), STEPPED)
    assert len(await other.answers(theirs)) == COUNT


@only(FRAMED)
async def test_a_cancel_of_no_call_means_nothing(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    await channel.begin(pb.ShareRequest(call_id=77, cancel=pb.SharedCancel()))
    assert np.array_equal(await channel.say(channel.push(0)), STEPPED)


async def test_a_proposal_holds_its_step_until_it_is_withdrawn(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    assert bench.host.propose("p", ParametersMember("worker-1", 1, 1, first_step=0)) == (True, 0)
    assert bench.host.proposals == {("p", "worker-1")}
    channel = await connect()
    await channel.send(request := channel.push(0))
    await channel.arrived()
    assert await bench.pull() == INITIAL.tobytes()
    bench.host.withdraw("p", "worker-1")
    assert [one.version for one in await channel.answers(request)] == [1] * COUNT
    assert bench.host.proposals == set()


# --- members and maps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"run_id": "other"}, WrongRunError), ({"incarnation": 9}, FencedError), ({"epoch": 1}, StaleEpochError)],
    ids=["run", "incarnation", "epoch"],
)
async def test_who_opens_a_channel_is_checked(
    bench: ServerBench, connect: Connect, transport: type[WorkerChannel], changes: Any, error: type[PsdistError]
) -> None:
    await bench.create()
    with pytest.raises(error):
        await transport(bench).open(bench.identity(**changes))
    await still_serves(bench, connect)


async def test_a_wrong_token_is_refused(bench: ServerBench, connect: Connect, transport: type[WorkerChannel]) -> None:
    await bench.create()
    with pytest.raises(UnauthenticatedError):
        await transport(bench, token="wrong").open()
    await still_serves(bench, connect)


async def test_who_was_admitted_is_looked_at_again_by_each_map(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    await channel.say(channel.push(0))
    early = channel.push(1)
    await bench.adopt(entry(1, ready=True))
    with pytest.raises(StaleEpochError):
        await channel.say(early)
    await bench.adopt(entry(1, ready=True), live=0)
    with pytest.raises(FencedError):
        await channel.say(channel.push(1))


async def test_a_call_by_a_newer_map_waits_for_it(bench: ServerBench, connect: Connect) -> None:
    await bench.create()
    channel = await connect()
    bench.epoch += 1
    early = channel.push(0)
    bench.epoch -= 1
    await channel.send(early)
    await channel.send(late := channel.pull())
    assert await bench.pull() == INITIAL.tobytes()
    await bench.adopt(entry(1, ready=True))
    assert [one.version for one in await channel.answers(early)] == [1] * COUNT
    if channel.is_framed:  # Calls are made in order: that one waited, too, and is out of date.
        with pytest.raises(StaleEpochError):
            await channel.answers(late)
    assert np.array_equal(await channel.say(channel.pull()), STEPPED)


async def test_a_fenced_workers_call_ends_in_the_middle_of_its_wait(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2)
    channel = await connect()
    await channel.send(request := channel.push(0, [0, 1]))
    await channel.arrived()
    await bench.adopt(entry(2, ready=True), live=0)
    with pytest.raises(FencedError):
        await channel.answers(request)


@only(SENDING)
async def test_a_fenced_workers_payloads_are_not_used(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2)
    channel = await connect()
    await channel.begin(request := channel.push(0))
    await channel.send_slice(request, 0, cut(GRADIENT)[0].tobytes())
    await bench.holds_payloads()
    await bench.adopt(entry(2, ready=True), live=0)
    for index in (1, 2):
        await channel.send_slice(request, index, cut(GRADIENT)[index].tobytes())
    with pytest.raises(FencedError):
        await channel.answers(request)


async def test_a_departed_contributor_is_fenced_in_the_middle_of_its_wait(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2)
    channel = await connect()
    await channel.send(request := channel.push(0, [0, 1]))
    await channel.arrived()
    both = entry(2, ready=True)
    await bench.adopt(replace(both, members=both.members[1:]))
    with pytest.raises(FencedError):
        await channel.answers(request)


# --- floods -----------------------------------------------------------------------------------------------------------


@only(FRAMED)
async def test_unfinished_calls_are_bounded(
    bench: ServerBench, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAM_CALLS_MAX", 3)
    await bench.create(workers=2)
    channel = await connect()
    for _ in range(4):
        await channel.begin(channel.pull(version=1, slices=[0]))
    error = await channel.end()
    assert isinstance(error, LimitExceededError) and "3 calls of one worker" in error.message


@only(FRAMED)
async def test_slices_that_unfinished_calls_name_are_bounded(bench: ServerBench, connect: Connect) -> None:
    await bench.create(workers=2)
    channel, other = await connect(), await connect(1)
    waiting = [channel.pull(version=1) for _ in range(limits.SHARED_ROUNDS_MAX)]
    for request in waiting:
        await channel.send(request)
    most = limits.SHARED_ROUNDS_MAX * COUNT
    with pytest.raises(LimitExceededError, match=f"name {most + 1} slices, more than {most}"):
        await channel.say(channel.pull(version=1, slices=[0]))
    await channel.cancel(waiting.pop(1))  # This makes room.
    await channel.send(pushed := channel.push(0))
    await other.send(other.push(0))
    for request in [*waiting, pushed]:
        assert [one.version for one in await channel.answers(request)] == [1] * COUNT


@only(FRAMED)
async def test_slices_of_shards_that_move_away_leave_room_for_calls(bench: ServerBench, connect: Connect) -> None:
    """Check that the bound is that of the whole set: calls that wait may name slices that this server had before."""
    await bench.create(workers=2)
    channel = await connect()
    for _ in range(limits.SHARED_ROUNDS_MAX - 1):
        await channel.send(channel.pull(version=1))
    await channel.arrived()
    whole = entry(2, ready=True)
    await bench.adopt(replace(whole, shards=(whole.shards[0], Shard(Replica("server-1", 1)))))
    channel.bench.epoch = bench.epoch
    await channel.send(waiting := channel.pull(version=1, slices=[0]))
    for worker in (channel, await connect(1)):
        await worker.send(worker.push(0, [0]))
    assert [one.version for one in await channel.answers(waiting)] == [1]
    gone = Shard(Replica("server-1", 1))
    await bench.adopt(replace(whole, shards=(gone, gone)))
    with pytest.raises(InvalidArgumentError, match="not on this server"):
        await channel.say(channel.pull(slices=[0]))
