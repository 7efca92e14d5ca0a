"""Ranks that a call of a group waits for. ``tests/property/test_deadlock_detection`` tests messages, and removes each
safeguard."""

from __future__ import annotations

import numpy as np

from psdist.collectives.core import plans
from psdist.collectives.core.machine import COLLECTIVES, CallLane, GroupMachine, SendCall
from psdist.collectives.core.plans import Plan
from psdist.collectives.frames import make_key
from psdist.collectives.group_runner import CallCounts
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


def test_a_call_of_a_group_that_is_not_open_waits_for_nobody() -> None:
    first = Rank(0)
    first.counts.open(b"", [])
    call_id, _ = first.call(plans.barrier(0, 3))
    assert first.need(call_id) is None


def test_a_message_of_any_rank_waits_for_nobody_once_a_rank_is_gone_or_if_there_are_too_many() -> None:
    first = Rank(0)
    need = first.counts.need_message(5)
    assert need is not None and need.text == "in recv_any(tag=5) of group 2 of ranks 0, 1, 2"
    first.machine.on_lost(1, "killed")
    assert first.counts.need_message(5) is None
    many = [WorkerEntry(f"worker-{rank}", 1, rank) for rank in range(AWAITED_REPORTED_MAX + 2)]
    counts = CallCounts(GroupMachine(0, len(many)))
    counts.open(KEY, many)
    assert counts.need_message(5) is None
