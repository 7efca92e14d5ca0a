"""The order in which a script trains its parameter sets, and where its iterations start. Pure.

A script that trains several BSP parameter sets pushes them in one order, and all workers push them in the same order.
One pass of that order is an iteration. Shutdowns, joins and snapshot cuts must fall where an iteration starts for all
sets, or a resumed script would repeat or skip the step of a set.

A script may declare its iterations. Otherwise they are inferred: an iteration is the shortest sequence of sets that
explains all pushes so far, once it has been seen twice. Until then, and for an order that does not repeat, the start of
an iteration is unknown.

Not here: holding pushes back (``worker_alignment``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psdist.client.core.push_sequence import PushSequence
from psdist.wire.limits import ORDER_PUSHES_MAX

#: Number of pushes after which an open set that was never pushed no longer counts as part of the iteration.
PATIENCE: Final = 64


class PeriodFinder:
    """Finds the period of a sequence of names.

    awaited: names that are expected in the sequence. Without them no period is accepted before ``PATIENCE`` names.
    """

    def __init__(self, awaited: frozenset[str] = frozenset()) -> None:
        self._awaited = awaited
        #: Names since the start of the sequence.
        self.count = 0
        #: The names of one period; empty while it is unknown.
        self.pattern: tuple[str, ...] = ()
        #: The sequence is longer than ``ORDER_PUSHES_MAX`` and repeats nothing.
        self.is_irregular = False
        self._names: list[str] = []
        #: Length of the longest proper prefix that ends at each position (Knuth, Morris and Pratt).
        self._borders: list[int] = []

    def add(self, name: str) -> None:
        """Take the next name of the sequence."""
        if self.is_irregular:
            return
        if self.pattern and name != self.pattern[self.count % len(self.pattern)]:
            self._restart()
        self.count += 1
        if self.pattern or self.is_irregular:
            return
        self._append(name)
        self._accept()

    def _restart(self) -> None:
        """Search again through everything so far, because the pattern was wrong."""
        pattern, self.pattern = self.pattern, ()
        self.is_irregular = self.count >= ORDER_PUSHES_MAX
        for index in range(0 if self.is_irregular else self.count):
            self._append(pattern[index % len(pattern)])

    def _append(self, name: str) -> None:
        names, borders = self._names, self._borders
        length = borders[-1] if borders else 0
        while length and names[length] != name:
            length = borders[length - 1]
        borders.append(length + 1 if names and names[length] == name else 0)
        names.append(name)

    def _accept(self) -> None:
        period = self.count - self._borders[-1]
        is_complete = self._awaited <= set(self._names[:period]) or self.count >= PATIENCE
        if self.count >= 2 * period and is_complete:
            self.pattern = tuple(self._names[:period])
        self.is_irregular = not self.pattern and self.count >= ORDER_PUSHES_MAX
        if self.pattern or self.is_irregular:
            self._names, self._borders = [], []


@dataclass(frozen=True, slots=True)
class Standing:
    """Progress of a worker's script.

    position: pushes begun over all sets, as the sum of their next steps. next: the next step of each set.
    start: position of the newest known start of an iteration; None while it is unknown.
    period: pushes of one iteration; 0 if it is unknown or declared.
    is_declared: the script declares its iterations.
    """

    position: int
    next: dict[str, int]
    start: int | None
    period: int = 0
    is_declared: bool = False


class ProgramOrder:
    """The order of one worker's pushes over all of its ordered parameter sets, which are those of BSP that train.

    If a push is dropped, or the worker rejoins elsewhere, the script is within an iteration that its sets have left, or
    have not started. The rest of that iteration is skipped, so that script and sets agree on the start of the next one.
    If the script is between two iterations but holds weights from before the rejoin, the next iteration is skipped as a
    whole: no iteration counts for some of its sets only. After a rollback, iterations are skipped until the script has
    received new weights of every set that it trains: gradients of older weights belong to the steps that were lost. So
    do those of samples that were leased before, whatever weights they are of: their ranges will be leased again.
    """

    def __init__(self) -> None:
        self.sequences: dict[str, PushSequence] = {}
        #: The rest of the script's iteration is dropped.
        self.is_skipping = False
        #: Sets whose next gradient is based on weights from before this worker rejoined.
        self.outdated: set[str] = set()
        #: Sets, including those without an order, whose new weights the script has not received since the run rolled
        #: back.
        self.lost_course: set[str] = set()
        #: Sets whose next gradient may be of ranges that were leased before the rollback.
        self.lost_ranges: set[str] = set()
        #: Leases whose samples the script may be using, by data set and number, with the incarnation that has them.
        self.ranges: dict[tuple[str, int], int] = {}
        #: Number of pushes dropped since the rollback.
        self._dropped = 0
        #: True if the script trains several parameter sets, so that their order matters.
        self.is_shared = False
        self._names: frozenset[str] = frozenset()
        self._finder = PeriodFinder()
        #: Number of the script's pushes, including dropped ones; and this number at the newest declared boundary.
        self._made = 0
        self._boundary: int | None = None

    def start_incarnation(self) -> None:
        """Forget the sequences of the previous incarnation. The script continues from its place."""
        self.sequences.clear()

    def enter(self, name: str, sequence: PushSequence) -> None:
        """Add a parameter set, or its sequence in a new incarnation."""
        self.sequences[name] = sequence
        if name not in self._names:
            self._names |= {name}
            self.is_shared = len(self._names) > 1
            self._finder = PeriodFinder(self._names)

    def begin_push(self, name: str) -> None:
        """Record that a push of ``name`` begins now."""
        if self.is_shared and name in self._names:
            self._made += 1
            self._finder.add(name)

    def lose_place(self) -> None:
        """Record that this worker rejoined elsewhere, where an iteration starts, without its push."""
        self.is_skipping = self.is_shared and self._may_be_inside

    def lose_course(self, name: str, incarnation: int) -> None:
        """Record that the run rolled back to a snapshot, and that the script's weights of ``name`` are older.

        incarnation: the first one after the rollback.
        """
        self.lost_course.add(name)
        if any(leased < incarnation for leased in self.ranges.values()):
            self.lost_ranges.add(name)
        self._dropped = 0

    def drops_next(self, name: str) -> bool:
        """Return True if the script's next push, which is of ``name``, is to be dropped."""
        if not (self.is_skipping or self.outdated or self.lost_course or self.lost_ranges):
            return False
        offset = self._offset
        if not self.is_shared or name not in self._names or (offset is None and not self.is_skipping):
            return name in self.lost_course | self.lost_ranges
        trained = self._finder.pattern if self._boundary is None else self._names
        lost = (self.lost_course | self.lost_ranges).intersection(trained)
        return self.is_skipping or (offset == 0 and bool(self.outdated or lost))

    def drop_push(self, name: str, *, has_begun: bool) -> None:
        """Record that a push of ``name`` was dropped. has_begun: it was recorded before."""
        if not has_begun:
            self.begin_push(name)
        self.outdated.clear()
        self._dropped += 1
        self.lost_course.discard(name)
        self.lost_ranges.discard(name)
        if self._dropped >= PATIENCE:  # The script may never train the others again.
            self.lost_course.clear()
            self.lost_ranges.clear()
        self.is_skipping = self.is_shared and self._may_be_inside

    def mark_boundary(self) -> None:
        """Record that the script declares the start or end of an iteration."""
        self._boundary, self.is_skipping = self._made, False

    @property
    def position(self) -> int:
        """Pushes begun, over all sets and from the first step of the run."""
        return sum(sequence.next for sequence in self.sequences.values())

    @property
    def is_at_start(self) -> bool:
        """True if an iteration is known to start with the next push that counts."""
        standing = self.standing
        return standing.start == standing.position

    @property
    def is_inside(self) -> bool:
        """True if the next push is known to be inside an iteration."""
        standing = self.standing
        return standing.start is not None and standing.start != standing.position

    @property
    def _offset(self) -> int | None:
        """Pushes of the script since its iteration started; None while that is unknown."""
        if self._boundary is not None:
            return self._made - self._boundary
        if self._finder.pattern:
            return self._finder.count % len(self._finder.pattern)
        return None if self._finder.count else 0

    @property
    def _may_be_inside(self) -> bool:
        """True unless the script is known to be between two iterations.

        A script whose pushes have shown no repeating order for ``PATIENCE`` pushes is assumed to have no iterations.
        Otherwise all of its later pushes might be dropped as belonging to an unfinished one.
        """
        offset = self._offset
        return self._finder.count < PATIENCE if offset is None else offset > 0

    @property
    def standing(self) -> Standing:
        """Progress to report."""
        position, offset = self.position, self._offset
        next_steps = {name: sequence.next for name, sequence in self.sequences.items()}
        # In a new incarnation the sets enter one by one; the position is valid once all have.
        is_complete = self._names <= self.sequences.keys()
        start = position - (0 if self.is_skipping else offset) if offset is not None and is_complete else None
        is_declared = self._boundary is not None
        period = 0 if is_declared else len(self._finder.pattern)
        return Standing(position, next_steps, start, period, is_declared)
