"""Events of strangers pass in turn: a burst immediately, then at a fixed rate, and never more than may wait."""

from __future__ import annotations

import pytest

from psdist.wire.limits import LogPacer, Pacer


def test_a_burst_passes_then_one_in_a_while() -> None:
    pacer = Pacer(per_second=10, burst=3, held_max=100)
    waits = [pacer.wait_seconds(0.0) for _ in range(6)]
    assert waits == pytest.approx([0.0, 0.0, 0.0, 0.1, 0.2, 0.3])


def test_a_burst_passes_again_after_a_quiet_time() -> None:
    pacer = Pacer(per_second=10, burst=3, held_max=100)
    for _ in range(5):
        pacer.wait_seconds(0.0)
    assert pacer.wait_seconds(0.1) == pytest.approx(0.2)
    assert [pacer.wait_seconds(9.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_a_closed_loop_is_held_to_the_rate() -> None:
    """Check twenty callers that each repeat their call as soon as it is answered."""
    pacer, calls = Pacer(per_second=50, burst=20, held_max=256), 0
    due = [0.0] * 20
    while min(due) < 10.0:
        now = min(due)
        wait = pacer.wait_seconds(now)
        assert wait is not None and wait <= 0.4 + 1e-9
        due[due.index(now)] = now + wait
        calls += 1
    assert calls <= 20 + 50 * 10 + 20


def test_no_more_wait_than_may_and_the_others_take_no_turn() -> None:
    pacer = Pacer(per_second=10, burst=1, held_max=4)
    waits = [pacer.wait_seconds(0.0) for _ in range(8)]
    assert waits[:5] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert waits[5:] == [None, None, None]
    assert pacer.wait_seconds(0.3) == pytest.approx(0.2)


def test_one_line_in_a_while_has_the_count_of_all_since() -> None:
    log = LogPacer(60.0)
    assert [log.note(at) for at in (0.0, 1.0, 59.0, 61.0, 62.0)] == [1, 0, 0, 3, 0]
