"""Policy values: when a run takes snapshots, and which ones it keeps. The scheduler acts on them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from psdist.errors import ConfigurationError

STEPS_MAX: Final = 1 << 40
#: With shorter intervals an attempt would always be in progress.
SECONDS_MIN: Final = 0.1
SECONDS_MAX: Final = 366 * 86400.0
KEEP_MAX: Final = 1_000_000

_INTERVAL = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_STEPS: Final = ("", "step", "steps")
_UNITS: Final = ((3600, "h"), (60, "min"))


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When snapshots are taken, and which are kept.

    steps, seconds: interval; at most one of them is set. Without either, snapshots are taken on demand and at the end.
    keep_last: number of newest snapshots to keep, at least 1.
    keep_every: keep the first snapshot of every this many steps forever; 0 for none.
    at_end: True to take one when the run ends, if anything was trained since the last one.

    Raises ConfigurationError for a value out of range.
    """

    steps: int = 0
    seconds: float = 0.0
    keep_last: int = 3
    keep_every: int = 0
    at_end: bool = True

    def __post_init__(self) -> None:
        if self.steps and self.seconds:
            raise ConfigurationError(f"an interval is in steps or in seconds, not both: {self.steps}, {self.seconds:g}")
        _check_range("steps", self.steps, 0, STEPS_MAX)
        _check_range("keep_last", self.keep_last, 1, KEEP_MAX)
        _check_range("keep_every", self.keep_every, 0, STEPS_MAX)
        if self.seconds:
            _check_range("seconds", self.seconds, SECONDS_MIN, SECONDS_MAX)

    @property
    def interval(self) -> str:
        """Interval in the form that ``parse_interval`` reads; empty if there is none."""
        if self.steps:
            return f"{self.steps}steps"
        return f"{self.seconds:.10g}s" if self.seconds else ""

    @property
    def every(self) -> str:
        """Interval as text: ``every 100 steps``, ``every 10 min``; empty if there is none."""
        if self.steps:
            return f"every {_counted(self.steps, 'step')}"
        size, unit = next(((size, unit) for size, unit in _UNITS if self.seconds % size == 0), (1, "s"))
        return f"every {self.seconds / size:g} {unit}" if self.seconds else ""

    @property
    def text(self) -> str:
        """Policy as text: ``every 100 steps and at the end, the last 3 kept``."""
        kept = f"the last {self.keep_last} kept" if self.keep_last > 1 else "the last one kept"
        kept += f", and one of every {_counted(self.keep_every, 'step')}" if self.keep_every else ""
        return f"{self.when}, {kept}"

    @property
    def when(self) -> str:
        """Times of snapshots as text: ``every 100 steps and at the end``."""
        ends = ("at the end",) if self.at_end else ()
        return " and ".join(filter(None, (self.every, *ends))) or "on demand"


def parse_interval(text: str) -> tuple[int, float]:
    """Parse an interval to (steps, seconds), one of them 0.

    text: such as ``100``, ``100steps``, ``30s``, ``5m``, ``2h`` or ``1d``; ``0`` is no interval.
    Raises ConfigurationError.
    """
    found = _INTERVAL.fullmatch(text.strip().lower())
    number, unit = (found[1], found[2]) if found else ("", "")
    if found is None or (unit not in _STEPS and unit not in _SECONDS) or (unit in _STEPS and "." in number):
        raise ConfigurationError(f"{text!r:.80} is not an interval: write steps, as 100, or a time, as 30s, 5m or 2h")
    steps = int(number) if unit in _STEPS else 0
    seconds = 0.0 if unit in _STEPS else float(number) * _SECONDS[unit]
    policy = SavePolicy(steps, seconds)
    return policy.steps, policy.seconds


def _check_range(name: str, value: float, minimum: float, maximum: float) -> None:
    if not math.isfinite(value) or not minimum <= value <= maximum:
        raise ConfigurationError(f"{name} {value} is not possible: it must be {minimum:g} to {maximum:,.0f}")


def _counted(count: int, noun: str) -> str:
    return noun if count == 1 else f"{count:,} {noun}s"


#: Policy of a run with a storage, unless flags override it.
DEFAULT_POLICY: Final = SavePolicy(seconds=600.0)
