"""Options of a run, all drawn from its seed: its size, its actions, and the faults that it has to survive.

Each run leaves out most kinds of faults, so that the others are not drowned ("swarm testing", Groce et al. 2012).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from psdist import ASP, BSP, SSP
from psdist.consistency import Consistency
from psdist.optim import SGD, Optimizer

#: Kinds of faults that the nemesis may cause.
SINGLE = (
    "kill worker",
    "kill worker host",
    "pause worker",
    "freeze worker",
    "kill scheduler",
    "pause scheduler",
    "pause server",
    "break connections",
    "partition worker",
    "partition worker from server",
    "isolate scheduler briefly",
    "cut scheduler off",
    "cut scheduler off from some",
    "pause all servers",
    "pause most servers",
    "slow node",
    "join worker",
    "starve worker",
    "starve scheduler",
    "break session of worker",
)
#: A worker loses its path to a server while both reach everybody else; in some runs for longer than its lease. It is
#: drawn separately, so that it changes no run without it.
CUT_OFF = "cut worker off server"
#: Longest such cut.
CUT_OFF_SECONDS = 60.0
#: Fraction of all runs with this fault.
CUT_OFF_SHARE = 0.04
#: A worker's script holds the interpreter for longer than its lease, while its connections answer pings. Only runs that
#: ask for it have it, without spontaneous cuts: a session that is cut meanwhile cannot be opened again in time.
HELD = "hold interpreter of worker"
#: Faults that a run survives only with a second copy of each shard.
REPLICATED = (
    "kill server",
    "kill server host",
    "freeze server",
    "partition server",
    "partition servers",
    "split off server and worker",
    "cut server and worker from scheduler",
    "break connections and kill server",
    "cut server from scheduler",
    "break session of server",
    "starve server",
    "starve all",
    "maps come late",
    "reports come late",
    "server skips maps",
    "a filling is in doubt",
    "join server",
    "drain server",
)

#: Faults that may last for up to CUT_OFF_SECONDS.
LASTING = frozenset({CUT_OFF, HELD, "cut scheduler off", "cut scheduler off from some"})
#: Faults that lose no member, however long they last: all are alive, and nobody replaces anybody.
HARMLESS = frozenset({"cut scheduler off", "break session of server", "pause scheduler", "pause all servers", HELD})


@dataclass(frozen=True)
class Options:
    """Options of one run. Times are virtual seconds."""

    seed: int
    servers: int = 2
    hosts: int = 4
    workers: int = 2
    replicas: int = 1
    consistency: Consistency = field(default_factory=BSP)
    optimizer: Optimizer = field(default_factory=lambda: SGD(lr=1.0))
    steps: int = 5
    slices: int = 4
    lives: int = 6
    think_seconds: float = 0.2
    #: Fractions of steps that begin with a pull, and that push without a pull.
    pulls: float = 0.2
    bare_pushes: float = 0.2
    #: True if a non-participant reads continually.
    reader: bool = False
    lease_seconds: float = 2.0
    worker_lease_seconds: float = 10.0
    handle_seconds: float = 0.0
    delay: tuple[float, float] = (0.0005, 0.005)
    slow: float = 0.0
    slow_seconds: float = 0.1
    cut: float = 0.0
    disk_seconds: tuple[float, float] = (0.0005, 0.003)
    faults: tuple[str, ...] = ()
    #: Number of faults, and the time by which they start.
    fault_count: int = 0
    fault_seconds: float = 4.0

    @property
    def slots(self) -> int:
        """Largest number of pushes."""
        return self.lives * self.steps

    @property
    def text(self) -> str:
        """All options on one line."""
        values = {name: value for name, value in vars(self).items() if name not in ("seed", "optimizer")}
        values["momentum"] = self.optimizer.values()["momentum"]
        return ", ".join(f"{name}={value}" for name, value in values.items())

    def stream(self, name: str) -> random.Random:
        """Return a separate random stream, so that drawing more from one does not change another."""
        return random.Random(f"{self.seed}/{name}")


def draw(seed: int) -> Options:
    """Return the options of a seed."""
    rng = random.Random(f"{seed}/options")
    replicas = rng.choice((1, 2, 2))
    kinds = list(SINGLE) + (list(REPLICATED) * 2 if replicas > 1 else [])
    workers = rng.choice((1, 2, 2, 3, 3, 4))
    consistency: Consistency = rng.choice((BSP(), BSP(), SSP(0), SSP(1), SSP(2), ASP()))
    exact = isinstance(consistency, BSP)
    lease = rng.choice((1.0, 2.0))
    options = Options(
        seed=seed,
        servers=rng.choice((2, 3, 4) if replicas > 1 else (1, 2, 3)),
        hosts=rng.choice((1, 4)),
        workers=workers,
        replicas=replicas,
        consistency=consistency,
        optimizer=SGD(lr=1.0, momentum=0.5 if exact and rng.random() < 0.5 else 0.0),
        steps=rng.choice((3, 4, 6)),
        slices=rng.choice((2, 4, 6)),
        lives=workers + 4,
        think_seconds=rng.choice((0.02, 0.1, 0.4)),
        pulls=rng.choice((0.0, 0.3)),
        bare_pushes=rng.choice((0.0, 0.3)),
        reader=rng.random() < 0.25,
        lease_seconds=lease,
        handle_seconds=rng.choice((0.0, 5e-6, 5e-5)),
        delay=rng.choice(((0.0002, 0.001), (0.0005, 0.005), (0.001, 0.03))),
        slow=rng.choice((0.0, 0.0, 0.02)),
        slow_seconds=rng.choice((0.05, 0.3)),
        cut=rng.choice((0.0, 0.0, 0.05, 0.2)),
        disk_seconds=rng.choice(((0.0005, 0.003), (0.0005, 0.003), (0.02, 0.15))),
        faults=tuple(sorted(set(rng.choices(kinds, k=rng.choice((1, 2, 3, 4)))))),
        fault_count=rng.choice((0, 1, 2, 3, 5)),
        fault_seconds=rng.choice((1.5, 4.0)),
        worker_lease_seconds=rng.choice((lease, 10.0)),
    )
    beside = random.Random(f"{seed}/cut off")
    return cut_off(options, beside) if beside.random() < CUT_OFF_SHARE else options


def cut_off(options: Options, rng: random.Random) -> Options:
    """Return the options with a cut between a worker and a server added, and enough steps for the others to train
    during it."""
    lease = options.lease_seconds
    others = rng.sample(options.faults, k=min(len(options.faults), rng.choice((0, 1, 2))))
    return replace(
        options,
        faults=(CUT_OFF, *sorted(others)),
        fault_count=1 if not others else rng.choice((2, 4)),
        workers=max(2, options.workers),
        lives=max(2, options.workers) + 4,
        steps=40,
        think_seconds=0.4,
        worker_lease_seconds=rng.choice((2 * lease, 2 * lease, 10.0)),
        fault_seconds=4.0,
    )
