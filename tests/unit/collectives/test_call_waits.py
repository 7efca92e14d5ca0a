"""Ranks that a call of a group waits for, and whether a rank lacks a call that another one waits for."""

from __future__ import annotations

import numpy as np

from psdist.collectives import calls
from psdist.collectives.call_waits import CallCounts
from psdist.collectives.core.group_key import make_key
from psdist.collectives.core.machine import COLLECTIVES, CallLane, GroupMachine, SendCall
from psdist.collectives.core.plan import Plan
from psdist.types import WorkerEntry
from psdist.v1 import scheduler_pb2 as pb

MEMBERS = [WorkerEntry(f"worker-{rank}", 1, rank) for rank in range(3)]
KEY = make_key("g", 2, MEMBERS)
DATA = np.ones(3, np.float32)


class Rank:
    """Machine and counts of one rank."""

    def __init__(self, rank: int) -> None:
        self.machine, self.counts = GroupMachine(rank, 3), CallCounts()

    def call(self, plan: Plan, lane: CallLane = COLLECTIVES) -> tuple[int, list[SendCall]]:
        """Make a call. Returns its id and announcements."""
        call_id, effects = self.machine.start(lane, plan)
        self.counts.made(lane, plan)
        return call_id, [effect for effect in effects if isinstance(effect, SendCall)]

    def hear(self, peer: int, call: SendCall) -> None:
        self.counts.heard(call.lane, peer)
        self.machine.on_call(peer, call.lane, call.number, call.header, call.data)

    def need(self, call_id: int) -> pb.Activity.GroupCall | None:
        return self.counts.need(self.machine, call_id, KEY, MEMBERS)

    def lacks(self, need: pb.Activity.GroupCall, peer: int) -> bool:
        return self.counts.lacks(pb.CheckCall(message=need.message, number=need.number), peer)


def test_a_collective_waits_for_ranks_that_have_not_called() -> None:
    first, second = Rank(0), Rank(1)
    call_id, _ = first.call(calls.barrier(0, 3))
    queued, _ = first.call(calls.barrier(0, 3))
    need = first.need(call_id)
    assert need is not None and need == first.need(queued), "a call waits for those before it"
    assert [one.worker_id for one in need.awaited] == ["worker-1", "worker-2"]
    assert need.text == "in barrier() of group 2 of ranks 0, 1, 2" and not need.message
    assert second.lacks(need, 0)
    _, announced = second.call(calls.barrier(1, 3))
    assert not second.lacks(need, 0), "it is on its way"
    first.hear(1, announced[0])
    need = first.need(call_id)
    assert need is not None and [one.worker_id for one in need.awaited] == ["worker-2"]
    _, announced = Rank(2).call(calls.barrier(2, 3))
    first.hear(2, announced[0])
    assert first.need(call_id) is None


def test_of_messages_those_on_the_way_are_counted() -> None:
    first, second = Rank(0), Rank(1)
    call_id, _ = first.call(calls.receive(np.zeros(3, np.float32), 1), CallLane(1, 0, 5))
    need = first.need(call_id)
    assert need is not None and need.message and [one.worker_id for one in need.awaited] == ["worker-1"]
    assert second.lacks(need, 0)
    _, other = second.call(calls.send(DATA, 0), CallLane(1, 0, 9))
    assert not second.lacks(need, 0), "this message of another tag is on the way, and so might be the awaited one"
    first.hear(1, other[0])
    need = first.need(call_id)
    assert need is not None and second.lacks(need, 0), "it has arrived, and is another one"
    _, awaited = second.call(calls.send(DATA, 0), CallLane(1, 0, 5))
    assert not second.lacks(need, 0)
    first.hear(1, awaited[0])
    assert first.need(call_id) is None


def test_a_call_of_a_group_that_is_not_open_waits_for_nobody() -> None:
    first = Rank(0)
    call_id, _ = first.call(calls.barrier(0, 3))
    assert first.counts.need(first.machine, call_id, b"", []) is None
