"""One run of one seed: faults while the workers train, then none, and an end that must come.

``run`` returns the result. The same seed gives the same trace in every process.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psdist.client.session.loop
from tests.simulation.cluster import World
from tests.simulation.environment import RunLoop
from tests.simulation.loop import Deadlock, Failed, TooLong
from tests.simulation.nemesis import Nemesis
from tests.simulation.options import CUT_OFF_SECONDS, LASTING, Options, draw

#: Virtual seconds within which everything must be over, once all faults have ended.
CONVERGE_SECONDS = 90.0


@dataclass
class Result:
    """Result of a seed."""

    seed: int
    options: Options
    violations: list[str]
    trace_hash: str
    counts: Counter[str]
    virtual_seconds: float
    handles: int
    cpu_seconds: float
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Options of the run, and its violations."""
        return "\n  ".join([f"seed {self.seed}: {self.options.text}", *self.violations])


def run(
    seed: int,
    options: Options | None = None,
    *,
    trace: bool = False,
    world: type[World] = World,
    nemesis: type[Nemesis] = Nemesis,
) -> Result:
    """Run a seed. The environment must be installed."""
    options = options or draw(seed)
    started = time.process_time()
    loop = RunLoop(options.stream("schedule"), options.handle_seconds)
    loop.lines = [] if trace else None
    result = _play(loop, world(loop, options), nemesis)
    tear_down(loop)
    result.violations += loop.failures
    result.cpu_seconds = time.process_time() - started
    return result


def _play(loop: RunLoop, world: World, nemesis: type[Nemesis]) -> Result:
    options = world.options
    violations, begun = list[str](), loop.time()
    try:
        lasting = CUT_OFF_SECONDS if LASTING.intersection(options.faults) else 0.0
        loop.run(_main(world, nemesis), options.fault_seconds + lasting + CONVERGE_SECONDS)
    except (Deadlock, TooLong) as error:
        violations.append(f"no end: {error}; {state(world)}")
    except Failed:
        pass
    except Exception as error:
        violations.append(f"the run failed: {error!r}")
    violations = [*world.oracle.violations, *world.doomed, *violations]
    counts = world.counts + world.network.counts + world.oracle.counts
    counts["disk lost a write"] += world.disk.lost
    return Result(
        options.seed, options, violations, loop.trace_hash, counts, loop.time() - begun, loop.steps, 0.0,
        loop.lines or [],
    )  # fmt: skip


async def _main(world: World, kind: type[Nemesis]) -> None:
    options, loop = world.options, world.loop
    world.begin()
    if options.reader:
        world.start_reader()
    nemesis = kind(world)
    await nemesis.run()
    await loop.after(options.lease_seconds * options.stream("heal").random())
    await loop.after(nemesis.lasts_until - loop.time())
    nemesis.heal()
    await world.all_finished()
    await world.final_read()


def state(world: World) -> str:
    """Return the progress of all workers and of the scheduler."""
    workers = []
    for life in world.lives:
        client = world.clients.get(life.number)
        if not life.over:
            session = client.session if client is not None else None
            waits = [wait.sentence for wait in session.waits.open_waits.values()] if session is not None else []
            acked = sum(push.acked for push in life.pushes)
            workers.append(f"{life.worker_id} pushed {len(life.pushes)}, {acked} answered, {waits}")
    phase = world.scheduler.cluster.phase if world.scheduler is not None else "no scheduler"
    waits = world.scheduler.cluster.waits if world.scheduler is not None else []
    return f"workers {workers}; {phase}; waits {waits}"


def tear_down(loop: RunLoop) -> None:
    """Release all nodes. Objects that die now may complain, as they die in the middle of their work."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        psdist.client.session.loop.open_clients.clear()
        loop.close()
        cleared: Any = loop
        cleared.world = cleared.network = cleared.answered = None
        gc.collect()
    finally:
        sys.unraisablehook = hook
