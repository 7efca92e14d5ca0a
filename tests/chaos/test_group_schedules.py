"""Random schedules of sends, collectives and faults in groups of real processes: each call at each rank ends with its
result, or within 2 s of the first rank's error with an error that names the cause.

``SCHEDULES`` in the environment is the number of schedules, 3 by default, and ``FIRST`` the first one's seed. The
promised time is checked from ten on: fewer run beside other tests, where a process may not get a core for seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.chaos.group_schedules import Run, Totals
from tests.chaos.schedule_draw import Fault, Operation, Schedule, draw
from tests.chaos.schedule_oracle import SPREAD_SECONDS, Call, Record, Stop, spread, violations

SCHEDULES = int(os.environ.get("SCHEDULES", "3"))
FIRST = int(os.environ.get("FIRST", "0"))
SECONDS = SPREAD_SECONDS if SCHEDULES >= 10 else 30.0
ALL = (0, 1, 2)
AT_ONCE = (0, 0, 0)


@pytest.fixture(scope="module")
def processes() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


@pytest.mark.timeout(600 + 20 * SCHEDULES)
def test_random_schedules(processes: Run) -> None:
    totals, found = Totals(), []
    for seed in range(FIRST, FIRST + SCHEDULES):
        record = processes.play(draw(seed))
        totals.add(record)
        if broken := violations(record, SECONDS):
            print(record.schedule, record.course, sep="\n")
            found += [f"seed {seed}: {text}" for text in broken]
    print(totals)
    assert not found, "\n".join(found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("elements", [100, 20_000, 150_000])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_rank_that_was_stopped_learns_of_a_time_limit_whose_rank_was_killed(
    processes: Run, kind: str, elements: int
) -> None:
    # Rank 0 reaches its limit while rank 2 cannot hear of it, and is dead when it can.
    faults = (
        Fault("time limit", 0, 1, "before", 0.2),
        Fault("freeze", 2, 1, "before", 0.0, 1.0),
        Fault("kill", 0, -1, "own error"),
    )
    operations = tuple(Operation(number, kind, elements + number, ALL, AT_ONCE) for number in range(3))
    record = processes.play(Schedule(0, ALL, None, operations, faults))
    assert not violations(record, SECONDS), record.course
    assert [record.calls[rank, 1].result for rank in ALL] == ["error"] * 3, record.course
    assert record.strikes.keys() == {0, 1, 2}


@pytest.mark.timeout(600)
def test_ranks_that_need_nothing_from_a_closed_one_have_their_results(processes: Run) -> None:
    operations = (
        Operation(0, "message", 20_000, (0, 1), AT_ONCE),
        Operation(1, "message", 30_000, (1, 0), AT_ONCE),
        Operation(2, "all_reduce", 100, ALL, AT_ONCE),
    )
    record = processes.play(Schedule(1, ALL, 0.4, operations, (Fault("close", 2, 2, "before"),)))
    assert not violations(record, SECONDS), record.course
    assert [record.calls[rank, number].result for rank in (0, 1) for number in (0, 1)] == ["right"] * 4
    assert {record.calls[rank, 2].error for rank in ALL} == {"ClosedError"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_message_of_any_rank_ends_within_the_limit_on_silence(processes: Run, lag: int) -> None:
    operations = (
        Operation(0, "message of any", 100, (0, 1), (0, lag, 0), 7),
        Operation(1, "message of any", 101, (0, 2), AT_ONCE, 8),
    )
    # Rank 0 stays stopped. Its lease would end the waits seconds later.
    record = processes.play(Schedule(3, ALL, 0.4, operations, (Fault("freeze", 0, 0, "before"),)))
    assert not violations(record, SECONDS), record.course
    assert all("its process is stopped" in record.calls[rank, rank - 1].text for rank in (1, 2)), record.course


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_message_of_any_rank_that_nobody_sends_is_a_deadlock(processes: Run, lag: int) -> None:
    operations = (
        Operation(0, "message of any", 100, (1, 0), (lag,) * 3, 7),
        Operation(1, "barrier", 0, ALL, AT_ONCE),
        Operation(2, "barrier", 1, ALL, AT_ONCE),
    )
    # Rank 1 does not send, and waits in the barrier with rank 2. Rank 0 makes it only if it need not wait before.
    record = processes.play(Schedule(2, ALL, 0.4, operations, (Fault("omitted call", 1, 0, "before"),)))
    assert not violations(record, SECONDS), record.course
    if lag:  # The barrier ends, and the others then wait in the second one.
        assert [record.calls[rank, 1].result for rank in ALL] == ["right"] * 3, record.course
    assert {record.calls[rank, 1 + (lag > 0)].error for rank in (1, 2)} == {"MutualWaitError"}, record.course
    assert record.calls[0, 0].error == "MutualWaitError", record.course


def test_schedules_have_all_faults_and_no_two_arrays_of_one_size() -> None:
    schedules = [draw(seed) for seed in range(200)]
    assert all(len({one.elements for one in schedule.operations}) == len(schedule.operations) for schedule in schedules)
    faults = {(fault.kind, fault.moment) for schedule in schedules for fault in schedule.faults}
    assert {kind for kind, _ in faults} == {
        "kill", "freeze", "freeze briefly", "other kind", "other size", "other dtype", "omitted call", "time limit",
        "late", "close", "end of script", "give up",
    }  # fmt: skip
    assert {moment for kind, moment in faults if kind == "kill"} == {"before", "during", "own error", "any error"}


# --- the checks can fail ----------------------------------------------------------------------------------------------


def _recorded() -> Record:
    """Return the record of an all-reduce: rank 2 is killed at 1.0, the others have their errors by 1.2."""
    operation = Operation(0, "all_reduce", 100, ALL, AT_ONCE)
    record = Record(Schedule(0, ALL, 0.4, (operation,), (Fault("kill", 2, 0, "during"),)))
    text = "rank 2 is gone: worker-2 closed its link"
    for rank, end in ((0, 1.1), (1, 1.2)):
        record.calls[rank, 0] = Call(rank, operation, 0.5, 0.5, end, "error", "WorkerLostError", text, 2)
    record.calls[2, 0] = Call(2, operation, 0.9, 0.9)
    record.strikes[0] = record.deaths[2] = 1.0
    return record


def _end(at: float) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.calls[1, 0].ended = at
        record.calls[1, 0].result = "error" if at < float("inf") else ""

    return change


def _say(text: str, lost: int = 2) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.calls[1, 0].text, record.calls[1, 0].lost = text, lost

    return change


def _have(result: str) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.calls[1, 0].result, record.calls[1, 0].error = result, ""

    return change


def _strike_later(record: Record) -> None:
    record.strikes[0] = record.deaths[2] = 1.15


def _late_to_hear(record: Record) -> None:
    """Let rank 2 be stopped instead, without a limit on silence: rank 0 has noticed it early by other means."""
    fault = replace(record.schedule.faults[0], kind="freeze")
    record.schedule = replace(record.schedule, silence=None, faults=(fault,))
    record.stops.append(Stop(2, 1.0))
    record.calls[1, 0].ended = 3.2


def _live(record: Record) -> None:
    del record.deaths[2]


def test_a_course_in_order_has_no_violation() -> None:
    record = _recorded()
    assert not violations(record) and spread(record) == pytest.approx(0.1)


def test_time_in_which_a_process_was_stopped_does_not_count() -> None:
    record = _recorded()
    record.stops.append(Stop(1, 1.05, 3.0))
    record.calls[1, 0].ended = 4.9
    assert not violations(record) and spread(record) == pytest.approx(1.9)
    record.calls[1, 0].ended = 5.1
    assert violations(record)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_end(3.2), "ended 2.20 s after: its ranks have made it"),
        (_end(float("inf")), "has not ended: its ranks have made it"),
        (_late_to_hear, "ended 2.10 s after: the first error"),
        (_say("rank 0 is gone: worker-0 closed its link", 0), "names no fault"),
        (_say("worker-2 closed its link"), "names no fault"),
        (_have("wrong: 1 of 100 elements"), "wrong: 1 of 100"),
        (_strike_later, "names no fault"),
        (_live, "has not ended"),
    ],
)
def test_the_checks_see_each_breach(change: Callable[[Record], None], text: str) -> None:
    record = _recorded()
    change(record)
    (found,) = violations(record)
    assert text in found
