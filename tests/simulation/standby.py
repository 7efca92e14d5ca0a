"""Runs with two schedulers whose store is in etcd: the general runs, in which the leader is replaced again and again.

The leader is killed, frozen and resumed, or cut off together with its way to etcd. When its lease has ended, a
scheduler at the other address leads. Writes of a frozen leader reach the store after it has resumed, which must refuse
them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from psdist.errors import LeadershipLostError
from psdist_scheduler.etcd_client import LEASE_SECONDS
from tests.simulation import options as general
from tests.simulation import scenario
from tests.simulation.cluster import SCHEDULER, World
from tests.simulation.disk import DiskStore
from tests.simulation.environment import RunLoop
from tests.simulation.loop import Node
from tests.simulation.nemesis import Nemesis
from tests.simulation.options import Options
from tests.simulation.scenario import Result

OTHER: Final = "10.0.0.2:7000"
REPLACE: Final = "replace scheduler"
_PLACES: Final = (("scheduler", SCHEDULER), ("scheduler-b", OTHER))


class StandbyWorld(World):
    """A run with two places for a scheduler."""

    schedulers = f"{SCHEDULER},{OTHER}"

    def __init__(self, loop: RunLoop, options: Options) -> None:
        super().__init__(loop, options)
        self._place = 1

    def start_scheduler(self) -> None:
        """Let a scheduler lead at the other place: the lease of the one before has ended."""
        self._place = 1 - self._place
        name, address = _PLACES[self._place]
        self.scheduler_node = node = self.loop.node(name, f"host-{name}")
        store = DiskStore(self.disk, self.disk.new_leader())
        self.loop.start(node, self.schedule(node, address, store))

    def scheduler_ended(self, node: Node, error: BaseException) -> None:
        """Check that only a scheduler that was replaced ends by itself."""
        if not isinstance(error, LeadershipLostError) or node is self.scheduler_node:
            super().scheduler_ended(node, error)
        self.counts["a deposed scheduler ended"] += 1
        self.loop.world_soon(self._bury, node)

    def _bury(self, node: Node) -> None:
        if not node.dead:
            self.kill(node, silent=False)


class StandbyNemesis(Nemesis):
    """The general faults, and the replacement of the leader."""

    _world: StandbyWorld

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._frozen: list[Node] = []

    def cause(self, kind: str) -> bool:
        """See Nemesis."""
        return self._replace() if kind == REPLACE else super().cause(kind)

    def _replace(self) -> bool:
        """Kill, freeze or cut off the leader until its lease has ended, and start another one."""
        node, rng = self._world.scheduler_node, self._rng
        if node is None or node.dead or node.paused or self._is_apart():
            return False
        seconds = LEASE_SECONDS * rng.uniform(1.0, 1.5)
        self._set_apart(seconds)
        self._lasts_until = max(self._lasts_until, self._loop.time() + seconds)
        match rng.choice(("kill", "freeze", "freeze in a write", "cut")):
            case "kill":
                self._world.kill(node, silent=rng.random() < 0.5)
            case "freeze":
                self._freeze(node, seconds)
                return True
            case "freeze in a write":
                if not self.cause("kill worker"):
                    return False
                self._world.disk.on_begin = lambda: self._freeze(node, seconds)
                return True
            case _:
                self._part([node.name], self._names(), seconds + rng.uniform(0.0, 2.0), one_way=False)
        self._later(seconds, self._let_other_lead, node)
        return True

    def _freeze(self, node: Node, seconds: float) -> None:
        """Freeze the leader until a little after its lease has ended."""
        self._world.disk.on_begin = None
        if node.dead or node.paused or node is not self._world.scheduler_node:
            return
        self._frozen.append(node)
        self._loop.pause(node)
        self._network.watch_silence(node.name, "*")
        self._later(seconds, self._let_other_lead, node)
        self._later(seconds + self._rng.uniform(0.0, 2.0), self._resume, node)
        self._lasts_until = max(self._lasts_until, self._loop.time() + seconds)

    def _let_other_lead(self, before: Node) -> None:
        if self._world.scheduler_node is before:
            self._world.start_scheduler()

    def heal(self) -> None:
        """See Nemesis."""
        super().heal()
        self._world.disk.on_begin = None
        for node in self._frozen:
            self._resume(node)


def draw(seed: int) -> Options:
    """Return the options of a seed: those of a general run, with replacements."""
    options = general.draw(seed)
    rng = random.Random(f"{seed}/standby")
    kept = [kind for kind in options.faults if kind not in general.LASTING]
    return replace(
        options,
        faults=(REPLACE, *rng.sample(kept, k=min(len(kept), rng.choice((0, 1, 2))))),
        fault_count=rng.choice((1, 2, 4)),
        fault_seconds=rng.choice((2.0, 8.0)),
        steps=rng.choice((6, 20)),
        think_seconds=rng.choice((0.1, 0.4)),
        disk_seconds=rng.choice(((0.0005, 0.003), (0.02, 0.15), (0.02, 0.15))),
    )


def run(seed: int, options: Options | None = None, *, trace: bool = False) -> Result:
    """Run a seed. The environment must be installed."""
    return scenario.run(seed, options or draw(seed), trace=trace, world=StandbyWorld, nemesis=StandbyNemesis)
