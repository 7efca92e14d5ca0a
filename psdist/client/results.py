"""Results of the user's calls: the destination of the weights, and the arrays made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from psdist.client.core import flat_vector
from psdist.client.core.flat_vector import Arrays, Flat
from psdist.client.participation import Participation
from psdist.client.transport.buffers import BufferPool, HeldWeights, PullTarget
from psdist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from psdist.client.device.vectors import DeviceVectors


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
    """Results of one handle's calls."""

    def __init__(self, part: Participation) -> None:
        self._layout = part.layout
        self._part = part
        self._pool = BufferPool(part.layout)
        #: Weights that differences are added to; None if servers send whole weights.
        self._held: HeldWeights | None = None
        if part.current.entry.spec.pull_compression:
            self._held = HeldWeights(part.slicing, self._pool.kept)
        #: Vector and arrays of the last result without a copy. The next result is mostly the same.
        self._viewed: tuple[Flat, Arrays] | None = None

    def target(self, destination: PullDestination) -> PullTarget:
        """Return the destination of a call's weights. Raises as ``flat_vector.check_out``."""
        slicing, dtype, out = self._part.slicing, self._part.options.pull_dtype, destination.out
        mine = flat_vector.check_out(self._layout, out) if out is not None else None
        if self._held is not None:
            return PullTarget(slicing, self._pool.kept, self._part.shared_memory.weights, held=self._held)
        if out is not None:
            if mine is not None:
                return PullTarget(slicing, mine, dtype=dtype)
        elif destination.copy and destination.there is None:
            return PullTarget(slicing, self._pool.fresh(), dtype=dtype)
        # Weights in fewer bits are rounded, so they cannot be read in the servers' memory.
        shared = self._part.shared_memory.weights if dtype == "float32" else None
        return PullTarget(slicing, self._pool.kept, shared, dtype)

    def arrays(self, target: PullTarget, destination: PullDestination) -> dict[str, Any]:
        """Return the arrays for the user, once all weights have arrived."""
        if destination.there is not None:
            vector = target.vector(range(self._part.slicing.count))
            return destination.there.arrays(vector, copy=destination.copy)
        return self._host_arrays(target, destination.out, destination.copy)

    def _host_arrays(self, target: PullTarget, out: Mapping[str, NDArray[Any]] | None, copy: bool) -> Arrays:
        if out is None and copy and target.held is None:
            return flat_vector.unflatten(self._layout, target.target)
        vector = target.vector(range(self._part.slicing.count))
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
