"""Memory that a handle reuses from call to call, so that steady training allocates none.

The kernel clears each new page on first touch. For a large model this takes longer than copying it.

``attachment`` manages memory shared with servers, and ``flat_vector`` maps tensors to the flat vector.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.address_range import AddressRange
from psdist.client.core.flat_vector import Arrays, Flat
from psdist.client.transport.held_weights import HeldWeights
from psdist.compression import payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InternalError
from psdist.off_loop import LARGE_ELEMENTS
from psdist.types import DType, Layout, Slicing
from psdist.v1.server_pb2 import SliceResult

#: Number of vectors lent to the user that are remembered for reuse once nobody refers to them. A loop that assigns each
#: result to the same name still holds the previous one while the next is filled.
_LENT_MAX: Final = 2


def _vector(elements: int) -> Flat:
    """Return an uninitialised float32[elements]. Freeing a large one blocks nobody, see ``AddressRange``."""
    if elements < LARGE_ELEMENTS:
        return np.empty(elements, np.float32)
    memory = AddressRange(4 * elements)
    memory.advise(0, memory.size, "MADV_HUGEPAGE")  # As numpy does.
    return memory.view(np.dtype(np.float32), 0, elements)


class BufferPool:
    """Vectors for ``layout``, created on first use."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lent: list[tuple[Flat, weakref.ref[NDArray[Any]]]] = []
        #: Arrays for read-only results of tensors that are not float32.
        self.converted: Arrays = {}

    @cached_property
    def kept(self) -> Flat:
        """Vector that zero-copy results view if the servers' memory cannot be viewed."""
        return _vector(self._layout.total)

    def release(self) -> None:
        """Drop all memory. Arrays held by the user stay unchanged."""
        self.__dict__.pop("kept", None)
        self._lent = []
        self.converted = {}

    def fresh(self) -> Flat:
        """Return a vector that nobody else refers to: a new one, or a lent one that is no longer in use.

        Every array derived from it refers to the returned object, so its collection shows that all of them are gone.
        """
        if self._layout.total == 0:
            return np.empty(0, np.float32)
        free = [memory for memory, user in self._lent if user() is None]
        memory = free[0] if free else _vector(self._layout.total)
        # Made from a memoryview, because a view of an array's view refers to the base array alone.
        lent: Flat = np.frombuffer(memory.data, np.float32)
        others = [entry for entry in self._lent if entry[0] is not memory]
        self._lent = [*others, (memory, weakref.ref(lent))][-_LENT_MAX:]
        return lent


@dataclass
class PullTarget:
    """Destination of the weights of one call.

    target: receives the weights of each slice in ``received``.
    shared: the servers' own memory if the other slices are read in place; None if all slices are received.
    dtype: dtype of the weights on the wire.
    held: owner of ``target`` if servers may send differences.
    """

    slicing: Slicing
    target: Flat
    shared: Flat | None = None
    dtype: DType = "float32"
    held: HeldWeights | None = None
    received: set[int] = field(default_factory=set)

    def write(self, answer: SliceResult, payload: memoryview, peer: str) -> None:
        """Write the weights of a slice sent by ``peer``, widened to float32, or add differences to them.

        Raises InternalError for a payload of the wrong size, and as ``HeldWeights.add``.
        """
        memory = self.memory_for(answer, len(payload), peer)
        memory.view(np.uint8)[...] = np.frombuffer(payload, np.uint8)
        self.accept(answer, memory, peer)

    def memory_for(self, answer: SliceResult, size: int, peer: str) -> NDArray[Any]:
        """Return a buffer of ``size`` bytes for the weights of a slice from ``peer``: their final place if they are
        float32. Call ``accept`` once it is filled.

        Raises InternalError for the wrong size.
        """
        index = answer.slice
        if answer.HasField("differences"):
            self._check_differences(index, size, peer)
            return np.empty(size, np.uint8)
        self._check_size(index, size, peer)
        if self.held is not None:
            self.held.forget(index)
        start, stop = self.slicing.bounds(index)
        return self.target[start:stop] if self.dtype == "float32" else np.empty(stop - start, NUMPY_DTYPES[self.dtype])

    def accept(self, answer: SliceResult, values: NDArray[Any], peer: str) -> None:
        """Take over the weights that were received in the buffer of ``memory_for``. Raises as ``HeldWeights.add``."""
        index = answer.slice
        if self.dtype != "float32":
            start, stop = self.slicing.bounds(index)
            payloads.widen(values, self.target[start:stop])
        if self.held is not None:
            if answer.HasField("differences"):
                self.held.add(index, answer.version, values, answer.differences.bytes, peer)
            else:
                self.held.take(index, answer.version)
        self.received.add(index)

    def part(self, index: int) -> Flat:
        """Return the place of a slice in ``target``, for a caller that writes the weights itself and then calls
        ``replaced``.

        The held version is forgotten first, because the caller may be cancelled in the middle of writing.
        """
        if self.held is not None:
            self.held.forget(index)
        start, stop = self.slicing.bounds(index)
        return self.target[start:stop]

    def replaced(self, index: int) -> None:
        """Record that the weights of a slice were written to its ``part``."""
        self.received.add(index)

    def _check_differences(self, index: int, size: int, peer: str) -> None:
        if self.held is None or size > 4 * self.slicing.size(index):
            raise InternalError(f"{peer} sent {size} bytes of differences for slice {index}, which were not requested")

    def _check_size(self, index: int, size: int, peer: str) -> None:
        wanted = NUMPY_DTYPES[self.dtype].itemsize * self.slicing.size(index)
        if size != wanted:
            raise InternalError(f"{peer} sent {size} bytes for slice {index}, which has {wanted} in {self.dtype}")

    def vector(self, slices: Iterable[int]) -> Flat:
        """Return the vector that holds the weights of all ``slices``, which must be answered."""
        if self.shared is None:
            return self.target
        slices = set(slices)
        if self.received.isdisjoint(slices):
            return self.shared
        for index in slices - self.received:
            if self.held is not None:
                self.held.forget(index)
            start, stop = self.slicing.bounds(index)
            self.target[start:stop] = self.shared[start:stop]
        return self.target
