"""State of a run: small with many members, complete, with bounded curves and the problems of the run by name."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from psdist.monitoring.run_json import status_json
from psdist.monitoring.run_state import POINTS, RunState, difference, without_nulls
from psdist.monitoring.run_summary import RunCurves
from psdist.v1 import scheduler_pb2
from tests.support.dashboard_runs import advance, sample, status

WORKER = scheduler_pb2.ROLE_WORKER


def seconds(shares: dict[str, tuple[float, float, float, float]], pushes: int = 10) -> scheduler_pb2.RunSample:
    """Return a sample of workers with these shares of compute, push, wait and pull."""
    made = scheduler_pb2.RunSample(number=1, time=1.0)
    for name, (compute, push, wait, pull) in shares.items():
        made.workers.add(
            worker_id=name, seconds=1.0, compute_seconds=compute, push_seconds=push, wait_seconds=wait,
            pull_seconds=pull, pushes={"model": pushes},
        )  # fmt: skip
    return made


def test_a_large_run_needs_less_than_50_kb_a_second() -> None:
    rng, run = random.Random(7), RunState()
    answer, before, sent = status(100, 16, 64, 2000), {}, []
    for half in range(20):
        advance(answer, rng)
        points = run.add_samples([sample(half // 2 + 1, 100, 16, rng)], status_json(answer)) if half % 2 else []
        state: dict[str, Any] = run.state(status_json(answer))
        event = {"change": difference(before, state), "points": points}
        sent.append(len(msgspec.json.encode(event)))
        before = state
    assert sent[0] < 100_000  # The whole state.
    assert 1000 < sum(sent[2:]) / 9 < 50_000


def test_a_frozen_worker_is_silent_and_not_slow_by_what_it_did_before() -> None:
    answer = status()
    answer.problems.add(who="worker-1", kind="silent", text="worker worker-1 is silent")
    run, shares = RunState(), {f"worker-{rank}": (0.2, 0.05, 0.7, 0.05) for rank in range(3)}
    run.add_samples([seconds(shares | {"worker-1": (0.6, 0.2, 0.1, 0.1)})], status_json(answer))
    state = run.state(status_json(answer))
    assert [one["kind"] for one in state["problems"]] == ["silent"]
    assert "phases" not in state["workers"]["worker-1"] and "phases" in state["workers"]["worker-0"]


def test_what_peers_name_themselves_stays_text() -> None:
    name = "<script>alert(1)</script>"
    answer = status(1)
    answer.members[0].member_id, answer.members[0].reason = name, name
    run = RunState()
    run.add_samples([seconds({name: (0.4, 0.1, 0.4, 0.1)})], status_json(answer))
    assert name in run.state(status_json(answer))["workers"]


def test_memory_for_members_that_left_is_freed() -> None:
    run = RunState()
    run.add_samples([seconds({f"worker-{rank}": (0.5, 0, 0.5, 0) for rank in range(100)})], status_json(status()))
    run.state(status_json(status()))
    assert run._workers.keys() == {"worker-0", "worker-1", "worker-2"}


def test_a_run_that_has_not_begun_has_a_state() -> None:
    state = RunState().state(status_json(scheduler_pb2.GetStatusResponse(run_id="r")))
    assert state["workers"] == state["parameters"] == {} and state["problems"] == []


# --- curves -----------------------------------------------------------------------------------------------------------


def test_the_recent_curve_is_bounded_and_the_whole_one_begins_with_the_run() -> None:
    run, rng, form = RunState(), random.Random(1), status_json(status())
    whole = RunCurves()
    for number in range(1, POINTS + 50):
        whole.add(run.add_samples([sample(number, 2, 0, rng)], form, whole if number == 1 else None)[0])
    assert [point.time for point in run.recent] == [1000.0 + number for number in range(50, POINTS + 50)]
    assert len(run.whole.points) == POINTS + 49 and run.whole.points[0].time == 1001.0


def test_the_curves_begin_again_with_another_scheduler() -> None:
    run, rng, form = RunState(), random.Random(1), status_json(status())
    run.add_samples([sample(number, 2, 0, rng) for number in (1, 2, 3)], form)
    run.add_samples([sample(1, 2, 0, rng)], form)
    assert len(run.recent) == 1 and run.last_sample == 1


# --- merge patches ----------------------------------------------------------------------------------------------------


TREES = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c", "__proto__"]), inner, max_size=4),
).filter(lambda tree: isinstance(tree, dict))


def apply(target: Any, patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a patch as RFC 7396 says."""
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply(result.get(name), value) if isinstance(value, dict) else value
    return result


@given(TREES, TREES)
def test_a_patch_leads_from_one_tree_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply(before, difference(before, after)) == after


@given(TREES)
def test_nothing_changes_without_a_change(tree: dict[str, Any]) -> None:
    assert difference(tree, tree) == {}


def test_only_what_changed_is_in_a_patch() -> None:
    before = {"a": {"x": 1, "y": [1, 2]}, "b": 1, "c": {"z": 1}}
    assert difference(before, {"a": {"x": 2, "y": [1, 2]}, "b": 1}) == {"a": {"x": 2}, "c": None}


def test_nulls_are_left_out() -> None:
    assert without_nulls({"a": None, "b": {"c": None, "d": 0}, "e": [None]}) == {"b": {"d": 0}, "e": [None]}
