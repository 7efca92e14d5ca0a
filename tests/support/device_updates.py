"""Updates on the processor and on a device side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist import BSP, optim
from psdist.consistency import Reduction
from psdist.device.device import Device
from psdist.types import GroupRange, ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.arrays import DenseParameters, Update
from psdist_server.kernels.device_parameters import DeviceParameters, Lanes
from psdist_server.kernels.interpreted import DTYPES
from tests.support.dense_updates import SLICE, SPECS
from tests.support.host_device import HostDevice

every_optimizer = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{len(spec.values())}")
TOTAL = 3 * SLICE - 700


def entry_of(
    spec: optim.Optimizer,
    slice_elements: int = SLICE,
    total: int = TOTAL,
    reduction: Reduction = "mean",
    **others: Any,
) -> ParametersEntry:
    ranges = (GroupRange(100, 6000, 1), GroupRange(9000, 9001, 1)) if spec.overrides else ()
    made = ParametersSpec("p", spec, BSP(reduction=reduction), slice_elements=slice_elements, **others)
    shards = tuple(Shard(Replica("server-0", 1)) for _ in range(2))
    return ParametersEntry(spec=made, total=total, shards=shards, ranges=ranges, ready=True)


class Both:
    """The same parameters on the CPU and on a device."""

    def __init__(self, entry: ParametersEntry, device: Device | None = None) -> None:
        self.lanes = Lanes(device or HostDevice())
        self.host, self.on_device = DenseParameters(entry), DeviceParameters(entry, self.lanes)
        values = np.linspace(-1, 1, entry.total, dtype=np.float32)
        for dense in self.each:
            dense.hold(range(dense.slicing.count))
            for index in dense.indices:
                dense.install(index, values[slice(*dense.slicing.bounds(index))])

    @property
    def each(self) -> tuple[DenseParameters, DeviceParameters]:
        return self.host, self.on_device

    def update(self, updates: list[Update]) -> list[tuple[int, ...]]:
        """Update both, and check that they skip the same contributions and write equal means."""
        copies = [dataclasses.replace(one, mean=None if one.mean is None else one.mean.copy()) for one in updates]
        bad = self.host.apply(updates)
        assert self.on_device.apply(copies) == bad
        for one, copy in zip(updates, copies, strict=True):
            assert one.mean is None or (copy.mean is not None and one.mean.tobytes() == copy.mean.tobytes())
        return bad

    def check(self) -> None:
        """Check that all bytes and the sequence numbers are equal."""
        assert (self.host.weights.sequence == self.on_device.weights.sequence).all()
        for index in self.host.indices:
            ours, theirs = self.host.export(index), self.on_device.export(index)
            assert [one.tobytes() for one in ours] == [one.tobytes() for one in theirs], index
            assert self.host.digest(index) == self.on_device.digest(index)
            for dtype in DTYPES:
                assert bytes(self.host.read(index, dtype)) == bytes(self.on_device.read(index, dtype))

    def close(self) -> None:
        for dense in self.each:
            dense.close()
        assert self.on_device.held == self.host.held


def gradients(rng: np.random.Generator, size: int, dtypes: list[str]) -> list[NDArray[Any]]:
    return [rng.standard_normal(size).astype(DTYPES[dtype]) for dtype in dtypes]
