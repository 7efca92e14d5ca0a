"""Memory that a handle reuses from call to call, so that steady training allocates none, and the results made of it.

The kernel clears each new page on first touch. For a large model this takes longer than copying it.

A ``PullTarget`` is the destination of one call's weights. ``HeldWeights`` are weights that match a version at the
servers, for servers that send differences (``pull_compression``). Invariant: a slice with a version there has the bytes
of that version at the servers. It loses the version before anything else is written to it. All slices lose theirs when
the parameter set restarts from a snapshot. ``Results`` chooses the destination as the user named it, and returns the
arrays once the weights have arrived.

``shared_buffers`` is memory shared with servers, and ``flat_vector`` maps tensors to the flat vector.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.address_range import AddressRange
from psdist.client.core import flat_vector
from psdist.client.core.flat_vector import Arrays, Flat
from psdist.compression import casts
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InternalError, InvalidArgumentError
from psdist.off_loop import LARGE_ELEMENTS
from psdist.types import DType, Layout, Slicing
from psdist.v1 import server_pb2
from psdist.wire.limits import DIFFERENCES_MAX

if TYPE_CHECKING:
    from psdist.client.device.vectors import DeviceVectors

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
        memory: Flat | None = None
        for number, (vector, user) in enumerate(self._lent):
            if user() is None:
                memory = vector
                del self._lent[number]
                break
        if memory is None:
            memory = _vector(self._layout.total)
        # Made from a memoryview, because a view of an array's view refers to the base array alone.
        lent: Flat = np.frombuffer(memory.data, np.float32)
        self._lent.append((memory, weakref.ref(lent)))
        del self._lent[:-_LENT_MAX]
        return lent


class HeldWeights:
    """float32[total] ``vector`` and the versions of its slices, as received from the servers."""

    def __init__(self, slicing: Slicing, vector: Flat) -> None:
        from psdist.compression import segments

        segments.prepare_kernels(slicing.total)
        self.vector = vector
        self._slicing = slicing
        #: Generation of the parameter set and version, by slice.
        self._versions: dict[int, tuple[int, int]] = {}
        #: Generation in the map that the latest request for a slice was based on.
        self._asked: dict[int, int] = {}

    def message(self, slices: Sequence[int], generation: int) -> server_pb2.HeldWeights:
        """Return the held versions of ``slices``, for a request based on a map with this generation of the parameter
        set."""
        self._asked.update(dict.fromkeys(slices, generation))
        held = [index for index in slices if self._versions.get(index, (-1, 0))[0] == generation]
        versions = [self._versions[index][1] for index in held]
        if versions and min(versions) == max(versions):
            versions = versions[:1]
        return server_pb2.HeldWeights(generation=generation, slices=held, versions=versions)

    def forget(self, index: int) -> None:
        """Drop the version of a slice that is about to change."""
        self._versions.pop(index, None)

    def take(self, index: int, version: int) -> None:
        """Record the version of a requested slice that was received whole."""
        self._versions[index] = self._asked[index], version

    def add(self, index: int, version: int, payload: NDArray[np.uint8], sizes: Sequence[int], peer: str) -> None:
        """Add the differences that lead to ``version`` of a slice. The payload is their concatenation.

        Raises InternalError, MalformedPayloadError or NonFiniteGradientError for invalid differences, and changes
        nothing.
        """
        from psdist.compression import segments

        if self._versions.get(index, (-1, 0))[0] != self._asked[index]:
            raise InternalError(f"{peer} sent differences of slice {index}, but this worker holds no weights of it")
        if len(sizes) > DIFFERENCES_MAX or sum(sizes) != payload.size:
            raise InternalError(f"{peer} sent {len(sizes)} differences of {sum(sizes)} bytes in {payload.size} bytes")
        start, stop = self._slicing.bounds(index)
        parts = [payload[first:last] for first, last in pairwise(accumulate([0, *sizes]))]
        for part in parts:
            segments.check(part, stop - start)
        for part in parts:
            segments.accumulate(part, self.vector[start:stop])
        self.take(index, version)


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

    def write(self, answer: server_pb2.SliceResult, payload: memoryview, peer: str) -> None:
        """Write the weights of a slice sent by ``peer``, widened to float32, or add differences to them.

        Raises InternalError for a payload of the wrong size, and as ``HeldWeights.add``.
        """
        memory = self.memory_for(answer, len(payload), peer)
        memory.view(np.uint8)[...] = np.frombuffer(payload, np.uint8)
        self.accept(answer, memory, peer)

    def memory_for(self, answer: server_pb2.SliceResult, size: int, peer: str) -> NDArray[Any]:
        """Return a buffer of ``size`` bytes for the weights of a slice from ``peer``: their final place if they are
        float32. Call ``accept`` once it is filled.

        Raises InternalError for the wrong size.
        """
        index = answer.slice
        if answer.HasField("differences"):
            if self.held is None or size > 4 * self.slicing.size(index):
                raise InternalError(
                    f"{peer} sent {size} bytes of differences for slice {index}, which were not requested"
                )
            return np.empty(size, np.uint8)
        start, stop = self.slicing.bounds(index)
        dtype = NUMPY_DTYPES[self.dtype]
        if size != (wanted := dtype.itemsize * (stop - start)):
            raise InternalError(f"{peer} sent {size} bytes for slice {index}, which has {wanted} in {self.dtype}")
        if self.held is not None:
            self.held.forget(index)
        return self.target[start:stop] if self.dtype == "float32" else np.empty(stop - start, dtype)

    def accept(self, answer: server_pb2.SliceResult, values: NDArray[Any], peer: str) -> None:
        """Take over the weights that were received in the buffer of ``memory_for``. Raises as ``HeldWeights.add``."""
        index = answer.slice
        if self.dtype != "float32":
            start, stop = self.slicing.bounds(index)
            casts.interpret_first()
            casts.widen(values, self.target[start:stop])
        if self.held is not None:
            if answer.HasField("differences"):
                self.held.add(index, answer.version, values, answer.differences.bytes, peer)
            else:
                self.held.take(index, answer.version)
        self.received.add(index)

    def part(self, index: int) -> Flat:
        """Return the place of a slice in ``target``, for a caller that writes the weights itself and then adds the
        slice to ``received``.

        The held version is forgotten first, because the caller may be cancelled in the middle of writing.
        """
        if self.held is not None:
            self.held.forget(index)
        start, stop = self.slicing.bounds(index)
        return self.target[start:stop]

    def vector(self, slices: Iterable[int]) -> Flat:
        """Return the vector that holds the weights of all ``slices``, which must be answered."""
        if self.shared is None:
            return self.target
        slices = set(slices)
        if self.received.isdisjoint(slices):
            return self.shared
        for index in slices - self.received:
            start, stop = self.slicing.bounds(index)
            self.part(index)[...] = self.shared[start:stop]
        return self.target


@dataclass(frozen=True, slots=True)
class PullDestination:
    """Destination of a pull, as the user named it: see ``AsyncParameters.pull``.

    there: vectors on the device that the call names; None for the host.

    Raises InvalidArgumentError for arguments that exclude each other.
    """

    out: Mapping[str, NDArray[Any]] | None
    copy: bool
    there: DeviceVectors | None = None

    def __post_init__(self) -> None:
        if self.out is not None and self.there is not None:
            raise InvalidArgumentError("out and device exclude each other: pass one of them")
        if self.out is not None and not self.copy:
            raise InvalidArgumentError("out and copy=False exclude each other: pass one of them")


class Results:
    """Results of one handle's calls.

    dtype: dtype of the weights on the wire.
    shared: returns the servers' own memory if all weights can be read in it, else None.
    has_differences: True if servers may send differences to the weights that this handle holds.
    """

    def __init__(
        self,
        layout: Layout,
        slicing: Slicing,
        dtype: DType,
        shared: Callable[[], Flat | None],
        *,
        has_differences: bool,
    ) -> None:
        self._layout = layout
        self._slicing = slicing
        self._dtype: DType = dtype
        self._shared = shared
        self._pool = BufferPool(layout)
        #: Weights that differences are added to; None if servers send whole weights.
        self._held = HeldWeights(slicing, self._pool.kept) if has_differences else None
        #: Vector and arrays of the last result without a copy. The next result is mostly the same.
        self._viewed: tuple[Flat, Arrays] | None = None

    def target(self, destination: PullDestination) -> PullTarget:
        """Return the destination of a call's weights. Raises as ``flat_vector.check_out``."""
        slicing, dtype, out = self._slicing, self._dtype, destination.out
        mine = flat_vector.check_out(self._layout, out) if out is not None else None
        if self._held is not None:
            return PullTarget(slicing, self._pool.kept, self._shared(), held=self._held)
        if out is not None:
            if mine is not None:
                return PullTarget(slicing, mine, dtype=dtype)
        elif destination.copy and destination.there is None:
            return PullTarget(slicing, self._pool.fresh(), dtype=dtype)
        # Weights in fewer bits are rounded, so they cannot be read in the servers' memory.
        shared = self._shared() if dtype == "float32" else None
        return PullTarget(slicing, self._pool.kept, shared, dtype)

    def arrays(self, target: PullTarget, destination: PullDestination) -> dict[str, Any]:
        """Return the arrays for the user, once all weights have arrived."""
        out, copy = destination.out, destination.copy
        if out is None and copy and target.held is None and destination.there is None:
            return flat_vector.unflatten(self._layout, target.target)
        vector = target.vector(range(self._slicing.count))
        if destination.there is not None:
            return destination.there.arrays(vector, copy=copy)
        if out is None and copy:
            fresh = self._pool.fresh()
            fresh[...] = vector
            return flat_vector.unflatten(self._layout, fresh)
        if out is not None:
            if target.target is self._pool.kept:
                flat_vector.copy_out(self._layout, vector, out)
            return {tensor.name: out[tensor.name] for tensor in self._layout.tensors}
        if self._viewed is None or self._viewed[0] is not vector or self._pool.converted:
            every = range(len(self._layout.tensors))
            self._viewed = vector, flat_vector.views(self._layout, every, vector, self._pool.converted)
        return {name: array.view() for name, array in self._viewed[1].items()}

    def bucket_arrays(self, target: PullTarget, numbers: tuple[int, ...], slices: frozenset[int]) -> Arrays:
        """Return read-only arrays of these tensors, whose ``slices`` have arrived."""
        return flat_vector.views(self._layout, numbers, target.vector(slices), self._pool.converted)

    def release_memory(self) -> None:
        """Release the memory of results without a copy, unless it is the base of the servers' differences."""
        self.discard()
        if self._held is None:
            self._pool.release()

    def discard(self) -> None:
        """Forget the last result: its memory may be released."""
        self._viewed = None
