"""The data path: a request to all of its servers at once, each slice answered exactly once.

``DataPath.deliver`` follows every slice of a request. What breaks is sent again for the slices that are unanswered,
with the same number. A route that is out of date is planned anew. A difference to what a server does not keep is sent
again as the whole gradient. An attempt on a server that is gone ends at once, and its slices wait for the map that has
their new primary. Only a map says that something is lost (``routing``). The servers do not wait for each other here,
because with clipping by the global norm the answer of one may depend on a slice that is sent again to another.

Not here: the numbers of steps and versions (``push_sequence``), which server has what (``routing``), how a request
travels (``transport``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from psdist.client.core.routing import Route, RoutingPlan
from psdist.client.session.scheduler_session import WorkerSession
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.requests import PushRequest, Request
from psdist.client.transport.transport import Transports
from psdist.errors import (
    InternalError,
    PsdistError,
    ServerUnreachableError,
    StaleEpochError,
    StaleEstimateError,
    UnknownParametersError,
    again,
)
from psdist.wire.backoff import Backoff

#: A newer map is waited for at most so long; then the route is tried again, in case it was the server that was behind.
_NEWER_MAP_SECONDS: Final = 1.0
#: A server that denies the parameters is believed after so many answers in a row while the scheduler is heard.
_DENIALS: Final = 10

#: Where slices go, by the newest map. Raises why the call cannot go on.
Planner = Callable[[Sequence[int]], RoutingPlan]


class DataPath:
    """The way of one handle's requests."""

    def __init__(self, session: WorkerSession, transports: Transports) -> None:
        self._session = session
        self._transports = transports
        self.view = session.membership.view
        self._waits = session.waits
        self._reachability = session.activities.reachability
        self._rng = session.calls.rng
        #: Slices that were sent more than once.
        self.resent = 0
        #: What the last call waited for when it was given up.
        self.last_reason = "for an answer"

    async def deliver(self, request: Request, planner: Planner) -> None:
        """Returns when every slice of ``request`` is answered.

        planner: where slices go by the newest map.
        Raises ServerLostError, FencedError and whatever else a server refuses with; then some slices may be answered.
        """
        await self._send_routes(request, planner, planner(sorted(request.progress.pending)))

    async def wait_while(self, reason: Callable[[], str]) -> None:
        """Returns when ``reason`` gives an empty text. It is asked again with each map and each news."""
        with self._waits.open(reason()) as wait:
            while text := reason():
                wait.update_reason(text)
                self.last_reason = text
                await self.view.changed()

    async def _send_routes(self, request: Request, planner: Planner, plan: RoutingPlan) -> None:
        parts = [self._deliver_route(request, planner, route) for route in plan.routes]
        if plan.orphans:
            parts.append(self._await_new_primary(request, planner, plan))
        if len(parts) == 1:
            await parts[0]
        elif parts:
            await all_or_first_error(parts)

    async def _await_new_primary(self, request: Request, planner: Planner, plan: RoutingPlan) -> None:
        """Waits until the scheduler says who has the orphans of ``plan`` now, and gets them answered there."""
        orphans = plan.orphans
        with self._waits.open(f"{plan.reason}, for {request.title}") as wait:
            # It may have been said since the plan was made.
            while len((plan := planner(orphans)).orphans) == len(orphans):
                wait.update_reason(f"{plan.reason}, for {request.title}")
                try:
                    await self.view.changed()
                finally:
                    self.last_reason = wait.reason
        await self._send_routes(request, planner, plan)

    async def _deliver_route(self, request: Request, planner: Planner, route: Route) -> None:
        """Gets the slices of ``route`` answered, by whoever holds them in the end."""
        backoff, denials = Backoff(self._rng), 0
        sends = isinstance(request, PushRequest) and not request.abstains
        with self._waits.open_request(f"for {route.peer} to answer {request.title}", sends=sends) as wait:
            while True:
                try:
                    broken = await self._attempt(request, route, wait)
                finally:
                    self.last_reason = wait.reason
                left = request.progress.unanswered(route.slices)
                if not left:
                    return
                if isinstance(broken, StaleEstimateError):
                    if not isinstance(request, PushRequest) or request.encoded is None:
                        raise InternalError(f"{route.peer} takes {request.title} for a difference")
                    request.encoded.send_whole(left)
                elif isinstance(broken, UnknownParametersError):
                    denials = denials + 1 if self._session.is_heard else 0
                    if denials >= _DENIALS:
                        raise broken
                    reason = f"for {self._session.calls.peer} to say what became of the parameters of {request.title}"
                    wait.update_reason(f"{reason}: {broken.message}")
                    await self.view.newer_than(route.epoch, _NEWER_MAP_SECONDS)
                elif isinstance(broken, StaleEpochError):
                    wait.update_reason(f"for a newer cluster map, for {request.title}: {broken.message}")
                    await self.view.newer_than(route.epoch, _NEWER_MAP_SECONDS)
                elif broken is not None:
                    if len(left) < len(route.slices):
                        backoff.reset()
                    wait.update_reason(f"for {route.peer} to be reachable again, for {request.title}: {broken.message}")
                    await self._pause(route, backoff.next_seconds())
                self.resent += len(left)
                plan = planner(left)
                if plan.orphans or len(plan.routes) > 1 or plan.routes[0].server != route.server:
                    break
                route = plan.routes[0]
        await self._send_routes(request, planner, plan)

    async def _pause(self, route: Route, seconds: float) -> None:
        """Waits before the next attempt, but not for a server that is gone meanwhile."""
        loss = self.view.loss_of(route.server_id, route.incarnation)
        await asyncio.wait({loss}, timeout=seconds)

    async def _attempt(self, request: Request, route: Route, wait: Wait) -> PsdistError | None:
        """One attempt. Returns why it broke if it is worth another one; raises what is not."""
        loss = self.view.loss_of(route.server_id, route.incarnation)
        try:
            if loss.done():
                raise again(loss.result())
            await self._transports.choose(route).exchange(request, route, wait, loss)
        except (StaleEpochError, StaleEstimateError, ServerUnreachableError, UnknownParametersError) as error:
            if isinstance(error, ServerUnreachableError) and not loss.done():
                self._reachability.attempt_broke(route.server)
            return error
        return None


async def all_or_first_error(coroutines: Sequence[Any]) -> None:
    """Runs all at once; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
