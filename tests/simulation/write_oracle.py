"""Oracle of runs whose scripts write weights: every slice has a journal, which shows when it was written last.

A journal has an element for each push. Scripts write all of it. Each push then changes its own element, as it changes
its slot, but a slot is never written. So after a write the journal shows which pushes came later, and the slots show
which pushes there are.

In BSP a slice must equal the result of plain numpy, whose scripts write before the same steps. In SSP and ASP each push
writes a value of its own. The journal must then hold the value of one push of the slice, and the pushes after that one
must be those that began after its answer, or may have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tests.simulation.oracle import NOISE, Array, Life, Push
from tests.simulation.snapshot_oracle import SnapshotOracle

#: Difference between the values that two pushes write: more than the learning rate of a push.
_VALUE: Final = 100.0

#: Journals that a script writes, by slice.
Journals = dict[int, Array]


class WriteOracle(SnapshotOracle):
    """Oracle for one parameter set that scripts write to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        plain = self.initial
        self.slice_elements = 2 * self.slots + NOISE
        self.slicing = type(self.slicing)(len(plain) * self.slice_elements, self.slice_elements)
        self.initial = np.zeros((len(plain), self.slice_elements), np.float32)
        self.initial[:, : -self.slots] = plain
        #: Journals written before each push, by its slot.
        self.wrote: dict[int, Journals] = {}
        #: Number of workers that wrote differently, or may have, by era and step.
        self.odd: Counter[tuple[int, int]] = Counter()
        self._refusals: Counter[tuple[int, int, int]] = Counter()
        #: Position of the beginning and of the answer of each push, by its slot, in the order in which they happened.
        self._began: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def value(self, slot: int) -> Array:
        """Return the journal that the push with this slot writes in SSP and ASP."""
        return np.full(self.slots, _VALUE * (slot + 1), np.float32)

    def gradient(self, slot: int) -> Array:
        """See Oracle."""
        gradient = np.zeros((self.slicing.count, self.slice_elements), np.float32)
        gradient[:, slot] = gradient[:, slot - self.slots] = -1.0
        gradient[:, self.slots : -self.slots] = self._noise[slot]
        return gradient.reshape(-1)

    def begins(self, life: Life, step: int) -> Push:
        """See Oracle."""
        push = super().begins(life, step)
        self._began[push.slot] = len(self._began) + len(self._ended)
        return push

    def answered(self, push: Push, ignored: int) -> None:
        """See Oracle."""
        super().answered(push, ignored)
        self._ended[push.slot] = len(self._began) + len(self._ended)

    def refused(self, life: Life, step: int, text: str) -> None:
        """Check a refusal because workers wrote different values: there is one for each that did."""
        self.counts["refused for different writes"] += 1
        era = len(self.eras)
        self._refusals[life.number, era, step] += 1
        odd = self.odd[era, step] + self.odd[era - 1, step]  # The push may have begun in the era before.
        if (times := self._refusals[life.number, era, step]) > odd:
            self.violation(f"{life.worker_id} was refused in step {step} for time {times}, after {odd} writes: {text}")

    def is_absent(self, push: Push, index: int) -> bool:
        """See Oracle. Here the tensors are others, and each push has a gradient for all of them."""
        return False

    # --- checks -------------------------------------------------------------------------------------------------------

    def _write(self, index: int, weights: Array, pushes: Sequence[Push]) -> None:
        written = [self.wrote[push.slot][index] for push in pushes if index in self.wrote.get(push.slot, ())]
        if written:
            weights[-self.slots :] = written[0]
            self.counts["steps with writes checked"] += 1
        if any(one.tobytes() != written[0].tobytes() for one in written):
            self.violation(f"slice {index} has step {pushes[0].step} of workers that wrote different values")

    def saw(self, life: Life, versions: Sequence[int], weights: Array, *rest: Any) -> None:
        """See Oracle."""
        super().saw(life, versions, weights, *rest)
        if self.exact or self.era_of_life(life) != len(self.eras) - 1:
            return
        for index, values in enumerate(weights.reshape(self.slicing.count, -1)):
            self._check_journal(f"{life.worker_id} read slice {index}", index, values)

    def _check_counts(self, index: int, version: int, values: Array, present: Sequence[int]) -> None:
        super()._check_counts(index, version, values, present)
        self._check_journal(f"slice {index} at version {version}", index, values)

    def _check_journal(self, where: str, index: int, values: Array) -> None:
        """Check the journal of a slice in SSP and ASP."""
        present = {slot for slot in np.flatnonzero(values[: self.slots]).tolist() if slot in self.pushes}
        journal = values[-self.slots :]
        base = float(journal.min() // _VALUE) * _VALUE
        after = set(np.flatnonzero(journal != base).tolist())
        writers = {slot for slot in present if index in self.wrote.get(slot, ())}
        worth = {slot: base + self.worth(self.pushes[slot]) for slot in present}
        if wrong := [slot for slot in after if journal[slot] != worth.get(slot)]:
            self.violation(f"{where} has a journal of {base:g} with {[float(journal[s]) for s in wrong]} of {wrong}")
            return
        last = round(base / _VALUE) - 1
        if last < 0 and (writers or after != present):
            self.violation(f"{where} lacks the writes of {sorted(writers)}; its journal has {sorted(after)}")
        elif last >= 0 and last not in writers:
            self.violation(f"{where} has the write of push {last}, which did not write it or is not in the slice")
        elif last >= 0:
            self.counts["last writes checked"] += 1
            self._check_order(where, last, after, present - after, writers)

    def _check_order(self, where: str, last: int, after: set[int], before: set[int], writers: set[int]) -> None:
        """Check that the write of push ``last`` came before the pushes ``after``, and after the pushes ``before``."""
        if late := sorted(writers & after - {last}):
            self.violation(f"{where} has the write of push {last}, and pushes {late} after it, which wrote it, too")
        if last not in after:
            self.violation(f"{where} has the write of push {last} and not its gradient on top")
        if early := [slot for slot in sorted(before) if self._precedes(last, slot)]:
            self.violation(f"{where} has the write of push {last} after the later pushes {early}")
        if stale := [slot for slot in sorted(after) if self._precedes(slot, last)]:
            self.violation(f"{where} has the write of push {last} before the earlier pushes {stale}")

    def _precedes(self, one: int, other: int) -> bool:
        """True if push ``one`` was answered before ``other`` began, so no slice may have them in the other order."""
        ended = self._ended.get(one)
        return one != other and ended is not None and ended < self._began[other]
