"""The memory of a device: what parameters take of it, and when they give it back; and a device that fails."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from psdist import BSP, optim
from psdist.errors import DeviceLostError, LimitExceededError
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.arrays import DenseParameters, Update
from psdist_server.kernels.device_parameters import LANES, REGISTERED_BYTES, DeviceParameters, Lanes
from tests.support.host_device import HostDevice, needs_compiler

pytestmark = needs_compiler

#: Device memory allowed beside weights and state.
BESIDE_BYTES = 200_000_000
SLICE = 1 << 18


def entry(slices: int = 8, shards: int = 4, optimizer: optim.Optimizer | None = None) -> ParametersEntry:
    spec = ParametersSpec("p", optimizer or optim.Adam(lr=0.1), BSP(), slice_elements=SLICE)
    made = tuple(Shard(Replica("server-0", 1)) for _ in range(shards))
    return ParametersEntry(spec=spec, total=slices * SLICE, shards=made, ready=True)


def filled(dense: DeviceParameters) -> DeviceParameters:
    dense.hold(range(dense.slicing.count))
    for index in dense.indices:
        dense.install(index, np.ones(SLICE, np.float32))
    return dense


def gradient(value: float = 1.0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.full(SLICE, value, np.float32)


def test_adam_takes_12_bytes_a_parameter_and_what_is_copied_less_than_200_megabytes() -> None:
    device = HostDevice()
    dense = filled(DeviceParameters(entry(), Lanes(device)))
    threads = [threading.Thread(target=dense.apply, args=([Update(i, 0, [gradient()])],)) for i in dense.indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dense.read(0, "bfloat16")
    assert 12 * dense.slicing.total <= device.most <= 12 * dense.slicing.total + BESIDE_BYTES
    # All lanes, and the one for reads, whether or not these threads ran concurrently.
    each = (8 << 20) + (4 << 20)
    assert (2 * LANES + 1) * each < BESIDE_BYTES
    dense.close()


def test_a_shard_that_goes_gives_its_memory_back() -> None:
    device = HostDevice()
    dense = filled(DeviceParameters(entry(), Lanes(device)))
    before = device.allocated
    assert len(device.registered) == 8, "all slices are large enough, and whole pages"
    dense.release([1, 5])
    assert device.allocated == before - 12 * 2 * SLICE
    assert len(device.registered) == 6
    dense.hold([1, 5])
    assert device.allocated == before
    dense.close()
    assert device.allocated == before - 12 * 8 * SLICE
    assert not device.registered


def test_small_slices_are_not_registered() -> None:
    device = HostDevice()
    spec = ParametersSpec("p", optim.SGD(lr=0.1), BSP(), slice_elements=4096)
    made = ParametersEntry(spec=spec, total=10 * 4096, shards=(Shard(Replica("server-0", 1)),), ready=True)
    dense = DeviceParameters(made, Lanes(device))
    dense.hold(range(10))
    assert REGISTERED_BYTES > 4 * 4096 and not device.registered
    dense.close()


def test_without_room_nothing_has_changed() -> None:
    device = HostDevice()
    lanes = Lanes(device)
    lanes.prepare()
    device.memory_bytes = device.allocated + 12 * 6 * SLICE
    dense = DeviceParameters(entry(), lanes)
    before = device.allocated
    dense.hold([0, 1, 2, 4])
    with pytest.raises(LimitExceededError, match="no room"):
        dense.hold([3, 7, 5])
    assert dense.indices == (0, 1, 2, 4) and device.allocated == before + 12 * 4 * SLICE
    dense.close()


def test_an_update_needs_no_more_memory() -> None:
    """Else it would end in the middle, and its slice would look for ever as if it was being written."""
    device = HostDevice()
    dense = filled(DeviceParameters(entry(), Lanes(device)))
    device.memory_bytes = device.allocated
    assert dense.apply([Update(0, 0, [gradient()])]) == [()] and dense.weights.sequence[0] == 2
    assert dense.read(0, "bfloat16").nbytes == 2 * SLICE
    dense.close()


def test_without_room_for_what_updates_need_nothing_is_held() -> None:
    device = HostDevice(memory_bytes=30 << 20)
    dense = DeviceParameters(entry(), Lanes(device))
    with pytest.raises(LimitExceededError, match="no room"):
        dense.hold([0])
    assert not dense.held and not device.allocated
    device.memory_bytes = 1 << 30
    dense.hold([0])
    dense.close()


def test_a_device_that_fails_is_reported_and_nothing_of_the_update_counts() -> None:
    device, lost = HostDevice(), list[DeviceLostError]()
    dense = filled(DeviceParameters(entry(), Lanes(device, lost.append)))
    assert dense.apply([Update(0, 0, [gradient()])]) == [()]
    device.failure = "unspecified launch failure"
    with pytest.raises(DeviceLostError, match="unspecified launch failure"):
        dense.apply([Update(1, 0, [gradient()])])
    assert dense.weights.sequence[1] % 2 == 1, "workers that read in place see that it is being written"
    with pytest.raises(DeviceLostError):
        dense.export(0)
    assert len(lost) == 2
    dense.close()


def test_a_lane_is_free_again_after_an_error() -> None:
    device = HostDevice()
    dense = filled(DeviceParameters(entry(), Lanes(device)))
    for _ in range(LANES + 1):
        device.failure = "for a moment"
        with pytest.raises(DeviceLostError):
            dense.apply([Update(0, 0, [gradient()])])
    device.failure = ""
    assert dense.apply([Update(0, 0, [gradient()])]) == [()]
    dense.close()


def test_skipped_elements_give_the_bytes_of_the_processor() -> None:
    device, host = filled(DeviceParameters(entry(2, 1), Lanes(HostDevice()))), DenseParameters(entry(2, 1))
    host.hold(range(2))
    for index in range(2):
        host.install(index, np.ones(SLICE, np.float32))
    rng = np.random.default_rng(1)
    for step in range(4):
        absent = ((1000, 5000), (100_001, 200_000)) if step % 2 else ((4000, 6000),)
        values = rng.standard_normal(SLICE).astype(np.float32)
        for start, stop in absent:
            values[start:stop] = 0.0
        means = [np.full(SLICE, np.nan, np.float32) for _ in range(2)]
        for dense, mean in zip((device, host), means, strict=True):
            dense.apply([Update(1, step, [values, values], mean=mean, absent=absent)])
        assert means[0].tobytes() == means[1].tobytes()
        assert device.digest(1) == host.digest(1)
    assert device.lags.of(1) == host.lags.of(1) != ()
    device.close()
    host.close()
