"""Data sets whose ranges are leased to workers, so that every sample is used. Pure.

The ranges of all data epochs are places on one line (``DatasetSpec.places``) and are given out from its beginning. A
place is free, leased to one incarnation of a worker, or over: done, or given up. There is no stop between data epochs.
Ranges of the next epoch are given out while the last ones of this epoch are still leased. Otherwise, in BSP, a worker
that waits for data while another one waits for its gradient would stop both. For the same reason nobody waits at the
end: when no range is left, workers get that answer even if others still hold ranges.

A lease ends when its holder reports it as done or returns it, or when the holder's incarnation ends. Then the place is
free again and, being the lowest, next to be given. So each range is done exactly once while nobody dies. Otherwise it
is done at least once, as long as a worker returns for ranges held by one that died after the others had left. Ranges
whose holders died more than ``retries_max`` times are the exception: they are given up, and counted.

Invariants: Every place is in one state. Lease ids grow and are never reused. A report about an ended lease has no
effect. ``repeated`` counts the leases of places that a lost worker had before, unless they were returned unused, and
those that were returned used in part. In a snapshot it includes the ranges that were held while pushes of the snapshot
were made, and are not done in it.

``psdist.data`` maps ranges to samples, ``members`` knows who is live, ``cluster`` and the store make changes
durable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from psdist.errors import (
    FencedError,
    InvalidArgumentError,
    LimitExceededError,
    SettingsMismatchError,
    UnknownDatasetError,
)
from psdist.optim import MEANS_SUFFIX
from psdist.snapshots.format import DatasetState, Manifest
from psdist.types import DataPosition
from psdist.wire.limits import DATASETS_MAX, LEASES_MAX, REPORTS_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import EqualContributions
from psdist_scheduler.decide.cluster_state import DataLease, DatasetRecord, Identity, Member
from psdist_scheduler.decide.effects import Answer, Done, Effect, LogEvent, Notice
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry
from psdist_scheduler.decide.snapshot_catalog import Resume


class LeasedDataset:
    """One data set."""

    def __init__(self, record: DatasetRecord) -> None:
        self.spec = record.spec
        self._free = list(record.free)
        self._leases = {lease.lease_id: lease for lease in record.leases}
        self._attempts = dict(record.attempts)
        self.repeated = record.repeated
        self.failed = record.failed
        self._given = record.given

    @property
    def record(self) -> DatasetRecord:
        """State that a restart needs."""
        return DatasetRecord(
            self.spec,
            tuple(self._free),
            tuple(self._leases.values()),
            tuple(sorted(self._attempts.items())),
            self.repeated,
            self.failed,
            self._given,
        )

    @property
    def leases(self) -> tuple[DataLease, ...]:
        """Leases that are out."""
        return tuple(self._leases.values())

    @property
    def position(self) -> DataPosition:
        """Current position. Leased ranges are not done."""
        return self.position_without(())

    def position_without(self, places: Iterable[int], again: int = 0) -> DataPosition:
        """Return the position as it would be without ``places``, which are done.

        again: ranges that count as repeated there, but not now.
        """
        repeated = self.repeated + again
        taken = [(place, place + 1) for place in (*(lease.place for lease in self.leases), *places)]
        unfinished = sorted([*self._free, *taken])
        if not unfinished:
            return DataPosition(self.spec.places // self.spec.ranges, (), repeated, self.failed)
        data_epoch = unfinished[0][0] // self.spec.ranges
        base = data_epoch * self.spec.ranges
        over = _gaps(unfinished, base, self.spec.places)
        done = tuple((start - base, stop - start) for start, stop in over)
        return DataPosition(data_epoch, done, repeated, self.failed)

    @property
    def standing(self) -> ef.DatasetStanding:
        """Settings, position and number of leases that are out."""
        return ef.DatasetStanding(self.spec, self.position, len(self._leases))

    @property
    def finished(self) -> bool:
        """True if every range is over."""
        return not self._free and not self._leases

    def held_by(self, worker: Member) -> list[DataLease]:
        """Return the leases of this incarnation of the worker, oldest first."""
        return [lease for lease in self._leases.values() if lease.identity == worker.identity]

    def check_ends(self, ids: Iterable[int], worker: Member) -> None:
        """Raise FencedError if another incarnation holds one of the leases, and InvalidArgumentError if one never
        existed."""
        for lease_id in ids:
            if not 1 <= lease_id <= self._given:
                raise InvalidArgumentError(
                    f"lease {lease_id} of data set {self.spec.name!r} was never given: report only what LeaseRange gave"
                )
            lease = self._leases.get(lease_id)
            if lease is not None and lease.identity != worker.identity:
                raise FencedError(
                    f"lease {lease_id} of data set {self.spec.name!r} is held by {lease.worker_id} (incarnation "
                    f"{lease.incarnation}), not by {worker.member_id} (incarnation {worker.incarnation})",
                    lease_id=lease_id,
                )

    def validate(self) -> None:
        bounds = [bound for stretch in self._free for bound in stretch]
        assert all(low < high for low, high in pairwise(bounds)), f"free: {self._free}"
        assert not bounds or (bounds[0] >= 0 and bounds[-1] <= self.spec.places)
        places = [lease.place for lease in self._leases.values()]
        assert len(set(places)) == len(places), "a place is leased twice"
        assert not any(self._is_free(place) for place in places), "a place is free and leased"
        assert all(self._is_free(place) and count > 0 for place, count in self._attempts.items())
        assert all(1 <= lease_id <= self._given for lease_id in self._leases)

    def acquire(self, worker: Member) -> DataLease | None:
        """Lease the lowest free place. Returns None if there is none."""
        if not self._free:
            return None
        place, stop = self._free[0]
        self._free[:1] = [(place + 1, stop)] if place + 1 < stop else []
        attempt = self._attempts.pop(place, 0)
        self.repeated += attempt > 0
        self._given += 1
        lease = DataLease(self._given, place, worker.member_id, worker.incarnation, attempt)
        self._leases[lease.lease_id] = lease
        return lease

    def finish(self, lease_id: int) -> DataLease | None:
        """End a lease whose samples are used. Returns None, without effect, if it had ended before."""
        return self._leases.pop(lease_id, None)

    def release(self, lease_id: int, *, is_used: bool) -> DataLease | None:
        """End a lease whose samples were not all used. Returns None, without effect, if it had ended before.

        is_used: some of them may have been.
        """
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            # A place that was lost before counts again with its next lease.
            self.repeated += is_used - (lease.attempt > 0)
            self._put_back(lease.place, lease.attempt)
        return lease

    def lose(self, is_live: Callable[[str, int], bool]) -> tuple[list[DataLease], list[DataLease]]:
        """End the leases of workers that are gone. Returns those whose range is given out again, and those given up."""
        lost = [lease for lease in self._leases.values() if not is_live(*lease.identity)]
        for lease in lost:
            del self._leases[lease.lease_id]
        again = [lease for lease in lost if lease.attempt < self.spec.retries_max]
        for lease in again:
            self._put_back(lease.place, lease.attempt + 1)
        self.failed += len(lost) - len(again)
        return again, [lease for lease in lost if lease.attempt >= self.spec.retries_max]

    def go_to(self, position: DataPosition) -> None:
        """Continue from ``position``, which voids all leases. Raises InvalidArgumentError if there is no such
        position."""
        ranges, places = self.spec.ranges, self.spec.places
        base = position.data_epoch * ranges
        if base > places:
            raise self._no_position(f"data epoch {position.data_epoch} of {places // ranges}")
        over = [(base + first, base + first + count) for first, count in position.done]
        bounds = [bound for stretch in over for bound in stretch]
        if any(low >= high for low, high in pairwise(bounds)):
            raise self._no_position("stretches that are empty, or not ascending and apart")
        if bounds and bounds[-1] > places:
            raise self._no_position(f"a stretch beyond the last of {places} ranges")
        self._free = _gaps(over, base, places)
        self._leases.clear()
        self._attempts.clear()
        self.repeated, self.failed = position.repeated_ranges, position.failed_ranges

    def _put_back(self, place: int, attempt: int) -> None:
        if attempt:
            self._attempts[place] = attempt
        index = bisect_right(self._free, (place, place))
        start, stop = place, place + 1
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

    def _is_free(self, place: int) -> bool:
        index = bisect_right(self._free, place, key=lambda stretch: stretch[0])
        return index > 0 and place < self._free[index - 1][1]

    def _no_position(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"the position is not valid for data set {self.spec.name!r}: it has {what}")


class Datasets:
    """All data sets of the run."""

    def __init__(self, records: tuple[DatasetRecord, ...], resume: Resume) -> None:
        self._resume = resume
        self.used_ranges = UsedRanges()
        self._all = {record.spec.name: LeasedDataset(record) for record in records}
        #: Data sets changed since ``take_changes``.
        self.changed: dict[str, None] = {}

    @property
    def standings(self) -> list[ef.DatasetStanding]:
        """Position and leases of each data set."""
        return [dataset.standing for dataset in self._all.values()]

    @property
    def holders(self) -> set[Identity]:
        """Workers, by id and incarnation, that hold ranges."""
        return {lease.identity for d in self._all.values() for lease in d.leases}

    def states(self, cut: CutBounds) -> tuple[DatasetState, ...]:
        """Return the state of each data set in a snapshot. Those of the previous snapshot that nobody opened are
        unchanged."""
        mine = []
        for name, dataset in self._all.items():
            again = self.used_ranges.repeated_by(name, dataset.leases, cut)
            position = dataset.position_without(self.used_ranges.after(name, cut), again)
            mine.append(DatasetState(dataset.spec, position))
        return (*mine, *(state for state in self._resume.datasets if state.spec.name not in self._all))

    def stand_as_in(self, manifest: Manifest) -> bool:
        """Return True if data sets would have the same state in a snapshot with the same cut as this one.

        A data set at its beginning may be in a snapshot or not.
        """

        def cut(worker: Identity) -> dict[str, int]:
            return {state.spec.name: state.next_of(worker) for state in manifest.parameters}

        mine, theirs = ({state.spec.name: state.position for state in s} for s in (self.states(cut), manifest.datasets))
        beginning = DataPosition()
        return all(mine.get(name, beginning) == theirs.get(name, beginning) for name in mine.keys() | theirs.keys())

    def undecided(self, cut: CutBounds) -> list[str]:
        """Return workers that may have used a range before the cut without having reported it."""
        found = [worker for n, d in self._all.items() for worker in self.used_ranges.undecided(n, d.leases, cut)]
        return list(dict.fromkeys(found))

    def get_position(self, event: ev.GetPosition) -> list[Effect]:
        """Return the position of a data set. Raises UnknownDatasetError."""
        return [Answer(event.call, self._get(event.dataset).standing)]

    def validate(self) -> None:
        for dataset in self._all.values():
            dataset.validate()

    def take_changes(self) -> tuple[DatasetRecord, ...]:
        """Return the records that changed since the previous call, for a restart."""
        changed, self.changed = self.changed, {}
        return tuple(self._all[name].record for name in changed)

    def open(self, event: ev.OpenDataset) -> list[Effect]:
        """Open a data set: create it, or check that it has these settings. Raises SettingsMismatchError,
        LimitExceededError and StorageError."""
        spec = event.spec
        dataset = self._all.get(spec.name)
        if dataset is not None:
            if difference := dataset.spec.difference(spec):
                raise SettingsMismatchError(f"data set {spec.name!r} exists with other settings: {difference}")
            return [Answer(event.call, dataset.standing)]
        if len(self._all) >= DATASETS_MAX:
            raise LimitExceededError(f"the run has {DATASETS_MAX} data sets already, which is the limit")
        state = self._resume.dataset(spec)
        dataset = self._all[spec.name] = LeasedDataset(DatasetRecord(spec, ((0, spec.places),)))
        self.changed[spec.name] = None
        text = f"data set {spec.name!r}: {spec.size} samples in {spec.ranges} ranges"
        if state is not None:
            dataset.go_to(state.position)
            text = f"{text}, resuming at data epoch {state.position.data_epoch} of the snapshot"
        return [LogEvent(text), Answer(event.call, dataset.standing)]

    def lease(self, event: ev.LeaseRange, worker: Member) -> list[Effect]:
        """End the done leases, and give out another range, or one whose first answer was lost.

        Raises UnknownDatasetError, FencedError, InvalidArgumentError and LimitExceededError.
        """
        dataset = self._get(event.dataset)
        dataset.check_ends(event.done, worker)
        mine = [lease for lease in dataset.held_by(worker) if lease.lease_id not in event.done]
        pending_answer = [lease for lease in mine if lease.lease_id not in event.held]
        if not pending_answer and len(mine) >= LEASES_MAX:
            raise LimitExceededError(
                f"{worker} holds {LEASES_MAX} ranges of data set {event.dataset!r}, which is the limit: use them first"
            )
        notes = self._finish(dataset, event)
        self.used_ranges.on_report(worker.identity, dict(event.now))
        lease = pending_answer[0] if pending_answer else dataset.acquire(worker)
        if lease is not None and not pending_answer:
            self.used_ranges.on_given(event.dataset, lease, dict(event.now))
            self.changed[event.dataset] = None
        data_epoch, number = divmod(lease.place, dataset.spec.ranges) if lease else (0, 0)
        given = ef.RangeGiven(lease, data_epoch, number, dataset.repeated, dataset.failed)
        return [*notes, Answer(event.call, given)]

    def end(self, event: ev.EndRanges, worker: Member) -> list[Effect]:
        """End leases. Raises UnknownDatasetError, FencedError and InvalidArgumentError."""
        dataset = self._get(event.dataset)
        dataset.check_ends((*event.done, *event.returned), worker)
        notes = self._finish(dataset, event)
        self.used_ranges.on_report(worker.identity, dict(event.now))
        for lease_id in event.returned:
            is_used = lease_id in event.used
            if (lease := dataset.release(lease_id, is_used=is_used)) is not None:
                self.used_ranges.on_ended(event.dataset, lease, is_used=is_used)
                self.changed[event.dataset] = None
        return [*notes, Answer(event.call, Done())]

    def set_position(self, event: ev.SetPosition, worker: Member) -> list[Effect]:
        """Continue a data set from a given position. Raises UnknownDatasetError and InvalidArgumentError."""
        dataset = self._get(event.dataset)
        dataset.go_to(event.position)
        self.used_ranges.forget(event.dataset)
        self.changed[event.dataset] = None
        where = f"data epoch {event.position.data_epoch}"
        return [
            LogEvent(f"data set {event.dataset!r} continues from {where}, set by {worker}", kind="data"),
            Answer(event.call, Done()),
        ]

    def go_back(self, states: Iterable[DatasetState]) -> None:
        """Return all data sets to their positions in a snapshot, or to their beginning if it does not have them."""
        positions = {state.spec.name: state.position for state in states}
        for name, dataset in self._all.items():
            dataset.go_to(positions.get(name, DataPosition()))
            self.used_ranges.forget(name)
            self.changed[name] = None

    def lose(self, is_live: Callable[[str, int], bool]) -> list[Effect]:
        """End the leases of workers that are gone."""
        effects: list[Effect] = []
        for name, dataset in self._all.items():
            again, given_up = dataset.lose(is_live)
            for lease in (*again, *given_up):
                self.used_ranges.on_ended(name, lease)
            if again or given_up:
                self.changed[name] = None
            if again:
                effects.append(
                    LogEvent(f"data set {name!r}: {_ranges(again)} will be handed out again", "warning", kind="data")
                )
            if given_up:
                tries = dataset.spec.retries_max + 1
                text = f"data set {name!r}: {_ranges(given_up)} given up, after {tries} workers were lost with each"
                effects += [LogEvent(text, "warning"), *self._note_end(dataset)]
        return effects

    def _get(self, name: str) -> LeasedDataset:
        dataset = self._all.get(name)
        if dataset is None:
            raise UnknownDatasetError(f"there is no data set {name!r:.80}: open it first", dataset=name)
        return dataset

    def _finish(self, dataset: LeasedDataset, event: ev.LeaseRange | ev.EndRanges) -> list[Effect]:
        finished = []
        for lease_id, at in zip_longest(event.done, event.done_at[: len(event.done)], fillvalue=()):
            assert isinstance(lease_id, int)
            if (lease := dataset.finish(lease_id)) is not None:
                self.used_ranges.on_done(dataset.spec.name, lease, dict(at))
                finished.append(lease)
        if not finished:
            return []
        self.changed[dataset.spec.name] = None
        return self._note_end(dataset)

    def _note_end(self, dataset: LeasedDataset) -> list[Effect]:
        if not dataset.finished:
            return []
        counts = f"{dataset.repeated} ranges handed out again, {dataset.failed} given up"
        return [LogEvent(f"data set {dataset.spec.name!r} is finished: {counts}", kind="data")]


def _gaps(stretches: Iterable[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Return the parts of [low, high) that the ascending intervals leave out."""
    gaps = []
    for start, stop in stretches:
        if low < start:
            gaps.append((low, start))
        low = stop
    if low < high:
        gaps.append((low, high))
    return gaps


def _ranges(leases: list[DataLease]) -> str:
    """Describe leases, such as ``2 ranges of worker-1``."""
    holders = ", ".join(dict.fromkeys(lease.worker_id for lease in leases))
    return f"{len(leases)} {'range' if len(leases) == 1 else 'ranges'} of {holders}"


# --- used ranges in a snapshot ----------------------------------------------------------------------------------------
#
# A range is in a snapshot if its worker had used it before the cut: if none of the worker's next pushes, as they were
# when the range was done, is after the cut. Ranges that were reported without such numbers count as included. So a
# done range is remembered until no later cut can come before it. Leases that are still out when everything is written
# need a decision too: their range may have been done before the cut and not be reported yet. Any of these decides it:
# the worker's next report after the cut, a request for a snapshot in which the worker waits, or a lease given after
# the cut. ``snapshots`` decides how long to wait for reports.

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
            self._done[dataset, lease.place] = lease.identity, at, given
            if len(self._done) > REPORTS_MAX:
                del self._done[next(iter(self._done))]

    def on_ended(self, dataset: str, lease: DataLease, *, is_used: bool = False) -> None:
        """Record that a lease ended without being done. is_used: it was returned used in part."""
        given = self._given.pop((dataset, lease.lease_id), None)
        if is_used and given:
            self._in_part[dataset, lease.lease_id] = lease.identity, given
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
        held = [(lease.identity, self._given.get((dataset, lease.lease_id))) for lease in leases]
        held += [(w, given) for (n, _), (w, at, given) in self._done.items() if n == dataset and _is_after(at, cut(w))]
        again = sum(numbers is not None and _is_before(numbers, cut(worker)) for worker, numbers in held)
        return again - sum(_is_later(given, cut(w)) for (n, _), (w, given) in self._in_part.items() if n == dataset)

    def undecided(self, dataset: str, leases: Iterable[DataLease], cut: CutBounds) -> list[str]:
        """Return workers that may have used a range before the cut without having reported it."""
        found: dict[str, None] = {}
        for lease in leases:
            worker = lease.identity
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


# --- workers that read the same batches -------------------------------------------------------------------------------
#
# Servers see that the gradients of workers are equal, byte for byte. The worker with the lowest rank logs it, since
# its log is the one that people read. It is said once per parameter set, however many servers report it. Workers that
# average their gradients before they push them (``MEANS_SUFFIX``) are not warned: these are equal.


class SameBatchWarnings:
    """Warnings about equal contributions, by parameter set."""

    def __init__(self, members: Membership, registry: Registry) -> None:
        self._members = members
        self._registry = registry
        self._said: set[str] = set()

    def on_report(self, event: EqualContributions) -> list[Effect]:
        """Process a server's report. It counts if the workers are still members."""
        wanted = set(event.worker_ids)
        alike = sorted((m for m in self._members.workers if m.member_id in wanted), key=lambda worker: worker.rank)
        is_known = self._registry.get(event.parameters) is not None
        are_means = self._registry.get(event.parameters + MEANS_SUFFIX) is not None
        if len(alike) < 2 or not is_known or are_means or event.parameters in self._said:
            return []
        self._said.add(event.parameters)
        text = _warning(event.parameters, event.step, alike)
        notice = self._members.tell([alike[0].member_id], Notice(text))
        # Once in the launcher's output: it shows the scheduler's warnings beside those of the worker.
        return [LogEvent(text), *notice] if notice else [LogEvent(text, "warning")]


def _warning(parameters: str, step: int, alike: list[Member]) -> str:
    *ranks, last = [str(worker.rank) for worker in alike]
    return (
        f"ranks {', '.join(ranks)} and {last} push the same gradients of {parameters!r}, byte for byte (steps up to "
        f"{step}): they train on the same batches, and {len(alike)} workers learn no more than one. Divide the data: "
        "psdist.data.DistributedSampler, data[context.rank::context.world_size], or psdist.torch.LeasedDataLoader. "
        "A script that draws its samples at random must include the rank in its seed"
    )
