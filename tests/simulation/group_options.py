"""Options of a run of groups, drawn from its seed: its size, and the faults that it has to survive."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

FAULTS: Final = (
    "kill", "kill and start again", "freeze", "freeze briefly", "starve", "cut host off", "cut one path",
    "cut one direction", "restart scheduler", "join", "other call", "time limit", "give up", "cut from scheduler",
)  # fmt: skip

#: Fault of some runs besides those that are drawn: a script ends, without ``finish``.
END: Final = "end of script"
#: Fault of ablations and some seeds: a call reaches its time limit, and its worker dies while it tells the others.
TELLING: Final = "time limit and death"
_ENDING: Final = 0.15
_SHORTEST_DELAY: Final = (0.0001, 0.0005)
#: Seconds of faults in runs whose workers make a thousand calls in a second.
_BUSY_SECONDS: Final = 0.5


@dataclass(frozen=True)
class GroupOptions:
    """Options of a run, drawn from its seed."""

    seed: int
    workers: int
    faults: tuple[str, ...]
    fault_count: int
    fault_seconds: float
    delay: tuple[float, float]
    handle_seconds: float
    think_seconds: float
    size_min: int
    pairs: bool
    steps: bool

    @property
    def text(self) -> str:
        """All options."""
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if name != "seed")

    def stream(self, name: str) -> random.Random:
        """Return the random stream of this name."""
        return random.Random(f"{self.seed}/{name}")


def draw(seed: int) -> GroupOptions:
    """Return the options of a seed."""
    rng = random.Random(f"{seed}/groups")
    drawn = GroupOptions(
        seed=seed,
        workers=rng.choice((2, 3, 3, 4, 5)),
        faults=tuple(sorted(set(rng.choices(FAULTS, k=rng.choice((1, 2, 3)))))),
        fault_count=rng.choice((0, 1, 2, 3, 5)),
        fault_seconds=rng.choice((0.5, 2.0, 5.0)),
        delay=rng.choice((_SHORTEST_DELAY, (0.0005, 0.005), (0.001, 0.03))),
        handle_seconds=rng.choice((0.0, 5e-6, 5e-5)),
        think_seconds=rng.choice((0.0, 0.01, 0.2)),
        size_min=rng.choice((1, 1, 2)),
        pairs=rng.random() < 0.4,
        steps=rng.random() < 0.4,
    )
    if random.Random(f"{seed}/end").random() < _ENDING:  # Apart, so that older seeds keep their course.
        drawn = replace(drawn, faults=(*drawn.faults, END))
    if random.Random(f"{seed}/telling").random() < _ENDING:
        drawn = replace(drawn, faults=(*drawn.faults, TELLING), fault_count=max(3, drawn.fault_count))
    is_busy = not drawn.think_seconds and drawn.delay == _SHORTEST_DELAY
    return replace(drawn, fault_seconds=_BUSY_SECONDS) if is_busy else drawn
