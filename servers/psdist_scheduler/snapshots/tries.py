"""The attempts at one snapshot until one is committed or has failed: what they have learned, and their limits. Pure.

A cut that is too early is refused, as slices have passed it. One that is too late makes everybody wait. So the first
attempts choose a near step, and each later one looks twice as far ahead as the one before.

Not here: an attempt (``attempt``), when the first one is due (``schedule``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from psdist_scheduler.placement.parameters import ParameterSet
from psdist_scheduler.snapshots import waiters
from psdist_scheduler.snapshots.cut import is_stepped

#: Cuts that may be refused, one upon the other.
REFUSALS_MAX: Final = 64
#: Attempts that may be begun anew, one upon the other, because the cluster changed.
RETRIES_MAX: Final = 64
#: Attempts that pushes may wait for in vain, one upon the other, each for a lease.
HELD_MAX: Final = 3
#: How far ahead a cut is chosen, at most, in steps.
_DISTANCE_MAX: Final = 1024


@dataclass(slots=True)
class Tries:
    """refused: cuts. retries: attempts begun anew. held: attempts that pushes waited for in vain."""

    refused: int = 0
    retries: int = 0
    held: int = 0
    #: Cut each parameter set where it stands, because the expected pushes did not come.
    exact: bool = False
    #: By parameter set, the step that a server named as not passed.
    known: dict[str, int] = field(default_factory=dict)

    def version(self, p: ParameterSet) -> int:
        """How far a parameter set is, as far as is known."""
        return max(p.version, self.known.get(p.name, 0))

    def soonest(self, ready: Iterable[ParameterSet], waiting: Iterable[Mapping[str, int]]) -> dict[str, int]:
        """The cut that can be had soonest, as far as is known. ``waiting``: next pushes of workers that wait for it."""
        waiting, stepped = list(waiting), [p for p in ready if is_stepped(p)]
        steps = {p.name: max(self.version(p), *(next.get(p.name, 0) for next in waiting), 0) for p in stepped}
        if self.exact or not any(p.entry.members for p in stepped):
            return steps
        distance = 0 if self.refused < 2 else min(1 << min(self.refused - 2, 10), _DISTANCE_MAX)
        later = {p.name: steps[p.name] + (0 if waiters.stand_still(p, waiting) else distance) for p in stepped}
        return later if waiting else _common(later)

    # --- what became of attempts --------------------------------------------------------------------------------------

    def learn(self, steps: Iterable[tuple[str, int]]) -> None:
        """No slice of these parameter sets has passed these steps, but one may be there."""
        for name, step in steps:
            self.known[name] = max(self.known.get(name, 0), step)

    def refuse(self) -> bool:
        """A cut was refused. Whether another may be tried."""
        self.refused += 1
        return self.refused <= REFUSALS_MAX

    def retry(self) -> bool:
        """An attempt was given up because the cluster changed. Whether another may be tried."""
        self.retries += 1
        return self.retries <= RETRIES_MAX

    def hold(self) -> bool:
        """Pushes waited for an attempt in vain. Whether another may be tried."""
        self.held += 1
        return self.held < HELD_MAX

    def aim_near(self) -> None:
        """A snapshot is wanted now, and not at a step far ahead."""
        self.refused = 0

    def aim_exactly(self) -> None:
        """Training stands still: cuts are where it stands."""
        self.exact = True


def _common(steps: Mapping[str, int]) -> dict[str, int]:
    """Steps that differ by one at most become the same, the higher: such parameter sets are trained together."""
    high = max(steps.values(), default=0)
    return dict.fromkeys(steps, high) if steps and high - min(steps.values()) <= 1 else dict(steps)
