"""Orders in which simulated scripts train several parameter sets, and the starts of their iterations.

An order repeats a pattern, or each iteration is drawn from a random stream that all workers share, as if it depended on
data. A position of an order is a vector: the next step of each set, in the order of the names.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import cached_property

#: Repeating patterns: two and three sets in turn, five steps of one set to one of another, nested turns.
PATTERNS = ("DG", "DG", "DDDDDG", "DGE", "DDGDGE", "DDG")
#: Largest number of steps of a drawn iteration.
DRAWN_MAX = 4

Vector = tuple[int, ...]


@dataclass
class Order:
    """One order. names: names of the sets. pattern: the sets of each iteration; empty if they are drawn from
    ``seed``."""

    names: str
    pattern: str
    seed: int
    #: Position vectors at which iterations start, and their numbers, computed on demand.
    _starts: list[Vector] = field(default_factory=list)
    _numbers: dict[Vector, int] = field(default_factory=dict)

    def iteration(self, number: int) -> str:
        """Return the sets of an iteration, one for each of its steps."""
        if self.pattern:
            return self.pattern
        rng = random.Random(f"{self.seed}/iteration {number}")
        return "".join(rng.choice(self.names) for _ in range(rng.randint(1, DRAWN_MAX)))

    def start(self, number: int) -> Vector:
        """Return the position at which an iteration starts."""
        while len(self._starts) <= number:
            before = self._starts[-1] if self._starts else (0,) * len(self.names)
            made = self.iteration(len(self._starts) - 1) if self._starts else ""
            start = tuple(step + made.count(name) for step, name in zip(before, self.names, strict=True))
            self._numbers[start] = len(self._starts)
            self._starts.append(start)
        return self._starts[number]

    def number(self, position: Vector, base: Vector | None = None) -> int | None:
        """Return the iteration that starts at a position, or None if none does.

        base: position at which the script began; the iterations of a pattern count from there.
        """
        if self.pattern and base is not None:
            position = tuple(step - first for step, first in zip(position, base, strict=True))
        number = self.first_from(sum(position))
        return number if min(position) >= 0 and self.start(number) == position else None

    def first_from(self, pushes: int) -> int:
        """Return the first iteration that starts after at least ``pushes`` pushes."""
        return next(n for n in itertools.count() if sum(self.start(n)) >= pushes)

    @property
    def period(self) -> int:
        """Number of steps of a repeating iteration; 0 if iterations are drawn."""
        return len(self.pattern)

    @cached_property
    def longest(self) -> int:
        """Largest number of steps of one set in an iteration."""
        return max(self.pattern.count(name) for name in self.names) if self.pattern else DRAWN_MAX
