"""Requests of one handle to its servers, and the transports that carry them.

A request gets its number and its routes here.

Not here: the order of calls and the results for the user (``parameters``), the numbers (``participation``), time
limits, attempts and retries (``delivery``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from psdist.client.core.flat_vector import Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.core.routing import RoutingPlan
from psdist.client.participation import Participation
from psdist.client.reporting.phase_timer import PhaseTimer
from psdist.client.session.membership import Expulsion, Registration
from psdist.client.session.waits import ReportedWait
from psdist.client.session.worker_session import WorkerSession
from psdist.client.transport.buffers import PullTarget
from psdist.client.transport.delivery import Delivery
from psdist.client.transport.grpc import GrpcTransport
from psdist.client.transport.requests import ByteCounters, EncodedGradient, PullRequest, PushRequest
from psdist.client.transport.shm import ShmTransport
from psdist.client.transport.tcp import TcpTransport
from psdist.client.transport.transport import Transport, Transports
from psdist.compression import Cast, Codec, Float32
from psdist.errors import FencedError, WaitTimeoutError, WrittenWeightsError
from psdist.settings.config import TransportName
from psdist.tracing.spans import SpanKind
from psdist.types import DType


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of each worker for itself.

    request_timeout: seconds; None waits as long as it takes.
    reason: why the codec was chosen, if psdist chose it.
    """

    codec: Codec
    pull_dtype: DType
    request_timeout: float | None = None
    transport: TransportName = "auto"
    reason: str = ""

    @property
    def cast(self) -> Cast:
        """Cast of gradients for the wire and for shared memory. A codec that compresses starts from float32."""
        return self.codec if isinstance(self.codec, Cast) else Float32()


class ServerAccess:
    """Requests of one handle. grpc: the transport that all handles of a client share."""

    def __init__(
        self, session: WorkerSession, grpc: GrpcTransport, participation: Participation, options: Options
    ) -> None:
        self.participation = participation
        self.slicing = participation.entry.slicing
        self.options = options
        self.traffic = ByteCounters()
        self._session = session
        self._membership = session.membership
        view, waits = session.membership.view, session.waits
        self.shared_memory = ShmTransport(
            view, waits, grpc, participation.current.sender, participation.entry, options.cast.dtype,
            required=options.transport == "shm", member=participation.is_member, stable=participation.is_stable,
        )  # fmt: skip
        self.tcp = TcpTransport(
            view, waits, grpc, participation.current.sender, participation.entry, required=options.transport == "tcp"
        )
        preferred: dict[str, tuple[Transport, ...]] = {"shm": (self.shared_memory,), "tcp": (self.tcp,), "grpc": ()}
        self._transports = Transports(*preferred.get(options.transport, (self.shared_memory, self.tcp)), grpc)
        pusher = participation if participation.is_member else None
        self.delivery = Delivery(session, self._transports, pusher, options.request_timeout)
        self._rejoining = asyncio.Lock()
        #: All handles of this client that take part. They rejoin together: other workers may wait for any of them.
        self.siblings: Callable[[], Iterable[ServerAccess]] = tuple

    async def rejoin(self, fenced: FencedError, incarnation: int) -> bool:
        """Take part in the next incarnation of this client, after ``fenced`` ended work of ``incarnation``.

        Returns True if the current or next push continues: it is sent again, and slices that have it ignore it.
        Otherwise it is dropped, since its step was closed without it.

        Raises the error that ends the membership for good, and WaitTimeoutError.
        """
        limit = self.options.request_timeout
        try:
            async with asyncio.timeout(limit), self._rejoining:
                if self.participation.incarnation == incarnation:  # Otherwise another call has rejoined.
                    await self._membership.wait_until_rejoined(fenced, incarnation)
                    others = [one for one in self.siblings() if one is not self]
                    mine = self._membership.retry_across_incarnations(self._start_incarnation)
                    await asyncio.gather(mine, *(one.follow_rejoin() for one in others))
        except TimeoutError:
            raise WaitTimeoutError(
                f"taking part in {self.participation.name!r} again took longer than request_timeout={limit:g} s: "
                "calling again continues"
            ) from None
        return self.participation.current.continues

    async def follow_rejoin(self) -> None:
        """Take part in the incarnation in which another handle of this client rejoins."""
        participation = self.participation
        if self._rejoining.locked() or participation.incarnation == self._membership.registration.incarnation:
            return
        async with self._rejoining:
            await self._membership.retry_across_incarnations(self._start_incarnation)
            participation.is_outdated = not participation.current.continues and not participation.has_begun

    async def _start_incarnation(self, mine: Registration) -> None:
        await self.participation.start_incarnation(mine)
        await self.shared_memory.withdraw()
        for transport in (self.shared_memory, self.tcp):
            transport.rejoin(self.participation.current.sender, self.participation.entry)

    @property
    def expulsion(self) -> Expulsion:
        """Why the previous incarnation ended."""
        return self._membership.expulsion

    def waiting(self, *, push: bool, reads: bool, limited: bool = False) -> ReportedWait:
        """See ``Participation.report_wait``. limited: True if the wait has a time limit besides the client's."""
        limited = limited or self.options.request_timeout is not None
        return self.participation.report_wait(push=push, reads=reads, limited=limited)

    @property
    def phases(self) -> PhaseTimer:
        """Clock of the script's calls."""
        return self.participation.phases

    def work(self, kind: SpanKind) -> AbstractContextManager[None]:
        """Return a ``with`` block for work on the gradient of the next push, for traces."""
        return self.phases.work(kind, self.participation.name, self.participation.sequence.step)

    def counted_wait(self) -> AbstractContextManager[None]:
        """Return a context manager that counts its block as waiting. For waits that no other worker can end by
        itself."""
        return self._session.activities.throughput.waiting()

    def transports(self) -> dict[str, str]:
        """Return, by server, the transport in use, and why preferred ones are not: "shm", "grpc: the transport is
        'grpc'"."""
        entry = self._membership.view.cluster.entry(self.participation.name) or self.participation.entry
        # A shard of few slices may have none.
        servers = tuple(dict.fromkeys(entry.primaries[: self.slicing.count]))
        if self.options.transport == "grpc":
            return dict.fromkeys(servers, "grpc: the transport is 'grpc'")
        return self._transports.statuses(servers)

    async def close(self) -> None:
        """Close this handle's own connections to servers, and withdraw its shared memory."""
        await self.shared_memory.close()
        await self.tcp.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Prepare missing transports. Called before each call.

        Raises the reason if this client is out: FencedError if only this incarnation has ended, see ``rejoin``.
        """
        routes = self._plan_all().routes
        if not self._transports.is_missing(routes):
            return
        limit = self.options.request_timeout
        try:
            async with asyncio.timeout(limit):
                await self._transports.prepare(routes)
        except TimeoutError:
            raise WaitTimeoutError(
                f"connecting {self.participation.name!r} to its servers took longer than request_timeout={limit:g} s"
            ) from None

    def push(
        self,
        progress: PendingRequest,
        gradient: Flat | EncodedGradient | None,
        norm: float,
        target: PullTarget | None = None,
        weight: float = 1.0,
    ) -> Coroutine[Any, Any, None]:
        """Return a coroutine that delivers a gradient. It adds no frame of its own to that of ``Delivery.deliver``.

        gradient: None abstains.
        target: where the new weights go; None if they are not asked for.
        weight: weight of the gradient in the mean of its step.
        """
        flat, encoded = (gradient, None) if isinstance(gradient, np.ndarray) else (None, gradient)
        part = self.participation
        what = "step" if part.sequence.synchronous else "push"
        title = f"{what} {progress.number} of {part.name!r}"
        request = PushRequest(
            part.current.sender, progress, self.slicing, title, part.sequence.versions, flat, self.options.cast, norm,
            self.traffic, target, encoded, weight,
        )  # fmt: skip
        return self.delivery.deliver(request, part.current.routes.plan)

    async def withdraw_push(self, error: WrittenWeightsError) -> bool:
        """Withdraw the push under way from all servers, after some refused it with ``error``.

        Returns False if some slice has applied it, because a worker that wrote differently left meanwhile: the push is
        then completed as it is.
        """
        sequence = self.participation.sequence
        withdrawal = sequence.begin_withdrawal(int(error.details.get("attempt", 0)))
        await self.push(withdrawal, None, 0.0)
        return sequence.end_withdrawal(withdrawal)

    async def pull(self, target: PullTarget) -> None:
        """Pull the weights into ``target``."""
        part = self.participation
        progress = part.sequence.begin_pull()
        title = f"the pull of {part.name!r}"
        request = PullRequest(part.current.sender, progress, self.slicing, title, target, self.traffic)
        await self.delivery.deliver(request, part.current.routes.plan)
        part.sequence.end_pull(progress)

    def _plan_all(self) -> RoutingPlan:
        """Return the routes of all slices. Raises as ``Routes.plan``."""
        return self.participation.current.routes.plan(range(self.slicing.count))

    def remote_slices(self) -> list[tuple[int, ...]]:
        """Return, by server, the slices of servers that share no memory with this worker."""
        transports, routes = self.transports(), self._plan_all().routes
        return [route.slices for route in routes if transports.get(route.server_id) != "shm"]

    async def probe(self, slices: Sequence[int], target: PullTarget) -> None:
        """Pull some slices, in any version, to measure the speed of the links."""
        part = self.participation
        progress = PendingRequest(0, set(slices))
        title = f"measuring the links of {part.name!r}"
        request = PullRequest(part.current.sender, progress, self.slicing, title, target, self.traffic)
        await self.delivery.deliver(request, part.current.routes.plan)
