"""Device arrays of scripts on the CPU: ``psdist.client.device_vectors.DeviceArrays`` over a ``HostDevice``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist.client.device_vectors import TakenArray
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.device.memory import DeviceVector
from psdist.types import DType
from tests.support.host_device import HostDevice


class HostArray:
    """Array that claims to be on a device.

    values: its content.
    number: number of the device.
    """

    def __init__(self, values: NDArray[Any], owner: object = None, number: int = 0) -> None:
        self.values = values
        self.owner = owner
        self.number = number

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number

    def __array__(self, *_: object, **__: Any) -> NDArray[Any]:
        raise TypeError("an array of a device is not copied to the host by itself")


class CountingDevice(HostDevice):
    """Device that counts copies and registrations.

    It counts bytes and copies to the host. events: copies to the device, and waits for the script's earlier work.
    threads: threads that waited for it, or compiled for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []
        self.registered: list[int] = []
        self.events: list[str] = []
        self.threads: set[int] = set()

    def kernels(self, source: str) -> Callable[[str], Any]:
        self.threads.add(threading.get_ident())
        return super().kernels(source)

    def wait(self, stream: object) -> None:
        self.threads.add(threading.get_ident())
        super().wait(stream)

    def copy_in(self, address: int, values: NDArray[Any], stream: object) -> None:
        self.events.append("copy_in")
        super().copy_in(address, values, stream)

    def copy_out(self, values: NDArray[Any], address: int, stream: object) -> None:
        self.copied.append(values.nbytes)
        super().copy_out(values, address, stream)

    def register(self, array: NDArray[Any]) -> bool:
        self.registered.append(array.ctypes.data)
        return True

    def unregister(self, array: NDArray[Any]) -> None:
        self._check()
        self.registered.remove(array.ctypes.data)


class HostArrays:
    """Arrays of one device."""

    def __init__(self) -> None:
        self.device = CountingDevice()

    def take(self, name: str, value: HostArray) -> TakenArray:
        array = np.ascontiguousarray(value.values, np.float32).reshape(value.shape)
        return TakenArray(array.ctypes.data, array.shape, array)

    def make(self, vector: DeviceVector, start: int, shape: tuple[int, ...], dtype: DType) -> HostArray:
        size = int(np.prod(shape))
        memory = (ctypes.c_float * size).from_address(vector.at(start))
        values = np.frombuffer(memory, np.float32, size).reshape(shape)
        owner = vector.owner
        return HostArray(values if dtype == "float32" else values.astype(NUMPY_DTYPES[dtype]), owner)

    def synchronize(self) -> None:
        self.device.threads.add(threading.get_ident())
        self.device.events.append("synchronize")
