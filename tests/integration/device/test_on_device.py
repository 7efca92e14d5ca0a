"""Comparisons on a CUDA device, if there is one, that other tests make on the processor's. Skipped and counted
elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from psdist import optim
from psdist.device.device import CudaDevice, open_device
from psdist.errors import DeviceUnavailableError, LimitExceededError
from psdist_server.kernels.arrays import Update
from tests.support.device_runs import TRAIN, digests_of, ended
from tests.support.device_updates import Both, entry_of, every_optimizer, gradients
from tests.support.launched import Run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    try:
        return open_device("cuda")
    except DeviceUnavailableError as error:
        pytest.skip(error.message)


@every_optimizer
def test_a_hundred_steps_have_the_processors_bytes(device: CudaDevice, spec: optim.Optimizer) -> None:
    both = Both(entry_of(spec), device)
    rng = np.random.default_rng(7)
    for step in range(100):
        dtypes = [["float32"], ["float32", "bfloat16"], ["float16", "float32", "float32"]][step % 3]
        sizes = map(both.host.slicing.size, both.host.indices)
        updates = [Update(index, step, gradients(rng, size, dtypes)) for index, size in enumerate(sizes)]
        if step % 10 == 9:  # In one block of one contribution.
            updates[0].parts[-1][17] = np.inf
        if step % 10 == 5:  # Denormal numbers.
            updates[1].parts[0][:] = updates[1].parts[0] * np.asarray(1e-7, updates[1].parts[0].dtype)
        both.update(updates)
    both.check()
    both.close()


def test_large_slices_means_and_sums_of_squares_have_the_processors_bytes(device: CudaDevice) -> None:
    before = device.allocated
    both = Both(entry_of(optim.Adam(lr=0.1), slice_elements=1 << 20, total=(3 << 20) + 4097), device)
    rng = np.random.default_rng(3)
    for step in range(3):
        sizes = [both.host.slicing.size(index) for index in both.host.indices]
        means = [np.zeros(size, np.float32) for size in sizes]
        parts = [gradients(rng, size, ["float32", "bfloat16", "float32"]) for size in sizes]
        parts[0][1][-1] = np.inf
        for index in both.host.indices:
            ours, theirs = (dense.combine(index, parts[index]) for dense in both.each)
            assert ours[0] is not None and theirs[0] is not None
            assert ours[0].tobytes() == theirs[0].tobytes() and ours[1:] == theirs[1:]
        both.update([Update(index, step, parts[index], mean=means[index]) for index in both.host.indices])
    both.check()
    assert device.allocated - before <= 12 * both.host.slicing.total + 200_000_000
    both.close()


def test_more_than_there_is_is_refused(device: CudaDevice) -> None:
    with pytest.raises(LimitExceededError, match="are free"):
        device.allocate(1 << 50)
    assert device.memory()[0] > 0


def test_programs_have_the_bytes_of_servers_without_a_device(
    device: CudaDevice, tmp_path: Path, runs: list[Run]
) -> None:
    steps = 20
    arguments = (str(steps), "1", "65536")
    digests = []
    for kind in ("cpu", "cuda", "cuda,cpu"):
        folder = tmp_path / kind.replace(",", "-")
        folder.mkdir()
        runs.append(Run(folder, TRAIN, *arguments, flags=("--nservers", "2", "--server-device", kind)))
        digests.append(digests_of(ended(runs[-1]), steps))
    assert digests[0] == digests[1] == digests[2]
