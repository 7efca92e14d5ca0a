"""The requests behind the user's calls: pushes, pulls and initial values. They know no transport.

A request says what is sent, to whom it was answered, and where an answer goes. A transport asks it for the payload of a
slice, and gives it the answers. A slice is encoded when it is sent, so that only a few encoded slices exist at once.

Not here: how a request is written to the wire (``grpc``, ``shm``), retries (``delivery``), its number
(``push_sequence``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.partition import Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.transport.buffer_pool import PullTarget
from psdist.compression import Cast
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InternalError
from psdist.types import GradientDifference, Identity, Replica, Slicing
from psdist.v1 import server_pb2
from psdist.wire import convert


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


@dataclass(slots=True)
class ByteCounters:
    """Payload bytes of one handle's requests, both ways."""

    sent: int = 0
    received: int = 0


@dataclass
class Request:
    """One call of the user, as the servers see it.

    title: what the user did, for messages: "step 12 of 'mlp'".
    progress: the number of the call, and the slices that are not answered yet.
    """

    sender: RequestIdentity
    progress: PendingRequest
    slicing: Slicing
    title: str

    async def ready(self, index: int) -> None:
        """Waits until a slice can be sent. Raises why it cannot be."""


class EncodedGradient(Protocol):
    """A gradient that is encoded before it is sent, slice by slice. It stays the same until its push is over.

    is_raw: whether its payloads are elements in the wire's dtype, and no segments.
    """

    is_raw: bool

    async def ready(self, index: int) -> None:
        """Waits until a slice is encoded. Raises why it cannot be."""

    def difference(self, slices: Sequence[int]) -> GradientDifference | None:
        """What the payloads of ``slices``, which one server gets, are differences to; None where they are gradients."""

    def send_whole(self, slices: Sequence[int]) -> None:
        """A server does not keep what the payloads of ``slices`` are differences to: they become whole gradients.
        Raises InternalError where they are that already."""

    def payload(self, index: int) -> memoryview:
        """A slice as it is sent."""

    def decode_into(self, index: int, out: Flat) -> None:
        """Writes a slice as a server decodes it."""


@dataclass
class PushRequest(Request):
    """A gradient. Each slice is acknowledged once it is applied.

    versions: version of the weights that the gradient was computed on, by slice.
    flat: the gradient, which ``codec`` casts as it is sent.
    encoded: the gradient where it was encoded before, in place of ``flat``. Without both the worker abstains.
    target: where the new weights go; None if they are not asked for.
    weight: what the gradient counts for in the mean of its step.
    mark: the newest snapshot attempt that had marked this worker's pushes when this one began.
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
        """Whether it has no gradient."""
        return self.flat is None and self.encoded is None

    async def ready(self, index: int) -> None:
        """Waits until there is a payload of the slice. Raises why there is none."""
        if self.encoded is not None:
            await self.encoded.ready(index)

    def payload(self, index: int) -> memoryview:
        """The encoded gradient of a slice that is ready, valid until the next call; empty where this worker
        abstains."""
        if self._scratch is None:
            self._scratch = self._memory(self.slicing.slice_elements if self.encoded is None else 0)
        return self._encode(index, self._scratch)

    def lasting_payload(self, index: int) -> memoryview:
        """The same, valid as long as the gradient stays as it is."""
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
        """Writes the gradient of a slice as servers take it into memory that is shared with them: float32 where it was
        encoded in segments, else in the dtype of ``codec``."""
        if self.encoded is not None:
            self.encoded.decode_into(index, out)
            return
        assert self.flat is not None
        start, stop = self.slicing.bounds(index)
        cast = self.codec.encode(self.flat[start:stop], out)
        if cast is not out:  # No cast was needed.
            out[...] = cast


@dataclass
class PullRequest(Request):
    """Weights into ``target``."""

    target: PullTarget
    traffic: ByteCounters


@dataclass
class InstallRequest(Request):
    """Initial values, always float32. A server answers once, for all of its slices.

    placed: gets the server of each slice that is answered.
    """

    flat: Flat
    placed: dict[int, Replica]

    def payload(self, index: int) -> memoryview:
        """The values of a slice."""
        start, stop = self.slicing.bounds(index)
        return self.flat[start:stop].view(np.uint8).data

    def on_installed(self, server: Replica, slices: tuple[int, ...]) -> None:
        """The server has ``slices``."""
        for index in slices:
            self.placed[index] = server
            self.progress.answer(index, 0)


def write_weights(
    request: PushRequest | PullRequest, answer: server_pb2.SliceResult, payload: memoryview, peer: str
) -> None:
    """Writes the weights of a slice that ``peer`` sent.

    Raises InternalError for a slice that is not asked for any more: a late answer must not overwrite a newer one; and
    as ``PullTarget.write``.
    """
    index = answer.slice
    if index not in request.progress.pending or request.target is None:
        raise InternalError(f"{peer} answered slice {index}, which is not asked for or was answered before")
    request.target.write(answer, payload, peer)
    request.traffic.received += len(payload)
