"""The casts shared by all kernel sources equal numpy's, and the emulated device runs barriers like a real one."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from psdist.device.device import ARCHITECTURES, common_source, compile_source, nvrtc
from psdist.device.memory import codec_source
from tests.support.host_device import HostDevice, needs_compiler

SOURCE = """
extern "C" __global__ void widen(const u16* values, float* out, i64 size, i64 is_half) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < size; i += (i64)gridDim.x * blockDim.x)
        out[i] = is_half ? widen_half(values[i]) : widen_brain(values[i]);
}
extern "C" __global__ void narrow(const float* values, u16* out, i64 size, i64 is_half) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < size; i += (i64)gridDim.x * blockDim.x)
        out[i] = is_half ? narrow_half(values[i]) : narrow_brain(values[i]);
}
extern "C" __global__ void neighbors(const int* values, int* out, int* counts) {
    __shared__ int line[64];
    line[threadIdx.x] = values[threadIdx.x];
    BARRIER
    out[threadIdx.x] = line[(threadIdx.x + 1) % 64] + line[(threadIdx.x + 63) % 64];
    int count = __syncthreads_count(values[threadIdx.x] > 10);
    int any = __syncthreads_or(values[threadIdx.x] > 1000);
    int sum = __shfl_down_sync(~0u, values[threadIdx.x], 1);
    if (threadIdx.x == 0) { counts[0] = count; counts[1] = any; counts[2] = sum; }
    unsigned votes = __ballot_sync(~0u, values[threadIdx.x] > 10);
    if (threadIdx.x == 32) counts[3] = votes;
}
"""


def source(barrier: str = "__syncthreads();") -> str:
    return common_source() + SOURCE.replace("BARRIER", barrier)


def cast(kernel: str, values: NDArray[np.generic], out: NDArray[np.generic], is_half: bool) -> None:
    device = HostDevice()
    stream, given, made = device.stream(), device.allocate(values.nbytes), device.allocate(out.nbytes)
    device.copy_in(given.address, values, stream)
    size, half = np.int64(values.size), np.int64(is_half)
    arguments = (np.uint64(given.address), np.uint64(made.address), size, half)
    device.launch(device.kernels(source())(kernel), 2, 64, arguments, stream)
    device.copy_out(out, made.address, stream)


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_value_of_16_bits_is_widened_as_by_numpy(dtype: type) -> None:
    values = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(values.size, np.float32)
    cast("widen", values, out, dtype is np.float16)
    with np.errstate(all="ignore"):
        expected = values.view(dtype).astype(np.float32)
    numbers = ~np.isnan(expected)
    assert (np.isnan(out) == ~numbers).all()
    assert (out.view(np.uint32)[numbers] == expected.view(np.uint32)[numbers]).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_values_are_narrowed_as_by_numpy(dtype: type) -> None:
    # All exponents and signs, with fractions that are ties, next to ties, and arbitrary.
    rng = np.random.default_rng(0)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *rng.integers(0, 1 << 16, 4).tolist()]
    values = np.concatenate([upper | np.uint32(low) for low in lower]).view(np.float32)
    out = np.empty(values.size, np.uint16)
    cast("narrow", values, out, dtype is np.float16)
    with np.errstate(all="ignore"):
        expected = values.astype(dtype)
    numbers = ~np.isnan(values)
    assert (np.isnan(out.view(dtype).astype(np.float32)) == ~numbers).all()
    assert (out[numbers] == expected.view(np.uint16)[numbers]).all()


def exchanged(text: str, descending: bool) -> tuple[list[int], list[int]]:
    device = HostDevice(descending=descending)
    stream, values = device.stream(), np.arange(64, dtype=np.int32)
    given, made, counts = (device.allocate(size) for size in (256, 256, 16))
    device.copy_in(given.address, values, stream)
    addresses = [np.uint64(one.address) for one in (given, made, counts)]
    device.launch(device.kernels(text)("neighbors"), 1, 64, addresses, stream)
    out, found = np.empty(64, np.int32), np.empty(4, np.uint32)
    device.copy_out(out, made.address, stream)
    device.copy_out(found, counts.address, stream)
    return out.tolist(), found.tolist()


@needs_compiler
def test_threads_of_a_block_meet_at_barriers() -> None:
    expected = [(i + 1) % 64 + (i + 63) % 64 for i in range(64)]
    for descending in (False, True):
        assert exchanged(source(), descending) == (expected, [53, 0, 1, (1 << 32) - 1])


@needs_compiler
def test_a_barrier_that_is_missing_shows() -> None:
    expected = [(i + 1) % 64 + (i + 63) % 64 for i in range(64)]
    for descending in (False, True):  # Separate memory: shared memory keeps the content of an earlier block.
        assert exchanged(source(f"/* {descending} */"), descending)[0] != expected


@needs_compiler
def test_an_argument_of_another_type_is_refused() -> None:
    device = HostDevice()
    kernel = device.kernels(source())("neighbors")
    with pytest.raises(AssertionError, match="takes"):
        device.launch(kernel, 1, 64, (np.uint64(0), np.uint64(0), np.int32(0)), device.stream())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("make_source", [source, codec_source])
def test_the_sources_are_compiled_for_devices(make_source: Callable[[], str], architecture: str) -> None:
    nvrtc()
    assert compile_source(make_source(), architecture)[:4] == b"\x7fELF"
