"""The gradient vector and the weights of one handle in the memory of a device.

Not here: what is sent of the gradient, and when (``client.gradients``, ``client.steps``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist.client.core import partition
from psdist.client.core.partition import Flat
from psdist.client.device import arrays as device_arrays
from psdist.client.device.arrays import DeviceArrays, TakenArray, is_on_device
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.gpu.coders import CastCoder
from psdist.compression.gpu.launcher import Launcher
from psdist.compression.gpu.memory import DeviceVector, PinnedPool
from psdist.compression.gpu.tables import SegmentRange, table
from psdist.compression.regions import Region
from psdist.compression.specifications import Float32
from psdist.errors import DeviceLostError
from psdist.gpu.device import Device
from psdist.types import DType, Layout, TensorSpec

_U32, _U64, _F32 = np.uint32, np.uint64, np.float32


class DeviceVectors:
    """Vectors of ``layout`` on one device. One thread at a time uses them.

    Raises DeviceUnavailableError and DeviceLostError, here and in its methods.
    """

    def __init__(self, layout: Layout, arrays: DeviceArrays, number: int = 0) -> None:
        #: The device's.
        self.number = number
        self._layout = layout
        self._arrays = arrays
        self._device = arrays.device
        self._run = Launcher(arrays.device)
        self._pinned = PinnedPool(arrays.device)
        self._gradients: DeviceVector | None = None
        self._buffers: dict[str, Any] = {}
        self._weights: DeviceVector | None = None
        #: Memory of the host, and what takes its registration back.
        self._registered: list[tuple[NDArray[Any], weakref.finalize[[Device, NDArray[Any]], DeviceVectors]]] = []

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> DeviceVector:
        """Where gradients are put together. It stays at its address until ``release_memory``."""
        if self._gradients is None:
            self._gradients = self._new_vector()
        return self._gradients

    def _new_vector(self) -> DeviceVector:
        vector = DeviceVector.allocate(self._device, self._layout.total, self._run.stream)
        self._run.wait()
        return vector

    def buffers(self) -> dict[str, Any]:
        """float32 views of the gradient vector, by tensor name."""
        if not self._buffers:
            bounds = zip(self._layout.tensors, self._layout.offsets, strict=False)
            vector, make = self.gradients, self._arrays.make
            self._buffers = {tensor.name: make(vector, start, tensor.shape, "float32") for tensor, start in bounds}
        return dict(self._buffers)

    def gather(self, gradients: Mapping[str, Any]) -> DeviceVector:
        """All gradients as one vector: the caller's own memory, where they lie in it one after another.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, InvalidArgumentError.
        """
        partition.check_names(self._layout, gradients)
        tensors = self._layout.tensors
        taken = self._take(tensors, gradients)
        shared = _shared_address(tensors, taken)
        if shared is not None:
            return DeviceVector(self._device, shared, self._layout.total, taken)
        self._copy(range(len(tensors)), taken)
        return self.gradients

    def gather_some(self, numbers: Sequence[int], gradients: Mapping[str, Any]) -> None:
        """Copies the gradients of these tensors to their places in the vector; those that are not given lie there.
        Raises as ``gather``."""
        self.synchronize()
        numbers = [number for number in numbers if self._layout.tensors[number].name in gradients]
        self._copy(numbers, self._take([self._layout.tensors[number] for number in numbers], gradients))

    def _take(self, tensors: Sequence[TensorSpec], gradients: Mapping[str, Any]) -> list[TakenArray | Flat]:
        """The arrays of these tensors, on the device or, contiguous, in the host's memory."""
        self.synchronize()
        found: list[TakenArray | Flat] = []
        for tensor in tensors:
            value = gradients[tensor.name]
            if is_on_device(value):
                array = self._arrays.take(tensor.name, value)
                partition.check_shape(tensor, array.shape)
                found.append(array)
            else:
                host = partition.as_float(tensor.name, value)
                partition.check_shape(tensor, host.shape)
                with np.errstate(over="ignore"):  # It becomes Inf, which is looked for.
                    found.append(np.ascontiguousarray(host, np.float32))
        self.synchronize()  # Arrays that were converted.
        return found

    def synchronize(self) -> None:
        """Returns when all that the script has given to the device is done: gradients that are computed, above all."""
        self._arrays.synchronize()

    def _copy(self, numbers: Sequence[int], taken: Sequence[TakenArray | Flat]) -> None:
        """Writes arrays to the places of their tensors."""
        segments, addresses, vector = [], [], self.gradients
        for number, array in zip(numbers, taken, strict=True):
            start, stop = self._layout.offsets[number], self._layout.offsets[number + 1]
            if start == stop:
                continue
            if isinstance(array, TakenArray):
                segments.append(_range(start, stop))
                addresses.append(array.address)
            else:
                self._device.copy_in(vector.at(start), array, self._run.stream)
        found = table(segments, [segment.tiles for segment in segments], addresses)
        rows = _U64(self._run.upload(found.rows)), _U64(len(found.rows))
        self._run.launch("gather", found.tasks, 256, _U64(vector.address), *rows)
        self._run.wait()

    def is_finite(self, vector: DeviceVector, dtype: DType, numbers: Iterable[int] | None = None) -> bool:
        """Whether all elements are finite, also after the cast to ``dtype`` for the wire. numbers: of the tensors that
        are looked at; None for all."""
        offsets = self._layout.offsets
        bounds = [(0, vector.size)] if numbers is None else [(offsets[one], offsets[one + 1]) for one in numbers]
        segments = [_range(start, stop) for start, stop in bounds if start < stop]
        found = table(segments, [segment.tiles for segment in segments])
        flags = np.zeros(2, np.uint32)  # The flag, and that nothing is forgotten.
        at = self._run.upload(flags)
        rows = _U64(self._run.upload(found.rows)), _U64(len(found.rows))
        limit = np.float32(partition.OVERFLOW[dtype]).view(np.uint32)
        self._run.launch(
            *("check_finite", found.tasks, 256, _U64(vector.address), _U64(0), *rows, _U64(at), _U64(at + 4)),
            *(_F32(1.0), _U64(0), _F32(0), limit),
        )
        out = np.empty(1, np.uint32)
        self._run.copy_out(out, at)
        self._run.wait()
        return not out[0]

    # --- to the host and back -----------------------------------------------------------------------------------------

    def copy_out(self, vector: DeviceVector, out: Flat, numbers: Iterable[int] | None = None) -> None:
        """Writes the vector to ``out``, which is as long; only tensors of these ``numbers``, if they are given."""
        offsets = self._layout.offsets
        bounds = [(0, vector.size)] if numbers is None else [(offsets[one], offsets[one + 1]) for one in numbers]
        for start, stop in bounds:
            self._run.copy_out(out[start:stop], vector.at(start))
        self._run.wait()

    def cast(self, vector: DeviceVector, dtype: DType) -> NDArray[Any]:
        """The vector in a dtype of 16 bits, in pinned memory of the host that is used again when nobody has it."""
        size = NUMPY_DTYPES[dtype].itemsize * vector.size
        out, flags = self._run.scratch(size), self._run.scratch(4)
        segment = _range(0, vector.size)
        found = table([segment], [segment.tiles], [out])
        rows = _U64(self._run.upload(found.rows)), _U64(len(found.rows))
        kind = _U32(CastCoder.KINDS[dtype].number)
        self._run.launch("encode_casts", found.tasks, 256, _U64(vector.address), *rows, _U64(flags), kind)
        taken = self._pinned.take(size)
        self._run.copy_out(taken, out)
        self._run.wait()
        return taken.view(NUMPY_DTYPES[dtype])

    def copy_in(self, numbers: Iterable[int], values: Flat) -> None:
        """Writes tensors of these ``numbers`` of the gradient vector ``values`` on the host to that of the device."""
        for number in numbers:
            start, stop = self._layout.offsets[number], self._layout.offsets[number + 1]
            if start < stop:
                self._device.copy_in(self.gradients.at(start), values[start:stop], self._run.stream)
        self._run.wait()

    def arrays(self, weights: Flat, *, copy: bool) -> dict[str, Any]:
        """The weights on the device, in their declared dtypes and shapes.

        copy: False writes them to memory that each such call uses again.
        """
        vector = self._weights if self._weights is not None and not copy else self._new_vector()
        if not copy:
            self._weights = vector
            self.synchronize()  # Work on the weights before, which the script has queued, reads the same memory.
        vector.write(weights, self._run.stream)
        bounds = zip(self._layout.tensors, self._layout.offsets, strict=False)
        made = {one.name: self._arrays.make(vector, start, one.shape, one.dtype) for one, start in bounds}
        self.synchronize()  # Other dtypes are copies.
        return made

    def register(self, memory: NDArray[Any]) -> None:
        """Lets copies to ``memory`` of the host go at full speed, until ``unregister``. Its pages stay the same until
        then: copies go to those that were there when it was registered."""
        if not memory.nbytes or any(memory is one for one, _ in self._registered) or not self._device.register(memory):
            return
        # It keeps the memory, so that this is not given back first.
        ending = weakref.finalize(self, _unregister, self._device, memory)
        ending.atexit = False  # The end of a process ends its registrations.
        self._registered.append((memory, ending))

    def unregister(self) -> None:
        """Takes all registrations back. No copy is under way."""
        registered, self._registered = self._registered, []
        for _, end in registered:
            end()

    def release_memory(self) -> None:
        """Lets go of all memory. Views of the gradient vector stay as they are."""
        self.unregister()
        self._buffers = {}
        self._gradients = self._weights = None


def _unregister(device: Device, memory: NDArray[Any]) -> None:
    with suppress(DeviceLostError):  # Nothing is copied by a lost device.
        device.unregister(memory)


def open_vectors(layout: Layout, number: int) -> DeviceVectors:
    """The vectors of a handle on device ``number``. Raises DeviceUnavailableError."""
    return DeviceVectors(layout, device_arrays.open_arrays(number), number)


def _range(start: int, stop: int) -> SegmentRange:
    """Elements of the flat vector, as one segment."""
    return SegmentRange(0, Region(start, stop, Float32(), (stop - start,)), 0, stop - start)


def _shared_address(tensors: Sequence[TensorSpec], taken: Sequence[TakenArray | Flat]) -> int | None:
    """Where the arrays begin, if they lie in memory in order without gaps; else None."""
    first = address = None
    for tensor, array in zip(tensors, taken, strict=True):
        if not tensor.size:
            continue
        if not isinstance(array, TakenArray) or (address is not None and array.address != address):
            return None
        first = array.address if first is None else first
        address = array.address + 4 * tensor.size
    return first
