"""Ranks that a call of a group waits for, and whether a rank lacks a call that another one waits for."""

from __future__ import annotations

import numpy as np

from psdist.collectives.core import plans
from psdist.collectives.core.machine import COLLECTIVES, CallLane, GroupMachine, SendCall
from psdist.collectives.core.plans import Plan
from psdist.collectives.group_runner import CallCounts
from psdist.collectives.messages import make_key
from psdist.types import WorkerEntry
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import AWAITED_REPORTED_MAX

MEMBERS = [WorkerEntry(f"worker-{rank}", 1, rank) for rank in range(3)]
KEY = make_key("g", 2, MEMBERS)
DATA = np.ones(3, np.float32)


class Rank:
    """Machine and counts of one rank."""

    def __init__(self, rank: int) -> None:
        self.machine = GroupMachine(rank, 3)
        self.counts = CallCounts(self.machine)
        self.counts.open(KEY, MEMBERS)

    def call(self, plan: Plan, lane: CallLane = COLLECTIVES) -> tuple[int, list[SendCall]]:
        """Make a call. Returns its id and announcements."""
        call_id, effects = self.machine.start(lane, plan)
        self.counts.made(lane, plan)
        return call_id, [effect for effect in effects if isinstance(effect, SendCall)]

    def hear(self, peer: int, call: SendCall) -> None:
        self.counts.heard(call.lane, peer)
        self.machine.on_call(peer, call.lane, call.number, call.header, call.data)

    def need(self, call_id: int) -> pb.Activity.GroupCall | None:
        return self.counts.need(call_id)

    def lacks(self, need: pb.Activity.GroupCall, peer: int) -> bool:
        return self.counts.lacks(pb.CheckCall(message=need.message, number=need.number, next=need.next), peer)


def test_a_collective_waits_for_ranks_that_have_not_called() -> None:
    first, second = Rank(0), Rank(1)
    call_id, _ = first.call(plans.barrier(0, 3))
    queued, _ = first.call(plans.barrier(0, 3))
    need = first.need(call_id)
    assert need is not None and need == first.need(queued), "a call waits for those before it"
    assert [one.worker_id for one in need.awaited] == ["worker-1", "worker-2"]
    assert need.text == "in barrier() of group 2 of ranks 0, 1, 2" and not need.message
    assert second.lacks(need, 0)
    _, announced = second.call(plans.barrier(1, 3))
    assert not second.lacks(need, 0), "it is on its way"
    first.hear(1, announced[0])
    need = first.need(call_id)
    assert need is not None and [one.worker_id for one in need.awaited] == ["worker-2"]
    _, announced = Rank(2).call(plans.barrier(2, 3))
    first.hear(2, announced[0])
    assert first.need(call_id) is None


def test_of_messages_those_on_the_way_are_counted() -> None:
    first, second = Rank(0), Rank(1)
    call_id, _ = first.call(plans.receive(np.zeros(3, np.float32), 1), CallLane(1, 0, 5))
    need = first.need(call_id)
    assert need is not None and need.message and [one.worker_id for one in need.awaited] == ["worker-1"]
    assert second.lacks(need, 0)
    _, other = second.call(plans.send(DATA, 0), CallLane(1, 0, 9))
    assert not second.lacks(need, 0), "this message of another tag is on the way, and so might be the awaited one"
    first.hear(1, other[0])
    need = first.need(call_id)
    assert need is not None and second.lacks(need, 0), "it has arrived, and is another one"
    _, awaited = second.call(plans.send(DATA, 0), CallLane(1, 0, 5))
    assert not second.lacks(need, 0)
    first.hear(1, awaited[0])
    assert first.need(call_id) is None


def test_a_call_of_a_group_that_is_not_open_waits_for_nobody() -> None:
    first = Rank(0)
    first.counts.open(b"", [])
    call_id, _ = first.call(plans.barrier(0, 3))
    assert first.need(call_id) is None


def test_a_message_of_any_rank_waits_for_all_others_until_one_has_sent_it() -> None:
    first, second, third = Rank(0), Rank(1), Rank(2)
    _, other = second.call(plans.send(DATA, 0), CallLane(1, 0, 9))
    first.hear(1, other[0])
    need = first.counts.need_message(5)
    assert need is not None and need.message and not need.awaited
    assert [(one.worker.worker_id, one.number) for one in need.sources] == [("worker-1", 1), ("worker-2", 0)]
    assert need.text == "in recv_any(tag=5) of group 2 of ranks 0, 1, 2"
    for rank, source in zip((second, third), need.sources, strict=True):
        assert rank.counts.lacks(pb.CheckCall(message=True, number=source.number), 0)
    _, sent = third.call(plans.send(DATA, 0), CallLane(2, 0, 5))
    check = pb.CheckCall(message=True, number=need.sources[1].number)
    assert not third.counts.lacks(check, 0), "it is on its way"
    first.hear(2, sent[0])
    assert first.counts.need_message(5) is None


def test_a_message_of_any_rank_waits_for_nobody_once_a_rank_is_gone_or_if_there_are_too_many() -> None:
    first = Rank(0)
    first.machine.on_lost(1, "killed")
    assert first.counts.need_message(5) is None
    many = [WorkerEntry(f"worker-{rank}", 1, rank) for rank in range(AWAITED_REPORTED_MAX + 2)]
    counts = CallCounts(GroupMachine(0, len(many)))
    counts.open(KEY, many)
    assert counts.need_message(5) is None


def test_a_rank_that_takes_any_message_makes_calls_by_itself_while_some_are_on_the_way() -> None:
    first, second = Rank(0), Rank(1)
    call_id, announced = second.call(plans.send(DATA, 0), CallLane(1, 0, 9))
    need = second.need(call_id)
    assert need is not None and need.next == 2
    check = pb.CheckCall(message=True, number=need.number, next=need.next)
    assert first.counts.lacks(check, 1)
    with first.counts.taking():
        assert not first.counts.lacks(check, 1)
        assert first.counts.lacks(pb.CheckCall(), 1), "it makes no collective by itself"
        first.hear(1, announced[0])
        assert first.counts.lacks(check, 1)
        assert not first.counts.lacks(pb.CheckCall(message=True), 1), "an older worker does not count its messages"
