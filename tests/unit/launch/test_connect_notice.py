"""Notices of a launcher that waits for workers."""

from __future__ import annotations

from psdist.launcher.runner import ConnectNotice


def test_a_long_import_is_said_after_some_seconds_and_then_less_and_less_often() -> None:
    notice = ConnectNotice()
    said = [second for second in range(0, 300) if notice.text([0, 1], float(second))]
    assert said == [5, 15, 35, 75, 135, 195, 255]


def test_a_quick_start_says_nothing_and_a_worker_that_starts_again_is_news() -> None:
    notice = ConnectNotice()
    assert not any(notice.text([0], float(second)) for second in range(5))
    assert not notice.text([], 5.0)
    assert not notice.text([1], 100.0)
    assert notice.text([1], 105.0) == "worker 1: importing, 5 s (psdist.init() is not called yet)"


def test_who_is_waited_for_is_named() -> None:
    for ranks, names in [
        ([3], "worker 3"),
        ([0, 1], "workers 0 and 1"),
        ([0, 1, 2, 5], "workers 0, 1, 2 and 5"),
        (range(9), "workers 0, 1, 2, 3 and 5 others"),
    ]:
        notice = ConnectNotice()
        notice.text(ranks, 0.0)
        assert notice.text(ranks, 9.0) == f"{names}: importing, 9 s (psdist.init() is not called yet)"
