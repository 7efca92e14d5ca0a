"""Used ranges of data that belong to a snapshot. Pure.

A range is in the snapshot if its worker had used it before the cut: if none of the worker's next pushes, as they were
when the range was done, is after the cut. Ranges that were reported without such numbers count as included. So a done
range is remembered until no later cut can come before it. Leases that are still out when everything is written need a
decision too: their range may have been done before the cut and not be reported yet. Any of these decides it: the
worker's next report after the cut, a request for a snapshot in which the worker waits, or a lease given after the cut.

``datasets`` handles leases; ``snapshots`` decides how long to wait for reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from psdist.wire.limits import REPORTS_MAX
from psdist_scheduler.events.cluster_state import DataLease, Identity

#: Number of a worker's next push, by parameter set.
NextPushes = Mapping[str, int]
#: Returns the bound below which the pushes of an incarnation are in the snapshot. Other parameter sets do not matter.
CutBounds = Callable[[Identity], NextPushes]


@dataclass(slots=True)
class UsedRanges:
    """Reports of workers, for as long as they may matter."""

    #: Holder of a done range, and its next pushes when it was done and when it was given, by data set and place.
    _done: dict[tuple[str, int], tuple[Identity, NextPushes, NextPushes]] = field(default_factory=dict)
    #: Next pushes of the worker when it was given a lease, by data set and lease.
    _given: dict[tuple[str, int], NextPushes] = field(default_factory=dict)
    #: Holder of a lease that was returned used in part, and its next pushes when it was given, by data set and lease.
    _in_part: dict[tuple[str, int], tuple[Identity, NextPushes]] = field(default_factory=dict)
    #: Next pushes of each incarnation in its last report.
    _heard: dict[Identity, NextPushes] = field(default_factory=dict)

    def on_given(self, dataset: str, lease: DataLease, now: NextPushes) -> None:
        """Record a lease given to a worker whose next pushes are ``now``."""
        self._given[dataset, lease.lease_id] = now

    def on_done(self, dataset: str, lease: DataLease, at: NextPushes) -> None:
        """Record that a lease's samples were used before the pushes ``at``."""
        given = self._given.pop((dataset, lease.lease_id), {})
        if at:
            self._done[dataset, lease.place] = (lease.worker_id, lease.incarnation), at, given
            if len(self._done) > REPORTS_MAX:
                del self._done[next(iter(self._done))]

    def on_ended(self, dataset: str, lease: DataLease, *, is_used: bool = False) -> None:
        """Record that a lease ended without being done. is_used: it was returned used in part."""
        given = self._given.pop((dataset, lease.lease_id), None)
        if is_used and given:
            self._in_part[dataset, lease.lease_id] = (lease.worker_id, lease.incarnation), given
            if len(self._in_part) > REPORTS_MAX:
                del self._in_part[next(iter(self._in_part))]

    def on_report(self, worker: Identity, now: NextPushes) -> None:
        """Record a worker's report of all done ranges. Its next pushes are ``now``."""
        self._heard[worker] = now

    def forget(self, dataset: str) -> None:
        """Forget a data set that continues from another position."""
        self._done = {key: value for key, value in self._done.items() if key[0] != dataset}
        self._given = {key: value for key, value in self._given.items() if key[0] != dataset}
        self._in_part = {key: value for key, value in self._in_part.items() if key[0] != dataset}

    def forget_before(self, floor: CutBounds, is_live: Callable[[str, int], bool]) -> None:
        """Forget reports that are before every later cut. floor: returns the lowest bound of any later cut."""
        self._done = {key: done for key, done in self._done.items() if _is_after(done[1], floor(done[0]))}
        self._in_part = {key: part for key, part in self._in_part.items() if _is_later(part[1], floor(part[0]))}
        self._heard = {worker: now for worker, now in self._heard.items() if is_live(*worker)}

    def after(self, dataset: str, cut: CutBounds) -> list[int]:
        """Return places that are done, but not in the snapshot."""
        return [
            place
            for (name, place), (worker, at, _) in self._done.items()
            if name == dataset and _is_after(at, cut(worker))
        ]

    def repeated_by(self, dataset: str, leases: Iterable[DataLease], cut: CutBounds) -> int:
        """Return how many more repeated ranges the snapshot has than the data set has now.

        A run that restores the snapshot reads those again that were held when their workers made pushes of the
        snapshot, and are not done in it. Ranges that were used in part count already, but not if all of these pushes
        are after the cut.

        leases: those that are out.
        """
        held = [((lease.worker_id, lease.incarnation), self._given.get((dataset, lease.lease_id))) for lease in leases]
        held += [(w, given) for (n, _), (w, at, given) in self._done.items() if n == dataset and _is_after(at, cut(w))]
        again = sum(numbers is not None and _is_before(numbers, cut(worker)) for worker, numbers in held)
        return again - sum(_is_later(given, cut(w)) for (n, _), (w, given) in self._in_part.items() if n == dataset)

    def undecided(self, dataset: str, leases: Iterable[DataLease], cut: CutBounds) -> list[str]:
        """Return workers that may have used a range before the cut without having reported it."""
        found: dict[str, None] = {}
        for lease in leases:
            worker = (lease.worker_id, lease.incarnation)
            given = self._given.get((dataset, lease.lease_id))
            if given is not None and not _is_before(given, cut(worker)):
                continue
            if not _is_after(self._heard.get(worker, {}), cut(worker)):
                found[lease.worker_id] = None
        return list(found)


def _is_before(numbers: NextPushes, cut: NextPushes) -> bool:
    """Return True if the snapshot has a push of ``numbers`` or a later one."""
    return any(number < cut.get(name, 0) for name, number in numbers.items())


def _is_later(numbers: NextPushes, cut: NextPushes) -> bool:
    """Return True if neither a push of ``numbers`` nor a later one is in the snapshot."""
    return all(name in cut and number >= cut[name] for name, number in numbers.items())


def _is_after(numbers: NextPushes, cut: NextPushes) -> bool:
    """Return True if some of the pushes before ``numbers`` are not in the snapshot."""
    return any(name in cut and number > cut[name] for name, number in numbers.items())
