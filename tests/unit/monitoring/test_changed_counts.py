"""Heartbeats that lack unchanged counts, and the scheduler that completes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import LimitExceededError
from psdist.monitoring.worker_reports import ChangedCounts
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import PARAMETERS_MAX
from psdist_scheduler import conversions
from psdist_scheduler.decide.cluster_events import Heartbeat
from psdist_scheduler.service import FollowedPushes

NAMES = ("actor", "critic", "target")


def beat(numbers: dict[str, int], partial: tuple[str, ...] = ()) -> pb.SessionRequest.Heartbeat:
    activity = pb.Activity(sequence=3, next=numbers, partial=partial)
    return pb.SessionRequest.Heartbeat(activity=activity, totals=pb.WorkerTotals(compute_seconds=1.0, pushes=numbers))


def counts(heartbeat: pb.SessionRequest.Heartbeat) -> tuple[bool, dict[str, int], dict[str, int]]:
    return heartbeat.changed_only, dict(heartbeat.activity.next), dict(heartbeat.totals.pushes)


def followed(heartbeat: pb.SessionRequest.Heartbeat, session: FollowedPushes) -> Heartbeat:
    event = conversions.session_event(7, pb.SessionRequest(heartbeat=heartbeat))
    assert isinstance(event, Heartbeat)
    return session.complete(event, changed_only=heartbeat.changed_only)


def test_the_first_heartbeat_has_all_counts_and_later_ones_the_changes() -> None:
    changed, sent = ChangedCounts(enabled=True), []
    for numbers in ({"a": 1, "b": 5}, {"a": 1, "b": 5}, {"a": 2, "b": 5, "c": 0}, {"a": 2, "b": 4, "c": 0}):
        sent.append(beat(numbers))
        changed.drop_unchanged(sent[-1])
    assert [counts(one) for one in sent] == [
        (False, {"a": 1, "b": 5}, {"a": 1, "b": 5}),
        (True, {}, {}),
        (True, {"a": 2, "c": 0}, {"a": 2, "c": 0}),
        (True, {"b": 4}, {"b": 4}),
    ]
    assert all(one.totals.compute_seconds == 1.0 and one.activity.sequence == 3 for one in sent)


def test_a_new_session_starts_with_all_counts() -> None:
    for _ in range(2):
        heartbeat = beat({"a": 1})
        ChangedCounts(enabled=True).drop_unchanged(heartbeat)
        assert counts(heartbeat) == (False, {"a": 1}, {"a": 1})


def test_a_scheduler_that_takes_no_changes_gets_whole_heartbeats() -> None:
    changed = ChangedCounts(enabled=False)
    for _ in range(2):
        changed.drop_unchanged(heartbeat := beat({"a": 1}))
        assert counts(heartbeat) == (False, {"a": 1}, {"a": 1})


def test_a_push_sent_in_part_is_named_with_its_number() -> None:
    changed, session = ChangedCounts(enabled=True), FollowedPushes()
    for partial in ((), ("a",)):
        changed.drop_unchanged(heartbeat := beat({"a": 1, "b": 2}, partial))
        event = followed(heartbeat, session)
    assert event.activity is not None
    assert (event.activity.next, event.activity.partial) == ((("a", 1), ("b", 2)), ("a",))


@given(st.lists(st.tuples(st.booleans(), st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3))), max_size=12))
def test_the_scheduler_knows_all_numbers_after_each_heartbeat(steps: list[tuple[bool, dict[str, int]]]) -> None:
    """Sets only come, numbers may change in any way, and the stream breaks at any time."""
    numbers: dict[str, int] = {}
    changed, session = ChangedCounts(enabled=True), FollowedPushes()
    for breaks, news in steps:
        if breaks:
            changed, session = ChangedCounts(enabled=True), FollowedPushes()
        numbers |= news
        changed.drop_unchanged(heartbeat := beat(numbers))
        event = followed(heartbeat, session)
        assert event.activity is not None and dict(event.activity.next) == numbers
        assert list(event.activity.next) == sorted(numbers.items())


def test_a_session_cannot_name_ever_more_parameters() -> None:
    session = FollowedPushes()
    for at in range(0, PARAMETERS_MAX, 128):
        heartbeat = beat({f"p{at + number}": 1 for number in range(128)})
        heartbeat.changed_only = True
        followed(heartbeat, session)
    heartbeat.activity.next["one-more"] = 1
    with pytest.raises(LimitExceededError, match=f"{PARAMETERS_MAX + 1} parameters, over the limit"):
        followed(heartbeat, session)
