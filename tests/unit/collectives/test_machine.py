"""Calls that differ between ranks, late and absent ranks, and frames that make no sense: typed errors at all ranks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from psdist.collectives.core import machine as machines
from psdist.collectives.core import plans
from psdist.collectives.core.machine import COLLECTIVES, CallDone, CallLane, GroupMachine
from psdist.collectives.core.plans import Header, Plan
from psdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    WaitTimeoutError,
    WorkerLostError,
)
from tests.support.collective_network import CollectiveNetwork

NOTHING = np.empty(0, np.uint8)


def summed(rank: int, size: int, array: np.ndarray, op: str = "sum") -> Plan:
    return plans.all_reduce(rank, size, array, np.empty_like(array), op)


def test_a_call_that_differs_is_named_at_all_ranks() -> None:
    for odd, texts in [
        (lambda: plans.barrier(1, 3), ("barrier()", "all_reduce(op=sum, dtype=float32, shape=(2,))")),
        (lambda: summed(1, 3, np.ones(2, np.float32), "max"), ("op=max", "op=sum")),
        (lambda: summed(1, 3, np.ones(2, np.int32)), ("dtype=int32", "dtype=float32")),
        (lambda: summed(1, 3, np.ones(3, np.float32)), ("shape=(3,)", "shape=(2,)")),
        (lambda: plans.reduce(1, 3, np.ones(2), np.ones(2), "sum", 1), ("root=1", "all_reduce")),
    ]:
        network = CollectiveNetwork(3, random.Random(1))
        first, last = (summed(rank, 3, np.ones(2, np.float32)) for rank in (0, 2))
        started = [network.start(0, first), network.start(1, odd()), network.start(2, last)]
        network.run()
        for call in started:
            assert isinstance(call.error, CollectiveMismatchError)
            assert all(text in call.error.message for text in texts) and "rank 1" in call.error.message
        again = network.start(0, plans.barrier(0, 3))
        assert isinstance(again.error, CollectiveMismatchError), "the group has ended"


def test_sizes_of_messages_that_differ_are_named() -> None:
    network = CollectiveNetwork(2, random.Random(1))
    sent = network.start(0, plans.send(np.ones(3, np.int8), 1), CallLane(0, 1))
    received = network.start(1, plans.receive(np.ones(4, np.int8), 0), CallLane(0, 1))
    network.run()
    assert all("3 bytes" in str(call.error) and "4" in str(call.error) for call in (sent, received))


def test_a_time_limit_names_the_absent_rank_at_all_ranks() -> None:
    network = CollectiveNetwork(3, random.Random(1))
    started = {rank: network.start(rank, plans.barrier(rank, 3)) for rank in (0, 1)}
    network.run()
    assert network.machines[0].waiting_for(1) == "for rank 2 to call barrier()"
    network.expire(0, started[0])
    network.run()
    for call in started.values():
        assert isinstance(call.error, WaitTimeoutError)
        assert call.error.message == "rank 0 reached the timeout of 1 s, waiting for rank 2 to call barrier()"
        assert call.error.details == {"absent": "2"}
    late = network.start(2, plans.barrier(2, 3))
    assert isinstance(late.error, WaitTimeoutError)


@pytest.mark.parametrize("in_data", [False, True], ids=["barrier", "data"])
def test_a_failure_reaches_a_rank_that_the_failed_one_has_not_told(in_data: bool) -> None:
    network = CollectiveNetwork(3, random.Random(1))
    waiting = [network.start(rank, plans.barrier(rank, 3)) for rank in (0, 2)]
    if in_data:  # Rank 1 is in a call of its own, with rank 2.
        network.start(1, plans.receive(np.ones(1), 2), CallLane(2, 1))
    network.run()
    network.expire(0, waiting[0])
    network._links[0, 2].leaving.clear()  # Rank 0 dies before it has told rank 2, which needs nothing more from it.
    network.run()
    network.kill(0)
    network.run()
    assert waiting[1].has_ended and isinstance(waiting[1].error, WaitTimeoutError)
    assert waiting[1].error.message.startswith("rank 0 reached the timeout of 1 s"), "the first cause is kept"


def test_a_late_announcement_is_answered_by_the_end_of_the_group() -> None:
    network = CollectiveNetwork(3, random.Random(1))
    network.close(0, InternalError("the first cause"))
    for target in (1, 2):
        network._links[0, target].leaving.clear()
    late = network.start(1, plans.barrier(1, 3))
    network.run()
    assert late.error is not None and late.error.message == "the first cause"
    assert network.machines[2].error is late.error


@pytest.mark.parametrize("holds_data", [False, True])
def test_a_rank_that_fails_after_a_collective_and_dies_leaves_no_call_without_an_end(holds_data: bool) -> None:
    machine = GroupMachine(0, 2)
    array = np.zeros((2, 10**6))
    call, effects = machine.start(COLLECTIVES, plans.all_gather(0, 2, np.zeros(10**6), array))
    theirs = plans.all_gather(1, 2, np.zeros(10**6), np.zeros((2, 10**6)))
    effects += machine.on_call(1, COLLECTIVES, 0, theirs.header(0), NOTHING)
    if not holds_data:
        for part in sorted(machine._lanes[COLLECTIVES].queue[0].plan.missing[1]):
            machine.on_part(1, COLLECTIVES, 0, part)
    assert machine.on_peer_failure(1, CollectiveMismatchError("differs"), 1) == []
    done = [effect for effect in machine.on_lost(1, "killed") if isinstance(effect, CallDone)]
    assert [effect.call_id for effect in done] == [call]
    assert (done[0].error is None) is not holds_data, "the rank has received all of it before it failed"
    assert isinstance(machine.broken, CollectiveMismatchError)
    machine.validate()


def test_a_message_of_any_rank_is_one_for_which_no_call_waits() -> None:
    network = CollectiveNetwork(3, random.Random(1))
    machine = network.machines[0]
    network.start(1, plans.send(np.ones(3), 0), CallLane(1, 0, 7))
    network.start(0, plans.receive(np.ones(3), 2), CallLane(2, 0, 7))
    network.run()
    assert machine.announced(0) is None
    assert machine.announced(7) == 1
    network.start(0, plans.receive(np.ones(3), 1), CallLane(1, 0, 7))
    network.run()
    assert machine.announced(7) is None
    machine.on_lost(1, "killed")
    with pytest.raises(WorkerLostError, match="rank 1 is gone"):
        machine.announced(7)
    network.close(0, ClosedError("closed"))
    with pytest.raises(ClosedError):
        machine.announced(7)


def test_calls_behind_another_wait_for_its_ranks() -> None:
    machine = GroupMachine(0, 3)
    machine.start(COLLECTIVES, summed(0, 3, np.ones(2)))
    machine.on_call(2, COLLECTIVES, 0, summed(2, 3, np.ones(2)).header(0), NOTHING)
    waiting = [machine.start(COLLECTIVES, plans.barrier(0, 3))[0] for _ in range(3)]
    reasons = {machine.waiting_for(call_id) for call_id in waiting}
    assert reasons == {"for rank 1 to call all_reduce(op=sum, dtype=float64, shape=(2,))"}
    machine.validate()
    machine.expire(waiting[-1], 1.0)
    assert isinstance(machine.broken, WaitTimeoutError) and machine.broken.details == {"absent": "1"}
    assert machine.waiting_for(waiting[0]) == "for nothing"
    machine.validate()


class _CountedQueue(deque):  # type: ignore[type-arg]
    """A queue that counts the calls that are read from it by a search."""

    searched = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        for call in super().__iter__():
            _CountedQueue.searched += 1
            yield call


def test_asking_for_the_reasons_of_many_calls_searches_no_queue() -> None:
    machine = GroupMachine(0, 2)
    waiting = [machine.start(COLLECTIVES, plans.barrier(0, 2))[0] for _ in range(1000)]
    lane = machine._lanes[COLLECTIVES]
    lane.queue = _CountedQueue(lane.queue)
    assert {machine.waiting_for(call_id) for call_id in waiting} == {"for rank 1 to call barrier()"}
    assert not _CountedQueue.searched


@pytest.mark.parametrize("lane", [COLLECTIVES, CallLane(0, 1), CallLane(1, 0)], ids=["collective", "send", "recv"])
def test_a_call_after_a_loss_ends_the_group_at_all_ranks(lane: CallLane) -> None:
    network = CollectiveNetwork(3, random.Random(1))
    network.kill(1)
    network.run()
    assert not any(network.machines[rank].error for rank in (0, 2)), "no call has needed the rank"
    plan = plans.barrier(0, 3) if lane == COLLECTIVES else plans.send(np.ones(1), 1)
    plan = plans.receive(np.ones(1), 1) if lane == CallLane(1, 0) else plan
    after = network.start(0, plan, lane)
    network.run()
    assert isinstance(after.error, WorkerLostError)
    for rank in (0, 2):
        error = network.machines[rank].error
        assert isinstance(error, WorkerLostError) and error.details["rank"] == "1"


@pytest.mark.parametrize("sends", [True, False])
def test_a_message_that_has_not_begun_fails_with_the_group(sends: bool) -> None:
    machine = GroupMachine(0, 3)
    whole = [plans.all_gather(rank, 3, np.zeros(10**6), np.zeros((3, 10**6))) for rank in range(3)]
    collective = machine.start(COLLECTIVES, whole[0])[0]
    for peer in (1, 2):
        machine.on_call(peer, COLLECTIVES, 0, whole[peer].header(0), NOTHING)
    lane = CallLane(0, 2) if sends else CallLane(2, 0)
    mine, theirs = (plans.send(NOTHING, 2), plans.receive(NOTHING, 0)) if sends else (
        plans.receive(NOTHING, 2), plans.send(NOTHING, 0)
    )  # fmt: skip
    first, second = (machine.start(lane, mine)[0] for _ in range(2))
    machine.on_call(2, lane, 0, theirs.header(0), NOTHING)
    assert machine.on_peer_failure(1, CollectiveMismatchError("differs"), 1) == [], "rank 1 has the collective's result"
    assert machine.on_sent(2, lane, first) == [CallDone(first)]
    assert machine.on_call(2, lane, 1, theirs.header(0), NOTHING) == [], "a call ended that was never announced"
    machine.validate()
    ended = {effect.call_id for effect in machine.on_lost(2, "killed") if isinstance(effect, CallDone)}
    assert ended == {collective, second}


@pytest.mark.parametrize("number", [1, 7])
def test_an_announcement_out_of_order_is_refused(number: int) -> None:
    machine = GroupMachine(0, 2)
    with pytest.raises(InvalidArgumentError, match=f"announces call {number} .* 0 is next"):
        machine.on_call(1, COLLECTIVES, number, Header("barrier"), NOTHING)
    machine.on_call(1, COLLECTIVES, 0, Header("barrier"), NOTHING)
    with pytest.raises(InvalidArgumentError, match="announces call 0"):
        machine.on_call(1, COLLECTIVES, 0, Header("barrier"), NOTHING)


def test_unexpected_parts_are_refused() -> None:
    machine = GroupMachine(0, 2)
    machine.start(COLLECTIVES, plans.broadcast(0, 2, np.ones(1 << 20), 1))
    for part, size in ((0, 3), (1, 1 << 20), (99, 1 << 20)):
        with pytest.raises(InvalidArgumentError, match=f"unexpected part {part} of {size} bytes"):
            machine.place(1, COLLECTIVES, 0, part, size)
    assert machine.place(1, COLLECTIVES, 5, 0, 1) is None, "the call is over, or was never made"


def test_a_rank_outside_of_a_message_cannot_send_its_data() -> None:
    machine = GroupMachine(0, 3)
    machine.start(CallLane(1, 0), plans.receive(np.ones(1 << 20), 1))
    with pytest.raises(InvalidArgumentError, match=r"rank 2 sends data .* no part"):
        machine.place(2, CallLane(1, 0), 0, 0, 1 << 20)
    with pytest.raises(InvalidArgumentError, match="rank 2 announces call 0"):
        machine.on_call(2, CallLane(1, 0), 0, Header("send"), NOTHING)


def exchanged(network: CollectiveNetwork, tags: Sequence[int], received: Sequence[int]) -> None:
    """Send a number from rank 0 to rank 1 under each tag, and receive them in another order."""
    sent = [network.start(0, plans.send(np.array([tag]), 1), CallLane(0, 1, tag)) for tag in tags]
    outs = {tag: np.zeros(1, int) for tag in received}
    ended = [network.start(1, plans.receive(out, 0), CallLane(0, 1, tag)) for tag, out in outs.items()]
    network.run()
    assert all(call.has_ended and call.error is None for call in (*sent, *ended))
    assert all(out[0] == tag for tag, out in outs.items())


def test_a_lane_of_messages_is_dropped_with_its_last_call() -> None:
    network = CollectiveNetwork(2, random.Random(1))
    for _ in range(3):
        exchanged(network, range(20), range(20))
    assert [list(machine._lanes) for machine in network.machines] == [[COLLECTIVES]] * 2


@pytest.mark.parametrize("size", [2, 20])
def test_messages_beyond_the_limit_wait_for_others(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "EARLY_MESSAGES_MAX", 6)
    monkeypatch.setattr(machines, "EARLY_MESSAGES_MIN", 4)
    for seed in range(10):
        network = CollectiveNetwork(size, random.Random(seed))
        exchanged(network, range(30), range(29, -1, -1))


def test_messages_that_no_rank_receives_stay_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "EARLY_MESSAGES_MAX", 6)
    monkeypatch.setattr(machines, "EARLY_MESSAGES_MIN", 4)
    network = CollectiveNetwork(3, random.Random(1))
    for tag in range(30):
        network.start(0, plans.send(np.ones(1), 1), CallLane(0, 1, tag))
    network.run()
    early = [next(iter(lane.early.values())) for lane in network.machines[1]._lanes.values() if lane.early]
    assert sorted(data.nbytes for _, data in early) == [0, 8, 8, 8], "data travels with the first messages only"
    with pytest.raises(LimitExceededError, match="rank 0 announces more than 4 messages"):
        network.machines[1].on_call(0, CallLane(0, 1, 77), 0, Header("send"), NOTHING)
    exchanged(network, [30], [30])


def test_no_number_of_calls_is_too_large() -> None:
    network = CollectiveNetwork(2, random.Random(1))
    ended = [network.start(rank, plans.barrier(rank, 2)) for rank in range(2) for _ in range(6000)]
    while not all(call.has_ended for call in ended):
        for (source, target), link in network._links.items():
            if link.leaving:
                network._leave(source, link)
            elif link.moving:
                network._arrive(source, target, link)
    assert all(call.error is None for call in ended)
