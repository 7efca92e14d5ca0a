"""Delivery of a request to all of its servers together, each slice answered exactly once.

``Delivery.deliver`` sends every slice of a request along the routes of the newest map. Slices of a broken attempt are
sent again under the same number. A stale route is planned again. A difference to an estimate that the server lost is
replaced by the whole gradient. An attempt on a server that is gone ends immediately, and its slices wait for the map
that names their new primary. Only a map says that something is lost (``routing``). Servers do not wait for each other
here: with clipping by the global norm, the answer of one may depend on a slice that is sent again to another.

A handle has its transports in the order of preference. Before each call the missing connections are prepared, which may
take a negotiation with servers. A request then uses the first transport that is open to its server. gRPC is last, and
always open. It alone carries weights that the script wrote, beside the gradients of their slices.

Not here: the numbers of steps and versions (``push_sequence``), the server of each slice (``routing``), how a request
travels (``transport``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Final, Protocol

from psdist.client.core.routing import Route, RoutingPlan
from psdist.client.session.worker_session import WorkerSession
from psdist.client.transport.transport import Connection, PushRequest, Request, Transport
from psdist.errors import (
    InternalError,
    NotMemberError,
    PsdistError,
    ServerUnreachableError,
    StaleEpochError,
    StaleEstimateError,
    UnknownParametersError,
    WaitTimeoutError,
    copy_error,
)
from psdist.monitoring.phase_timer import Subject
from psdist.settings.debugging import time_limit
from psdist.wire.limits import Backoff

#: Longest wait for a newer map. Then the route is tried again, in case it was the server that was behind.
_NEWER_MAP_SECONDS: Final = 1.0
#: Denials of the parameters in a row after which a server is believed, if the scheduler is heard.
_DENIALS: Final = 10

#: Plans the routes of slices by the newest map. Raises why the call cannot continue.
Planner = Callable[[Sequence[int]], RoutingPlan]


class Pusher(Protocol):
    """The worker whose requests are delivered, as far as pushes depend on it."""

    @property
    def incarnation(self) -> int:
        """The incarnation that takes part."""

    async def start_push(self) -> int:
        """Return the snapshot mark of the next push, once it may begin."""


class Transports:
    """Transports of one handle, the preferred one first. The last is always open."""

    def __init__(self, *transports: Transport) -> None:
        self._transports = transports

    def connection(self, route: Route, request: Request) -> Connection:
        """Return the connection that carries ``request`` to the route's server now."""
        written = request.progress.options.written
        has_more = written is not None and written.touches(request.slicing, route.slices)
        for transport in self._transports[-1:] if has_more else self._transports:
            if connection := transport.connection(route):
                return connection
        raise InternalError(f"no transport to {route.peer} is open")

    def is_missing(self, routes: Sequence[Route]) -> bool:
        """Return True if ``prepare`` has anything to do. Call it before each call."""
        for route in routes:
            for transport in self._transports:
                if transport.connection(route):
                    break
                if transport.is_missing(route):
                    return True
        return False

    async def prepare(self, routes: Sequence[Route]) -> None:
        """Open the transports to the servers of ``routes`` that were not tried yet, or broke, unless a preferred one is
        open."""
        for transport in self._transports:
            if not routes:
                return
            await transport.prepare(routes)
            routes = [route for route in routes if not transport.connection(route)]

    def statuses(self, servers: Iterable[str]) -> dict[str, str]:
        """Return, by server, the transport in use, and why those before it are not: "shm", "grpc: too old a kernel"."""
        return {server_id: self._status(server_id) for server_id in servers}

    def _status(self, server_id: str) -> str:
        reasons: list[tuple[str, str]] = []
        for transport in self._transports:
            if not (reason := transport.why_closed(server_id)):
                break
            reasons.append((transport.name, reason))
        if len(reasons) > 1:
            return f"{transport.name}: {'; '.join(f'no {name}: {reason}' for name, reason in reasons)}"
        return f"{transport.name}: {reasons[0][1]}" if reasons else transport.name


class Delivery:
    """The requests of one handle on their way to its servers.

    pusher: the member that pushes; None if this handle only reads, or uploads initial values.
    timeout: limit of one request in seconds; None waits as long as its servers live.
    """

    def __init__(
        self,
        session: WorkerSession,
        transports: Transports,
        pusher: Pusher | None = None,
        timeout: float | None = None,
    ) -> None:
        self._session = session
        self._transports = transports
        self._pusher = pusher
        self._timeout = timeout
        self.view = session.membership.view
        self._waits = session.waits
        self._reachability = session.reachability
        self._rng = session.calls.rng
        #: Slices that were sent more than once.
        self.resent = 0
        #: Reason of the newest wait, for the error of a call that is given up.
        self._last_reason = "for an answer"

    async def deliver(self, request: Request, planner: Planner) -> None:
        """Return when every slice of ``request`` is answered.

        Raises ServerLostError, FencedError, WaitTimeoutError and whatever else a server refuses with; then some slices
        may be answered.
        """
        limit = time_limit(self._timeout)
        try:
            async with nullcontext() if limit is None else asyncio.timeout(limit):
                try:
                    if isinstance(request, PushRequest) and self._pusher is not None:
                        if self.view.cluster.paused:
                            await self._wait_until_unpaused(request, self._pusher)
                        request.mark = await self._pusher.start_push()
                    parts = self._parts(request, planner, planner(sorted(request.progress.pending)))
                    if len(parts) == 1:
                        await parts[0]
                    elif parts:
                        async with running(parts) as tasks:
                            raise_first_error(tasks, await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
                except NotMemberError:
                    if self._pusher is not None:  # A server also says so to a worker that was expelled meanwhile.
                        await self._session.calls.confirm_membership(request.sender.incarnation)
                    raise
        except TimeoutError:
            if limit is None:
                raise
            raise WaitTimeoutError(
                f"{request.title} took longer than request_timeout={limit:g} s: waiting {self._last_reason}. The "
                "step was not advanced; calling again continues it"
            ) from None

    async def _wait_until_unpaused(self, request: PushRequest, pusher: Pusher) -> None:
        """Return when the run has enough workers for a push to begin."""
        with self._waits.open(self._pause_reason(request, pusher)) as wait:
            while reason := self._pause_reason(request, pusher):
                wait.update_reason(reason)
                self._last_reason = reason
                await self.view.changed()

    def _pause_reason(self, request: PushRequest, pusher: Pusher) -> str:
        """Return why pushes pause; empty if they do not. Raises if this incarnation has ended."""
        if not (paused := self.view.cluster.paused):
            return ""
        self._session.membership.raise_if_expelled(pusher.incarnation)
        return f"{paused}, for {request.title}"

    def _parts(self, request: Request, planner: Planner, plan: RoutingPlan) -> list[Coroutine[Any, Any, None]]:
        """The deliveries that make up ``plan``, to be awaited together."""
        parts = [self._deliver_route(request, planner, route) for route in plan.routes]
        if plan.orphans:
            parts.append(self._deliver_orphans(request, planner, plan))
        return parts

    async def _deliver_orphans(self, request: Request, planner: Planner, plan: RoutingPlan) -> None:
        """Wait until the scheduler names new primaries of the orphans of ``plan``, and deliver these slices there."""
        orphans = plan.orphans
        with self._waits.open(f"{plan.reason}, for {request.title}") as wait:
            # The map may have changed since the plan was made.
            while len((plan := planner(orphans)).orphans) == len(orphans):
                wait.update_reason(f"{plan.reason}, for {request.title}")
                try:
                    await self.view.changed()
                finally:
                    self._last_reason = wait.reason
        await all_or_first_error(self._parts(request, planner, plan))

    async def _deliver_route(self, request: Request, planner: Planner, route: Route) -> None:
        """Get the slices of ``route`` answered, by whichever server holds them in the end."""
        backoff: Backoff | None = None
        denials = 0
        sends = isinstance(request, PushRequest) and not request.abstains
        subject = Subject(request.sender.parameters, request.progress.number, route.server_id)
        reason = f"for {route.peer} to answer {request.title}"
        with self._waits.open_request(reason, sends=sends, subject=subject) as wait:
            while True:
                broken: PsdistError | None = None
                loss = self.view.loss_of(route.server_id, route.incarnation)
                try:
                    if loss.done():
                        raise copy_error(loss.result())
                    await self._transports.connection(route, request).exchange(request, route, wait, loss)
                except (StaleEpochError, StaleEstimateError, ServerUnreachableError, UnknownParametersError) as error:
                    broken = error.with_traceback(None)  # It refers to this frame, which refers to the error.
                finally:
                    self._last_reason = wait.reason
                if isinstance(broken, ServerUnreachableError) and not loss.done():
                    self._reachability.attempt_broke(route.server)
                if request.progress.pending.isdisjoint(route.slices):
                    return
                left = request.progress.unanswered(route.slices)
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
                    if backoff is None or len(left) < len(route.slices):
                        backoff = Backoff(self._rng)
                    cause = self._reachability.reason(route.server) or broken.message
                    wait.update_reason(f"for {route.peer} to be reachable again, for {request.title}: {cause}")
                    # A server that is gone meanwhile is not waited for.
                    gone = self.view.loss_of(route.server_id, route.incarnation)
                    await asyncio.wait({gone}, timeout=backoff.next_seconds())
                self.resent += len(left)
                plan = planner(left)
                if plan.orphans or len(plan.routes) > 1 or plan.routes[0].server != route.server:
                    break
                route = plan.routes[0]
        await all_or_first_error(self._parts(request, planner, plan))


@asynccontextmanager
async def running(coroutines: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines in tasks for an ``async with`` block, which cancels the unfinished ones at its end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_or_first_error(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines concurrently. The first error cancels the others and is raised."""
    if len(coroutines) == 1:
        await coroutines[0]
    elif coroutines:
        async with running(coroutines) as tasks:
            raise_first_error(tasks, await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))


def raise_first_error(tasks: Sequence[asyncio.Task[None]], waited: tuple[set[asyncio.Task[None]], Any]) -> None:
    """Raise the error of the first of ``tasks`` that failed. waited: the result of ``asyncio.wait``."""
    for task in tasks:
        if task in waited[0]:
            task.result()
