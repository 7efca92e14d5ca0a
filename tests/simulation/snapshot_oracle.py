"""Oracle of runs with snapshots: checks the contents of each snapshot, and the state after a rollback or restart.

A run has eras. The first starts with the initial weights. Each later one starts when the parameters are placed again
from a committed snapshot, its base. A push belongs to the era in which its life was a member.

A snapshot of an era holds its base and, in every slice, exactly the era's own pushes before the cut. Weights and
optimizer state are what plain numpy computes from them, byte for byte. The final state holds the base of the last era
and every answered push of that era. Pushes of earlier eras that are not in the base are gone without a trace.

The real reader reads the snapshots from a copy of the storage, taken at the moment of the commit record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from psdist.consistency import Consistency
from psdist.errors import PsdistError
from psdist.optim import Optimizer
from psdist.snapshots import reader
from psdist.snapshots.format import CommitRecord, Manifest, ParametersState
from psdist.types import ClusterMap
from tests.simulation.oracle import Array, Life, Oracle, Push
from tests.simulation.storage import Bucket, SimStorage

#: (phase, worker, incarnation); a phase is the lifetime of one scheduler store.
Member = tuple[int, str, int]


@dataclass
class Era:
    """Stretch of training from one base. base: directory of a snapshot, or "" for the initial weights."""

    base: str
    key: tuple[int, int, str]
    #: Number of commits when the era started.
    commits: int = 0


@dataclass
class Saved:
    """One commit: the path of its record, its era, and the storage at that moment."""

    record: str
    era: int
    files: dict[str, tuple[bytes, float]]
    #: Filled by the check: the pushes in each slice, and the pushes that are in all slices.
    table: tuple[frozenset[int], ...] = ()
    slots: frozenset[int] = frozenset()
    directory: str = ""
    done: frozenset[int] = frozenset()
    acked: frozenset[int] = field(default_factory=frozenset)
    step: int = 0


class SnapshotOracle(Oracle):
    """Oracle for one parameter set and its snapshots. name: name of the parameter set."""

    def __init__(
        self,
        name: str,
        consistency: Consistency,
        optimizer: Optimizer,
        slices: int,
        slots: int,
        noise: np.random.Generator,
    ) -> None:
        super().__init__(consistency, optimizer, slices, slots, noise)
        self.phase = 0
        self.eras = [Era("", (0, 0, ""))]
        self.commits: list[Saved] = []
        #: True if storage faults of this run corrupt files silently, so that some snapshots cannot be read.
        self.spoilt = False
        self._name = name
        self._era_of: dict[Member, int] = {}
        #: Learning rate of a phase.
        self.rate: Callable[[int], float] = lambda phase: 1.0
        #: First step that each member participates in.
        self._first_steps: dict[Member, int] = {}
        #: Incarnation in which each member's push sequence began.
        self._origins: dict[Member, int] = {}
        self._of_push: dict[int, tuple[Member, int]] = {}
        #: Pushes made with each range of the data set, by the range's number.
        self._uses: dict[int, list[Push]] = {}
        #: Phase of the currently running process: members of a phase may outlive its scheduler.
        self.acting_phase: Callable[[], int] = lambda: self.phase
        #: Schedulers of this phase.
        self._schedulers: set[str] = set()
        #: Entries (first era, number of commits, directories): from this era on, only these directories among the first
        #: commits are readable.
        self._readable: list[tuple[int, int, frozenset[str]]] = [(0, 0, frozenset())]
        #: Eras whose base became readable only later. Snapshots that the run gave up before that stay given up.
        self._begun_again: set[int] = set()
        #: True while maps and primaries are not checked: nobody should follow the scheduler that publishes them.
        self.is_paused = False

    # --- events -------------------------------------------------------------------------------------------------------

    def begins(self, life: Life, step: int) -> Push:
        """See Oracle."""
        push = super().begins(life, step)
        self._of_push[push.slot] = ((life.phase, life.worker_id, life.incarnation), len(self.eras) - 1)
        return push

    def used(self, push: Push, number: int) -> None:
        """Record that the push was made with this range of the data."""
        self._uses.setdefault(number, []).append(push)

    def new_phase(self) -> None:
        """Start a phase in which all processes and the scheduler's store are gone and only the storage remains."""
        self.phase += 1
        self._maps.clear()
        self._primaries.clear()
        self._acting.clear()
        self._schedulers.clear()

    def only_readable(self, directories: Iterable[str], *, again: bool = False) -> None:
        """Record which of the snapshots so far can still be read. again: True if the last era could start only now."""
        if again:
            self._begun_again.add(len(self.eras) - 1)
        self._readable.append((len(self.eras) - again, len(self.commits), frozenset(directories)))

    def _readable_in(self, era: int) -> list[str]:
        """Return the directories of the snapshots that the era could start from, newest last."""
        _, damaged, left = next(known for known in reversed(self._readable) if known[0] <= era)
        committed = enumerate(self.commits[: self.eras[era].commits])
        return [s.directory for n, s in committed if s.directory and (n >= damaged or s.directory in left)]

    def acts(self, parameters: str, shard: int, term: int, server: str) -> None:
        """See Oracle. A term is valid within one phase."""
        if not self.is_paused:
            super().acts(f"{parameters} of phase {self.acting_phase()}", shard, term, server)

    def followed(self, cluster: ClusterMap) -> None:
        """See Oracle. An epoch is valid within one phase."""
        if cluster.scheduler_id in self._schedulers and not self.is_paused:
            super().followed(cluster)

    @property
    def went_back(self) -> bool:
        """True if the run rolled back to a snapshot without being restarted."""
        return any(one.key[0] == other.key[0] for one, other in pairwise(self.eras))

    def published(self, cluster: ClusterMap) -> None:
        """See Oracle."""
        if self.is_paused:
            return
        super().published(cluster)
        self._schedulers.add(cluster.scheduler_id)
        entry = cluster.entry(self._name)
        if entry is None:
            return
        base = entry.restore.directory if entry.restore is not None else ""
        key = (self.phase, entry.generation, base)
        # A map may drop the restore once everything is loaded.
        if key[:2] != self.eras[-1].key[:2] or (base and base != self.eras[-1].base):
            self.eras.append(Era(base, key, len(self.commits)))
            self.counts["eras"] += 1
            self.counts["began from a snapshot"] += bool(base)
        for member in entry.members:
            producer = (self.phase, member.worker_id, member.incarnation)
            self._era_of[producer] = len(self.eras) - 1
            self._origins[producer] = member.producer[1]
            self._first_steps[producer] = member.first_step

    def committed(self, record: str, bucket: Bucket) -> None:
        """Record a commit record that was created."""
        acked = frozenset(push.slot for push in self.pushes.values() if push.acked and not push.ignored)
        self.commits.append(Saved(record, len(self.eras) - 1, dict(bucket.files), acked=acked))
        self.counts["commits"] += 1

    def worth(self, push: Push) -> float:
        """See Oracle."""
        return super().worth(push) * self.rate(self.eras[self.era_of(push)].key[0])

    def era_of(self, push: Push) -> int:
        """Return the number of the era that a push belongs to."""
        member, begun = self._of_push[push.slot]
        return self._era_of.get(member, begun)

    def era_of_life(self, life: Life) -> int:
        """Return the era of a life's current incarnation."""
        return self._era_of.get((life.phase, life.worker_id, life.incarnation), -1)

    @property
    def acked(self) -> list[Push]:
        """Answered pushes of this era."""
        return [push for push in super().acked if self.era_of(push) == len(self.eras) - 1]

    def saw(
        self, life: Life, versions: Sequence[int], weights: Array, members: Sequence[Life], acked: Sequence[Push]
    ) -> None:
        """See Oracle. Reads made while an era ends prove nothing."""
        era = self.era_of_life(life)
        if era != len(self.eras) - 1:
            life.versions = []
            self.counts["reads while an era ended"] += 1
            return
        if life.era != era:
            life.versions = []
            life.era = era
            self._seen = {}
        super().saw(life, versions, weights, members, [push for push in acked if self.era_of(push) == era])

    def _check_own(self, life: Life, present: NDArray[np.bool_]) -> None:
        era, pushes = self.era_of_life(life), life.pushes
        life.pushes = [push for push in pushes if self.era_of(push) == era]
        try:
            super()._check_own(life, present)
        finally:
            life.pushes = pushes

    # --- checks at the end --------------------------------------------------------------------------------------------

    async def check_commits(self, loop: Any) -> None:
        """Check the contents of every committed snapshot."""
        for saved in self.commits:
            bucket = Bucket(loop.entropy, (0.0, 0.0), saved.files)
            storage = SimStorage(loop, bucket)
            try:
                await self._check_commit(storage, saved)
            except (PsdistError, FileNotFoundError) as error:
                if not self.spoilt:
                    self.violation(f"{saved.record} cannot be read: {error!r}")
        self._check_bases()

    def _check_bases(self) -> None:
        """Check that each era starts from the newest committed snapshot that is intact."""
        used = {self.era_of(push) for push in self.pushes.values()}
        for number, era in enumerate(self.eras[1:], 1):
            whole = self._readable_in(number)
            newest = whole[-1] if whole else ""
            if (self.spoilt or len(self._readable) > 1) and era.base not in whole and number not in used:
                continue  # The run noticed before anybody trained.
            if era.base not in ("", *whole):
                self.violation(f"era {number} began with {era.base}, which is no readable snapshot that was committed")
            elif era.base != newest and number not in self._begun_again:
                self.violation(f"era {number} began with {era.base!r}, though {newest!r} was committed")

    async def _check_commit(self, storage: SimStorage, saved: Saved) -> None:
        commits = await reader.commits(storage)
        found = next((c for c in commits if isinstance(c, CommitRecord) and _record(c) == saved.record), None)
        if found is None:
            raise PsdistError(f"{saved.record} is no valid commit record")
        manifest = await reader.load_manifest(storage, found)
        state = next((state for state in manifest.parameters if state.spec.name == self._name), None)
        if state is None:
            self._lacks(saved)
            return
        slices = reader.SliceReader(storage, manifest)
        table = [await slices.slice(state, i) for i in range(self.slicing.count)]
        saved.directory, saved.step = manifest.directory, state.step
        self.counts["snapshots compared"] += 1
        self._check_table(saved, state, table)
        if self._uses:
            self._check_data(saved, manifest)
        for kept in manifest.states:
            data = b"".join([part async for part in reader.read_state(storage, manifest, kept)])
            if kept.parameters == self._name:
                self._check_state(saved, kept.rank, *load(data)["numbers"].tolist())

    def _lacks(self, saved: Saved) -> None:
        """Report that the snapshot does not contain this parameter set."""
        self.violation(f"{saved.record} does not have {self._name!r}")

    def _check_data(self, saved: Saved, manifest: Manifest) -> None:
        """Check that the weights include every range that the data position marks as done. The position may mark fewer,
        if a worker was slow or died."""
        saved.done = frozenset(done_ranges(manifest))
        base = next((other.done for other in self.commits if other.directory == self.eras[saved.era].base), frozenset())
        for number in sorted(saved.done):
            uses = self._uses.get(number, [])
            excused = any(push.dropped and (self.era_of(push) == saved.era or number in base) for push in uses)
            if not excused and not any(push.slot in saved.slots for push in uses):
                self.violation(f"{saved.record} has range {number} as done, and no push that was made with it")
        again = {
            number for number, uses in self._uses.items() if any(p.slot in saved.slots for p in uses)
        } - saved.done  # fmt: skip
        self.counts["ranges done in snapshots"] += len(saved.done)
        self.counts["ranges that a snapshot has in the weights and not as done"] += len(again)

    def _check_state(self, saved: Saved, rank: int, taken: int, learned: int, slot: int) -> None:
        """Check that the state of a script is from the call of its last push in the snapshot.

        taken, learned: batches that it had taken before a push, and learned after one.
        slot: its newest push; -1 for none.
        """
        self.counts["states of scripts compared"] += 1
        where = f"{saved.record}: the state of rank {rank}"
        if taken - learned != (slot >= 0):
            self.violation(f"{where} has {taken} batches taken and {learned} learned")
        if slot < 0:
            return
        push = self.pushes[slot]
        if slot not in saved.slots and push.acked and not push.dropped and not push.ignored:
            self.violation(f"{where} is from push {push.step} of {push.life.worker_id}, which the weights lack")
        if later := [other for other in push.life.pushes if other.slot > slot and other.slot in saved.slots]:
            self.violation(f"{where} is from push {push.step}, and the weights have push {later[-1].step}")

    def _check_table(self, saved: Saved, state: ParametersState, table: Sequence[Sequence[Array]]) -> None:
        base = self._base(saved.era)
        shards, present = len(state.shards), list[set[int]]()
        for index, arrays in enumerate(table):
            version = state.shards[index % shards].versions[index // shards]
            slots = [slot for slot in range(self.slots) if arrays[0][slot] != 0.0]
            present.append(set(slots))
            where = f"{saved.record}: slice {index}"
            for slot in slots:
                if slot not in self.pushes:
                    self.violation(f"{where} has a push that nobody made (slot {slot})")
            for slot in sorted(base[index] ^ {slot for slot in slots if self._era(slot) < saved.era}):
                self.violation(f"{where} differs from the snapshot that its era began with (slot {slot})")
            self._check_cut(where, saved, state, version, set(slots))
            self.check_lags(f"of {saved.record}", index, slots, state.shards[index % shards].lags_of(index))
            if self.exact:
                self._check_bytes(where, version, arrays, slots)
            else:
                self._check_counts(index, version, arrays[0], slots)
        if not self.exact:
            self._check_gone(saved, state, present)
        saved.table, saved.slots = tuple(map(frozenset, present)), frozenset(set.intersection(*present))

    def _era(self, slot: int) -> int:
        return self.era_of(self.pushes[slot]) if slot in self.pushes else 0

    def _base(self, era: int) -> tuple[frozenset[int], ...]:
        """Return the pushes in each slice of the era's base."""
        directory = self.eras[era].base
        found = [saved.table for saved in self.commits if directory and saved.directory == directory]
        return found[0] if found and found[0] else (frozenset(),) * self.slicing.count

    def _check_cut(self, where: str, saved: Saved, state: ParametersState, version: int, slots: set[int]) -> None:
        """Check that a slice holds exactly those of the era's own pushes that precede the cut."""
        mine = [push for push in self.pushes.values() if self.era_of(push) == saved.era]
        if self.exact and version != state.step:
            self.violation(f"{where} is at version {version}, and the cut at step {state.step}")
        phase = self.eras[saved.era].key[0]
        ends = {self._producer(phase, worker, incarnation): number for worker, incarnation, number in state.next}
        for push in mine:
            end = state.step if self.exact else ends.get(self._producer(phase, push.life.worker_id, push.incarnation))
            there = push.slot in slots
            who = f"push {push.step} of {push.life.worker_id}/{push.incarnation} (slot {push.slot})"
            if end is None:
                continue
            if there and push.step >= end:
                self.violation(f"{where} has {who}, after the cut at {end}")
            must = push.acked and not push.ignored and not push.dropped
            if not there and push.step < end and must:
                self.violation(f"{where} lacks {who}, before the cut at {end}")
            if not self.exact and not there and push.step < end and not push.dropped:
                self.violation(f"{where} lacks {who}, which is said to be before the cut at {end}")

    def _producer(self, phase: int, worker_id: str, incarnation: int) -> tuple[str, int]:
        """Return the push sequence that a life continued."""
        return worker_id, self._origins.get((phase, worker_id, incarnation), incarnation)

    def _check_gone(self, saved: Saved, state: ParametersState, present: Sequence[set[int]]) -> None:
        """Check the producers that the cut does not name because they were lost before it or joined after it. Each
        slice must hold a prefix of their pushes. The prefixes may differ by one push: the one in flight when the
        producer was lost."""
        phase = self.eras[saved.era].key[0]
        named = {self._producer(phase, worker, incarnation) for worker, incarnation, _ in state.next}
        producers: dict[tuple[str, int], list[Push]] = {}
        for push in self.pushes.values():
            producer = self._producer(phase, push.life.worker_id, push.incarnation)
            if self.era_of(push) == saved.era and producer not in named and push.slot in saved.acked:
                producers.setdefault(producer, []).append(push)
        for producer, pushes in producers.items():
            there = [[push.slot in slots for push in pushes] for slots in present]
            counts = {sum(one) for one in there}
            if max(counts) - min(counts) > 1 or any(one != sorted(one, reverse=True) for one in there):
                self.violation(f"{saved.record} has not the first pushes of {producer}, which the cut does not name")

    def _check_bytes(self, where: str, version: int, arrays: Sequence[Array], slots: Sequence[int]) -> None:
        steps: dict[int, list[Push]] = {}
        for slot in slots:
            if slot in self.pushes:
                steps.setdefault(self.pushes[slot].step, []).append(self.pushes[slot])
        index = int(where.rpartition(" ")[2])
        expected = self.replay(index, version, steps)
        names = ["weights", *(f"state {n}" for n in range(len(expected) - 1))]
        if len(arrays) != len(expected):
            self.violation(f"{where} has {len(arrays)} arrays instead of {len(expected)}")
        for name, want, have in zip(names, expected, arrays, strict=False):
            if want.tobytes() != have.tobytes():
                self.violation(f"{where} at version {version}: {name} differ from what its pushes make")

    def check_stopped(self, phase: int, commits: int, lives: Sequence[Life]) -> None:
        """Check that a phase that was stopped as a whole, without faults, ended with a snapshot of all answered pushes.
        In BSP its step is one that all workers have made. Call after ``check_commits``. commits: number of commits at
        the stop."""
        eras = [number for number, era in enumerate(self.eras) if era.key[0] == phase]
        acked = [push for push in self.pushes.values() if push.acked and self.era_of(push) in eras]
        saved = next((one for one in reversed(self.commits[:commits]) if one.era in eras), None)
        if saved is None:
            if acked:
                self.violation(f"phase {phase} was stopped without a snapshot, after {len(acked)} answered pushes")
            return
        for push in acked:
            if push.slot not in saved.slots:
                self.violation(
                    f"{saved.record}, the last of phase {phase}, lacks push {push.step} of {push.life.worker_id}"
                )
        if self.exact:
            for life in (life for life in lives if life.phase == phase):
                self._check_took_part(saved, life)

    def _check_took_part(self, saved: Saved, life: Life) -> None:
        """Check that a worker contributed to all steps of the snapshot, from its first one on."""
        first = self._first_steps.get((life.phase, life.worker_id, life.incarnation))
        if first is None:
            return
        mine = {push.step for push in life.pushes if push.slot in saved.slots}
        if lacking := [step for step in range(first, saved.step) if step not in mine]:
            self.violation(f"{saved.record} has steps {lacking} without {life.worker_id}, with which it was stopped")

    def check_last(self, versions: Sequence[int], weights: Array) -> None:
        """Check the final weights. Call after ``check_commits``."""
        last = len(self.eras) - 1
        base = self._base(last)
        table = weights.reshape(self.slicing.count, self.slice_elements)
        for push in self.pushes.values():
            if self.era_of(push) == last:
                continue
            push.acked = False  # Only its part in the base counts.
            for index, slots in enumerate(base):
                if (table[index, push.slot] != 0.0) != (push.slot in slots):
                    self.violation(f"slice {index} is not what its era began with: slot {push.slot}")
        self.check_end(versions, weights)


def done_ranges(manifest: Manifest) -> set[int]:
    """Return the finished ranges of the first data epoch, from the position of the only data set."""
    if not manifest.datasets:
        return set()
    data = manifest.datasets[0]
    if data.position.data_epoch:
        return set(range(data.spec.ranges))
    return {number for first, count in data.position.done for number in range(first, first + count)}


def _record(commit: CommitRecord) -> str:
    return f"commits/{commit.sequence:012d}.json"
