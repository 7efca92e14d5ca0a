"""Memory that one handle uses again from call to call, so that steady training allocates none.

The kernel clears each new page when it is first touched, which for a large model takes longer than copying it.

Not here: memory shared with servers (``attachment``), what is written where (``partition``).
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
from psdist.client.core.partition import Arrays, Flat
from psdist.client.transport.held_weights import HeldWeights
from psdist.compression import payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InternalError
from psdist.off_loop import LARGE_ELEMENTS
from psdist.types import DType, Layout, Slicing
from psdist.v1.server_pb2 import SliceResult

#: Vectors that were given to the user are remembered, and used again when nobody holds them any more. A loop that
#: assigns each result to the same name holds the last one while the next is made.
_LENT_MAX: Final = 2


def _vector(elements: int) -> Flat:
    """float32[elements], any values. The end of a large one costs nobody time, see ``AddressRange``."""
    if elements < LARGE_ELEMENTS:
        return np.empty(elements, np.float32)
    memory = AddressRange(4 * elements)
    memory.advise(0, memory.size, "MADV_HUGEPAGE")  # As numpy does.
    return memory.view(np.dtype(np.float32), 0, elements)


class BufferPool:
    """Vectors of ``layout``, each made when it is first needed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lent: list[tuple[Flat, weakref.ref[NDArray[Any]]]] = []
        #: Arrays for read-only results of tensors that are not float32.
        self.converted: Arrays = {}

    @cached_property
    def kept(self) -> Flat:
        """The vector that results without a copy are views of, where the servers' memory is not."""
        return _vector(self._layout.total)

    def release(self) -> None:
        """Lets go of all memory. Arrays that the user has stay as they are."""
        self.__dict__.pop("kept", None)
        self._lent = []
        self.converted = {}

    def fresh(self) -> Flat:
        """A vector that nobody else has: a new one, or one that was lent before and is not in use any more.

        Every array made from it refers to the object that is returned here, so its end shows that they are all gone.
        """
        if self._layout.total == 0:
            return np.empty(0, np.float32)
        free = [memory for memory, user in self._lent if user() is None]
        memory = free[0] if free else _vector(self._layout.total)
        # Of a memoryview: views of a view of an array refer to that array alone.
        lent: Flat = np.frombuffer(memory.data, np.float32)
        others = [entry for entry in self._lent if entry[0] is not memory]
        self._lent = [*others, (memory, weakref.ref(lent))][-_LENT_MAX:]
        return lent


@dataclass
class PullTarget:
    """Where the weights of one call arrive.

    target: takes the weights of each slice that is in ``received``.
    shared: the servers' own memory, if the other slices are read in place; else None, and all are received.
    dtype: in which the weights are sent.
    held: whose vector ``target`` is, where servers may send differences.
    """

    slicing: Slicing
    target: Flat
    shared: Flat | None = None
    dtype: DType = "float32"
    held: HeldWeights | None = None
    received: set[int] = field(default_factory=set)

    def write(self, answer: SliceResult, payload: memoryview, peer: str) -> None:
        """Writes the weights of a slice that ``peer`` sent, widened to float32, or adds differences to them.

        Raises InternalError for a payload of another size, and as ``HeldWeights.add``.
        """
        memory = self.memory_for(answer, len(payload), peer)
        memory.view(np.uint8)[...] = np.frombuffer(payload, np.uint8)
        self.accept(answer, memory, peer)

    def memory_for(self, answer: SliceResult, size: int, peer: str) -> NDArray[Any]:
        """Memory of ``size`` bytes for the weights of a slice that ``peer`` sends: their own place if they are float32.
        ``accept`` when they are there.

        Raises InternalError for another size.
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
        """What ``memory_for`` was asked for is there, in ``values``. Raises as ``HeldWeights.add``."""
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
        """The place of a slice in ``target``, for a caller that writes the weights itself, and then calls ``replaced``.

        What was held there is forgotten first: the caller may be cancelled in the middle of writing.
        """
        if self.held is not None:
            self.held.forget(index)
        start, stop = self.slicing.bounds(index)
        return self.target[start:stop]

    def replaced(self, index: int) -> None:
        """The weights of a slice were written to its ``part``."""
        self.received.add(index)

    def _check_differences(self, index: int, size: int, peer: str) -> None:
        if self.held is None or size > 4 * self.slicing.size(index):
            raise InternalError(f"{peer} sent {size} bytes of differences for slice {index}, which were not asked for")

    def _check_size(self, index: int, size: int, peer: str) -> None:
        wanted = NUMPY_DTYPES[self.dtype].itemsize * self.slicing.size(index)
        if size != wanted:
            raise InternalError(f"{peer} sent {size} bytes for slice {index}, which has {wanted} in {self.dtype}")

    def vector(self, slices: Iterable[int]) -> Flat:
        """The vector that holds the weights of all of ``slices``, which are answered."""
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
