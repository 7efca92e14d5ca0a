"""Dropped pushes: reports, counters and errors. ``test_rejoin`` tests the decision to drop."""

from __future__ import annotations

import logging

import pytest

from psdist.client.session.membership import IN_A_ROW_MAX, DropCounter, Expulsion, OnDrop
from psdist.errors import PushDroppedError

SILENT = Expulsion("it was silent for 31 s, longer than --worker-timeout", rolled_back=False)
BACK = Expulsion("the run went back to snapshot 000000000007-3-0-abc", rolled_back=True)
TEXT = "step 4 of 'p' was dropped: it was silent"


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the levels of all messages."""
    assert {record.getMessage() for record in caplog.records} <= {TEXT}
    return [record.levelno for record in caplog.records]


def raises(drops: DropCounter, expulsion: Expulsion = SILENT) -> str:
    """Drop a push. Returns the error's text, empty if there is none."""
    try:
        drops.add(TEXT, expulsion)
    except PushDroppedError as error:
        return error.message
    return ""


def test_the_third_in_a_row_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    drops = DropCounter("warn")
    texts = [raises(drops) for _ in range(IN_A_ROW_MAX)]
    assert texts[:-1] == ["", ""] and IN_A_ROW_MAX == 3
    for words in (TEXT, "So were the 2 before it.", "--worker-timeout", "on_drop='ignore'"):
        assert words in texts[-1]
    assert levels(caplog) == [logging.WARNING] * 2
    # A script that catches it starts a new row.
    assert [bool(raises(drops)) for _ in range(4)] == [False, False, True, False]
    assert drops.count == 7


@pytest.mark.parametrize("on_drop", ["warn", "raise", "ignore"])
def test_a_run_that_goes_back_is_nobodys_fault(on_drop: OnDrop, caplog: pytest.LogCaptureFixture) -> None:
    drops = DropCounter(on_drop)
    for _ in range(5):
        assert not raises(drops, BACK)
    assert drops.count == 5 and levels(caplog) == [logging.WARNING] * 5
    # It does not make a row, or end one, either.
    drops = DropCounter("warn")
    assert [bool(raises(drops, why)) for why in (SILENT, BACK, SILENT, BACK, SILENT)] == [False] * 4 + [True]


@pytest.mark.parametrize(("on_drop", "level"), [("warn", logging.WARNING), ("ignore", logging.INFO)])
def test_dropped_writes_are_counted_beside_pushes(
    caplog: pytest.LogCaptureFixture, on_drop: OnDrop, level: int
) -> None:
    caplog.set_level(logging.INFO)
    drops = DropCounter(on_drop)
    for _ in range(IN_A_ROW_MAX):
        drops.add_write(TEXT, SILENT)
    assert (drops.writes, drops.count, levels(caplog)) == (IN_A_ROW_MAX, 0, [level] * IN_A_ROW_MAX)


def test_dropped_writes_raise_where_drops_do() -> None:
    drops = DropCounter("raise")
    drops.add_write(TEXT, BACK)
    with pytest.raises(PushDroppedError, match="Write them again if they are still wanted"):
        drops.add_write(TEXT, SILENT)
    assert drops.writes == 2
