"""Dropped pushes: counted, reported, and an error after several in a row.

A push is dropped when its worker was expelled and the others have gone on without it, or when the run rolled back to a
snapshot. A rollback is no worker's fault, and is reported with the steps that are lost.

Not here: when a push is dropped (``parameters``).
"""

from __future__ import annotations

import logging
from typing import Final, Literal, get_args

from psdist.client.session.membership import Expulsion
from psdist.errors import InvalidArgumentError, PushDroppedError

logger = logging.getLogger("psdist")

#: "warn": a warning, and PushDroppedError for the third in a row. "raise": PushDroppedError at once. "ignore": a log
#: entry of level INFO. A drop because the run went back to a snapshot is a warning with each of them.
OnDrop = Literal["warn", "raise", "ignore"]
IN_A_ROW_MAX: Final = 3


def check_on_drop(value: object) -> None:
    """Raises InvalidArgumentError if ``value`` is no OnDrop."""
    if value not in get_args(OnDrop):
        raise InvalidArgumentError(f"on_drop={value!r:.60} is unknown: use one of {', '.join(get_args(OnDrop))}")


class DropCounter:
    """The dropped pushes of one handle. count: all of them."""

    def __init__(self, on_drop: OnDrop) -> None:
        self._on_drop = on_drop
        self.count = 0
        self._in_a_row = 0

    def not_dropped(self) -> None:
        """Ends a row of drops: a push was answered."""
        self._in_a_row = 0

    def add(self, text: str, expulsion: Expulsion) -> None:
        """Counts a dropped push, and reports it as ``on_drop`` says. text: which push, why, and how the worker goes on.
        Raises PushDroppedError."""
        self.count += 1
        if expulsion.rolled_back:
            logger.warning("%s", text)
            return
        self._in_a_row += 1
        if self._on_drop == "raise" or (self._on_drop == "warn" and self._in_a_row >= IN_A_ROW_MAX):
            before, self._in_a_row = self._in_a_row - 1, 0
            row = f" So were the {before} before it." if before else ""
            raise PushDroppedError(
                f"{text}.{row} What this worker computes does not count while that goes on: find out what keeps it "
                "from answering, raise --worker-timeout, or set on_drop='ignore'"
            )
        logger.log(logging.INFO if self._on_drop == "ignore" else logging.WARNING, "%s", text)
