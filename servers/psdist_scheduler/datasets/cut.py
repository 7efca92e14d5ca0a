"""Which ranges of data are in a snapshot. Pure.

A range is in the snapshot if its worker had used it before the cut: if none of the worker's next pushes, as they were
when the range was done, is after the cut. Ranges that were reported without such numbers count as in it. So a range
that was reported as done is remembered until no later cut can come before it. Leases that are out when everything is
written need a decision too: their range may have been done before the cut and not be reported yet. The worker's next
report after the cut decides, or its waiting in a request for a snapshot, or that the lease was given after the cut.

Not here: leases (``datasets``), what is waited for and how long (``schedule``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from psdist.wire.limits import REPORTS_MAX
from psdist_scheduler.events.records import DataLease, Identity

#: By parameters, the number of a worker's next push.
Next = Mapping[str, int]
#: By incarnation, the bound below which its pushes are in the snapshot. Other parameter sets do not matter.
Cut = Callable[[Identity], Next]


@dataclass(slots=True)
class DataCut:
    """What workers reported, while it may matter."""

    #: By data set and place: whose the range was, and its next pushes when it was done.
    _done: dict[tuple[str, int], tuple[Identity, Next]] = field(default_factory=dict)
    #: By data set and lease: its worker's next pushes when it was given.
    _given: dict[tuple[str, int], Next] = field(default_factory=dict)
    #: By incarnation, its next pushes in its last report.
    _heard: dict[Identity, Next] = field(default_factory=dict)

    def on_given(self, dataset: str, lease: DataLease, now: Next) -> None:
        """A lease is given to a worker whose next pushes are ``now``."""
        self._given[dataset, lease.lease_id] = now

    def on_done(self, dataset: str, lease: DataLease, at: Next) -> None:
        """A lease's samples were used before the pushes ``at``."""
        self._given.pop((dataset, lease.lease_id), None)
        if at:
            self._done[dataset, lease.place] = ((lease.worker_id, lease.incarnation), at)
            if len(self._done) > REPORTS_MAX:
                del self._done[next(iter(self._done))]

    def on_ended(self, dataset: str, lease: DataLease) -> None:
        """A lease ended unused."""
        self._given.pop((dataset, lease.lease_id), None)

    def on_report(self, worker: Identity, now: Next) -> None:
        """A worker's next pushes are ``now``, and it has reported all that is done."""
        self._heard[worker] = now

    def forget(self, dataset: str) -> None:
        """A data set goes on from elsewhere."""
        self._done = {key: value for key, value in self._done.items() if key[0] != dataset}
        self._given = {key: value for key, value in self._given.items() if key[0] != dataset}

    def settle(self, floor: Cut, is_live: Callable[[str, int], bool]) -> None:
        """Forgets what is before every cut to come. ``floor``: what no later cut is below."""
        self._done = {key: (worker, at) for key, (worker, at) in self._done.items() if _is_after(at, floor(worker))}
        self._heard = {worker: now for worker, now in self._heard.items() if is_live(*worker)}

    def after(self, dataset: str, cut: Cut) -> list[int]:
        """Places that are done, but not in the snapshot."""
        return [
            place
            for (name, place), (worker, at) in self._done.items()
            if name == dataset and _is_after(at, cut(worker))
        ]

    def undecided(self, dataset: str, leases: Iterable[DataLease], cut: Cut) -> list[str]:
        """Workers that may have used a range before the cut without having reported that."""
        found: dict[str, None] = {}
        for lease in leases:
            worker = (lease.worker_id, lease.incarnation)
            given = self._given.get((dataset, lease.lease_id))
            if given is not None and all(number >= cut(worker).get(name, 0) for name, number in given.items()):
                continue
            if not _is_after(self._heard.get(worker, {}), cut(worker)):
                found[lease.worker_id] = None
        return list(found)


def _is_after(numbers: Next, cut: Next) -> bool:
    """Whether some of the pushes before ``numbers`` are not in the snapshot."""
    return any(name in cut and number > cut[name] for name, number in numbers.items())
