"""Recordings: when they end, whom they wait for, whose clock is believed, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import InvalidArgumentError, NotMemberError, TraceInProgressError
from psdist.wire.limits import TRACE_BYTES_MAX, TRACE_SECONDS_MAX
from psdist_scheduler.decide.cluster_events import ClockReported, SpansReported, TraceRequested
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member
from psdist_scheduler.decide.effects import (
    Answer,
    Effect,
    MemberSpans,
    TraceCommand,
    TracedMember,
    TraceEnded,
    Waiting,
)
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.trace_recording import ANSWER_SECONDS, CLOCK_ROUNDS, Traces

#: Calls: of the command, and the sessions of the members.
COMMAND, WORKER_0, WORKER_1, SERVER = 1, 10, 11, 20


class Recording:
    """Two workers and a server, and the recordings of their run."""

    def __init__(self) -> None:
        self.members = Membership(ClusterSettings("run"), (), 0.0)
        workers = [(Member(f"worker-{rank}", "worker", 1, rank, 2), 10 + rank) for rank in (0, 1)]
        for member, session in (*workers, (Member("server-0", "server", 1, address="host:1"), SERVER)):
            self.members.add(member, 0.0)
            self.members.sessions.open(session, member.member_id, 0.0)
        self.traces = Traces(self.members)
        self.number = 0

    def start(self, steps: int = 5, call: int = COMMAND, now: float = 0.0) -> dict[int, list[Any]]:
        told = by_call(self.traces.start(TraceRequested(call, "run", steps), now))
        self.number = told[WORKER_0][0].number
        return told

    def spans(self, session: int, steps: int = 0, *, done: bool = False, size: int = 3) -> dict[int, list[Any]]:
        event = SpansReported(session, self.number, b"x" * size, 7, steps, done)
        return by_call(self.traces.on_spans(event, 1.0))

    def clock(self, session: int, sent: int, member: int, received: int) -> dict[int, list[Any]]:
        return by_call(self.traces.on_clock(ClockReported(session, self.number, sent, member, received, "c")))

    def tick(self, now: float) -> dict[int, list[Any]]:
        return by_call(self.traces.tick(now))


def by_call(effects: list[Effect]) -> dict[int, list[Any]]:
    told: dict[int, list[Any]] = {}
    for effect in effects:
        assert isinstance(effect, Answer)
        told.setdefault(effect.call, []).append(effect.value)
    return told


def kinds(values: list[Any]) -> list[str]:
    return [value.kind for value in values if isinstance(value, TraceCommand)]


def test_servers_end_after_the_workers_and_then_the_recording() -> None:
    run = Recording()
    told = run.start()
    assert all(kinds(told[session]) == ["start", "clock"] for session in (WORKER_0, WORKER_1, SERVER))
    assert run.spans(WORKER_0, 2)[COMMAND] == [MemberSpans("worker-0", b"xxx")]
    assert run.tick(1.0)[COMMAND] == [Waiting("for worker-1 (rank 1) to complete step 1 of 5")]
    assert COMMAND not in run.tick(1.1), "the same progress is sent once"
    run.spans(WORKER_0, 5, done=True)
    assert kinds(run.spans(WORKER_1, 5, done=True)[SERVER]) == ["end"]
    *states, end = run.spans(SERVER, done=True)[COMMAND][1:]
    assert end == TraceEnded("") and [(state.recorded, state.done) for state in states] == [(7, True)] * 3
    assert run.start(now=2.0)[COMMAND], "the next one may start"


def test_a_second_recording_is_refused_with_the_first_by_name() -> None:
    run = Recording()
    run.start(steps=20)
    with pytest.raises(TraceInProgressError, match=r"of 20 steps began 3 s ago, and waits for worker-0"):
        run.traces.start(TraceRequested(2, "run", 1), 3.0)
    assert kinds(by_call(run.traces.end_call(COMMAND))[SERVER]) == ["end"], "Ctrl-C ends the first"
    assert not run.spans(WORKER_0), "what still comes of it is ignored"
    assert run.start(call=2)[2]


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (TraceRequested(COMMAND, "run", 0), InvalidArgumentError, "0 steps cannot be recorded: give 1 to 10000"),
        (TraceRequested(COMMAND, "run", 10_001), InvalidArgumentError, "10001 steps"),
    ],
)
def test_a_request_that_is_not_possible_is_refused(request_: TraceRequested, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Recording().traces.start(request_, 0.0)


def test_a_run_without_workers_has_no_steps() -> None:
    run = Recording()
    for worker in list(run.members.workers):
        run.members.lose(worker.member_id, "killed", 0.0)
    with pytest.raises(NotMemberError, match="start the workers first"):
        run.start()


def test_the_shortest_round_trip_shows_the_clock() -> None:
    run = Recording()
    run.start()
    run.clock(WORKER_0, 0, 5_000, 1_000)
    run.clock(WORKER_0, 2_000, 6_105, 2_010)
    for _ in range(CLOCK_ROUNDS - 3):
        assert kinds(run.clock(WORKER_0, 3_000, 0, 9_000)[WORKER_0]) == ["clock"]
    (state,) = run.clock(WORKER_0, 4_000, 0, 3_000).get(COMMAND, [None])  # It ends before it begins.
    assert state is None
    (state,) = run.clock(WORKER_0, 3_000, 0, 9_000)[COMMAND]
    assert (state.offset_ns, state.uncertainty_ns, state.clock_id) == (4_100, 5, "c")


def test_members_that_are_gone_or_silent_are_named_and_not_waited_for() -> None:
    run = Recording()
    run.start()
    run.spans(WORKER_0)
    run.members.lose("worker-1", "killed", 1.0)
    run.tick(2.0)
    run.spans(WORKER_0, 5, done=True)
    ended = run.tick(ANSWER_SECONDS + 0.1)[COMMAND]
    missing = {one.member.member_id: one.missing for one in ended if isinstance(one, TracedMember)}
    assert missing["worker-0"] == "" and missing["worker-1"] == "it was expelled (killed)"
    assert missing["server-0"].startswith("it did not start to record within 5 s")
    assert ended[-1] == TraceEnded("")


def test_a_member_that_is_back_on_another_session_records_no_more() -> None:
    run = Recording()
    run.start()
    run.spans(WORKER_0)
    run.members.sessions.open(99, "worker-0", 1.0)
    assert not run.spans(99, 5, done=True)
    run.tick(1.0)
    run.spans(WORKER_1, 5, done=True)
    ended = run.spans(SERVER, done=True)[COMMAND]
    assert {one.missing for one in ended if isinstance(one, TracedMember)} == {
        "",
        "its session with the scheduler broke",
    }


def test_without_any_worker_left_the_recording_says_so() -> None:
    run = Recording()
    run.start()
    run.spans(SERVER)
    for worker in ("worker-0", "worker-1"):
        run.members.leave(worker, "done", 1.0)
    assert kinds(run.tick(2.0)[SERVER]) == ["end"]
    assert run.spans(SERVER, done=True)[COMMAND][-1] == TraceEnded("all workers are gone")


def test_a_recording_ends_after_its_time_and_its_bytes() -> None:
    run = Recording()
    run.start()
    for session in (WORKER_0, WORKER_1, SERVER):
        run.spans(session)
    assert kinds(run.tick(TRACE_SECONDS_MAX + 1)[WORKER_0]) == ["end"]
    for session in (WORKER_0, WORKER_1):
        run.spans(session, done=True)
    assert "600 s are over" in run.spans(SERVER, done=True)[COMMAND][-1].reason
    run.start()
    assert kinds(run.spans(WORKER_0, size=TRACE_BYTES_MAX + 1)[WORKER_1]) == ["end"]
