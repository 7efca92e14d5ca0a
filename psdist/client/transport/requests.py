"""The requests behind the user's calls: pushes, pulls and initial values, each as a ``data_path.Job``.

A job makes the messages for a route and takes the answers, straight from and into flat vectors. A slice is encoded when
it is sent, so that only a few encoded slices exist at once.

Not here: streams and retries (``data_path``), the step's number (``push_sequence``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.partition import Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.core.routing import Route
from psdist.compression import Cast, payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InternalError
from psdist.types import Identity, Replica, Slicing
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert, frames

if TYPE_CHECKING:
    from psdist.client.transport.shm.attachment import SharedMemory


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Who sends, for the identity of each request."""

    run_id: str
    worker_id: str
    incarnation: int
    parameters: str

    def identity(self, epoch: int) -> server_pb2.Identity:
        """The identity of a request that was routed by the map of ``epoch``."""
        return convert.identity_to_proto(
            Identity(self.run_id, self.worker_id, self.incarnation, epoch, self.parameters)
        )


def decode_into(target: Flat, payload: memoryview, dtype: str, peer: str) -> None:
    """Writes a payload of weights into ``target``, widened to float32. Raises InternalError for another size."""
    item = NUMPY_DTYPES[dtype].itemsize
    if len(payload) != item * len(target):
        raise InternalError(f"{peer} sent {len(payload)} bytes for a slice of {len(target)} elements of {dtype}")
    values = np.frombuffer(payload, NUMPY_DTYPES[dtype])
    if dtype == "float32":
        target[...] = values
    else:
        payloads.widen(values, target)


@dataclass(slots=True)
class ByteCounters:
    """Payload bytes of a job, both ways."""

    sent: int = 0
    received: int = 0


@dataclass
class PushJob:
    """A gradient, acknowledged slice by slice once it is applied.

    flat: the gradient, or None to abstain.
    versions: version of the weights that the gradient was computed on, by slice.
    sharing: the memory shared with servers, which is used where a route has it.
    """

    sender: RequestIdentity
    request: PendingRequest
    slicing: Slicing
    versions: list[int]
    flat: Flat | None
    codec: Cast
    grad_norm: float
    title: str
    traffic: ByteCounters
    method: str = "Push"
    shared_memory: SharedMemory | None = None
    #: The newest snapshot attempt that had marked this worker's pushes when this one began.
    mark: int = 0
    _scratch: NDArray[Any] | None = field(default=None, init=False, repr=False)

    def header(self, route: Route, pull_dtype: common_pb2.DType | None = None) -> server_pb2.PushHeader:
        """Who pushes what, for a request to the server of ``route``."""
        header = server_pb2.PushHeader(
            pull_dtype=pull_dtype,
            identity=self.sender.identity(route.epoch),
            codec=common_pb2.CODEC_RAW,
            dtype=convert.dtype_to_proto(self.codec.dtype),
        )
        self.number(header)
        return header

    def number(self, header: server_pb2.PushHeader) -> None:
        """Writes into a header what differs from push to push."""
        header.step, header.abstain, header.grad_norm = self.request.number, self.flat is None, self.grad_norm
        header.mark = self.mark

    def _payload(self, index: int) -> memoryview:
        if self.flat is None:
            return memoryview(b"")
        start, stop = self.slicing.bounds(index)
        # One scratch for all slices: each is copied into its message before the next is encoded.
        if self._scratch is None:
            self._scratch = np.empty(self.slicing.slice_elements, NUMPY_DTYPES[self.codec.dtype])
        payload = self.codec.encode(self.flat[start:stop], self._scratch[: stop - start]).view(np.uint8).data
        self.traffic.sent += len(payload)
        return payload

    def messages(self, route: Route) -> Iterator[tuple[int, bytes]]:
        """One message per slice that is not answered yet; the first has the header."""
        header: server_pb2.PushHeader | None = self.header(route)
        for index in self.request.unanswered(route.slices):
            message = server_pb2.PushRequest(header=header, slice=index, base_version=self.versions[index])
            yield index, frames.pack(message, self._payload(index))
            header = None

    def take(self, route: Route, data: bytes) -> str:
        """An acknowledgement."""
        answer = server_pb2.PushResponse.FromString(data)
        if not answer.waiting_for:
            self.request.answer(answer.slice, answer.version, answer.staleness, answer.ignored)
        return answer.waiting_for


@dataclass
class PushPullJob(PushJob):
    """A gradient up, the new weights down into ``target``.

    in_place: the caller reads shared weights where they lie, so only those that came in messages are in ``target``.
    received: the slices that were written to ``target``.
    """

    method: str = "PushPull"
    target: Flat | None = None
    pull_dtype: str = "float32"
    in_place: bool = False
    received: set[int] = field(default_factory=set)

    def messages(self, route: Route) -> Iterator[tuple[int, bytes]]:
        """One message per slice that is not answered yet; the first has the header."""
        header: server_pb2.PushHeader | None = self.header(route, convert.dtype_to_proto(self.pull_dtype))
        for index in self.request.unanswered(route.slices):
            message = server_pb2.PushPullRequest(header=header, slice=index, base_version=self.versions[index])
            yield index, frames.pack(message, self._payload(index))
            header = None

    def take(self, route: Route, data: bytes) -> str:
        """New weights."""
        assert self.target is not None
        frame = frames.unpack(server_pb2.PushPullResponse, data)
        answer = frame.header
        if not answer.waiting_for:
            _take_weights(self.request, self.slicing, answer.slice, self.target, frame.payload, self.pull_dtype, route)
            self.received.add(answer.slice)
            self.traffic.received += len(frame.payload)
            self.request.answer(answer.slice, answer.version, answer.staleness, answer.ignored)
        return answer.waiting_for


@dataclass
class PullJob:
    """Weights into ``target``. Fields as in ``PushPullJob``."""

    sender: RequestIdentity
    request: PendingRequest
    slicing: Slicing
    target: Flat
    dtype: str
    title: str
    traffic: ByteCounters
    method: str = "Pull"
    shared_memory: SharedMemory | None = None
    in_place: bool = False
    received: set[int] = field(default_factory=set)

    def messages(self, route: Route) -> Iterator[tuple[int, bytes]]:
        """One request."""
        message = server_pb2.PullRequest(
            identity=self.sender.identity(route.epoch),
            dtype=convert.dtype_to_proto(self.dtype),
            min_version=self.request.number,
            slices=self.request.unanswered(route.slices),
        )
        yield 0, message.SerializeToString()

    def take(self, route: Route, data: bytes) -> str:
        """Weights of one slice."""
        frame = frames.unpack(server_pb2.PullResponse, data)
        answer = frame.header
        if not answer.waiting_for:
            _take_weights(self.request, self.slicing, answer.slice, self.target, frame.payload, self.dtype, route)
            self.received.add(answer.slice)
            self.traffic.received += len(frame.payload)
            self.request.answer(answer.slice, answer.version)
        return answer.waiting_for


@dataclass
class InstallJob:
    """Initial values, always float32. A server answers once, for all of its slices.

    placed: gets who has each slice.
    """

    sender: RequestIdentity
    request: PendingRequest
    slicing: Slicing
    flat: Flat
    title: str
    placed: dict[int, Replica]
    method: str = "Install"
    shared_memory: SharedMemory | None = None

    def messages(self, route: Route) -> Iterator[tuple[int, bytes]]:
        """One message per slice of the route; after a break all of them come again."""
        identity: server_pb2.Identity | None = self.sender.identity(route.epoch)
        for index in route.slices:
            start, stop = self.slicing.bounds(index)
            payload = self.flat[start:stop].view(np.uint8).data
            yield index, frames.pack(server_pb2.InstallRequest(identity=identity, slice=index), payload)
            identity = None

    def take(self, route: Route, data: bytes) -> str:
        """The server has them all."""
        answer = server_pb2.InstallResponse.FromString(data)
        if answer.slices != len(route.slices):
            raise InternalError(f"{route.peer} took {answer.slices} of {len(route.slices)} slices of initial values")
        for index in route.slices:
            self.placed[index] = route.server
            self.request.answer(index, 0)
        return ""


def _take_weights(
    request: PendingRequest, slicing: Slicing, index: int, target: Flat, payload: memoryview, dtype: str, route: Route
) -> None:
    """Writes a slice's weights, but only where they are still asked for: a late answer must not overwrite a newer."""
    if index not in request.pending:
        raise InternalError(f"{route.peer} answered slice {index}, which is not asked for or was answered before")
    start, stop = slicing.bounds(index)
    decode_into(target[start:stop], payload, dtype, route.peer)
