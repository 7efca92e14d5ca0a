"""Requests for the stacks of all members: whom they wait for, and when they end."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import LimitExceededError
from psdist.wire.limits import STACKS_REQUESTS_MAX, TRACE_BYTES_MAX
from psdist_scheduler.decide.cluster_events import StacksReported, StacksRequested
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member
from psdist_scheduler.decide.effects import Answer, Effect, MemberStacks, StacksCommand, StacksEnded
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.stack_dumps import ANSWER_SECONDS, StackDumps

COMMAND, WORKER, SERVER = 1, 10, 20
WORKER_0, SERVER_0 = Member("worker-0", "worker", 1), Member("server-0", "server", 1, address="host:1")


def dumps(*without_session: str) -> StackDumps:
    members = Membership(ClusterSettings("run"), (), 0.0)
    for member, session in ((WORKER_0, WORKER), (SERVER_0, SERVER)):
        members.add(member, 0.0)
        if member.member_id not in without_session:
            members.sessions.open(session, member.member_id, 0.0)
    return StackDumps(members)


def told(effects: list[Effect]) -> list[tuple[int, Any]]:
    return [(effect.call, effect.value) for effect in effects if isinstance(effect, Answer)]


def test_it_ends_when_all_have_answered_and_each_answer_counts_once() -> None:
    machine = dumps()
    assert told(machine.start(StacksRequested(COMMAND, "run"), 0.0)) == [
        (COMMAND, MemberStacks(None)),
        *[(COMMAND, MemberStacks(SERVER_0)), (SERVER, StacksCommand(1))],
        *[(COMMAND, MemberStacks(WORKER_0)), (WORKER, StacksCommand(1))],
    ]
    answer = (COMMAND, MemberStacks(WORKER_0, "here"))
    assert told(machine.on_stacks(StacksReported(WORKER, 1, "here"), 0.1)) == [answer]
    assert not machine.on_stacks(StacksReported(WORKER, 1, "again"), 0.1)
    assert not machine.on_stacks(StacksReported(SERVER, 2, "of no request"), 0.1)
    last = told(machine.on_stacks(StacksReported(SERVER, 1, "there"), 0.2))
    assert last == [(COMMAND, MemberStacks(SERVER_0, "there")), (COMMAND, StacksEnded())]
    assert not machine.tick(100.0)


def test_a_silent_member_is_named_after_its_time_and_one_without_a_session_at_once() -> None:
    machine = dumps("server-0")
    first = told(machine.start(StacksRequested(COMMAND, "run"), 0.0))
    assert (COMMAND, MemberStacks(SERVER_0, missing="it has no session with the scheduler")) in first
    assert not machine.tick(ANSWER_SECONDS)
    late = told(machine.tick(ANSWER_SECONDS + 0.1))
    assert late == [
        (COMMAND, MemberStacks(WORKER_0, missing="it did not answer within 1.5 s")),
        (COMMAND, StacksEnded()),
    ]


def test_a_command_that_has_gone_is_forgotten_and_others_continue() -> None:
    machine = dumps()
    for call in range(1, STACKS_REQUESTS_MAX + 1):
        machine.start(StacksRequested(call, "run"), 0.0)
    with pytest.raises(LimitExceededError, match="8 commands"):
        machine.start(StacksRequested(99, "run"), 0.0)
    machine.end_call(1)
    assert not machine.on_stacks(StacksReported(WORKER, 1, "here"), 0.1)
    assert told(machine.on_stacks(StacksReported(WORKER, 2, "here"), 0.1)) == [(2, MemberStacks(WORKER_0, "here"))]
    assert machine.start(StacksRequested(99, "run"), 0.0)


def test_more_bytes_than_the_scheduler_may_hold_end_it() -> None:
    machine = dumps()
    machine.start(StacksRequested(COMMAND, "run"), 0.0)
    answers = told(machine.on_stacks(StacksReported(WORKER, 1, "x" * (TRACE_BYTES_MAX + 1)), 0.1))
    assert "is the limit" in answers[1][1].missing and answers[2][1] == StacksEnded()
