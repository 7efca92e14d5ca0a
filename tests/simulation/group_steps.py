"""Runs of groups whose workers make steps by ``ElasticSteps``, with the faults of ``groups``.

Each worker gives a vector with its own element, so a mean shows which workers it contains. Checked: Two workers that
have completed a step, each in a group with the other, have the same mean, and the same weights after it. A mean is that
of the workers that contributed. No worker goes back by more than the step that it completed last.

A worker that was killed or left out may have completed a step that the others repeat without it, with another mean. It
is then in no group with them, and has no say again before it has received their state.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def bytes_max(self) -> int:
        """See ElasticState."""
        return self.weights.nbytes

    async def export(self) -> NDArray[np.uint8]:
        """See ElasticState."""
        return self.weights.copy().view(np.uint8)

    async def load(self, data: NDArray[np.uint8]) -> None:
        """See ElasticState."""
        self.weights = data.view(np.float64).copy()

    @property
    def origin(self) -> float:
        return float(self.weights[0])


@dataclass(frozen=True)
class _Step:
    """A step that a worker has completed.

    members: of its group then.
    weights: those after the step.
    """

    members: frozenset[tuple[str, int]]
    mean: bytes
    weights: bytes


class StepWorld(GroupWorld):
    """See the module."""

    def __init__(self, loop: Any, options: Any) -> None:
        super().__init__(loop, options)
        #: Steps that each process has completed since it last joined the group.
        self._made: dict[_Life, dict[int, _Step]] = {}

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
            self._compare(life, steps.step, _Step(_members(steps.group), out.tobytes(), state.weights.tobytes()))
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

    def _compare(self, life: _Life, number: int, made: _Step) -> None:
        """Compare a step with the same step of other workers."""
        self._made[life][number] = made
        for other, steps in self._made.items():
            other_made = steps.get(number)
            if other_made is None or _identity(other) not in made.members or _identity(life) not in other_made.members:
                continue
            if made.mean != other_made.mean:
                self.violations.append(f"{life.member}: another mean of step {number} than {other.member}")
            if made.weights != other_made.weights:
                self.violations.append(f"{life.member}: other weights after step {number} than {other.member}")


def _identity(life: _Life) -> tuple[str, int]:
    return life.member.member_id, life.member.incarnation


def _members(group: AsyncWorkerGroup) -> frozenset[tuple[str, int]]:
    return frozenset((member.worker_id, member.incarnation) for member in group._runner.members)
