"""Schedule: when a snapshot is due, at which cut, and which callers wait for it. Pure.

The last snapshot of a run takes precedence, then requests of callers, then the policy's interval. A snapshot every N
steps is started long before its step if all trained parameter sets advance together. It makes way for a request for an
immediate one. Sets that are not trained, such as values that workers only share, are cut at their current step.

Invariant: A multiple of the interval is due once.

``snapshots`` has the preconditions, and makes the attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Literal

from psdist.changes import changes
from psdist.consistency import BSP
from psdist.errors import PsdistError
from psdist.snapshots.format import CommitRecord, Manifest
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide.alignment import Alignment
from psdist_scheduler.decide.cluster_state import EndStep, Member
from psdist_scheduler.decide.effects import Answer, Effect, Refuse
from psdist_scheduler.decide.leased_datasets import Datasets
from psdist_scheduler.decide.parameter_sets import ParameterSet
from psdist_scheduler.decide.snapshot_attempt import Attempt, AttemptPhase, DueSnapshot
from psdist_scheduler.decide.snapshot_events import AT_THE_END, CommitFound, Saved

#: Name under which workers are held.
HOLDER: Final = "snapshot"
#: Limit of consecutive refused cuts.
REFUSALS_MAX: Final = 64
#: Refused cuts after which parameter sets that were seen idle are assumed to move again.
_EXACT_TRIES: Final = 4
#: Limit of consecutive attempts that are restarted because the cluster changed.
RETRIES_MAX: Final = 64
#: Limit of consecutive attempts for which pushes waited in vain, each for a lease.
HELD_MAX: Final = 3
#: Largest distance of a cut, in steps.
_DISTANCE_MAX: Final = 1024


@dataclass(slots=True)
class CutSearch:
    """Knowledge gained from the attempts at one snapshot until one is committed or fails, and their limits.

    A cut that is too early is refused, because slices have passed it. One that is too late makes everybody wait. So the
    first attempts choose a near step, and each later one looks twice as far ahead as the one before.

    refused: number of refused cuts.
    retries: number of restarted attempts.
    held: number of attempts for which pushes waited in vain.
    """

    refused: int = 0
    retries: int = 0
    held: int = 0
    #: Parameter sets that are cut at their current step, because the expected pushes did not come.
    exact: set[str] = field(default_factory=set)
    #: Step that a server reported as not passed, by parameter set.
    known: dict[str, int] = field(default_factory=dict)
    #: Earliest step for which a worker still has its state, by parameter set. Slices may be at other steps.
    kept: dict[str, int] = field(default_factory=dict)

    def version(self, p: ParameterSet) -> int:
        return max(p.version, self.known.get(p.name, 0))

    def earliest(self, p: ParameterSet) -> int:
        """Return the earliest step that no slice has passed and for which all workers have their state."""
        return max(self.version(p), self.kept.get(p.name, 0))

    def is_passed(self, steps: Mapping[str, int]) -> bool:
        """Return True if a cut at ``steps`` is too early for a slice or for a worker's state."""
        return any(max(self.known.get(name, 0), self.kept.get(name, 0)) > step for name, step in steps.items())

    def soonest(self, ready: Iterable[ParameterSet], waiting: Iterable[Mapping[str, int]]) -> dict[str, int]:
        """Return the earliest possible cut, as far as is known.

        waiting: next pushes of the workers that wait for it.
        """
        waiting, stepped = list(waiting), [p for p in ready if p.is_stepped]
        steps = {
            # Workers that wait make no pushes for the sake of a later cut.
            p.name: max(
                self.version(p) if is_idle(p, waiting) else self.earliest(p),
                *(next.get(p.name, 0) for next in waiting),
                0,
            )
            for p in stepped
        }
        if not any(p.entry.members for p in stepped):
            return steps
        distance = 0 if self.refused < 2 else min(1 << min(self.refused - 2, 10), _DISTANCE_MAX)
        # Nobody advances a set without members, such as one that resumed workers have not opened yet.
        moving = {
            p.name: p for p in stepped if p.entry.spec.is_trained and p.entry.members and p.name not in self.exact
        }
        later = {name: steps[name] + (0 if is_idle(p, waiting) else distance) for name, p in moving.items()}
        return steps | (later if waiting else _common(later))

    def learn(self, steps: Iterable[tuple[str, int]]) -> None:
        """Record that no slice of these parameter sets has passed these steps, though one may have reached them."""
        for name, step in steps:
            self.known[name] = max(self.known.get(name, 0), step)

    def learn_states(self, steps: Iterable[tuple[str, int]]) -> None:
        """Record that a worker has no state of these parameter sets from before these steps."""
        for name, step in steps:
            self.kept[name] = max(self.kept.get(name, 0), step)

    def count_refusal(self) -> bool:
        """Count a refused cut. Returns True if another one may be tried."""
        self.refused += 1
        if self.refused > _EXACT_TRIES:
            self.exact.clear()  # They are not idle.
        return self.refused <= REFUSALS_MAX

    def count_retry(self) -> bool:
        """Count an attempt that was given up because the cluster changed. Returns True if another one may be tried."""
        self.retries += 1
        return self.retries <= RETRIES_MAX

    def count_held(self) -> bool:
        """Count an attempt for which pushes waited in vain. Returns True if another one may be tried."""
        self.held += 1
        return self.held < HELD_MAX


class EndState(Enum):
    """State of a run's last snapshot."""

    NONE = auto()
    WANTED = auto()
    TAKEN = auto()
    FAILED = auto()


class EndSnapshot:
    """The last snapshot of a run whose workers stop together.

    When it is wanted, all workers have stopped pushing, at steps that no slice can pass meanwhile. Once the servers
    have agreed to its cut, the workers leave one after another (``run_end``). Their departure may close
    steps that were in progress, and these must not be saved. So this snapshot stays the last one until somebody trains
    again. If it fails, no later step is saved, nor by a scheduler that was restarted meanwhile: ``ends`` has the steps
    that its predecessor stored.

    steps: final step of each BSP parameter set.
    attempt: number of the attempt that takes it; 0 for none.
    commit: its commit record; None before it was taken.
    """

    def __init__(self, ends: Sequence[EndStep] = ()) -> None:
        self._stored = dict[str, int]()
        # Whether the predecessor's attempt was committed is not known: a snapshot of these steps is allowed.
        self._set(EndState.FAILED if ends else EndState.NONE, {end.parameters: end.step for end in ends})
        self._stored = self.steps

    def take_change(self) -> tuple[EndStep, ...] | None:
        """Return the steps, if they changed since the previous call."""
        if self._stored == self.steps:
            return None
        self._stored = self.steps
        return tuple(EndStep(*end) for end in sorted(self.steps.items()))

    def want(self, steps: Mapping[str, int]) -> None:
        """Request the last snapshot at ``steps``."""
        self._set(EndState.WANTED, steps)

    def forget(self) -> None:
        """Forget the last snapshot: somebody trains again, or the run rolls back."""
        self._set(EndState.NONE, {})

    def set_taken(self, commit: CommitRecord) -> None:
        """Use an existing snapshot, which contains everything."""
        self._set(EndState.TAKEN, {}, commit)

    def on_attempt_ended(self, attempt: int, commit: CommitRecord | None) -> None:
        """Note that an attempt ended for good. commit: None if it failed."""
        if attempt == self.attempt != 0:
            self._set(EndState.TAKEN if commit else EndState.FAILED, self.steps, commit)

    def check(self, steps: Mapping[str, int]) -> str:
        """Return why no snapshot may be taken at ``steps``, in which case this one has failed; empty if one may."""
        for name, agreed in self.steps.items():
            if steps.get(name, agreed) > agreed:
                self._set(EndState.FAILED, self.steps)
                return (
                    f"the workers ended together at step {agreed} of {name!r}, which is at step {steps[name]} now: "
                    "later steps include only some of them. The newest snapshot before that stays the last"
                )
        return ""

    def is_safe(self, attempt: Attempt | None) -> bool:
        """Return True if no action of workers can change it any more."""
        if self.state is not EndState.WANTED:
            return True
        if attempt is None or attempt.number != self.attempt:
            return False
        if attempt.marks:  # A worker that leaves while files are written may have pushes that the servers wait for.
            return attempt.is_whole
        return attempt.phase >= AttemptPhase.CUTTING and not attempt.uploads.missing

    def _set(self, state: EndState, steps: Mapping[str, int], commit: CommitRecord | None = None) -> None:
        self.state, self.steps, self.commit, self.attempt = state, dict(steps), commit, 0


class SnapshotSchedule:
    """Decides when snapshots of one run are due."""

    def __init__(self, policy: SavePolicy, now: float) -> None:
        self._policy = policy
        self.search = CutSearch()
        #: Time at which the last attempt ended, and the highest version then. Multiples of the interval up to it are
        #: over.
        self._ended_at = now
        self._ended_version = 0

    def due(
        self,
        ready: Sequence[ParameterSet],
        waiters: SnapshotWaiters,
        end: EndSnapshot,
        saved: Mapping[str, int],
        now: float,
        *,
        is_even: bool = True,
    ) -> DueSnapshot | None:
        """Return the snapshot that is due now; None for nothing.

        saved: steps of the newest snapshot, by parameter set; empty if there is none.
        is_even: False if an iteration of the script makes more steps of one set than of another.
        """
        soonest = self.search.soonest(ready, [waiter.next for waiter in waiters.workers])
        if end.state is EndState.WANTED:
            steps = {name: max(step, self.search.known.get(name, 0)) for name, step in end.steps.items()}
            return DueSnapshot(soonest | steps, AT_THE_END)
        if waiters:
            return DueSnapshot(soonest, next(iter(waiters)).reason)
        if self._policy.steps:
            return self._due_by_steps(ready, soonest, is_even=is_even)
        if self._policy.seconds and now - self._ended_at >= self._policy.seconds and self.has_trained(ready, saved):
            return DueSnapshot(soonest, self._policy.every)
        return None

    def align(self, due: DueSnapshot, waiters: SnapshotWaiters, alignment: Alignment) -> DueSnapshot | None:
        """Return the due snapshot, cut where an iteration starts for all sets; None until the workers are held there.

        A script that requests a snapshot itself determines the cut by its call.
        """
        if not alignment.applies or waiters.workers or (due.ahead and alignment.is_even):
            alignment.release(HOLDER)
            return due
        alignment.want(HOLDER)
        if (vector := alignment.vector) is None or (due.ahead and alignment.is_even is not False):
            return None
        if self.search.is_passed(vector):
            alignment.restart()
            return None
        return None if due.ahead else DueSnapshot(due.steps | vector, due.reason)

    def has_trained(
        self, ready: Sequence[ParameterSet], saved: Mapping[str, int], least: Mapping[str, int] | None = None
    ) -> bool:
        """Return True if anything was trained since a snapshot with the steps ``saved``.

        least: steps that are known to be reached, even if servers have not reported them.
        """
        return any(max(self.search.version(p), (least or {}).get(p.name, 0)) > saved.get(p.name, 0) for p in ready)

    def attempt_ended(self, attempt: Attempt, now: float) -> None:
        """Note that an attempt ended for good, successfully or not."""
        versions = [self.search.version(p) for p in attempt.parameters.values() if p.record]
        self._ended_at, self._ended_version = now, max(self._ended_version, attempt.step, *versions)
        self.search = CutSearch(known=self.search.known, kept=self.search.kept)

    def rolled_back(self) -> None:
        """Forget the known steps, which a rollback has undone."""
        self.search, self._ended_version = CutSearch(), 0

    def _due_by_steps(
        self, ready: Sequence[ParameterSet], soonest: dict[str, int], *, is_even: bool
    ) -> DueSnapshot | None:
        versions = {p.name: self.search.earliest(p) for p in ready if p.entry.spec.is_trained}
        if not versions:
            return None
        high, interval = max(versions.values()), self._policy.steps
        if is_even and all(p.is_stepped for p in ready) and high - min(versions.values()) <= 1:
            step = _next_multiple(max(high, self._ended_version), interval)
            return DueSnapshot(soonest | dict.fromkeys(versions, step), self._policy.every, ahead=True)
        if high < _next_multiple(self._ended_version, interval):
            return None
        return DueSnapshot(soonest, self._policy.every)


def _common(steps: Mapping[str, int]) -> dict[str, int]:
    """Raise steps that differ by one at most to the highest of them: such parameter sets are trained together."""
    high = max(steps.values(), default=0)
    return dict.fromkeys(steps, high) if steps and high - min(steps.values()) <= 1 else dict(steps)


def _next_multiple(step: int, interval: int) -> int:
    """Return the first multiple of ``interval`` after ``step``."""
    return (step // interval + 1) * interval


# --- callers that wait ------------------------------------------------------------------------------------------------
#
# A waiting worker makes no push until it is answered. So it is served by a cut that is reachable without one, and
# that contains all of its pushes. Any other caller wants the current state: a cut that is agreed after its request.


@dataclass(slots=True)
class SnapshotWaiter:
    """A call that waits for a snapshot.

    next: next pushes of a waiting worker.
    drains: True for a server's call that wants to leave: it gets the answers of a drain, and continues afterwards.
    """

    call: int
    worker: Member | None
    next: dict[str, int]
    reason: str
    drains: bool = False
    #: Number of the attempt that will answer it; 0 for the next one.
    attempt: int = 0


class SnapshotWaiters:
    """All callers that wait for a snapshot."""

    def __init__(self) -> None:
        self._all: dict[int, SnapshotWaiter] = {}

    def __iter__(self) -> Iterator[SnapshotWaiter]:
        return iter(list(self._all.values()))

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, call: int) -> bool:
        return call in self._all

    @property
    def workers(self) -> list[SnapshotWaiter]:
        """Callers that make no push until they are answered."""
        return [waiter for waiter in self if waiter.worker is not None]

    def add(self, waiter: SnapshotWaiter, attempt: int) -> None:
        """Add a caller that waits for this attempt; 0 for the next one."""
        waiter.attempt = attempt
        self._all[waiter.call] = waiter

    def end_call(self, call: int) -> None:
        self._all.pop(call, None)

    def assign(self, attempt: int) -> None:
        """Assign all callers to this attempt; 0 for the next one."""
        for waiter in self:
            waiter.attempt = attempt

    def answer(self, waiter: SnapshotWaiter, result: Saved | PsdistError) -> list[Effect]:
        """Answer a caller whose snapshot exists, or that no snapshot will serve."""
        self.end_call(waiter.call)
        if waiter.drains:
            return []
        return [Refuse(waiter.call, result) if isinstance(result, PsdistError) else Answer(waiter.call, result)]

    def answer_all(self, result: Saved | PsdistError, attempt: int | None = None) -> list[Effect]:
        """Answer the callers that wait for this attempt; None for all."""
        answered = [waiter for waiter in self if attempt in (None, waiter.attempt)]
        return [effect for waiter in answered for effect in self.answer(waiter, result)]


def place(waiter: SnapshotWaiter, attempt: Attempt) -> Literal["joins", "waits", "supersedes"]:
    """Return whether the attempt in progress serves a new caller ("joins"), precedes ("waits") or obstructs
    ("supersedes") the attempt that will serve it."""
    early = attempt.phase <= AttemptPhase.MARKING
    if waiter.worker is None:
        if attempt.due.ahead and not attempt.reached:
            return "supersedes"
        return "joins" if early else "waits"
    marked = attempt.marks.get(waiter.worker.identity)
    for name in attempt.parameters:
        wanted = waiter.next.get(name)
        step = attempt.steps.get(name)
        if wanted is None:
            continue
        if step is None:
            if not early and (marked is None or marked.get(name, 0) < wanted):
                return "waits"
        elif wanted < step and not attempt.reached:
            return "supersedes"
        elif wanted > step:
            return "supersedes" if early else "waits"
    return "joins"


def is_idle(p: ParameterSet, waiting: Iterable[Mapping[str, int]]) -> bool:
    """Return True if no step of a BSP parameter set is possible while workers wait whose next pushes are
    ``waiting``."""
    consistency = p.entry.spec.consistency
    return isinstance(consistency, BSP) and sum(p.name in next for next in waiting) > consistency.backup_workers


def is_as_saved(manifest: Manifest, parameters: Iterable[ParameterSet], datasets: Datasets) -> bool:
    """Return True if a snapshot that has all steps also matches in everything else.

    A run that resumed from it may have other settings, or have reset an optimizer's state.
    """
    for p in parameters:
        state, entry = manifest.state(p.name), p.entry
        if state is None or state.state_since != entry.state_since or changes(state.spec, entry.spec):
            return False
    return datasets.stand_as_in(manifest)


def serves(found: CommitFound, waiter: SnapshotWaiter, ready: list[ParameterSet], datasets: Datasets) -> bool:
    """Return True if an existing snapshot contains everything that a waiting worker pushed and used."""
    if waiter.worker is None or not waiter.next or {p.name for p in ready} != set(found.commit.steps):
        return False
    worker = waiter.worker.identity
    for name, wanted in waiter.next.items():
        state = found.manifest.state(name)
        if state is None:
            return False
        known = isinstance(state.spec.consistency, BSP) or any((w, i) == worker for w, i, _ in state.next)
        if not known or wanted > state.next_of(worker):
            return False
    return is_as_saved(found.manifest, ready, datasets)
