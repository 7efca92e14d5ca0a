"""Oracle: every push has its own element in every slice, so the weights show which pushes they contain.

A push's gradient is -1 at its slot of each slice and 0 elsewhere, apart from some noise; the learning rate is 1. So in
SSP and ASP a slot is 1 once the push is in and 2 if it is in twice. In BSP the whole slice, including the noise, must
equal the result of plain numpy for the pushes whose slots are set, in rank order, byte for byte. Pushes have no
gradient for the noise of some slices, in turn: updates skip it if no push of the step has one.

The oracle sees the start and the answer of each push, all weights that a worker gets, every published map, and the
server that answers for each shard. Weights must contain every push that was answered before they were requested, and
nobody sees a version decrease. ``violations`` has one sentence for each broken promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist import BSP, SSP
from psdist.consistency import Consistency
from psdist.optim import Optimizer
from psdist.types import ClusterMap, ParametersMember, Slicing
from tests.support import reference

Array = NDArray[np.float32]
#: Elements of a slice that are not slots.
NOISE = 3


#: Factors on the learning rate, by the push's number.
LR_FACTORS = (1.0, 0.5, 2.0)
#: Learning rates that pushes set, by step; those of the specification are 1.
LR_SETTINGS = (1.0, 4.0)
#: Momentums that pushes set, by step, if the specification has one.
MOMENTUMS = (0.5, 0.75, 0.25)


@dataclass
class Push:
    """One call of push or push_pull. ``step`` is the client's number for it."""

    life: Life
    slot: int
    step: int
    rank: int
    incarnation: int
    acked: bool = False
    #: True if the client reports that it was not applied, because its worker was fenced meanwhile.
    dropped: bool = False
    ignored: int = 0


@dataclass
class Life:
    """One process of a worker. A client that rejoins by itself continues in the same life, as another member."""

    worker: int
    number: int
    slots: range
    rank: int = 0
    incarnation: int = 0
    #: SSP and ASP: the clock at which it joined (None if unknown), and its pushes since.
    clock: int | None = 0
    since: list[Push] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    joined: bool = False
    over: bool = False
    versions: list[int] = field(default_factory=list)
    #: With snapshots: the number of full restarts before this life, and the era that ``versions`` belong to.
    phase: int = 0
    era: object = None

    @property
    def worker_id(self) -> str:
        """The id under which it registers."""
        return f"worker-{self.worker}"


class Oracle:
    """Promises of one run, and their violations."""

    def __init__(
        self, consistency: Consistency, optimizer: Optimizer, slices: int, slots: int, noise: np.random.Generator
    ) -> None:
        self.consistency = consistency
        self.optimizer = optimizer
        self.slots = slots
        self.slice_elements = slots + NOISE
        self.slicing = Slicing(slices * self.slice_elements, self.slice_elements)
        self.pushes: dict[int, Push] = {}
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        #: True if pushes set the learning rate, in place of the specification's.
        self.sets_rates = True
        self.initial = np.zeros((slices, self.slice_elements), np.float32)
        self.initial[:, slots:] = noise.standard_normal((slices, NOISE))
        self._noise = noise.standard_normal((slots, slices, NOISE)).astype(np.float32)
        self._noise.flags.writeable = False
        #: Digest of a slice's weights at a version, and the first worker that saw them.
        self._seen: dict[tuple[int, int], tuple[bytes, str]] = {}
        self._maps: dict[int, ClusterMap] = {}
        self._primaries: dict[tuple[str, int, int], tuple[str, int]] = {}
        self._acting: dict[tuple[str, int, int], str] = {}

    @property
    def exact(self) -> bool:
        """True if the step of each push is known."""
        return isinstance(self.consistency, BSP)

    def violation(self, text: str) -> None:
        """Record a broken promise."""
        if len(self.violations) < 20:
            self.violations.append(text)

    # --- events -------------------------------------------------------------------------------------------------------

    def gradient(self, slot: int) -> Array:
        """Return the gradient of the push with this slot."""
        gradient = np.zeros((self.slicing.count, self.slice_elements), np.float32)
        gradient[:, slot] = -1.0
        gradient[:, self.slots :] = self._noise[slot]
        return gradient.reshape(-1)

    def tensors(self, flat: Array) -> dict[str, Array]:
        """Divide a vector into the tensors of the parameter set: slots and noise of each slice."""
        names = [f"{part}{index}" for index in range(self.slicing.count) for part in ("slots", "noise")]
        ends = np.cumsum([self.slots, NOISE] * self.slicing.count)[:-1]
        return dict(zip(names, np.split(flat, ends), strict=True))

    def joined(self, tensors: Mapping[str, Array]) -> Array:
        """Join tensors to a vector."""
        return np.concatenate(list(tensors.values()))

    def is_absent(self, push: Push, index: int) -> bool:
        """Return True if the push has no gradient for the noise of this slice: in a third of the steps no push of the
        step has, and in another third every other push."""
        third = (push.step + index) % 3
        return third == 0 or (third == 1 and push.slot % 2 == 0)

    def absent(self, push: Push) -> list[str]:
        """Return the names of the tensors that the push has no gradient for."""
        return [f"noise{index}" for index in range(self.slicing.count) if self.is_absent(push, index)]

    def begins(self, life: Life, step: int) -> Push:
        """Record a push that is about to be sent."""
        push = Push(life, life.slots[len(life.pushes)], step, life.rank, life.incarnation)
        life.pushes.append(push)
        life.since.append(push)
        self.pushes[push.slot] = push
        return push

    def answered(self, push: Push, ignored: int) -> None:
        """Record that the push returned."""
        push.acked, push.ignored = True, ignored
        self.counts["acknowledged"] += 1
        if ignored:
            self.counts["ignored"] += 1

    def saw(
        self, life: Life, versions: Sequence[int], weights: Array, members: Sequence[Life], acked: Sequence[Push]
    ) -> None:
        """Check weights that a worker got. members: others that were members at the request and still are. acked:
        pushes that were answered before the request."""
        table = weights.reshape(self.slicing.count, self.slice_elements)
        self.counts["reads"] += 1
        for index, version in enumerate(versions):
            if life.versions and version < life.versions[index]:
                self.violation(f"{life.worker_id} saw slice {index} at version {version} after {life.versions[index]}")
            digest = blake2b(table[index].tobytes(), digest_size=16).digest()
            first, who = self._seen.setdefault((index, version), (digest, life.worker_id))
            if first != digest:
                self.violation(f"slice {index} at version {version} is not for {life.worker_id} what it is for {who}")
        life.versions = list(versions)
        present: Any = table.all(axis=0)
        for push in acked:
            if not present[push.slot]:
                self.violation(
                    f"{life.worker_id} read weights without push {push.step} of {push.life.worker_id}, which was "
                    "acknowledged before it asked"
                )
        self._check_own(life, present)
        if isinstance(self.consistency, SSP) and life.joined:
            self._check_bound(life, table, members)

    def _check_own(self, life: Life, present: NDArray[np.bool_]) -> None:
        for push in life.pushes:
            if push.acked and not push.ignored and not present[push.slot]:
                self.violation(f"{life.worker_id} does not see its acknowledged push {push.step} (slot {push.slot})")

    def _check_bound(self, life: Life, table: Array, members: Sequence[Life]) -> None:
        """Check that no member lags by more than the bound: all weights read contain the pushes that it must have
        made."""
        assert isinstance(self.consistency, SSP)
        if life.clock is None:
            return
        clock = life.clock + sum(push.acked for push in life.since)
        for other in members:
            if other.clock is None:
                continue
            wanted = clock - self.consistency.staleness - other.clock
            if wanted > len(other.since):
                self.violation(
                    f"SSP: {life.worker_id} at clock {clock} read while {other.worker_id} had begun "
                    f"{len(other.since)} pushes from clock {other.clock}"
                )
            for push in other.since[: max(0, wanted)]:
                self.counts["bounds"] += 1
                if not push.dropped and not table[:, push.slot].all():
                    self.violation(
                        f"SSP: {life.worker_id} at clock {clock} read weights without push {push.step} of "
                        f"{other.worker_id}"
                    )

    def published(self, cluster: ClusterMap) -> None:
        """Check a map that was published."""
        known = self._maps.setdefault(cluster.epoch, cluster)
        if known is cluster:
            self._check_terms(cluster)
        elif known != cluster:
            self.violation(f"epoch {cluster.epoch} is the number of two different maps")

    def followed(self, cluster: ClusterMap) -> None:
        """Check a map that a client built from its session's messages."""
        known = self._maps.get(cluster.epoch)
        if known is not None and known != cluster:
            self.violation(f"a client has another map of epoch {cluster.epoch} than was published")

    def _check_terms(self, cluster: ClusterMap) -> None:
        for entry in cluster.parameters:
            for number, shard in enumerate(entry.shards):
                key = (entry.spec.name, number, shard.term)
                now = (shard.primary.server_id, shard.primary.incarnation)
                before = self._primaries.setdefault(key, now)
                if before != now:
                    self.violation(f"shard {number} has primaries {before} and {now} under term {shard.term}")
                elif shard.term > 1:
                    self.counts["term above 1"] += 1

    @property
    def acked(self) -> list[Push]:
        """Pushes that were answered."""
        return [push for push in self.pushes.values() if push.acked and not push.ignored]

    def took(self, server: str, worker_id: str, incarnation: int, members: Mapping[str, ParametersMember]) -> None:
        """Check that a contribution accepted by a server came from a member known to it."""
        member = members.get(worker_id)
        if member is None or member.incarnation != incarnation:
            self.violation(f"{server} took a push of incarnation {incarnation} of {worker_id}, which is no member")

    def acts(self, parameters: str, shard: int, term: int, server: str) -> None:
        """Check ``server``, which answered a worker as the primary of the shard."""
        before = self._acting.setdefault((parameters, shard, term), server)
        if before != server:
            self.violation(f"{before} and {server} both act as primary of shard {shard} under term {term}")

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_end(self, versions: Sequence[int], weights: Array) -> None:
        """Check the final weights."""
        table = weights.reshape(self.slicing.count, self.slice_elements)
        for index in range(self.slicing.count):
            present = [slot for slot in range(self.slots) if table[index, slot] != 0.0]
            for slot in present:
                if slot not in self.pushes:
                    self.violation(f"slice {index} has a push that nobody made (slot {slot})")
            for push in self.pushes.values():
                if push.acked and not push.ignored and table[index, push.slot] == 0.0:
                    self.violation(f"slice {index} lost push {push.step} of {push.life.worker_id} (slot {push.slot})")
            if self.exact:
                self._check_exact(index, versions[index], table[index], present)
            else:
                self._check_counts(index, versions[index], table[index], present)

    def _check_counts(self, index: int, version: int, values: Array, present: Sequence[int]) -> None:
        for slot in present:
            if slot in self.pushes and values[slot] != self.worth(self.pushes[slot]):
                self.violation(f"slice {index} has push {slot} {values[slot]:g} times")
        if version != len(present):
            self.violation(f"slice {index} is at version {version} with {len(present)} pushes in it")

    def _check_exact(self, index: int, version: int, values: Array, present: Iterable[int]) -> None:
        """Check that the slice equals the result of numpy for its pushes."""
        steps: dict[int, list[Push]] = {}
        for slot in present:
            if slot in self.pushes:
                steps.setdefault(self.pushes[slot].step, []).append(self.pushes[slot])
        for step, pushes in steps.items():
            workers = [(push.life.worker_id, push.incarnation) for push in pushes]
            if len(set(workers)) < len(workers) or step >= version:
                self.violation(f"slice {index} at version {version} has step {step} of {workers}")
        expected = self.replay(index, version, steps)[0]
        if expected.tobytes() != values.tobytes():
            wrong = np.flatnonzero(expected != values)
            self.violation(
                f"slice {index} at version {version} differs from its pushes at elements {wrong[:8].tolist()}: "
                f"{values[wrong[:4]].tolist()} instead of {expected[wrong[:4]].tolist()}"
            )

    def check_lags(self, where: str, index: int, slots: Iterable[int], lags: Sequence[tuple[int, int, int]]) -> None:
        """Check the lags of a slice that has the pushes with these slots."""
        absent: dict[int, list[bool]] = {}
        for push in (self.pushes[slot] for slot in slots if slot in self.pushes):
            absent.setdefault(push.step if self.exact else push.slot, []).append(self.is_absent(push, index))
        lag = sum(map(all, absent.values()))
        expected = ((self.slots, self.slice_elements, lag),) if lag else ()
        self.counts["lags compared"] += 1
        if tuple(lags) != expected:
            self.violation(f"slice {index} {where} has lags {lags} instead of {expected}")

    def lr_factor(self, number: int) -> float:
        """Return the learning rate factor that workers give push or step ``number``."""
        return LR_FACTORS[number % len(LR_FACTORS)]

    def settings(self, number: int) -> dict[int, dict[str, float]]:
        """Return the hyperparameters that workers give push or step ``number``."""
        settings = {"lr": LR_SETTINGS[number % len(LR_SETTINGS)]} if self.sets_rates else {}
        if self.optimizer.values()["momentum"]:
            settings["momentum"] = MOMENTUMS[number % len(MOMENTUMS)]
        return {0: settings}

    def worth(self, push: Push) -> float:
        """Return the learning rate with which the push was applied; it is the value of its slot."""
        return self.lr_factor(push.step) * self.settings(push.step)[0].get("lr", 1.0)

    def replay(self, index: int, version: int, steps: dict[int, list[Push]]) -> list[Array]:
        """Return the weights and state that numpy computes from pushes, given by step."""
        weights = self.initial[index].copy()
        names: dict[str, Any] = self.optimizer.group_values(0)
        states = [np.zeros_like(weights)] if names.get("momentum") else []
        mean = np.zeros_like(weights)
        for step in range(version):
            pushes = sorted(steps.get(step, ()), key=lambda push: (push.rank, push.life.worker_id, push.incarnation))
            if pushes:
                parts = [self.gradient(push.slot).reshape(self.slicing.count, -1)[index].copy() for push in pushes]
                absent = [self.is_absent(push, index) for push in pushes]
                for part, lacks_noise in zip(parts, absent, strict=True):
                    part[self.slots :] *= not lacks_noise
                reference.combine(mean, parts, len(parts))
                names |= self.settings(step)[0] | {"lr": self.worth(pushes[0])}
                self._write(index, weights, pushes)
                before = [array[self.slots :].copy() for array in (weights, *states)]
                reference.update(self.optimizer, names, weights, states, mean, step)
                if all(absent):
                    self.counts["skipped"] += 1
                    for array, noise in zip((weights, *states), before, strict=True):
                        array[self.slots :] = noise
        return [weights, *states]

    def _write(self, index: int, weights: Array, pushes: Sequence[Push]) -> None:
        """Write to the weights of a slice what the scripts of these pushes wrote before them: here nothing."""
