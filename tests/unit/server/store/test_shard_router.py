"""Routing of calls to the machines: refusals, waits, and the ends of calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from psdist import BSP, optim
from psdist.errors import (
    FencedError,
    InternalError,
    InvalidArgumentError,
    MalformedPayloadError,
    NonFiniteGradientError,
    PsdistError,
    StaleEpochError,
)
from psdist.types import Identity, ParametersEntry, ParametersMember, ParametersSpec, Replica, Shard
from psdist_server.core.replication import ShardFenced
from psdist_server.core.role_changes import make_shard
from psdist_server.core.shard import Apply, Effect, SliceApplied, SliceLoaded
from psdist_server.store.gradients import PendingGradients
from psdist_server.store.rpc_call import Call, CallTable, PushedGradient
from psdist_server.store.shard_router import ShardRouter
from psdist_server.store.statistics import Counters, SliceSpans
from tests.support.segments import raw

SLICE = 16
ME = Replica("server-0", 1)
SPEC = ParametersSpec("p", optim.SGD(lr=1.0), BSP(), slice_elements=SLICE)
MEMBERS = (ParametersMember("worker-0", 1, 0),)
ENTRY = ParametersEntry(SPEC, 4 * SLICE, (Shard(ME),) * 2, MEMBERS)
PAYLOAD = memoryview(np.ones(SLICE, np.float32)).cast("B")


class Routed:
    """The first of two shards is served here, by the map of epoch 5."""

    def __init__(self, members: tuple[ParametersMember, ...] = MEMBERS) -> None:
        self.effects: list[Effect] = []
        self.counters, self.calls = Counters(), CallTable()
        self.gradients = PendingGradients(SPEC, ENTRY.slicing, self.counters)
        self.router = ShardRouter(ENTRY, self.calls, self.gradients, self.counters, self.run, SliceSpans(lambda: 0.0))
        self.router.assign(5, [0])
        self.router.add(0, make_shard(self.router.slices_of(0), members, SPEC.consistency, False))

    def run(self, effects: Sequence[Effect]) -> None:
        self.effects += effects


@pytest.fixture
async def routed() -> Routed:
    return Routed()


def call_of(incarnation: int = 1, worker: str = "worker-0", lr_factor: float | None = None) -> Call:
    call = Call(Identity("run", worker, incarnation, 5, "p"), is_push=True, wants_weights=False)
    call.gradient = PushedGradient(lr_factor=lr_factor)
    return call


def test_a_push_becomes_an_event_of_its_slices_machine(routed: Routed) -> None:
    call = call_of()
    routed.router.push(call, 2, 0, PAYLOAD)
    (effect,) = routed.effects
    assert isinstance(effect, Apply) and (effect.index, effect.step) == (2, 0)
    assert list(call.outstanding.values()) == [2] and routed.counters.bytes_held == 4 * SLICE
    assert [part.tolist() for part in routed.gradients.update(2, 0, effect.parts, None).parts] == [[1.0] * SLICE]
    routed.gradients.used(2, effect.parts, ())
    assert routed.counters.bytes_held == 0


def test_an_encoded_push_is_held_as_it_came(routed: Routed) -> None:
    prepared: list[bool] = []
    routed.gradients = PendingGradients(SPEC, ENTRY.slicing, routed.counters, lambda: prepared.append(True))
    routed.router = ShardRouter(
        ENTRY, routed.calls, routed.gradients, routed.counters, routed.run, SliceSpans(lambda: 0.0)
    )
    routed.router.assign(5, [0])
    routed.router.add(0, make_shard(routed.router.slices_of(0), MEMBERS, SPEC.consistency, False))
    call = call_of()
    call.is_encoded = True
    routed.gradients.begin_push(call)
    routed.gradients.begin_push(call)
    payload = raw(np.ones(SLICE, np.float16))
    with pytest.raises(MalformedPayloadError, match="slice 2"):
        routed.router.push(call, 2, 0, memoryview(payload[:-4]))
    assert routed.effects == [] and routed.counters.bytes_held == 0
    routed.router.push(call, 2, 0, memoryview(payload))
    (effect,) = routed.effects
    assert isinstance(effect, Apply)
    update = routed.gradients.update(2, 0, effect.parts, None)
    assert [part.tobytes() for part in update.parts] == [payload] and update.is_encoded
    assert routed.counters.bytes_held == len(payload)
    counted = routed.counters.workers["worker-0"]
    assert (counted.push_bytes, counted.saved_bytes) == (len(payload), 4 * SLICE - len(payload))
    routed.gradients.used(2, effect.parts, ())
    assert routed.counters.bytes_held == 0 and prepared == [True]


@pytest.mark.parametrize(
    "gradient",
    [
        *(PushedGradient(weight=weight) for weight in (0.0, -1.0, math.nan, math.inf, 1e19)),
        *(PushedGradient(lr_factor=factor) for factor in (-1.0, math.nan, math.inf, 1e10)),
    ],
)
def test_what_a_gradient_cannot_count_for_is_refused(routed: Routed, gradient: PushedGradient) -> None:
    call = call_of()
    call.gradient = gradient
    with pytest.raises(InvalidArgumentError, match=r"weight=|lr_factor="):
        routed.gradients.begin_push(call)


def test_a_header_is_checked_unless_it_repeats_the_last_one_that_was_right(routed: Routed) -> None:
    for factor, is_right in ((0.5, True), (-1.0, False), (-1.0, False), (0.5, True), (-1.0, False)):
        call = call_of(lr_factor=factor)
        with nullcontext() if is_right else pytest.raises(InvalidArgumentError, match="lr_factor="):
            routed.gradients.begin_push(call)


def test_what_is_not_served_here_is_refused_and_changes_nothing(routed: Routed) -> None:
    call = call_of()
    for index, error in ((1, InvalidArgumentError), (4, InvalidArgumentError)):
        with pytest.raises(error):
            routed.router.push(call, index, 0, PAYLOAD)
    with pytest.raises(StaleEpochError):
        routed.router.check_slice(1, epoch=4)
    with pytest.raises(InvalidArgumentError, match="64 bytes"):
        routed.router.push(call, 0, 0, PAYLOAD[:4])
    assert not call.outstanding and not routed.effects and routed.counters.bytes_held == 0


async def test_calls_end_when_the_shard_that_they_wait_for_goes_elsewhere(routed: Routed) -> None:
    call = call_of()
    routed.router.push(call, 0, 0, PAYLOAD)
    routed.router.remove(0)
    assert routed.router.indices == ()
    with pytest.raises(StaleEpochError):
        await call.next_answer()


async def test_a_fenced_shard_is_refused_until_a_map_names_its_primary(routed: Routed) -> None:
    call = call_of()
    routed.router.push(call, 0, 0, PAYLOAD)
    routed.router.fence_shard(ShardFenced(0))
    with pytest.raises(StaleEpochError):
        await call.next_answer()
    with pytest.raises(StaleEpochError):
        routed.router.check_slice(0, 5)
    routed.router.unfence()
    routed.router.check_slice(0, 5)


async def test_a_slice_that_was_loaded_takes_the_step_of_its_snapshot(routed: Routed) -> None:
    routed.router.dispatch(0, SliceLoaded(0, 7))
    assert routed.router.version(0) == 7 and routed.router.step_next == 7


async def test_calls_of_an_incarnation_that_is_over_end(routed: Routed) -> None:
    call = call_of()
    routed.router.pull(call, 0, 3)
    routed.calls.fence({"worker-0": 2})
    with pytest.raises(FencedError):
        await call.next_answer()


async def test_after_a_failure_all_calls_have_its_error(routed: Routed) -> None:
    call = call_of()
    routed.router.pull(call, 0, 3)
    routed.calls.raise_if_failed()
    routed.calls.fail_permanently(InternalError("a defect"))
    with pytest.raises(InternalError, match="a defect"):
        await call.next_answer()
    with pytest.raises(InternalError, match="a defect"):
        routed.calls.raise_if_failed()


async def test_a_call_that_was_cancelled_is_answered_nothing(routed: Routed) -> None:
    call = call_of()
    routed.router.push(call, 0, 0, PAYLOAD)
    routed.router.cancel(call)
    assert not call.outstanding and list(routed.calls) == []


# --- refusals that the worker did not read before its connection broke ------------------------------------------------


def update(routed: Routed, index: int, left_out: tuple[int, ...] = ()) -> None:
    """Carry out the update that the last effect asks for."""
    applied = routed.effects.pop()
    assert isinstance(applied, Apply)
    routed.gradients.used(index, applied.parts, left_out)
    routed.router.dispatch(index, SliceApplied(index))


async def test_settings_that_differ_are_refused_again() -> None:
    routed = Routed((*MEMBERS, ParametersMember("worker-1", 1, 1)))
    for number, factor in enumerate((0.5, 0.25)):
        call = call_of(worker=f"worker-{number}", lr_factor=factor)
        routed.gradients.begin_push(call)
        routed.router.push(call, 0, 0, PAYLOAD)
        routed.router.cancel(call)
    update(routed, 0)
    again = call_of(worker="worker-1", lr_factor=0.25)
    for index in (0, 2):
        routed.router.push(again, index, 0, PAYLOAD)
    with pytest.raises(InvalidArgumentError, match=r"lr_factor=0\.25 in step 0 .*lr_factor=0\.5, set by worker-0"):
        await again.next_answer()
    assert 2 in again.outstanding.values()  # The slice that had not counted the push takes it.
    for corrected in (call_of(worker="worker-1", lr_factor=0.5), call_of(lr_factor=0.5)):
        routed.router.push(corrected, 0, 0, PAYLOAD)
        assert "ignored=True" in repr(routed.effects[-1])
        routed.router.cancel(corrected)
        assert await failure(corrected) is None


async def test_values_that_are_not_finite_are_refused_again(routed: Routed) -> None:
    bad = np.full(SLICE, np.nan, np.float32)
    lost = call_of()
    routed.router.push_unchecked(lost, 0, 0, bad, is_shared=False)
    routed.router.cancel(lost)
    update(routed, 0, left_out=(0,))
    again, corrected = call_of(), call_of()
    routed.router.push_unchecked(again, 0, 0, bad, is_shared=False)
    routed.router.push_unchecked(corrected, 0, 0, np.ones(SLICE, np.float32), is_shared=False)
    with pytest.raises(NonFiniteGradientError, match="NaN or Inf in elements 0 to 15"):
        await again.next_answer()
    assert await failure(corrected) is None


async def failure(call: Call) -> BaseException | None:
    """Return the error of a call that is asked no more; None if it has none."""
    call.outstanding.clear()
    call.asked_all()
    try:
        assert await call.next_answer() is None
    except PsdistError as error:
        return error
    return None
