"""The gradient vector of one handle: gathers the user's arrays in it, and checks them before anything is sent.

Arrays on a CUDA device are gathered in a vector there if the codec works on devices. Otherwise they are copied to the
vector of the host. Modules for devices are imported with the first such array.

Not here: encoding and sending (``encoding``, ``push``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from psdist.client.core import flat_vector
from psdist.client.core.flat_vector import Flat
from psdist.device.device import device_number
from psdist.errors import InvalidArgumentError
from psdist.off_loop import in_thread
from psdist.types import DType, Layout, NonFinite, Slicing

if TYPE_CHECKING:
    from psdist.client.device_vectors import CastGradient, DeviceVectors
    from psdist.device.memory import DeviceVector


logger = logging.getLogger("psdist")

#: Pushes in a row with the same content, before a warning.
_REPEATS: Final = 5
#: Elements of the sample.
_SAMPLED: Final = 256
#: Vectors hashed in vain before the check gives up: the sample says nothing about these gradients.
_GIVE_UP: Final = 16


class GradientVector:
    """Vector in which the gradients of ``layout`` are gathered.

    dtype: dtype on the wire. NaN and Inf are looked for in it, and ``non_finite`` says how they are handled.
    shared: returns the vector in memory shared with servers, or None. Called when the vector is first needed.
    stale: looks for buffers that nobody writes to.
    encodes_on_device: returns True if gradients on a device are encoded there.
    casts_on_device: True if whole gradients are cast there.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: DType,
        non_finite: NonFinite,
        shared: Callable[[], NDArray[Any] | None],
        stale: StaleBufferCheck,
        encodes_on_device: Callable[[], bool] = lambda: False,
        casts_on_device: bool = False,
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._non_finite = non_finite
        self._shared = shared
        self._stale = stale
        self._buffers: dict[str, NDArray[Any]] = {}
        self._encodes_on_device = encodes_on_device
        self._casts_on_device = casts_on_device
        self._device: DeviceVectors | None = None
        #: True if names in a bucket mean the device's buffers.
        self._buffers_on_device = False
        #: Vector of the current step in buckets.
        self._step: Flat | DeviceVector | None = None

    @cached_property
    def vector(self) -> Flat:
        """The vector. It stays at its address until ``release_memory``."""
        shared = self._shared()
        return np.zeros(self._layout.total, np.float32) if shared is None else shared

    def release_memory(self) -> None:
        """Release the vector. The next one is newly allocated, unless it is shared."""
        if self._device is not None:
            self._device.release_memory()
        self._buffers, self._step, self._buffers_on_device = {}, None, False
        self.__dict__.pop("vector", None)

    def unregister(self) -> None:
        """Unregister the vector's pages with devices, before the pages are replaced or copying ends."""
        if self._device is not None:
            self._device.unregister()

    def buffers(self, *, is_checked: bool = True) -> dict[str, NDArray[Any]]:
        """Return views of the vector, by tensor name. is_checked: False ends the check for stale buffers."""
        if not is_checked:
            self._stale.stop()
        self._buffers, self._buffers_on_device = self._buffers or flat_vector.split(self._layout, self.vector), False
        return dict(self._buffers)

    def device_buffers(self, number: int) -> dict[str, Any]:
        """Return views of the vector of device ``number``. Raises DeviceUnavailableError, DeviceLostError."""
        buffers = self.on_device(number).buffers()
        self._buffers_on_device = True
        return buffers

    async def on_named(self, device: str | None) -> DeviceVectors | None:
        """Return the vectors on the device of this name; None for None. Raises as ``on_device``."""
        if device is None:
            return None
        number = device_number(device)
        return await in_thread(lambda: self.on_device(number))

    def on_device(self, number: int) -> DeviceVectors:
        """Return the vectors on a device.

        Raises InvalidArgumentError if this handle already has some on another one, or computes in float64.
        """
        if self._layout.dtype != "float32":
            raise InvalidArgumentError(
                f"arrays on device cuda:{number} with master_dtype={self._layout.dtype!r}: copy them to the host, such "
                "as by array.get() of CuPy or tensor.cpu() of torch"
            )
        from psdist.client.device_vectors import open_vectors

        if self._device is None:
            self._device = open_vectors(self._layout, number)
        if self._device.number != number:
            raise InvalidArgumentError(
                f"device cuda:{number}: this parameter set has its arrays on cuda:{self._device.number}, and they stay "
                "on one device"
            )
        return self._device

    def _device_of(self, gradients: object) -> DeviceVectors | None:
        """Return the vectors on the device of some of these arrays; None if all are on the host."""
        if not isinstance(gradients, Mapping):
            return self._device if self._buffers_on_device else None
        if (there := _first_on_device(gradients)) is None:
            return None
        from psdist.client.device_vectors import number_of

        return self.on_device(number_of(there))

    @property
    def has_device(self) -> bool:
        """True if there are vectors on a device."""
        return self._device is not None

    def waits_for_device(self, gradients: object) -> bool:
        """Return True if gathering these gradients, alone or in the step under way, waits for a device. Opens none."""
        if self._step is not None and not isinstance(self._step, np.ndarray):
            return True
        return _first_on_device(gradients) is not None if isinstance(gradients, Mapping) else self._buffers_on_device

    def gather(
        self, gradients: Mapping[str, ArrayLike], number: int, absent: Collection[int] = ()
    ) -> Flat | DeviceVector | None:
        """Return the vector with all of these gradients in it, or None to abstain. number: number of the push.

        absent: numbers of tensors without a gradient, which become zeros.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, NonFiniteGradientError;
        DeviceUnavailableError and DeviceLostError for arrays of a device.
        """
        flat = self.vector
        if (device := self._device_of(gradients)) is not None:
            there = device.gather(gradients)
            if absent:
                device.clear(there, absent)
            if self._casts_on_device or self._encodes_on_device():
                return there if self._is_finite_there(device, there) else None
            device.register(flat)
            device.copy_out(there, flat)
        elif self._are_buffers(gradients):
            self._stale.on_push(number, flat)
        else:
            flat = flat_vector.flatten(self._layout, gradients, flat)
        if absent:
            self._clear(flat, absent)
        if flat_vector.is_finite(flat_vector.values_of(self._layout, flat), self._dtype):
            return flat
        if self._non_finite == "reject":
            raise flat_vector.non_finite(self._layout, flat, self._dtype)
        return None

    def _clear(self, flat: Flat, numbers: Iterable[int]) -> None:
        for number in numbers:
            flat[self._layout.offsets[number] : self._layout.offsets[number + 1]] = 0.0

    def _is_finite_there(
        self, device: DeviceVectors, vector: DeviceVector, numbers: tuple[int, ...] | None = None
    ) -> bool:
        """Return True if all is finite, False to abstain. Raises NonFiniteGradientError."""
        if device.is_finite(vector, self._dtype, numbers):
            return True
        if self._non_finite == "reject":
            flat = np.empty(self._layout.total, np.float32)
            device.copy_out(vector, flat)
            raise flat_vector.non_finite(self._layout, flat, self._dtype, numbers)
        return False

    def _are_buffers(self, gradients: Mapping[str, ArrayLike]) -> bool:
        """Return True if these are exactly the arrays of ``buffers``, which need no check."""
        mine = self._buffers
        return (
            isinstance(gradients, Mapping)
            and 0 < len(gradients) == len(mine)
            and all(gradients.get(name) is array for name, array in mine.items())
        )

    def check_bucket(self, gradients: object) -> None:
        """Raise InvalidArgumentError if ``gradients`` cannot be a bucket."""
        if isinstance(gradients, str) or not isinstance(gradients, Iterable):
            raise InvalidArgumentError(f"a bucket is a dict of arrays or a list of names, not {gradients!r:.80}")
        if not isinstance(gradients, Mapping) and not (self._buffers or self._buffers_on_device):
            raise InvalidArgumentError("a bucket of names means gradient_buffers(): call that first, and fill them")

    def begin_step(self, gradients: object) -> Flat | DeviceVector:
        """Return the vector of a step in buckets that begins with these gradients."""
        device = self._device_of(gradients)
        self._step = device.gradients if device is not None and self._encodes_on_device() else self.vector
        return self._step

    def cast(self, vector: DeviceVector, slicing: Slicing) -> CastGradient:
        """Cast a gradient on a device to 16 bits, and copy it to the host."""
        from psdist.client.device_vectors import CastGradient

        assert self._device is not None
        return CastGradient(self._device.cast(vector, self._dtype), slicing)

    def gather_there(
        self,
        numbers: tuple[int, ...],
        gradients: Mapping[str, ArrayLike] | Iterable[str],
        absent: Collection[int] = (),
    ) -> bool:
        """Gather the gradients of these tensors as far as that waits for a device. Names mean that they are in the
        vector. Returns False to abstain. Call ``gather_here`` next. absent: as for ``gather``.

        Raises as ``gather``.
        """
        device, step = self._device_of(gradients), self._step
        if device is not None:
            device.gather_some(numbers, gradients if isinstance(gradients, Mapping) else {})
            if absent:
                device.clear(device.gradients, absent)
        if step is None or isinstance(step, np.ndarray):
            return True
        assert self._device is not None
        if device is None:
            if isinstance(gradients, Mapping):
                flat_vector.flatten_some(self._layout, numbers, gradients, self.vector)
            self._clear(self.vector, absent)
            self._device.copy_in(numbers, self.vector)
        return self._is_finite_there(self._device, step, numbers)

    def elements_gathered(self, numbers: tuple[int, ...]) -> int:
        """Return the number of elements that ``gather_here`` reads if it may run in a thread; 0 if it may not."""
        if self.has_device:
            return 0
        return sum(self._layout.offsets[number + 1] - self._layout.offsets[number] for number in numbers)

    def gather_here(
        self,
        numbers: tuple[int, ...],
        gradients: Mapping[str, ArrayLike] | Iterable[str],
        absent: Collection[int] = (),
    ) -> bool:
        """Gather them in the host's vector, if the step is gathered there. Must not run in a thread if a device is
        used: if a bucket fails, its registration there ends on the loop. Returns and raises as ``gather_there``."""
        if self._step is not None and not isinstance(self._step, np.ndarray):
            return True
        if (device := self._device_of(gradients)) is not None:
            device.copy_out(device.gradients, self.vector, numbers)
        elif isinstance(gradients, Mapping):
            flat_vector.flatten_some(self._layout, numbers, gradients, self.vector)
        self._clear(self.vector, absent)
        values = flat_vector.values_of(self._layout, self.vector)
        for number in numbers:
            part = values[self._layout.starts[number] : self._layout.starts[number + 1]]
            if not flat_vector.is_finite(part, self._dtype):
                if self._non_finite == "reject":
                    raise flat_vector.non_finite(self._layout, self.vector, self._dtype, numbers)
                return False
        return True

    def on_last_bucket(self, gradients: object, number: int) -> None:
        """Check the buffers once the last bucket of step ``number`` is gathered."""
        if not isinstance(gradients, Mapping) and not self._buffers_on_device:
            self._stale.on_push(number, self.vector)


def _first_on_device(gradients: Mapping[str, Any]) -> Any:
    """Return the first of these arrays that is on a device; None if there is none."""
    for value in gradients.values():
        if type(value) is not np.ndarray:
            from psdist.client.device_vectors import is_on_device

            if is_on_device(value):
                return value
    return None


# --- buffers that nobody writes to ------------------------------------------------------------------------------------


class StaleBufferCheck:
    """Warns of gradient buffers that nobody writes to: training with them learns nothing.

    The usual cause is torch's ``zero_grad()``, which sets ``grad`` to None: the next backward pass makes new arrays,
    and the buffers keep their old content. A push cannot see who wrote to memory, so the contents of successive pushes
    are compared. That must cost next to nothing. A sample of some elements is read at each push. Only if it is
    unchanged is the whole vector hashed, which costs less than the search for NaN that each push makes anyway.

    Equal gradients are possible (all zeros, or a constant). So this is a warning, logged once after several pushes in a
    row, and never an error. A single changed element prevents the warning.

    name: name of the parameter set.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._push = -1
        self._sample = b""
        #: Digest of the whole vector; empty if the sample has changed.
        self._digest = b""
        self._repeats = 0
        self._misses = 0
        self._is_over = False

    def stop(self) -> None:
        """Stop checking: the caller always writes to the buffers."""
        self._is_over = True

    def on_push(self, number: int, vector: Flat) -> None:
        """Check the buffers, ``vector``, before push ``number`` sends them. A repeated push does not count."""
        if self._is_over or number == self._push or not vector.size:
            return
        self._push = number
        sample = _sample(vector)
        if sample != self._sample:
            self._sample, self._digest, self._repeats = sample, b"", 0
            return
        digest = xxhash.xxh3_128_digest(vector.data)
        if digest == self._digest:
            self._repeats += 1
        else:
            # At the first equal sample the previous vector was not hashed.
            self._misses += self._digest != b""
            self._digest, self._repeats = digest, 1
        self._is_over = self._repeats >= _REPEATS or self._misses >= _GIVE_UP
        if self._repeats >= _REPEATS:
            self._warn()

    def _warn(self) -> None:
        logger.warning(
            "the gradient_buffers() of %r held the same values in %d pushes in a row: nothing may be writing to them, "
            "and then nothing is trained. With torch, zero_grad() takes gradients out of the buffers: call "
            "zero_grad(set_to_none=False), or pass the gradients themselves. If these gradients are meant to be the "
            "same, ignore this; it is not said again",
            self._name,
            self._repeats,
        )


def _sample(vector: Flat) -> bytes:
    """Return elements at even distances."""
    return np.ascontiguousarray(vector[:: max(1, vector.size // _SAMPLED)]).tobytes()
