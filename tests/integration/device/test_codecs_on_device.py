"""Codecs on a CUDA device, if there is one: gradients are encoded with the bytes of the host, and arrays of CuPy and
torch are accepted and returned. Skipped and counted elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psdist.client.device_vectors import CupyArrays, DeviceVectors, is_on_device
from psdist.compression import Codec
from psdist.device.device import CudaDevice, open_device
from psdist.errors import DeviceUnavailableError
from tests.support.device_encoders import CODECS, LAYOUT, BothEncoders, each_tensor, layout_of, worst_cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    try:
        return open_device("cuda")
    except DeviceUnavailableError as error:
        pytest.skip(error.message)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_pushes_are_those_of_the_host(device: CudaDevice, codec: Codec) -> None:
    both = BothEncoders(each_tensor(codec), LAYOUT, 500, device=device)
    for seed in range(20):
        both.push(worst_cases(LAYOUT.total, seed))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_large_pushes_are_those_of_the_host(device: CudaDevice, codec: Codec) -> None:
    layout = layout_of((3_000_017, 64, 1_234_567))
    both = BothEncoders(each_tensor(codec), layout, 1 << 19, device=device)
    for seed in range(2):
        both.push(worst_cases(layout.total, seed))


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_arrays_are_taken_and_given_where_they_lie(device: CudaDevice, library: str) -> None:
    module: Any = pytest.importorskip(library)
    if library == "torch" and not module.cuda.is_available():
        pytest.skip("torch has no CUDA")
    vectors = DeviceVectors(LAYOUT, CupyArrays("cuda"))
    buffers = vectors.buffers()
    values = np.random.default_rng(0).standard_normal(LAYOUT.total).astype(np.float32)
    for tensor, start in zip(LAYOUT.tensors, LAYOUT.offsets, strict=False):
        part = values[start : start + tensor.size]
        if library == "torch":
            buffers[tensor.name] = module.from_dlpack(buffers[tensor.name])
            buffers[tensor.name].copy_(module.from_numpy(part))
        else:
            buffers[tensor.name][...] = module.asarray(part)
    assert all(is_on_device(array) for array in buffers.values())
    found = vectors.gather(buffers)
    assert found.address == vectors.gradients.address and vectors.is_finite(found, "float32")
    out = np.empty(LAYOUT.total, np.float32)
    vectors.register(out)
    vectors.copy_out(found, out)
    np.testing.assert_array_equal(out, values)
    doubles = {
        name: array.astype("float64") if library == "cupy" else array.double() for name, array in buffers.items()
    }
    elsewhere = {name: 2 * array for name, array in buffers.items()}
    # The vector shares the memory of the buffers, so this overwrites them.
    vectors.copy_out(vectors.gather(elsewhere), out)
    np.testing.assert_array_equal(out, 2 * values)
    tiny = next(iter(doubles.values())).reshape(-1)
    tiny[:2] = -3e-45  # CuPy's own conversion would flush it to zero.
    vectors.copy_out(vectors.gather(doubles), out)
    assert out[0] == np.float32(-3e-45) == out[1] and np.array_equal(out[2:], values[2:])
    weights = vectors.arrays(values, copy=True)
    for tensor, start in zip(LAYOUT.tensors, LAYOUT.offsets, strict=False):
        np.testing.assert_array_equal(weights[tensor.name].get(), values[start : start + tensor.size])
    vectors.release_memory()
