"""The same pushes encoded by the host and by a device (by default the emulated one), for comparison."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.encoder import GradientEncoder
from psdist.client.device.gradient_encoder import DeviceGradientEncoder
from psdist.client.session.worker_state import DeferredArray
from psdist.compression import Codec
from psdist.compression.device.memory import DeviceVector
from psdist.device.device import Device
from psdist.types import Layout, Slicing
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
