"""The count of lost and repeated pushes detects each kind of loss and repeat, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.chaos.oracle import Outcome, Push, Verdict, judge, place
from tests.support.chaos.report import ChaosReport, Injected, percentile, table
from tests.support.chaos.workload import EventLog, EventReader

_SLICES, _SLOTS, _WORKERS = 3, 40, 2
_CAPACITY = _SLOTS // _WORKERS


def _pushes(count: int, *, start: int = 0, first: int = 0, outcome: Outcome = "acknowledged") -> list[Push]:
    return [Push(first + n, start, outcome, float(n), n + 0.5) for n in range(count)]


def _apply(weights: NDArray[np.float32], rank: int, number: int, share: float = 1.0, times: int = 1) -> None:
    weights[:, place(number, rank, _WORKERS, _SLOTS)] += share * times


def _weights(pushes: dict[int, list[Push]], share: float = 1.0) -> NDArray[np.float32]:
    weights = np.zeros((_SLICES, _SLOTS), np.float32)
    for rank, mine in pushes.items():
        for push in mine:
            _apply(weights, rank, push.number, share)
    return weights


def _asynchronous() -> dict[int, list[Push]]:
    """Return a run with more pushes than places, a worker that died in the middle of a push, and one that dropped a
    push."""
    first = [*_pushes(50), *_pushes(1, first=50, outcome="unknown"), *_pushes(9, first=51, start=1)]
    return {0: first, 1: [*_pushes(30), *_pushes(1, first=30, outcome="dropped")]}


def test_asynchronous_all_there() -> None:
    pushes = _asynchronous()
    assert judge(pushes, _weights(pushes), _WORKERS, synchronous=False) == Verdict(89, 1, 1, 0, 0)


def test_asynchronous_what_nobody_knows_may_be_missing() -> None:
    pushes = _asynchronous()
    weights = _weights(pushes)
    _apply(weights, 0, 50, times=-1)
    _apply(weights[:1], 1, 30, times=-1)
    assert judge(pushes, weights, _WORKERS, synchronous=False) == Verdict(89, 1, 1, 0, 0)


def test_asynchronous_sees() -> None:
    for rank, number, slices, times, lost, repeated in [
        (1, 7, 1, -1, 1, 0),
        (1, 7, 3, -1, 3, 0),
        (1, 7, 2, 1, 0, 2),
        (0, 50, 1, 1, 0, 1),
        (0, 50, 1, -2, 1, 0),
    ]:
        pushes = _asynchronous()
        weights = _weights(pushes)
        _apply(weights[:slices], rank, number, times=times)
        verdict = judge(pushes, weights, _WORKERS, synchronous=False)
        assert (verdict.lost, verdict.repeated) == (lost, repeated)


def test_what_nobody_pushed_is_seen() -> None:
    pushes = {0: _pushes(3), 1: _pushes(3)}
    weights = _weights(pushes)
    weights[2, _SLOTS - 1] = 1
    assert judge(pushes, weights, _WORKERS, synchronous=False).repeated == 1


def test_half_an_update_is_seen() -> None:
    pushes = {0: _pushes(3), 1: _pushes(3)}
    weights = _weights(pushes)
    weights[0, 0] = 0.5
    verdict = judge(pushes, weights, _WORKERS, synchronous=False)
    assert verdict.lost and verdict.repeated


@pytest.mark.parametrize(("times", "lost", "repeated"), [(0, 0, 0), (-1, 3, 0), (1, 0, 3)])
def test_bsp_of_the_same_workers(times: int, lost: int, repeated: int) -> None:
    pushes = {0: _pushes(70), 1: _pushes(70)}
    weights = _weights(pushes, share=0.5)
    _apply(weights, 0, 69, 0.5, times)
    assert judge(pushes, weights, _WORKERS, synchronous=True) == Verdict(140, 0, 0, lost, repeated)


def _elastic() -> tuple[dict[int, list[Push]], NDArray[np.float32]]:
    """Return steps 0 to 9. Worker 1 died in step 4, was not counted there, and rejoined in step 7."""
    died = Push(4, 0, "unknown", 4.0)
    pushes = {0: _pushes(10), 1: [*_pushes(4), died, *_pushes(3, first=7, start=1)]}
    weights = np.zeros((_SLICES, _SLOTS), np.float32)
    for step in range(10):
        alone = step in (4, 5, 6)
        _apply(weights, 0, step, 1.0 if alone else 0.5)
        if not alone:
            _apply(weights, 1, step, 0.5)
    return pushes, weights


def test_bsp_of_workers_that_come_and_go() -> None:
    pushes, weights = _elastic()
    assert judge(pushes, weights, _WORKERS, synchronous=True) == Verdict(17, 0, 1, 0, 0)
    # In one slice the dying worker's part was counted: that is allowed, too.
    _apply(weights[:1], 0, 4, -0.5)
    _apply(weights[:1], 1, 4, 0.5)
    assert judge(pushes, weights, _WORKERS, synchronous=True) == Verdict(17, 0, 1, 0, 0)


def test_bsp_of_workers_that_come_and_go_sees() -> None:
    for changes, lost, repeated in [
        ([(0, 8, -0.5), (1, 8, 0.5)], 3, 0),  # one push was lost, so the other had the whole step
        ([(0, 5, 1.0)], 0, 3),  # a step of one worker applied twice
        ([(0, 8, 0.5), (1, 8, 0.5)], 0, 6),  # a step of two applied twice
        ([(1, 5, 0.5), (0, 5, -0.5)], 0, 3),  # worker 1 took part in a step that it never pushed
    ]:
        pushes, weights = _elastic()
        for rank, step, share in changes:
            _apply(weights, rank, step, share)
        verdict = judge(pushes, weights, _WORKERS, synchronous=True)
        assert (verdict.lost, verdict.repeated) == (lost, repeated)


def test_bsp_of_workers_that_come_and_go_needs_a_place_for_each_step() -> None:
    pushes, weights = _elastic()
    pushes[0].append(Push(_CAPACITY, 0, "acknowledged", 99.0))
    with pytest.raises(ValueError, match="are too few"):
        judge(pushes, weights, _WORKERS, synchronous=True)


# --- logs -------------------------------------------------------------------------------------------------------------


def test_the_log_over_two_lives(tmp_path: Path) -> None:
    path = tmp_path / "events"
    reader = EventReader(path)
    reader.read()
    log = EventLog(path)
    log.write("B", 0)
    log.write("A", 0)
    log.write("B", 1)
    reader.read()
    assert [(push.number, push.outcome) for push in reader.pushes] == [(0, "acknowledged"), (1, "unknown")]
    again = EventLog(path)
    assert (again.start, again.begun) == (1, 2)
    again.write("B", 2)
    again.write("D", 2)
    again.write("E", "server_lost all of it")
    reader.read()
    assert [(push.number, push.start, push.outcome) for push in reader.pushes] == [
        (0, 0, "acknowledged"),
        (1, 0, "unknown"),
        (2, 1, "dropped"),
    ]
    assert reader.errors == ["server_lost all of it"]


def test_the_log_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("S 1.0 0\nB 2.0 0\nA 2.")
    reader = EventReader(path)
    reader.read()
    assert [push.outcome for push in reader.pushes] == ["unknown"]
    with path.open("a") as file:
        file.write("5 0\n")
    reader.read()
    assert reader.pushes == [Push(0, 0, "acknowledged", 2.0, 2.5)]
    assert reader.acknowledged_since(1.9) == reader.pushes[0]
    assert reader.acknowledged_since(2.0) is None


# --- the report -------------------------------------------------------------------------------------------------------


def test_percentile() -> None:
    for count, part, rank in [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.99, 99), (50, 0.99, 50)]:
        assert percentile([float(n) for n in range(1, count + 1)], part) == rank


def test_a_loss_makes_a_bad_report() -> None:
    report = ChaosReport("x", {}, [Injected("server-kill", "server-0", 1.0, 0.25, 0.3)], Verdict(5, 0, 0, 0, 0))
    assert report.good and "as promised" in table(report) and "250 ms" in table(report)
    for bad in (Verdict(5, 0, 0, 1, 0), Verdict(5, 0, 0, 0, 1)):
        report.verdict = bad
        assert not report.good and "NOT AS PROMISED" in table(report)
    report.verdict, report.equal = Verdict(5, 0, 0, 0, 0), False
    assert not report.good


def test_a_report_counts_strikes_during_a_filling_and_pauses_by_kind() -> None:
    faults = [
        Injected("server-kill", "server-0", 1.0, 0.1, 0.2),
        Injected("server-freeze", "server-1", 2.0, 0.3, 2.5, "target"),
        Injected("server-kill", "server-2", 3.0, 0.1, 0.4, "source"),
    ]
    shown = ChaosReport("x", {}, faults, Verdict(5, 0, 0, 0, 0)).as_json()
    assert shown["faults_by_kind"] == {"server-kill": 2, "server-freeze": 1}
    assert (shown["during_fill"], shown["during_fill_by_role"]) == (2, {"target": 1, "source": 1})
    assert shown["pause_seconds"] == {"p50": 0.4, "p99": 2.5, "max": 2.5}
    assert shown["pause_seconds_by_kind"]["server-kill"] == {"p50": 0.2, "p99": 0.4, "max": 0.4}


def test_an_update_that_is_refused_again_makes_a_bad_report() -> None:
    report = ChaosReport("x", {}, verdict=Verdict(5, 0, 0, 0, 0), refusals=Counter({"update 1": 1}))
    assert report.good and report.as_json()["refused_updates"] == 1
    report.refusals["update 1"] = 2
    assert not report.good and report.as_json()["refused_again"] == 1
    assert "1 of them more than once" in table(report)
