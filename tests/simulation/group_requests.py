"""Requests of simulated workers to the scheduler, whose answers may be lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from psdist.errors import PsdistError
from psdist.v1 import scheduler_pb2 as pb

if TYPE_CHECKING:
    from tests.simulation.groups import GroupWorld, _Life


class LossyCalls:
    """Stand-in for ``SchedulerCalls``. A request whose answer is lost is repeated."""

    stub = SimpleNamespace(FormGroup=None)

    def __init__(self, world: GroupWorld, life: _Life) -> None:
        self._world, self._life = world, life
        self.rng = world.options.stream(f"calls of {life.number}")

    async def call(self, method: Any, request: Any) -> Any:
        """See SchedulerCalls."""
        return await self.call_until_answered(method, lambda: request, "", None)

    async def call_until_answered(self, method: Any, make: Any, reason: str, incarnation: int | None = None) -> Any:
        """See SchedulerCalls."""
        world, life = self._world, self._life
        while True:
            life.membership.raise_if_expelled(incarnation)
            request = pb.FormGroupRequest.FromString(make().SerializeToString())
            await world.loop.after(world.network.delay())
            if world.is_reachable(life):
                try:
                    answer: Any = world.form(request)
                except PsdistError as error:
                    answer = error
                await world.loop.after(world.network.delay())
                if world.is_reachable(life) and self.rng.random() < 0.95:
                    if isinstance(answer, PsdistError):
                        raise answer
                    return answer
                world.counts["an answer of the scheduler was lost"] += 1
            await world.loop.after(0.02)
