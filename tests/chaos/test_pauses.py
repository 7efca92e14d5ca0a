"""Each pause of training counts for the fault that caused it."""

from __future__ import annotations

import pytest

from tests.support.chaos.report import Injected, longest_pauses

_STEADY = [0.1 * number for number in range(11)]


def _faults(*faults: tuple[str, float]) -> list[Injected]:
    return [Injected(kind, "server-0", at) for kind, at in faults]


def _moments(*gaps: tuple[float, float]) -> list[float]:
    """Return acknowledgements at 0, 0.1, ..., 1, except those within a gap."""
    return [moment for moment in _STEADY if not any(begin < moment < end for begin, end in gaps)]


def test_a_pause_counts_for_its_fault() -> None:
    for faults, gaps, expected in [
        ([("server-kill", 0.15)], [], [0.1]),
        ([("server-kill", 0.15)], [(0.1, 0.4)], [0.3]),
        ([("server-kill", 0.15)], [(0.5, 0.9)], [0.4]),  # later, as while a shard changes its primary
        ([("server-kill", 0.15), ("server-kill", 0.55)], [(0.1, 0.3), (0.5, 0.9)], [0.2, 0.4]),
        ([("server-kill", 0.15), ("server-kill", 0.25)], [(0.1, 0.6)], [0.5, 0.5]),
        ([("server-kill", 0.15), ("server-freeze", 0.25)], [(0.1, 0.6)], [0.0, 0.5]),
        ([("server-freeze", 0.15), ("server-kill", 0.55)], [(0.1, 0.6)], [0.5, 0.1]),
        ([("server-kill", 0.45)], [(0.0, 0.4)], [0.1]),  # before it
    ]:
        assert longest_pauses(_moments(*gaps), _faults(*faults), 1.0) == pytest.approx(expected)


def test_pauses_after_the_end_do_not_count() -> None:
    assert longest_pauses([0.0, 0.1, 0.2, 9.0], _faults(("server-kill", 0.05)), 0.15) == pytest.approx([0.1])
