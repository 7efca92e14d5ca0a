"""Samples of a run: differences between heartbeats, restarts of members, and what is kept."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from psdist.monitoring.run_json import sample_json
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import PARAMETERS_MAX
from psdist_scheduler import run_status
from psdist_scheduler.run_status import SampleHistory


def worker(compute: float, wait: float, pushes: int, **others: Any) -> pb.SessionRequest.Heartbeat:
    traffic = [
        pb.WorkerTotals.Traffic(transport="shm", push_codec="int8", pull_codec="float32", push_bytes=pushes * 10)
    ]
    totals = pb.WorkerTotals(
        compute_seconds=compute, wait_seconds=wait, pushes={"model": pushes}, traffic=traffic, **others
    )  # fmt: skip
    return pb.SessionRequest.Heartbeat(totals=totals)


def server(applied: int, seconds: float) -> pb.SessionRequest.Heartbeat:
    heartbeat = pb.SessionRequest.Heartbeat()
    heartbeat.statistics.resident_bytes = 7
    heartbeat.statistics.parameters.add(parameters="model", applied_slices=applied, apply_seconds=seconds, bytes_held=3)
    return heartbeat


def observe(history: SampleHistory, *heartbeats: pb.SessionRequest.Heartbeat) -> None:
    """Take a sample after each heartbeat of a worker, one a second."""
    for time, heartbeat in enumerate(heartbeats):
        history.on_heartbeat("worker-0", heartbeat, time)
        history.on_tick(time, time)


def test_a_sample_has_the_rates_between_two_heartbeats() -> None:
    history = SampleHistory()
    history.on_heartbeat("worker-0", worker(1.0, 1.0, 10), 0.0)
    history.on_heartbeat("server-0", server(100, 0.5), 0.0)
    history.on_tick(0.0, 1000.0)
    history.on_heartbeat(
        "worker-0", worker(2.5, 1.5, 30, reported={"loss": math.nan}, reported_step=9, abstained=2), 1.9
    )
    history.on_heartbeat("server-0", server(300, 1.5), 2.0)
    history.on_tick(0.9, 1001.0)  # Not due yet.
    history.on_tick(2.0, 1002.0)
    first, second = (sample_json(sample) for sample in history.after(0))
    assert first == {"number": 1, "time": 1000.0, "workers": {}, "servers": {}}
    assert second["workers"]["worker-0"] == {
        "seconds": 2.0,
        "phases": {"compute": 0.75, "push": 0.0, "wait": 0.25, "pull": 0.0},
        "steps_per_second": {"model": 10.0},
        "traffic": [
            {
                "transport": "shm", "push_codec": "int8", "pull_codec": "float32",
                "push_bytes_per_second": 100, "pull_bytes_per_second": 0,
            }
        ],
        "dropped": 0,
        "abstained": 2,
        "staleness": 0,
        "reported_step": 9,
        "reported": {"loss": "nan"},
        "samples_per_second": 0.0,
    }  # fmt: skip
    assert second["servers"]["server-0"] == {
        "seconds": 2.0, "slices_per_second": 100.0, "apply_share": 0.5,
        "waiting_bytes": 3, "resident_bytes": 7, "lag_updates": 0, "idle_cores": None,
    }  # fmt: skip
    json.dumps(second, allow_nan=False)
    assert [sample.number for sample in history.after(1)] == [2]
    assert [sample.number for sample in history.after(99)] == [1, 2]  # Of an earlier scheduler.


def test_a_member_that_starts_again_counts_from_zero() -> None:
    history = SampleHistory()
    observe(history, worker(50.0, 0.0, 100), worker(2.0, 0.0, 4))
    (period,) = history.after(1)[0].workers
    assert (period.seconds, period.pushes["model"]) == (2.0, 4)
    history.forget("worker-0")
    history.on_heartbeat("worker-0", worker(9.0, 0.0, 9), 2.0)
    history.on_tick(2.0, 2.0)
    assert not history.after(2)[0].workers


def changes(compute: float, **pushes: int) -> pb.SessionRequest.Heartbeat:
    totals = pb.WorkerTotals(compute_seconds=compute, pushes=pushes)
    return pb.SessionRequest.Heartbeat(totals=totals, changed_only=True)


def periods(history: SampleHistory) -> list[dict[str, int]]:
    return [dict(one.pushes) for sample in history.after(0) for one in sample.workers]


def test_counts_that_a_heartbeat_lacks_have_not_grown() -> None:
    history = SampleHistory()
    observe(history, worker(0.0, 0.0, 5), changes(1.0, model=7, other=1), changes(2.0), changes(3.0, model=8))
    assert periods(history) == [{"model": 2, "other": 1}, {"model": 0, "other": 0}, {"model": 1, "other": 0}]
    history.on_heartbeat("worker-0", worker(4.0, 0.0, 9), 4.0)  # A new stream: its first one has all counts.
    history.on_tick(4.0, 4.0)
    assert periods(history)[-1] == {"model": 1, "other": 0}


def test_growth_of_several_heartbeats_adds_up() -> None:
    history = SampleHistory()
    for time, heartbeat in [(0.0, worker(0.0, 0.0, 5)), (1.0, changes(1.0, model=7)), (1.5, changes(2.0, model=8))]:
        history.on_heartbeat("worker-0", heartbeat, time)
        history.on_tick(time, time)
    history.on_tick(2.0, 2.0)
    assert periods(history) == [{"model": 2}, {"model": 1}]


def test_changes_without_their_first_counts_are_no_growth() -> None:
    history = SampleHistory()
    observe(history, worker(math.nan, 0.0, 5), changes(1.0, model=700), changes(2.0, model=701))
    assert periods(history) == []


def test_sets_that_are_not_trained_any_more_are_not_named() -> None:
    history = SampleHistory()
    history.on_heartbeat("worker-0", worker(0.0, 0.0, 0), 0.0)
    history.on_tick(0.0, 0.0)
    for time in range(1, 63):
        history.on_heartbeat("worker-0", changes(time, **({"model": 1} if time == 1 else {"other": time})), time)
        history.on_tick(time, time)
    named = [set(period) for period in periods(history)]
    assert named[0] == {"model"} and named[58] == {"model", "other"} and named[-1] == {"other"}


def test_a_worker_cannot_name_ever_more_sets() -> None:
    history = SampleHistory()
    history.on_heartbeat("worker-0", worker(0.0, 0.0, 0), 0.0)
    for time in range(3):
        names = {f"p{time}-{number}": 1 for number in range(PARAMETERS_MAX)}
        history.on_heartbeat("worker-0", changes(time, **names), time)
        history.on_tick(time, time)
    assert max(map(len, periods(history))) <= PARAMETERS_MAX


def test_the_first_bytes_count_and_bytes_that_move_to_another_transport_do_not_count_again() -> None:
    history = SampleHistory()
    for time, (transport, sent) in enumerate([("grpc", 0), ("shm", 100), ("shm", 160), ("tcp", 200)]):
        heartbeat = worker(time, 0.0, time)
        heartbeat.totals.traffic[0].transport = transport
        heartbeat.totals.traffic[0].push_bytes = sent
        history.on_heartbeat("worker-0", heartbeat, time)
        history.on_tick(time, time)
    sizes = [[(one.transport, one.push_bytes) for one in sample.workers[0].traffic] for sample in history.after(1)]
    assert sizes == [[("shm", 100)], [("shm", 60)], [("tcp", 40)]]


def test_implausible_totals_are_not_kept() -> None:
    for heartbeat in [
        worker(math.inf, 0.0, 1),
        worker(-1.0, 0.0, 1),
        worker(math.nan, 0.0, 1),
        worker(1.0, 0.0, 1, reported={"n" * 2000: 1.0}),
        worker(1.0, 0.0, 1, samples_per_second=math.nan),
        worker(1.0, 0.0, 1, samples_per_second=1e308),
        worker(1e308, 0.0, 1),
    ]:
        history = SampleHistory()
        observe(history, worker(0.0, 0.0, 0), heartbeat)
        assert not history.after(1)[0].workers


def test_kept_samples_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "SAMPLES_KEPT", 5)
    history = SampleHistory()
    for time in range(10):
        history.on_tick(time, time)
    assert [sample.number for sample in history.after(0)] == [6, 7, 8, 9, 10]


def test_kept_samples_are_limited_in_bytes_whatever_workers_report(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = {f"{number:01000}": 1.0 for number in range(10)}
    monkeypatch.setattr(run_status, "BYTES_KEPT", 40_000)
    history = SampleHistory()
    for time in range(10):
        history.on_heartbeat("worker-0", worker(time, 0.0, time, reported=reported), time)
        history.on_tick(time, time)
    assert [sample.number for sample in history.after(0)] == [8, 9, 10]  # Some 10 kB each.


def test_rates_are_of_the_last_seconds() -> None:
    history = SampleHistory()
    beats = [worker(0.75 * second, 0.25 * second, 2 * second + max(0, second - 20)) for second in range(31)]
    for beat in beats:
        beat.totals.pull_seconds = beat.totals.wait_seconds
        beat.totals.compute_seconds -= beat.totals.wait_seconds
    observe(history, *beats)
    rates = history.rates()["worker-0"]
    assert (rates.seconds, rates.waiting_seconds, dict(rates.pushes)) == (10.0, 5.0, {"model": 30})
    rare = SampleHistory()
    for time in range(0, 61, 20):
        rare.on_heartbeat("worker-0", worker(10.0 * time, 10.0 * time, time), time)
        for tick in range(20):
            rare.on_tick(time + tick, time + tick)
    assert dict(rare.rates()["worker-0"].pushes) == {"model": 20}
