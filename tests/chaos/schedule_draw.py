"""Random schedules of a group's calls and faults, drawn from a seed.

All ranks of a group carry out the operations of a schedule in one order, each those in which it takes part, so that a
schedule without faults cannot deadlock. Asynchronous calls only begin earlier than they would. All arrays of a schedule
differ in size, so that calls which are not each other's never match by chance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final, Literal

from tests.simulation.group_calls import KINDS, data_of, expected_result

#: Workers of the run that all schedules share. A group has three or four of them.
WORKERS: Final = 4
_OPERATIONS_MAX: Final = 16
#: Elements of int64: arrays that travel with the call, above 64 KB, and above 1 MB.
_SIZES: Final = ((1, 400), (9_000, 20_000), (140_000, 200_000))
MESSAGES: Final = ("message", "message of any")
#: Faults that may come in the middle of a call.
_STRIKES: Final = ("kill", "freeze", "freeze briefly", "give up")
_FAULTS: Final = (
    "kill", "kill", "freeze", "freeze", "freeze briefly", "other kind", "other size", "other dtype", "omitted call",
    "time limit", "time limit", "close", "end of script", "give up", "late",
)  # fmt: skip
#: Second faults that come with the first error of a rank, or of any rank.
_AFTERMATHS: Final = ("kill", "kill", "freeze", "freeze briefly")

#: "before", "during": a call of the rank. "own error": once a call of the rank has ended with an error. "any error":
#: once that is so at any rank.
Moment = Literal["before", "during", "own error", "any error"]


@dataclass(frozen=True)
class Operation:
    """A collective of all ranks, or a message between two.

    ranks: those that take part; of a message, source and target.
    lags: by rank of the group, number of further operations after which the call is waited for; 0 for a synchronous
        call.
    """

    number: int
    kind: str
    elements: int
    ranks: tuple[int, ...]
    lags: tuple[int, ...]
    tag: int = 0

    def __str__(self) -> str:
        return f"{self.number} {self.kind}[{self.elements}] of {self.ranks}"


@dataclass(frozen=True)
class Fault:
    """A fault of one rank.

    operation: number of the operation before or during which it comes.
    seconds: delay after the moment if the driver strikes; limit of "time limit"; pause of "late".
    thaw_seconds: time for which a process is stopped; infinite if it is killed in the end.
    """

    kind: str
    rank: int
    operation: int
    moment: Moment
    seconds: float = 0.0
    thaw_seconds: float = float("inf")

    def __str__(self) -> str:
        when = f"{self.moment} {self.operation}" if self.moment in ("before", "during") else f"at {self.moment}"
        return f"{self.kind} of rank {self.rank} {when} ({self.seconds:.3f} s, thaw {self.thaw_seconds:.1f} s)"


@dataclass(frozen=True)
class Schedule:
    """Operations and faults of one group.

    workers: ranks of its members in the run.
    silence: see ``Context.join_group``.
    """

    seed: int
    workers: tuple[int, ...]
    silence: float | None
    operations: tuple[Operation, ...]
    faults: tuple[Fault, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.workers)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: workers {self.workers}, silence {self.silence}"]
        return "\n  ".join([*lines, *map(str, self.operations), *map(str, self.faults)])

    def given(self, operation: Operation, rank: int) -> Any:
        """Return the array that a rank gives."""
        rows = data_of(self.seed, operation.number, rank, operation.elements, self.size)
        return rows if operation.kind == "reduce_scatter" else rows[0]

    def expected(self, operation: Operation, rank: int) -> Any:
        """Return the result at a rank; None for the source of a message."""
        if operation.kind in MESSAGES:
            source, target = operation.ranks
            return self.given(operation, source) if rank == target else None
        return expected_result(operation.kind, self.seed, operation.number, rank, operation.elements, self.size)


def draw(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(f"{seed}/schedule")
    size = rng.choice((3, 4))
    workers = tuple(sorted(rng.sample(range(WORKERS), size)))
    silence = rng.choice((0.4, 0.4, 0.4, None))
    operations = tuple(_draw_operation(rng, number, size) for number in range(rng.randint(6, _OPERATIONS_MAX)))
    faults = _draw_faults(rng, operations, size)
    if any(one.kind == "message of any" for one in operations):
        # A rank that has closed its group might have sent the message.
        operations = (*operations, Operation(len(operations), "barrier", 0, tuple(range(size)), (0,) * size))
    return Schedule(seed, workers, silence, operations, faults)


def _draw_operation(rng: random.Random, number: int, size: int) -> Operation:
    kind = rng.choice((*KINDS, *MESSAGES, *MESSAGES, *MESSAGES))
    low, high = rng.choice((*_SIZES, _SIZES[0]))
    elements = rng.randrange(low, high, _OPERATIONS_MAX) + number
    ranks = tuple(rng.sample(range(size), 2)) if kind in MESSAGES else tuple(range(size))
    asynchronous = rng.random() < 0.4
    lags = tuple(rng.choice((0, 1, 2, 4)) if asynchronous else 0 for _ in range(size))
    # A message of any source has a tag of its own: its source is known to the checks.
    tag = 1000 + number if kind == "message of any" else rng.randrange(3)
    return Operation(number, kind, elements, ranks, lags, tag)


def _draw_faults(rng: random.Random, operations: tuple[Operation, ...], size: int) -> tuple[Fault, ...]:
    count = rng.choice((0, 1, 1, 1, 2, 2, 2, 2, 2, 2))
    if not count:
        return ()
    faults = _draw_fault(rng, rng.choice(_FAULTS), operations, size)
    if count == 1:
        return faults
    way = rng.random()
    if way < 0.6:  # One that strikes while the ranks learn of the first.
        rank = faults[0].rank if rng.random() < 0.5 else rng.randrange(size)
        kind = rng.choice(_AFTERMATHS)
        moment: Moment = "own error" if rng.random() < 0.5 else "any error"
        second = Fault(kind, rank, -1, moment, rng.choice((0.0, 0.0005, 0.002)), _draw_thaw(rng, kind))
        return (*faults, second)
    others = [one for one in _draw_fault(rng, rng.choice(_FAULTS), operations, size) if one not in faults]
    return (*faults, *others)


def _draw_fault(rng: random.Random, kind: str, operations: tuple[Operation, ...], size: int) -> tuple[Fault, ...]:
    operation = rng.choice(operations)
    rank = rng.choice(operation.ranks)
    if kind == "time limit":  # Another rank of the call is late, or stopped.
        late = rng.choice([other for other in operation.ranks if other != rank])
        limited = Fault(kind, rank, operation.number, "before", rng.choice((0.05, 0.1, 0.3)))
        if rng.random() < 0.5:
            return limited, Fault("late", late, operation.number, "before", rng.choice((0.5, 1.0)))
        return limited, Fault("freeze", late, operation.number, "before", 0.0, rng.choice((0.5, 1.0)))
    if kind == "late":
        return (Fault(kind, rank, operation.number, "before", rng.choice((0.01, 0.1, 0.5))),)
    moment: Moment = "before"
    if kind == "give up" or (kind in _STRIKES and rng.random() < 0.6):
        moment = "during"
    delay = rng.choice((0.0, 0.0005, 0.002, 0.01, 0.1)) if moment == "during" else 0.0
    return (Fault(kind, rank, operation.number, moment, delay, _draw_thaw(rng, kind)),)


def _draw_thaw(rng: random.Random, kind: str) -> float:
    return {"freeze": rng.choice((0.8, 1.5, 5.0, float("inf"))), "freeze briefly": 0.1}.get(kind, float("inf"))


def decode(fields: dict[str, Any]) -> Schedule:
    """Return a schedule from its fields, as ``dataclasses.asdict`` and JSON have them."""
    operations = [
        Operation(**one | {"ranks": tuple(one["ranks"]), "lags": tuple(one["lags"])}) for one in fields["operations"]
    ]
    faults = [Fault(**one) for one in fields["faults"]]
    read = {"workers": tuple(fields["workers"]), "operations": tuple(operations), "faults": tuple(faults)}
    return Schedule(**fields | read)
