"""Memory of one handle: buffers that it reuses from call to call, results in them, and memory shared with servers.

The kernel clears each new page on first touch. For a large model this takes longer than copying it.

A ``PullTarget`` is the destination of one call's weights. ``HeldWeights`` are weights that match a version at the
servers, for servers that send differences (``pull_compression``). Invariant: a slice with a version there has the bytes
of that version at the servers. It loses the version before anything else is written to it. All slices lose theirs when
the parameter set restarts from a snapshot. ``Results`` chooses the destination as the user named it, and returns the
arrays once the weights have arrived.

An ``OfferedArena`` holds the gradients of one handle, or of several that take turns with it. After a failed push, a
server may read the arena for as long as it likes. The arena is therefore detached from its file, and the memory becomes
private to this process with its content and addresses. It is shared again by a new file when the user is known not to
write to it: in the next push, or once all buckets of a step were given.

A ``WeightsView`` is one vector over the memory of several servers. It stays at its address, since the user may be
reading it. A shard that moved is mapped from the memory of its new primary, where the bytes are equal. A shard whose
primary shares no memory keeps its bytes.

``flat_vector`` maps tensors to the flat vector, ``psdist.link.arenas`` implements the memory files, and ``shm`` knows
which servers share memory.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from psdist.address_range import AddressRange
from psdist.client.core import flat_vector
from psdist.client.core.flat_vector import Arrays, Flat
from psdist.compression import casts
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InternalError, InvalidArgumentError
from psdist.link import processes
from psdist.link.arenas import GradientArena, MappedVector, Piece, WeightsArena, reason_of
from psdist.off_loop import LARGE_ELEMENTS, in_thread, off_loop
from psdist.types import DType, Layout, ParametersEntry, Replica, Slicing
from psdist.v1 import server_pb2
from psdist.wire.limits import DIFFERENCES_MAX

if TYPE_CHECKING:
    from psdist.client.device_vectors import DeviceVectors

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


logger = logging.getLogger("psdist")

#: Arenas that the shards are to be mapped from, by shard; None keeps the bytes.
Moves = Mapping[int, WeightsArena | None]
#: Returns the weights arena of a server, or None if it shares none.
ArenaOf = Callable[[Replica], WeightsArena | None]


class ArenaUser(Protocol):
    """Handle with its gradients in an arena."""

    #: Called before the pages at the arena's addresses are replaced or removed.
    before_replaced: Callable[[], None]

    def on_detached(self) -> None:
        """Called before servers lose the arena. Attachments made with it must not be used any more."""


class OfferedArena:
    """Arena of ``elements`` gradients of ``dtype``, created when the first server is to share it."""

    def __init__(self, elements: int, dtype: DType) -> None:
        self.elements = elements
        self.dtype: DType = dtype
        self._users: list[ArenaUser] = []
        self._arena: GradientArena | None = None
        #: Number of times that its memory was returned to the system: a server may have seen holes.
        self.releases = 0
        #: Reason that there is no file, once creating one has failed.
        self._no_file = ""
        #: True if there is no file until ``share`` is called.
        self.is_detached = False
        self._making = asyncio.Lock()
        self._is_detaching = False

    # --- users --------------------------------------------------------------------------------------------------------

    def join(self, user: ArenaUser) -> None:
        """Add a user of the arena."""
        self._users.append(user)

    async def leave(self, user: ArenaUser) -> None:
        """Remove a user whose last push has ended. The last user to leave ends the arena."""
        if self._users == [user]:
            await self.detach()
        self._users = [one for one in self._users if one is not user]

    def check_like(self, other: OfferedArena) -> None:
        """Raise InvalidArgumentError if gradients of ``other`` do not fit this arena."""
        if (self.elements, self.dtype) != (other.elements, other.dtype):
            raise InvalidArgumentError(
                f"{other.elements:,} gradients in {other.dtype} cannot take turns with {self.elements:,} in "
                f"{self.dtype}: sizes and dtypes on the wire must be the same"
            )

    # --- memory -------------------------------------------------------------------------------------------------------

    async def prepare(self) -> str:
        """Create the arena. Return why that is impossible; empty on success."""
        async with self._making:
            try:
                if self._arena is None:
                    processes.sweep()
                    # In a thread, because clearing a large file takes longer than the heartbeat interval.
                    self._arena = await in_thread(partial(GradientArena.create, self.elements, self.dtype))
                elif self._arena.has_holes:
                    await in_thread(self._arena.fill)
            except OSError as error:
                return reason_of(error)
        return self._no_file

    async def share(self) -> None:
        """Create a new file after ``detach``. Nobody may write to the arena during the call."""
        async with self._making:
            if self._arena is not None and self.is_detached:
                self._pages_replaced()
                try:
                    await in_thread(self._arena.share)
                except OSError as error:
                    self._no_file = reason_of(error)
                self._note_file()

    def allow_file(self) -> None:
        """Let ``share`` try again to create a file, although that has failed."""
        self._no_file = ""
        self._note_file()

    def _note_file(self) -> None:
        """Update ``is_detached``. Called when something that it follows from has changed."""
        arena = self._arena
        has_file = arena is None or (arena.shareable and not self._is_detaching)
        self.is_detached = not has_file and not self._no_file

    @property
    def memory(self) -> GradientArena:
        """The arena itself, once ``prepare`` has created it."""
        assert self._arena is not None
        return self._arena

    @property
    def gradients(self) -> NDArray[Any] | None:
        """Whole gradient vector if there is an arena and it is float32."""
        return self._arena.flat if self._arena is not None and self.elements and self.dtype == "float32" else None

    @property
    def is_shared(self) -> bool:
        """True if several handles take turns with it."""
        return len(self._users) > 1

    async def release(self) -> None:
        """Return the arena's memory to the system until it is written again. No push may be in progress."""
        if self._arena is not None:
            self.releases += 1
            self._pages_replaced()
            await off_loop(self.elements, self._arena.release)

    async def detach(self) -> None:
        """Leave the file to the servers that hold it. Anybody may write to the arena during the call."""
        for user in self._users:
            user.on_detached()
        if self._arena is not None:
            self._is_detaching = True
            self._note_file()
            async with self._making:
                self._pages_replaced()
                try:
                    await off_loop(self.elements, self._arena.detach)
                finally:
                    self._is_detaching = False
                    self._note_file()

    def _pages_replaced(self) -> None:
        for user in self._users:
            user.before_replaced()


class WeightsView:
    """Vector of all weights, and the origin of its parts."""

    def __init__(self) -> None:
        self._mapped: MappedVector | None = None
        #: Origin of each shard in the vector: the server and the nonce of its memory.
        self._shown: dict[int, tuple[Replica, bytes]] = {}
        #: False after the kernel refused a mapping: weights are copied from then on.
        self._works = True

    def vector(self, entry: ParametersEntry, arena_of: ArenaOf) -> Flat | None:
        """Return the vector, with each shard mapped from its primary in ``arena_of``, or None if that is
        impossible."""
        if self._mapped is None:
            self._mapped = MappedVector(entry.total)
            self.show(entry, self.moves(entry, arena_of, lambda server: True))
        return self._mapped.vector if self._works else None

    def show(self, entry: ParametersEntry, moved: Moves) -> None:
        """Map the shards of ``moves``. Runs in a thread, because it unmaps pages."""
        if self._mapped is None or not self._works:
            return
        slicing, count = entry.slicing, len(entry.shards)
        pieces = (
            Piece(slicing.bounds(index)[0], moved[index % count], slicing.size(index))
            for index in range(slicing.count)
            if index % count in moved
        )
        try:
            self._works = self._mapped.show(pieces)
        except OSError as error:
            logger.info("weights of %r are copied: %s", entry.spec.name, reason_of(error))
            self._works = False
        for number, arena in moved.items():
            if arena is not None:
                self._shown[number] = entry.shards[number].primary, arena.nonce

    def moves(
        self,
        entry: ParametersEntry,
        arena_of: ArenaOf,
        is_live: Callable[[Replica], bool],
    ) -> Moves:
        """Return the shards that must be mapped from other memory. They count as unmapped until ``show`` has ended.
        Empty before ``vector`` is called.

        Only a live server frees memory. The memory of a lost server lasts as long as it is mapped, so it is shown until
        the next primary shares memory.
        """
        moved: dict[int, WeightsArena | None] = {}
        for number, shard in enumerate(entry.shards if self._mapped is not None else ()):
            shown, arena = self._shown.get(number), arena_of(shard.primary)
            if arena is not None and shown != (shard.primary, arena.nonce):
                moved[number] = arena
            elif arena is None and shown is not None and shown[0] != shard.primary and is_live(shown[0]):
                moved[number] = None
            elif arena is not None or shown is None or shown[0] == shard.primary:
                continue
            self._shown.pop(number, None)
        return moved

    def shows(self, shard: int, arena: WeightsArena) -> bool:
        """True if the vector shows the shard from ``arena``."""
        shown = self._shown.get(shard)
        return self._works and shown is not None and shown[1] == arena.nonce

    def close(self) -> None:
        """Drop the vector. It is unmapped once the user drops its arrays, too."""
        self._mapped = None
