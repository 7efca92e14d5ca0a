"""The data path: slices to and from the servers, all servers at once, each slice answered exactly once.

A ``Job`` says what is sent, and what is done with an answer. ``DataPath.deliver`` follows every slice of it. A stream
that breaks is opened again for what is unanswered, with the same step. A route that is out of date is planned anew. An
attempt on a server that is gone ends at once, and its slices wait for the map that has their new primary. Only a map
says that something is lost (``routing``). The servers do not wait for each other here, because with clipping by the
global norm the answer of one may depend on a slice that is sent again to another.

Not here: the numbers of steps and versions (``push_sequence``), which server has what (``routing``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc
import grpc.aio

from psdist.client.core.push_sequence import PendingRequest
from psdist.client.core.routing import Route, RoutingPlan
from psdist.client.session.cluster_view import again
from psdist.client.session.scheduler_session import WorkerSession
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.requests import RequestIdentity
from psdist.client.transport.write_queue import WriteQueue
from psdist.errors import ClosedError, PsdistError, ServerUnreachableError, StaleEpochError
from psdist.wire import channels, malloc_options, status
from psdist.wire.backoff import Backoff

if TYPE_CHECKING:
    from psdist.client.transport.shm.attachment import SharedMemory

logger = logging.getLogger("psdist")

#: A newer map is waited for at most so long; then the route is tried again, in case it was the server that was behind.
_NEWER_MAP_SECONDS: Final = 1.0
#: What grpc.aio says, in place of the server's own status, where a write came after the server had ended the stream
#: (grpc issue 36066). The next attempt meets that status, or a server that is well again.
_WRITE_FAILED: Final = "Internal error from Core"
_SERVICE: Final = "/psdist.v1.ServerService/"

#: Where slices go, by the newest map. Raises why the call cannot go on.
Planner = Callable[[Sequence[int]], RoutingPlan]


class Job(Protocol):
    """One call of the user, as far as servers see it."""

    #: Name of the method of ServerService.
    method: str
    #: What the user did, for messages: "step 12 of 'mlp'".
    title: str
    request: PendingRequest
    sender: RequestIdentity
    #: The memory shared with servers, for jobs that can use it.
    shared_memory: SharedMemory | None

    def messages(self, route: Route) -> Iterator[tuple[int, bytes]]:
        """The requests for the slices of ``route``, in their order, each with the slice it is for."""

    def take(self, route: Route, data: bytes) -> str:
        """An answer of the route's server. Returns its reason if all it says is that it waits."""


class DataPath:
    """Channels to servers, and the way of a job over them."""

    def __init__(self, link: WorkerSession) -> None:
        malloc_options.keep_buffers()
        self._link = link
        self._methods: dict[tuple[str, str], Any] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turns: defaultdict[str, WriteQueue] = defaultdict(WriteQueue)
        #: Slices that were asked for more than once, by parameters' name.
        self.resent: Counter[str] = Counter()
        #: What the last call waited for when it was given up.
        self.last_reason = "for an answer"

    async def deliver(self, job: Job, planner: Planner) -> None:
        """Returns when every slice of ``job`` is answered.

        planner: where slices go by the newest map.
        Raises ServerLostError, FencedError and whatever else a server refuses with; then some slices may be answered.
        """
        await self._send_routes(job, planner, planner(sorted(job.request.pending)))

    async def close(self) -> None:
        """Closes all channels."""
        opened = list(self._channels.values())
        self._channels.clear()
        self._methods.clear()
        for channel in opened:
            await channel.close()

    async def _send_routes(self, job: Job, planner: Planner, plan: RoutingPlan) -> None:
        parts = [self._deliver_route(job, planner, route) for route in plan.routes]
        if plan.orphans:
            parts.append(self._await_new_primary(job, planner, plan))
        if len(parts) == 1:
            await parts[0]
        elif parts:
            await all_or_first_error(parts)

    async def _await_new_primary(self, job: Job, planner: Planner, plan: RoutingPlan) -> None:
        """Waits until the scheduler says who has the orphans of ``plan`` now, and gets them answered there."""
        orphans = plan.orphans
        with self._link.waits.open(f"{plan.reason}, for {job.title}") as wait:
            # It may have been said since the plan was made.
            while len((plan := planner(orphans)).orphans) == len(orphans):
                wait.hear(f"{plan.reason}, for {job.title}")
                try:
                    await self._link.watch.changed()
                finally:
                    self.last_reason = wait.reason
        await self._send_routes(job, planner, plan)

    async def _deliver_route(self, job: Job, planner: Planner, route: Route) -> None:
        """Gets the slices of ``route`` answered, by whoever holds them in the end."""
        backoff = Backoff(self._link.rng)
        with self._link.waits.open(f"for {route.peer} to answer {job.title}") as wait:
            while True:
                try:
                    broken = await self._attempt(job, route, wait)
                finally:
                    self.last_reason = wait.reason
                left = job.request.unanswered(route.slices)
                if not left:
                    return
                if isinstance(broken, StaleEpochError):
                    wait.hear(f"for a newer cluster map, for {job.title}: {broken.message}")
                    await self._link.watch.newer_than(route.epoch, _NEWER_MAP_SECONDS)
                elif broken is not None:
                    if len(left) < len(route.slices):
                        backoff.reset()
                    wait.hear(f"for {route.peer} to be reachable again, for {job.title}: {broken.message}")
                    await self._pause(route, backoff.next_seconds())
                self.resent[job.sender.parameters] += len(left)
                plan = planner(left)
                if plan.orphans or len(plan.routes) > 1 or plan.routes[0].server != route.server:
                    break
                route = plan.routes[0]
        await self._send_routes(job, planner, plan)

    async def _pause(self, route: Route, seconds: float) -> None:
        """Waits before the next attempt, but not for a server that is gone meanwhile."""
        loss = self._link.watch.loss_of(route.server_id, route.incarnation)
        await asyncio.wait({loss}, timeout=seconds)

    async def _attempt(self, job: Job, route: Route, wait: Wait) -> PsdistError | None:
        """One stream, to its end. Returns why it broke if it is worth another attempt; raises what is not."""
        loss = self._link.watch.loss_of(route.server_id, route.incarnation)
        if loss.done():
            return _worth_another(loss.result())
        if job.shared_memory is not None and (stream := job.shared_memory.stream_to(route)) is not None:
            return await stream.attempt(job, route, wait)
        call = self.method(route.address, job.method)(metadata=self._link.metadata)
        send = asyncio.create_task(_send(call, job, route, self._turns[route.address]))
        receive = asyncio.create_task(_receive(call, job, route, wait))
        try:
            await _until_received(receive, send, loss)
            if job.request.unanswered(route.slices):
                return ServerUnreachableError(f"{route.peer} ended the stream before all slices were answered")
            return None
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.INTERNAL and failure.details() == _WRITE_FAILED:
                return ServerUnreachableError(f"{route.peer} ended the stream while it was written to")
            return _worth_another(status.from_call(failure, route.peer))
        except ServerUnreachableError as error:  # it is gone
            return error
        finally:
            call.cancel()
            send.cancel()
            receive.cancel()
            await asyncio.gather(send, receive, return_exceptions=True)

    def method(self, address: str, name: str) -> Any:
        """The method as raw bytes both ways. On the wire a stream of one message is the same as a unary request."""
        method = self._methods.get((address, name))
        if method is None:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = channels.open_channel(address)
            method = self._methods[address, name] = channel.stream_stream(_SERVICE + name)
        return method


def _worth_another(error: PsdistError) -> PsdistError:
    """The error, if another attempt may go well; else raises it."""
    if isinstance(error, StaleEpochError | ServerUnreachableError) or type(error) is ClosedError:
        return error
    raise again(error) from None


async def _send(call: Any, job: Job, route: Route, turns: WriteQueue) -> None:
    """Writes all messages. A stream that breaks meanwhile is left for its reader to report."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for index, message in job.messages(route):
            turn = await turns.take(index)
            try:
                await call.write(message)
            finally:
                turns.give(turn)
        await call.done_writing()


async def _receive(call: Any, job: Job, route: Route, wait: Wait) -> None:
    """Takes answers until the stream ends."""
    async for data in call:
        if reason := job.take(route, data):
            wait.hear(reason)
        else:
            wait.progress()


async def _until_received(receive: asyncio.Task[None], send: asyncio.Task[None], loss: asyncio.Future[Any]) -> None:
    """Returns when ``receive`` has ended well; raises its error, an error of ours in ``send``, or the loss."""
    waiting: set[asyncio.Future[Any]] = {receive, send, loss}
    while not receive.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if loss in done and not receive.done():
            raise again(loss.result())
        if send in done and not send.cancelled():
            send.result()
    if receive.cancelled():  # by nobody but its channel, when that was closed
        raise ClosedError("the client was closed before the call was answered")
    receive.result()


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
