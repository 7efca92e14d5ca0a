"""The same pushes encoded by the host and by a device (by default the emulated one), for comparison."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.encoder import GradientEncoder
from psdist.client.device_encoder import DeviceGradientEncoder
from psdist.client.session.worker_state import DeferredArray
from psdist.compression import ChunkedTopK, Codec, Int2, Int4, Int8, OneBit, PerTensor, TopK
from psdist.device.device import Device
from psdist.device.memory import DeviceVector
from psdist.types import Layout, Slicing, TensorSpec
from tests.support.host_device import HostDevice

Floats = NDArray[np.float32]


def on_device(device: Device, values: Floats) -> DeviceVector:
    """Return a copy of ``values`` in the device's memory."""
    stream = device.stream()
    vector = DeviceVector.allocate(device, values.size, stream)
    vector.write(values, stream)
    return vector


class BothEncoders:
    """Pair of encoders that encodes every push twice, and compares payloads and residuals."""

    def __init__(
        self,
        codec: Codec,
        layout: Layout,
        slice_elements: int,
        *,
        descending: bool = False,
        device: Device | None = None,
    ) -> None:
        slicing = Slicing(layout.total, slice_elements)
        self.slicing = slicing
        self.device = HostDevice(descending=descending) if device is None else device
        self.host = GradientEncoder(codec, layout, slicing, rank=3)
        self.other = DeviceGradientEncoder(codec, layout, slicing, 3, self.device)

    def push(self, values: Floats, parts: Iterable[Iterable[int]] | None = None) -> dict[int, bytes]:
        """Make one push, whose slices are encoded in ``parts``, one part after another."""
        vector, host, other = on_device(self.device, values), self.host.begin_push(), self.other.begin_push()
        for part in parts if parts is not None else [range(self.slicing.count)]:
            assert self.host.encode(host, values, list(part)) and self.other.encode(other, vector, list(part))
        assert sorted(host.payloads) == sorted(other.payloads)
        for index, payload in host.payloads.items():
            assert bytes(other.payloads[index]) == payload, f"slice {index}"
        assert self.host.end_push() == self.other.end_push()
        self.check()
        return {index: bytes(payload) for index, payload in other.payloads.items()}

    def check(self) -> None:
        """Check that both have the same residual and velocity."""
        host, other = self.host.state(), self.other.state()
        for name in ("residual", "velocity"):
            if host[name].size:
                found = other[name]
                assert isinstance(found, DeferredArray)
                np.testing.assert_array_equal(found.copy().view(np.uint32), host[name].view(np.uint32))
            else:
                assert name not in other
        assert self.other.totals == self.host.totals


#: Tensors that begin and end anywhere in slices, some too small to be compressed.
SIZES = (1230, 41, 0, 697, 1, 3000, 64)
CODECS = [
    Int8(block=64), Int8(block=17), Int8(), Int8(error_feedback=False), Int8(stochastic=True, seed=5),
    Int8(stochastic=True, error_feedback=True), Int8(residual_decay=0.5), Int4(block=33), Int4(), Int4(stochastic=True),
    Int2(block=16), Int2(block=19, residual_decay=0.9), Int2(stochastic=True, error_feedback=True), OneBit(block=16),
    OneBit(block=33), OneBit(), OneBit(error_feedback=False),
    ChunkedTopK(4, 64), ChunkedTopK(3, 100, bits=16), ChunkedTopK(5, 64, bits=8), ChunkedTopK(7, 50, bits=2),
    ChunkedTopK(16, 4096), ChunkedTopK(9, 700, bits=8), ChunkedTopK(1, 16, bits=8, residual_decay=0.5),
    ChunkedTopK(60, 64), ChunkedTopK(64, 64), ChunkedTopK(2, 5000, bits=2, error_feedback=False), TopK(0.01),
    TopK(0.3), TopK(1.0), TopK(0.05, warm_up=3), TopK(1e-9, residual_decay=0.5), TopK(0.1, error_feedback=False),
    TopK(0.01, momentum=0.9), TopK(0.3, momentum=0.5, residual_decay=0.7), TopK(0.02, momentum=0.9, warm_up=3),
    TopK(1.0, momentum=0.9),
]  # fmt: skip


def layout_of(sizes: tuple[int, ...]) -> Layout:
    return Layout(tuple(TensorSpec(f"t{i}", (size,)) for i, size in enumerate(sizes)))


LAYOUT = layout_of(SIZES)


def each_tensor(codec: Codec) -> PerTensor:
    return PerTensor({"*": codec}, min_elements=64, min_vector=64)


def worst_cases(size: int, seed: int) -> Floats:
    """Return ordinary values, with stretches of zeros of both signs, constants, denormals and a huge value."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size).astype(np.float32)
    for fill in (0.0, -0.0, 1.0, -1e-41, 1e-45, 3e38, -3e38, 5e-39):
        start, length = int(rng.integers(0, size)), int(rng.integers(1, 150))
        values[start : start + length] = fill
    values[rng.integers(0, size, 3)] = np.float32(2.5e38)
    values[:: int(rng.integers(40, 90))] *= np.float32(1e-38)
    return values
