"""Time limit of checks that a dead disk or name server would block for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from psdist.cli.diagnosis.finding import Finding, fail


class Check(NamedTuple):
    """A check, and the remedy if it does not end."""

    name: str
    run: Callable[[], Iterable[Finding]]
    remedy: str


class TimeLimit:
    """Runs checks one after the other, each for at most ``seconds``. has_abandoned: True if a check still runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.has_abandoned = False

    def run(self, check: Check) -> list[Finding]:
        """Return the findings of a check, or that it did not end. Its errors propagate."""
        results: queue.SimpleQueue[list[Finding] | Exception] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put(list(check.run()))
            except Exception as error:  # The caller raises it.
                results.put(error)

        # Nothing can interrupt a thread that waits for a disk, so nobody waits for it.
        threading.Thread(target=work, name=f"doctor {check.name}", daemon=True).start()
        try:
            result = results.get(timeout=self._seconds)
        except queue.Empty:
            self.has_abandoned = True
            return [fail(check.name, f"no answer within {self._seconds:g} s", check.remedy)]
        if isinstance(result, Exception):
            raise result
        return result
