"""A run as ``psdist top`` knows it: the last status, the samples of some minutes, and series made from them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

#: Samples that are kept, one a second: as many as the scheduler keeps.
SAMPLES_KEPT: Final = 300
#: Newest samples over which rates and phases are averaged.
_RECENT_SAMPLES: Final = 5
_PHASES: Final = ("compute", "push", "wait", "pull")


class RunHistory:
    """The JSON forms of a run: ``status`` is None before the first one, ``trouble`` says why it is not the newest."""

    def __init__(self) -> None:
        self.status: dict[str, Any] | None = None
        self.trouble = ""
        #: The scheduler's clock at the last status, in seconds since 1970.
        self.time = 0.0
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_KEPT)

    @property
    def newest_number(self) -> int:
        """Number of the newest sample; 0 if there is none."""
        return int(self.samples[-1]["number"]) if self.samples else 0

    def add(self, status: dict[str, Any], samples: Iterable[dict[str, Any]], time: float) -> None:
        """Take an answer of the scheduler. samples: those after ``newest_number``, oldest first."""
        self.status, self.trouble, self.time = status, "", time
        for sample in samples:
            if sample["number"] <= self.newest_number:  # The scheduler restarted, and counts from 1 again.
                self.samples.clear()
            self.samples.append(sample)

    def recent_workers(self) -> dict[str, list[dict[str, Any]]]:
        """Return the newest periods of each worker, oldest first."""
        return self._recent("workers")

    def recent_servers(self) -> dict[str, list[dict[str, Any]]]:
        """Return the newest periods of each server, oldest first."""
        return self._recent("servers")

    def _recent(self, role: str) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for sample in list(self.samples)[-_RECENT_SAMPLES:]:
            for member_id, period in sample[role].items():
                found.setdefault(member_id, []).append(period)
        return found

    def reported_series(self) -> dict[str, list[float]]:
        """Return, by name, the values that scripts reported: the mean of all workers in each sample."""
        found: dict[str, list[float]] = {}
        for sample in self.samples:
            values: dict[str, list[float]] = {}
            for period in sample["workers"].values():
                for name, value in period["reported"].items():
                    if isinstance(value, int | float):  # NaN and infinities are texts.
                        values.setdefault(name, []).append(value)
            for name, each in values.items():
                found.setdefault(name, []).append(sum(each) / len(each))
        return found

    def step_series(self, parameters: str, *, is_shared: bool) -> list[float]:
        """Return a parameter set's steps per second by sample. is_shared: True if workers take each step together, so
        that the fastest worker's rate counts; otherwise the sum counts."""
        combine = max if is_shared else sum
        return [
            combine([period["steps_per_second"].get(parameters, 0.0) for period in sample["workers"].values()])
            for sample in self.samples
            if sample["workers"]
        ]

    def sum_series(self, key: str) -> list[float]:
        """Return the sum over workers of a number in their periods, by sample."""
        return [sum(one[key] for one in sample["workers"].values()) for sample in self.samples if sample["workers"]]

    def traffic_series(self, key: str) -> list[float]:
        """Return the bytes per second of all workers by sample; ``key`` is push_bytes_per_second or pull_..."""
        return [
            sum(each[key] for period in sample["workers"].values() for each in period["traffic"])
            for sample in self.samples
            if sample["workers"]
        ]


def mean(periods: Sequence[dict[str, Any]], *keys: str) -> float:
    """Return the mean of a number in these periods, weighted by their lengths. keys: the path to the number."""
    total = 0.0
    for period in periods:
        value: Any = period
        for key in keys:
            value = value[key]
        total += value * period["seconds"]
    seconds: float = sum(period["seconds"] for period in periods)
    return total / seconds


def phases(periods: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the shares of a worker's time by phase; they add up to 1."""
    return {phase: mean(periods, "phases", phase) for phase in _PHASES}
