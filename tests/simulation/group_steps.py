"""Runs of groups whose workers make steps by ``ElasticSteps``, with the faults of ``groups``.

Each worker gives a vector with its own element, so a mean shows which workers it contains. Checked: When a worker has
completed a step, all members of its group that have completed it have the same mean, and the same weights after it. A
mean is that of the workers that contributed. No worker goes back by more than the step that it completed last.

A worker that was killed or left out may have completed a step that the others repeat without it, with another mean. It
is in none of their groups then, and has no say again before it has received their state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist.collectives.elastic import ElasticSteps, StepArrays
from psdist.collectives.group import AsyncWorkerGroup
from tests.simulation.groups import GroupWorld, _Life

#: Elements of a vector: more than there are ranks.
_ELEMENTS = 40


class _State:
    """Weights of one worker, after the number of the worker whose initial weights they come from."""

    def __init__(self, number: int) -> None:
        self.weights = np.array([float(number), *np.zeros(_ELEMENTS)])

    async def export(self) -> NDArray[np.uint8]:
        """See ElasticState."""
        return self.weights.copy().view(np.uint8)

    async def load(self, data: NDArray[np.uint8]) -> None:
        """See ElasticState."""
        self.weights = data.view(np.float64).copy()

    @property
    def origin(self) -> float:
        return float(self.weights[0])


class StepWorld(GroupWorld):
    """See the module."""

    def __init__(self, loop: Any, options: Any) -> None:
        super().__init__(loop, options)
        #: Mean of each step that a process has completed, and the weights after it, since it last joined the group.
        self._made: dict[_Life, dict[int, tuple[bytes, bytes]]] = {}

    async def work(self, life: _Life) -> None:
        """Make steps, forever."""
        state = _State(life.number)
        steps = ElasticSteps(lambda: self.join(life), state)
        await steps.start()
        origin, step = state.origin, steps.step
        while True:
            life.group = steps.group
            await self.think(steps.group)
            await steps.begin_step()
            given, out = np.zeros(_ELEMENTS), np.zeros(_ELEMENTS)
            given[life.member.rank] = 1.0
            await steps.reduce(StepArrays([given, given[:2].copy()], [out, np.empty(2)], 1))
            self._check_mean(life, steps.step, out)
            state.weights[1:] = state.weights[1:] / 2 + out
            life.group = steps.group
            self._compare(life, steps.group, steps.step, (out.tobytes(), state.weights.tobytes()))
            if state.origin == origin and steps.step < step:
                self.violations.append(f"{life.member}: made step {steps.step} after step {step}")
            origin, step = state.origin, steps.step
            life.calls_at_end += self.is_healed
            self.counts["steps"] += 1

    async def join(self, life: _Life) -> AsyncWorkerGroup:
        """See ``GroupWorld``. The others may have continued without the newest step of this worker."""
        self._made[life] = {}
        return await super().join(life)

    def _check_mean(self, life: _Life, step: int, mean: NDArray[np.float64]) -> None:
        count = np.count_nonzero(mean)
        if count and not np.allclose(mean[mean > 0], 1 / count):
            self.violations.append(f"{life.member}: step {step} has the mean {mean[mean > 0].tolist()}")

    def _compare(self, life: _Life, group: AsyncWorkerGroup, step: int, made: tuple[bytes, bytes]) -> None:
        """Compare a step with the same step of the members of the group in which a worker has completed it."""
        self._made[life][step] = made
        members = {(member.worker_id, member.incarnation) for member in group._exchange.members}
        for other, steps in self._made.items():
            if (other.member.member_id, other.member.incarnation) not in members or step not in steps:
                continue
            for what, mine, theirs in zip(("mean", "weights"), made, steps[step], strict=True):
                if mine != theirs:
                    self.violations.append(f"{life.member}: another {what} of step {step} than {other.member}")
