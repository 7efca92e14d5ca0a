"""The requests behind the user's calls, and the interface of the transports that carry them.

A request holds its payload, its unanswered slices, and the destination of its answers. A transport asks it for its
header and the payload of a slice, and passes the answers to it. A slice is encoded when it is sent, so that only a few
encoded slices exist at a time.

Not here: messages with payloads (``grpc``, ``shm``, ``tcp``), the choice of a transport, retries and routes
(``delivery``), numbers of pushes (``push_sequence``).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.flat_vector import Flat
from psdist.client.core.push_sequence import PendingRequest, PushOptions
from psdist.client.core.routing import Route
from psdist.client.session.waits import Wait
from psdist.client.transport.buffers import PullTarget
from psdist.compression import Cast
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import ClosedError, PsdistError, ServerUnreachableError
from psdist.types import GradientDifference, Identity, Replica, Slicing
from psdist.v1 import common_pb2
from psdist.v1 import server_pb2 as pb
from psdist.wire import convert


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Identity of the sender of requests."""

    run_id: str
    worker_id: str
    incarnation: int
    parameters: str

    def identity(self, epoch: int) -> pb.Identity:
        """Return the identity of a request that was routed by the map of ``epoch``."""
        return convert.identity_to_proto(
            Identity(self.run_id, self.worker_id, self.incarnation, epoch, self.parameters)
        )


@dataclass(slots=True)
class ByteCounters:
    """Payload bytes of one handle's requests, both ways."""

    sent: int = 0
    received: int = 0


@dataclass
class Request:
    """One call of the user, as the servers see it.

    title: the user's action, for messages: "step 12 of 'mlp'".
    progress: number of the call, and its unanswered slices.
    """

    sender: RequestIdentity
    progress: PendingRequest
    slicing: Slicing
    title: str

    async def ready(self, index: int) -> None:
        """Wait until a slice can be sent. Raises why it cannot be."""


class EncodedGradient(Protocol):
    """A gradient that is encoded before it is sent, slice by slice. It does not change until its push is over.

    is_raw: True if its payloads are elements in the wire's dtype; False if they are segments.
    """

    is_raw: bool

    async def ready(self, index: int) -> None:
        """Wait until a slice is encoded. Raises why it cannot be."""

    def difference(self, slices: Sequence[int]) -> GradientDifference | None:
        """Return the estimate that the payloads of ``slices``, for one server, are differences to; None if they are
        gradients."""

    def send_whole(self, slices: Sequence[int]) -> None:
        """Replace the differences of ``slices`` by whole gradients, because a server lost the estimate. Raises
        InternalError if they are whole already."""

    def payload(self, index: int) -> memoryview:
        """Return the bytes of a slice on the wire."""

    def decode_into(self, index: int, out: Flat) -> None:
        """Write a slice as a server decodes it."""


@dataclass
class PushRequest(Request):
    """A gradient. Each slice is acknowledged once it is applied.

    versions: version of the weights that the gradient was computed on, by slice.
    flat: the gradient, which ``codec`` casts as it is sent.
    encoded: the gradient if it was encoded before, in place of ``flat``. Without both the worker abstains.
    target: destination of the new weights; None if they are not asked for.
    weight: weight of the gradient in the mean of its step.
    mark: number of the newest snapshot attempt for which this worker reported its next pushes before it numbered this
        one: the push is not in that snapshot. 0 for none.
    """

    versions: list[int]
    flat: Flat | None
    codec: Cast
    grad_norm: float
    traffic: ByteCounters
    target: PullTarget | None = None
    encoded: EncodedGradient | None = None
    weight: float = 1.0
    mark: int = 0
    _scratch: NDArray[Any] | None = field(default=None, init=False, repr=False)

    @property
    def abstains(self) -> bool:
        """True if it has no gradient."""
        return self.flat is None and self.encoded is None

    def header(self, route: Route, slices: Sequence[int]) -> pb.PushHeader:
        """Return the header for a push of ``slices`` to the server of ``route``."""
        header = pb.PushHeader(
            pull_dtype=convert.dtype_to_proto(self.target.dtype) if self.target is not None else None,
            identity=self.sender.identity(route.epoch),
            codec=common_pb2.CODEC_RAW if self.encoded is None or self.encoded.is_raw else common_pb2.CODEC_SEGMENTS,
            dtype=convert.dtype_to_proto(self.codec.dtype),
        )
        self.number_header(header, slices)
        return header

    def number_header(self, header: pb.PushHeader, slices: Sequence[int], before: PushOptions | None = None) -> None:
        """Write the header fields that differ between pushes of ``slices``. before: the options in the header."""
        header.step, header.abstain, header.grad_norm = self.progress.number, self.abstains, self.grad_norm
        header.mark = self.mark
        if self.weight != 1.0:
            header.weight = self.weight
        else:
            header.ClearField("weight")
        if self.progress.options != before:
            _write_options(header, self.progress.options)
        difference = self.encoded.difference(slices) if self.encoded is not None else None
        if difference is None:
            header.ClearField("difference")
        else:
            header.difference.number, header.difference.from_zeros = difference

    async def ready(self, index: int) -> None:
        """Wait until the payload of a slice is available. Raises why there is none."""
        if self.encoded is not None:
            await self.encoded.ready(index)

    def payload(self, index: int) -> memoryview:
        """Return the encoded gradient of a ready slice, valid until the next call; empty if this worker abstains."""
        if self._scratch is None:
            self._scratch = self._memory(self.slicing.slice_elements if self.encoded is None else 0)
        return self._encode(index, self._scratch)

    def lasting_payload(self, index: int) -> memoryview:
        """Return the encoded gradient of a ready slice, valid as long as the gradient does not change."""
        return self._encode(index, self._memory(self.slicing.size(index) if self.encoded is None else 0))

    def _memory(self, elements: int) -> NDArray[Any]:
        return np.empty(elements, NUMPY_DTYPES[self.codec.dtype])

    def _encode(self, index: int, memory: NDArray[Any]) -> memoryview:
        if self.encoded is not None:
            payload = self.encoded.payload(index)
        elif self.flat is None:
            return memoryview(b"")
        else:
            start, stop = self.slicing.bounds(index)
            payload = self.codec.encode(self.flat[start:stop], memory[: stop - start]).view(np.uint8).data
        self.traffic.sent += len(payload)
        return payload

    def write_decoded(self, index: int, out: NDArray[Any]) -> None:
        """Write the gradient of a slice to memory that is shared with servers: float32 if it was encoded in segments,
        else in the dtype of ``codec``."""
        if self.encoded is not None:
            self.encoded.decode_into(index, out)
            return
        assert self.flat is not None
        start, stop = self.slicing.bounds(index)
        if self.codec.dtype == "float32":
            out[...] = self.flat[start:stop]
        else:
            self.codec.encode(self.flat[start:stop], out)


@dataclass
class PullRequest(Request):
    """A pull of weights into ``target``."""

    target: PullTarget
    traffic: ByteCounters


@dataclass
class InstallRequest(Request):
    """Initial values, always float32. A server answers once, for all of its slices.

    placed: filled with the server of each answered slice.
    """

    flat: Flat
    placed: dict[int, Replica]

    def payload(self, index: int) -> memoryview:
        """Return the values of a slice."""
        start, stop = self.slicing.bounds(index)
        return self.flat[start:stop].view(np.uint8).data


def write_held(
    message: pb.HeldWeights, request: PushRequest | PullRequest, route: Route, slices: Sequence[int]
) -> None:
    """List the weights that this worker holds in a request, if servers may send differences to them."""
    if request.target is not None and request.target.held is not None:
        message.CopyFrom(request.target.held.message(slices, route.generation))


def _write_options(header: pb.PushHeader, options: PushOptions) -> None:
    if options.written is None:
        header.ClearField("written")
    else:
        header.written = options.written.digest
    if options.lr_factor is None:
        header.ClearField("lr_factor")
    else:
        header.lr_factor = options.lr_factor
    if options.settings is None:
        header.ClearField("settings")
    else:
        header.settings.CopyFrom(pb.GroupSettings(settings=convert.settings_to_proto(options.settings)))
    if options.absent:
        starts, sizes = zip(*((start, stop - start) for start, stop in options.absent), strict=True)
        header.absent.CopyFrom(pb.ElementRanges(starts=starts, sizes=sizes))
    else:
        header.ClearField("absent")
    header.follows_writes, header.attempt, header.withdraws = options.follows_writes, options.attempt, options.withdraws


#: Writing a slice that the server reads takes less, unless the network is slow; then two are written concurrently.
PATIENCE_SECONDS: Final = 0.02
_BEING_CHOSEN: Final = -1

#: Receives the error that ends attempts on a server.
ServerLoss = asyncio.Future[PsdistError]


def attempt_error(error: PsdistError) -> PsdistError:
    """Return a peer's error as ``Connection.exchange`` raises it: a closing peer counts as unreachable."""
    return ServerUnreachableError(error.message) if isinstance(error, ClosedError) else error


class Connection(Protocol):
    """Way of requests to one server."""

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        """Make one attempt to get the unanswered slices of ``route`` answered.

        wait: receives the server's reasons for not answering yet.
        loss: loss of the server, which ends the attempt.

        Raises StaleEpochError, StaleEstimateError and ServerUnreachableError if another attempt may succeed, and the
        server's refusal; then some slices may be answered.
        """


class Transport(ABC):
    """Carries requests of one handle to servers."""

    #: As ``Statistics.transports`` and ``psdist status`` show it.
    name: str

    @abstractmethod
    def connection(self, server: Route, /) -> Connection | None:
        """Return the connection to the server of a route, or None if there is none now."""

    def is_missing(self, route: Route) -> bool:
        """Return True if ``prepare`` would try to connect to the route's server, to which there is no connection."""
        return False

    async def prepare(self, routes: Sequence[Route]) -> None:  # noqa: B027 - gRPC needs no preparation
        """Open missing connections to the servers of ``routes``. Raises SharingUnavailableError or TcpUnavailableError
        if the user requires this transport and that is impossible."""

    def why_closed(self, server_id: str) -> str:
        """Return why it is not used to a server; empty if it is open."""
        return ""


class WriteQueue:
    """Turns of the writers to one server: the call with the lowest next slice writes first. For one event loop.

    Concurrent calls are the buckets of one step, and the forward pass needs low slices first. Without an order their
    streams would share the connection evenly, and the first slices would arrive last.

    The order is a preference, not a lock. A server stops reading a stream whose slices wait for other workers, and
    those may wait for data queued behind it here. A turn longer than ``PATIENCE_SECONDS`` therefore lets the next one
    start.
    """

    def __init__(self) -> None:
        self._order = itertools.count(1)
        #: Number of the turn that others wait for; 0 for none.
        self._current = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, slice_index: int) -> int:
        """Wait until no caller with a lower slice wants to write. Return the number to pass to ``release``."""
        number = next(self._order)
        if not self._current:
            self._current = number
            return number
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (slice_index, number, ready))
        if self._timer is None:
            self._timer = loop.call_later(PATIENCE_SECONDS, self._next)
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # its turn had just come
                self.release(number)
            raise
        return number

    def release(self, number: int) -> None:
        """End the turn."""
        if number != self._current:
            return
        if self._waiting:
            # Deferred: the releasing caller usually requests its next turn right away, possibly for a lower slice.
            self._current = _BEING_CHOSEN
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._current = 0

    def _next(self) -> None:
        self._current = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, number, ready = heapq.heappop(self._waiting)
            if not ready.done():
                self._current = number
                ready.set_result(None)
                break
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._next)
