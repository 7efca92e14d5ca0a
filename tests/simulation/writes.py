"""Runs whose scripts write weights between two pushes, with every fault of the runs with snapshots and with copies.

In BSP the seed decides which steps begin with a write, and all workers make it. A worker that has joined the others may
leave it out. Before some steps one worker writes something else. Then all workers must be refused, nothing may change,
and that worker writes the right values before it pushes again. In SSP and ASP each worker writes when it likes.

Some scripts think, or read, between a write and its push. If they are expelled meanwhile, or the run rolls back, the
write is for the push that they continue, or it is dropped and counted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from psdist.client.parameters import AsyncParameters
from psdist.errors import WrittenWeightsError
from tests.simulation import scenario, snapshots
from tests.simulation.cluster import NAME
from tests.simulation.environment import RunLoop
from tests.simulation.options import REPLICATED, SINGLE
from tests.simulation.oracle import Life, Push
from tests.simulation.snapshots import SnapshotOptions, SnapshotWorld
from tests.simulation.write_oracle import Journals, WriteOracle

#: Largest number of refusals of one push.
_REFUSALS_MAX: Final = 8


@dataclass(frozen=True)
class WriteOptions(SnapshotOptions):
    """Options of a run with writes; see also SnapshotOptions.

    writes: fraction of steps (BSP) or pushes that begin with a write.
    odd: BSP: fraction of steps before which one worker writes something else.
    waits: fraction of writes after which the script thinks, or reads, before it pushes.
    """

    writes: float = 0.4
    odd: float = 0.1
    waits: float = 0.3


def draw(seed: int) -> WriteOptions:
    """Return the options of a seed."""
    rng = random.Random(f"{seed}/writes")
    options = vars(snapshots.draw(seed)) | {"data": False}
    if options["replicas"] > 1 or rng.random() < 0.3:
        kinds = [*SINGLE, *REPLICATED * 2]
        options |= {"replicas": 2, "servers": rng.choice((2, 3)), "storage_faults": 0.0}
        options["faults"] = tuple(sorted(set(rng.choices(kinds, k=rng.choice((1, 2, 3))))))
    return WriteOptions(
        **options,
        writes=rng.choice((0.2, 0.5, 1.0)),
        odd=rng.choice((0.0, 0.0, 0.2, 0.5)),
        waits=rng.choice((0.0, 0.3, 1.0)),
    )


class WriteWorld(SnapshotWorld):
    """World whose scripts write weights."""

    options: WriteOptions
    oracle: WriteOracle

    def __init__(self, loop: RunLoop, options: WriteOptions) -> None:
        super().__init__(loop, options)
        noise = np.random.default_rng(options.stream("noise").getrandbits(64))
        make: Any = WriteOracle
        self.oracle = make(NAME, options.consistency, options.optimizer, options.slices, options.slots, noise)
        loop.oracle = self.oracle
        self._writing = options.stream("writing")
        #: Journals that each life has written before its next push.
        self._written: dict[int, Journals] = {}
        #: Eras and steps that a worker has written something else before.
        self._made_odd: set[tuple[int, int]] = set()

    # --- tensors ------------------------------------------------------------------------------------------------------

    def tensors_of(self, vector: Any) -> dict[str, Any]:
        """See World."""
        table, slots = vector.reshape(self.oracle.slicing.count, -1), self.options.slots
        rest = {f"w{index}": values[:-slots] for index, values in enumerate(table)}
        journals = {f"j{index}": values[-slots:] for index, values in enumerate(table)}
        return {name: part for pair in zip(rest.items(), journals.items(), strict=True) for name, part in pair}

    def vector_of(self, tensors: dict[str, Any]) -> Any:
        """See World."""
        return np.concatenate(list(tensors.values()))

    # --- what scripts write -------------------------------------------------------------------------------------------

    def _right(self, step: int) -> Journals:
        """Return what every worker writes before a step of BSP."""
        rng = self.options.stream(f"write {step}")
        return self._journals(rng) if rng.random() < self.options.writes else {}

    def _journals(self, rng: random.Random) -> Journals:
        count = self.oracle.slicing.count
        chosen = rng.sample(range(count), rng.randint(1, count))
        values = np.random.default_rng(rng.getrandbits(64))
        return {index: values.standard_normal(self.options.slots).astype(np.float32) for index in sorted(chosen)}

    def _choose(self, life: Life, handle: AsyncParameters) -> Journals:
        """Return what this worker writes before its next push."""
        if not self.oracle.exact:
            if self._writing.random() >= self.options.writes:
                return {}
            return {index: self.oracle.value(life.slots[len(life.pushes)]) for index in self._journals(self._writing)}
        step, right = handle.step, self._right(handle.step)
        if right and handle.step == handle.first_step > 0 and self._writing.random() < 0.5:
            self.counts["joined without a write"] += 1
            self.oracle.odd[len(self.oracle.eras), step] += 1  # After a restart all of them may join with this step.
            return {}
        rng, era = self.options.stream(f"odd {step}"), len(self.oracle.eras)
        if rng.random() >= self.options.odd or (era, step) in self._made_odd:
            return right
        if rng.randrange(self.options.workers) != life.worker:
            return right
        self._made_odd.add((era, step))
        self.oracle.odd[era, step] += 1
        self.counts["wrote something else"] += 1
        return {} if right and rng.random() < 0.5 else self._journals(rng)

    async def _before_push(self, life: Life, handle: AsyncParameters) -> None:
        """Write, perhaps wait, and write again if the write was dropped meanwhile."""
        while True:
            step, dropped = handle.step, handle._order.drops.writes
            written = self._choose(life, handle)
            if written:
                self.counts["wrote"] += 1
                await self._assign(handle, written)
            if self._writing.random() < self.options.waits:
                await self._wait(life, handle)
            if handle._order.drops.writes == dropped and handle.step == step:
                break
            self.counts["a write was dropped"] += handle._order.drops.writes > dropped
        self._written[life.number] = written

    async def _wait(self, life: Life, handle: AsyncParameters) -> None:
        await self.loop.after(self._writing.expovariate(1.0) * self.options.think_seconds)
        if self._writing.random() < 0.5:
            before = handle.participation.incarnation
            await self._read(self.clients[life.number], life, handle)
            self.counts["joined again with a write"] += before != handle.participation.incarnation

    async def _assign(self, handle: AsyncParameters, written: Journals) -> None:
        await handle.assign({f"j{index}": values for index, values in written.items()})

    async def _push(self, handle: AsyncParameters, push: Push) -> Any:
        """See World. A worker whose write was refused writes the right values, and pushes again."""
        self.oracle.wrote[push.slot] = self._written[push.life.number]
        for _ in range(_REFUSALS_MAX):
            try:
                return await super()._push(handle, push)
            except WrittenWeightsError as error:
                self.oracle.refused(push.life, push.step, str(error))
            right = self._right(push.step)
            if right.keys() != self.oracle.wrote[push.slot].keys() or self._differs(right, push):
                self.counts["wrote again after a refusal"] += 1
                self.oracle.wrote[push.slot] = right
                await self._assign(handle, right)
        raise AssertionError(f"{push.life.worker_id} is refused in step {push.step} again and again")

    def _differs(self, right: Journals, push: Push) -> bool:
        return any(values.tobytes() != self.oracle.wrote[push.slot][index].tobytes() for index, values in right.items())


def run(seed: int, options: WriteOptions | None = None, *, trace: bool = False) -> scenario.Result:
    """Run a seed. The environment must be installed."""
    return snapshots.play(options or draw(seed), WriteWorld, trace=trace)[0]
