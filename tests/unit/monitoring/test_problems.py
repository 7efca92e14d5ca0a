"""Problems of a run: each alert has one, each is seen, and those that last become events."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from psdist.monitoring.problems import KINDS, Announcer, Watch
from psdist.monitoring.run_json import sample_json, status_json
from psdist.v1 import scheduler_pb2
from tests.support.dashboard_runs import status

ALERTS = Path(__file__).resolve().parents[3] / "deploy" / "monitoring" / "alerts.yml"


def look(
    watch: Watch, answer: scheduler_pb2.GetStatusResponse, *samples: scheduler_pb2.RunSample
) -> list[dict[str, Any]]:
    """Return the problems of a look at this status."""
    return watch.look(status_json(answer), [sample_json(one) for one in samples], 0.5, answer.time)


def problems(answer: scheduler_pb2.GetStatusResponse, *samples: scheduler_pb2.RunSample) -> dict[str, tuple[str, str]]:
    """Return kind and text of the problems, by member."""
    return {one["who"]: (one["kind"], one["text"]) for one in look(Watch(), answer, *samples)}


def seconds(shares: dict[str, tuple[float, float, float, float]], pushes: int = 10) -> scheduler_pb2.RunSample:
    """Return a sample of workers with these shares of compute, push, wait and pull."""
    made = scheduler_pb2.RunSample(number=1, time=1.0)
    for name, (compute, push, wait, pull) in shares.items():
        made.workers.add(
            worker_id=name, seconds=1.0, compute_seconds=compute, push_seconds=push, wait_seconds=wait,
            pull_seconds=pull, pushes={"model": pushes},
        )  # fmt: skip
    return made


def test_a_run_without_problems_has_none() -> None:
    shares = {f"worker-{rank}": (0.4, 0.1, 0.4, 0.1) for rank in range(3)}
    assert problems(status(), seconds(shares)) == {}


def test_lost_silent_and_draining_members_are_named() -> None:
    answer = status()
    by_id = {member.member_id: member for member in answer.members}
    by_id["worker-0"].state, by_id["worker-0"].reason = "lost", "its process was killed"
    by_id["server-0"].heartbeat_age_seconds = 1.3
    by_id["server-1"].draining = True
    by_id["worker-1"].heartbeat_age_seconds = 0.9  # Two heartbeats are not missing yet.
    found = problems(answer)
    assert found["worker-0"] == ("lost", "worker worker-0 was lost: its process was killed")
    assert found["server-0"][0] == "silent" and "1.3 s" in found["server-0"][1]
    assert found["server-1"][0] == "draining" and len(found) == 3


@pytest.mark.parametrize(
    ("slow", "kind"), [((0.9, 0.05, 0.0, 0.05), "straggler"), ((0.2, 0.5, 0.1, 0.2), "link")]
)  # fmt: skip
def test_the_worker_for_which_the_others_wait_is_named(slow: tuple[float, float, float, float], kind: str) -> None:
    shares = {"worker-0": (0.2, 0.05, 0.7, 0.05), "worker-1": slow, "worker-2": (0.2, 0.05, 0.7, 0.05)}
    found = problems(status(), seconds(shares))
    assert found.keys() == {"worker-1"} and found["worker-1"][0] == kind
    assert "the others wait for it" in found["worker-1"][1]


def test_a_slow_sender_is_named_though_the_others_receive_for_as_long() -> None:
    shares = {"worker-0": (0.1, 0.05, 0.0, 0.85), "worker-1": (0.1, 0.8, 0.0, 0.1), "worker-2": (0.1, 0.05, 0.0, 0.85)}
    (found,) = problems(status(), seconds(shares)).values()
    assert found[0] == "link" and "has a slow link" in found[1] and "the others wait for it" in found[1]


def test_a_server_that_fails_makes_no_link_slow() -> None:
    watch, answer = Watch(), status()
    made = seconds({f"worker-{rank}": (0.2, 0.05, 0.7, 0.05) for rank in range(3)})
    made.workers[0].push_seconds, made.workers[0].wait_seconds = 0.75, 0.0

    def kinds(number: int) -> list[str]:
        made.number = number
        return [one["kind"] for one in look(watch, answer, made)]

    server = next(member for member in answer.members if member.member_id == "server-0")
    assert kinds(1) == ["link"]
    server.heartbeat_age_seconds = 1.2
    assert kinds(2) == ["silent"]
    server.heartbeat_age_seconds = 0.0
    answer.parameters[0].entry.shards[0].term = 2
    assert kinds(3) == kinds(4) == kinds(5) == []
    assert kinds(6) == ["link"]


def test_a_slow_worker_is_named_where_nobody_waits_for_it() -> None:
    made = seconds({"worker-0": (0.8, 0.1, 0.0, 0.1), "worker-1": (0.95, 0.05, 0.0, 0.0)})
    made.workers[1].pushes["model"] = 3
    found = problems(status(), made)
    assert found.keys() == {"worker-1"} and "3 steps/s, the others 10" in found["worker-1"][1]


def test_a_step_longer_than_a_sample_is_no_division_by_zero() -> None:
    shares = {"worker-0": (0.0, 0.0, 1.0, 0.0), "worker-1": (1.0, 0.0, 0.0, 0.0)}
    assert problems(status(), seconds(shares, pushes=0))["worker-1"][0] == "straggler"


def test_a_failed_snapshot_is_shown_until_one_succeeds() -> None:
    answer = status()
    answer.snapshots.failed, answer.snapshots.last_failure = 2, "No space left on device"
    answer.snapshots.last_failure_time = 500.0
    assert problems(answer)[""] == ("snapshot", "the last snapshot failed (2 attempts failed): No space left on device")
    answer.snapshots.committed.add(directory="1", time=501.0)
    assert problems(answer) == {}


def test_shards_without_copies_are_shown() -> None:
    answer = status()
    del answer.parameters[0].entry.shards[3].backups[:]
    assert problems(answer)[""] == ("copies", "model: 1 of 8 shards lack one of 2 copies")
    answer.parameters[0].entry.shards[3].lost = True
    assert problems(answer)[""] == ("shards", "model: 1 shards are lost")


# --- alerts -----------------------------------------------------------------------------------------------------------


def test_each_alert_names_its_problem_or_says_why_it_has_none() -> None:
    alerts = dict(re.findall(r"- alert: (\w+)\n(?:(?!- alert).*\n)*? +problem: (.*)\n", ALERTS.read_text()))
    assert alerts.keys() == set(re.findall(r"- alert: (\w+)", ALERTS.read_text())) and len(alerts) >= 15
    named = {kind for text in alerts.values() if not text.startswith('"none: ') for kind in text.split(", ")}
    assert named == KINDS.keys() - {"draining"}, "draining is asked for, and no fault"
    assert [name for name, text in alerts.items() if text.startswith('"none: ')] == [
        *("PsdistSchedulerDown", "PsdistLoopBlocked")
    ]


def made_up(kind: str) -> list[tuple[scheduler_pb2.GetStatusResponse, list[scheduler_pb2.RunSample]]]:
    """Return the looks after which there is a problem of this kind."""
    healthy = {f"worker-{rank}": (0.4, 0.1, 0.4, 0.1) for rank in range(3)}
    first, answer, sample = status(), status(), seconds(healthy)
    sample.servers.add(server_id="server-0", seconds=1.0, slices_applied=1)
    answer.time += 70.0
    sample.time = answer.time
    by_id = {member.member_id: member for member in answer.members}
    match kind:
        case "lost":
            by_id["worker-1"].state = "lost"
        case "silent":
            by_id["worker-1"].heartbeat_age_seconds = 2.0
        case "draining":
            by_id["server-1"].draining = True
        case "missing":
            first.workers_min = answer.workers_min = 4
        case "shards":
            answer.parameters[0].entry.shards[3].lost = True
        case "copies":
            del answer.parameters[0].entry.shards[3].backups[:]
        case "rollback":
            answer.events.add(number=101, time=answer.time - 290, kind="rollback", text="to step 7")
        case "snapshot":
            answer.snapshots.last_failure, answer.snapshots.last_failure_time = "No space left on device", 1.0
        case "snapshot_old":
            answer.snapshots.committed.add(directory="1", time=answer.time - 3601)
        case "stalled":
            first.time -= 60.0
            del sample.servers[:]
        case "dropped":
            sample.workers[1].dropped = 2
        case "not_finite":
            sample.workers[1].abstained = 2
        case "straggler":
            sample.workers[1].compute_seconds, sample.workers[1].wait_seconds = 0.8, 0.0
        case "link":
            sample.workers[1].push_seconds, sample.workers[1].wait_seconds = 0.5, 0.0
        case "lag":
            for each in (first, answer):
                each.members[3].statistics.parameters[0].replicas[0].lag_updates = 101
    return [(first, []), (answer, [sample])]


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_each_kind_is_found_and_a_healthy_run_has_none(kind: str) -> None:
    watch = Watch()
    *_, found = [look(watch, answer, *samples) for answer, samples in made_up(kind)]
    assert [one["kind"] for one in found] == [kind][: len(kind)], found


def test_gradients_that_servers_left_out_count_as_the_workers_own() -> None:
    watch, answer = Watch(), status()
    answer.parameters[0].entry.members.add(worker_id="worker-1", rank=1)
    counted = answer.members[3].statistics.parameters[0].workers.add(worker_id="worker-1", non_finite=3)
    assert look(watch, answer) == []  # From before.
    counted.non_finite, answer.time = 5, answer.time + 1
    (found,) = look(watch, answer)
    assert (found["who"], found["kind"]) == ("worker-1", "not_finite") and found["text"].startswith("2 gradients")
    answer.time += 301
    assert [one["kind"] for one in look(watch, answer)] == ["stalled"]


def test_a_worker_whose_work_is_done_is_not_missed() -> None:
    for reason, kinds in {"done": [], "stopped": ["missing"]}.items():
        watch, answer = Watch(), status()
        answer.members[0].state, answer.members[0].reason = "left", reason
        look(watch, answer)
        answer.time += 60
        assert [one["kind"] for one in look(watch, answer)] == kinds


# --- events -----------------------------------------------------------------------------------------------------------


def events(looks: dict[float, list[str]], kind: str = "not_finite") -> list[tuple[float, str, bool]]:
    """Return the events of looks: at each time, the members with a problem of this kind."""
    announcer = Announcer()
    return [
        (now, event.text, event.warning)
        for now, names in looks.items()
        for event in announcer.changes([{"who": who, "kind": kind, "text": f"{who} is bad"} for who in names], now)
    ]


def test_a_problem_that_lasts_is_an_event_and_so_is_its_end() -> None:
    lasting = {now: ["w"] if now < 30 and now != 13 else [] for now in range(0, 100)}
    assert events(lasting) == [(10, "w is bad", True), (89, "over: w is bad", False)]
    assert events(lasting, "straggler") == [(10, "w is bad", False), (89, "over: w is bad", False)]
    assert events(lasting, "lost") == [], "its loss is an event already"
    assert events({now: ["w"] if now % 20 < 9 else [] for now in range(100)}) == []


def test_the_same_problem_of_many_members_is_one_event() -> None:
    everybody = [f"w{number}" for number in range(1000)]
    assert events(dict.fromkeys(range(12), everybody)) == [(10, "w0 is bad; the same holds for 999 others", True)]
