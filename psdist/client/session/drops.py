"""Dropped pushes: counted, reported, and an error after several in a row.

A push is dropped if its worker was expelled and the others continued without it, or if the run rolled back to a
snapshot. A rollback is no worker's fault. Its report names the lost steps.

Not here: the decision to drop a push (``steps``).
"""

from __future__ import annotations

import logging
from typing import Final, Literal, get_args

from psdist.client.session.membership import Expulsion
from psdist.errors import InvalidArgumentError, PushDroppedError

logger = logging.getLogger("psdist")

#: "warn": a warning, and PushDroppedError for the third in a row. "raise": PushDroppedError for the first. "ignore": a
#: log entry of level INFO. A drop by a rollback is always a warning.
OnDrop = Literal["warn", "raise", "ignore"]
IN_A_ROW_MAX: Final = 3


def check_on_drop(value: object) -> None:
    """Raise InvalidArgumentError if ``value`` is no OnDrop."""
    if value not in get_args(OnDrop):
        raise InvalidArgumentError(f"on_drop={value!r:.60} is unknown: use one of {', '.join(get_args(OnDrop))}")


class DropCounter:
    """Dropped pushes of one handle.

    count: all of them.
    writes: times that weights which the script wrote were dropped before their push.
    """

    def __init__(self, on_drop: OnDrop) -> None:
        self._on_drop = on_drop
        self.count = self.writes = 0
        self._in_a_row = 0

    def not_dropped(self) -> None:
        """End a row of drops, because a push was answered."""
        self._in_a_row = 0

    def add(self, text: str, expulsion: Expulsion) -> None:
        """Count a dropped push, and report it according to ``on_drop``. Raises PushDroppedError.

        text: the push, the cause, and how the worker continues.
        """
        self.count += 1
        if expulsion.rolled_back:
            logger.warning("%s", text)
            return
        self._in_a_row += 1
        if self._on_drop == "raise" or (self._on_drop == "warn" and self._in_a_row >= IN_A_ROW_MAX):
            before, self._in_a_row = self._in_a_row - 1, 0
            row = f" So were the {before} before it." if before else ""
            raise PushDroppedError(
                f"{text}.{row} Its gradients are being discarded: find out what keeps this worker from answering, "
                "raise --worker-timeout, or set on_drop='ignore'"
            )
        self._log(text)

    def add_write(self, text: str, expulsion: Expulsion) -> None:
        """Count weights that were dropped before their push, and report them. Raises PushDroppedError for ``on_drop``
        "raise". text: see ``add``."""
        self.writes += 1
        if self._on_drop == "raise" and not expulsion.rolled_back:
            raise PushDroppedError(f"{text}. Write them again if they are still wanted, or set on_drop='ignore'")
        self._log(text)

    def _log(self, text: str) -> None:
        logger.log(logging.INFO if self._on_drop == "ignore" else logging.WARNING, "%s", text)
