"""Updates on a device: bandwidth beside a copy's and torch's, updates of a server, their memory, and their bytes.

Used by ``benchmarks.gpu``, which describes the functions. Each takes a device and the options, and returns rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist import BSP, optim
from psdist.device.device import CudaDevice, Device, common_source
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.arrays import DenseParameters, Update
from psdist_server.kernels.device_parameters import ARRAYS, SCALARS, THREADS, DeviceParameters, Lanes, update_source
from psdist_server.kernels.interpreted import BLOCK
from psdist_server.kernels.updates import UPDATES

Rows = list[dict[str, Any]]

_COPY = """
struct alignas(16) Quad { u32 words[4]; };
extern "C" __global__ void copy_quads(const Quad* from, Quad* to, i64 count) {
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) to[i] = from[i];
}
"""
#: Numbers of thread blocks to try for a copy.
_GRIDS = (512, 2048, 8192, 1 << 16)
#: One specification for each optimizer, with its arguments.
EXACT = {
    "sgd": optim.SGD(lr=0.1, weight_decay=0.1),
    "sgd_momentum": optim.SGD(lr=0.1, momentum=0.9, dampening=0.3),
    "sgd_nesterov": optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": optim.Adam(lr=0.1),
    "adamw": optim.AdamW(lr=0.1),
    "adagrad": optim.Adagrad(lr=0.1, lr_decay=0.1),
    "rmsprop": optim.RMSprop(),
    "rmsprop_momentum": optim.RMSprop(momentum=0.9),
    "rmsprop_centered": optim.RMSprop(centered=True),
    "rmsprop_centered_momentum": optim.RMSprop(centered=True, momentum=0.5),
    "lion": optim.Lion(lr=0.1, weight_decay=0.1),
    "ftrl": optim.FTRL(lr=0.5, l1=0.3, l2=0.2),
    "mean": optim.Mean(),
    "asgd": optim.ASGD(t0=10.0, weight_decay=0.1),
    "rprop": optim.Rprop(),
    "adam_amsgrad": optim.Adam(lr=0.1, amsgrad=True),
    "adamw_amsgrad": optim.AdamW(lr=0.1, amsgrad=True),
    "adamax": optim.Adamax(lr=0.1),
    "nadam": optim.NAdam(lr=0.1),
    "radam": optim.RAdam(lr=0.1),
    "adadelta": optim.Adadelta(),
}
_EXACT_ELEMENTS, _EXACT_SLICE, _EXACT_STEPS = 60_000, 20_000, 100


def median_seconds(work: Callable[[], None], wait: Callable[[], None], rounds: int, times: int) -> float:
    """Return the seconds of one call of ``work``, with ``times`` calls between two waits.

    It is the median of the rounds after one that does not count.
    """
    found = []
    for _ in range(rounds + 1):
        wait()
        began = time.perf_counter()
        for _ in range(times):
            work()
        wait()
        found.append((time.perf_counter() - began) / times)
    return statistics.median(found[1:])


def copy_bandwidth(device: Device, options: argparse.Namespace) -> Rows:
    """Return a copy of as many bytes as the weights have, by kernels, and by the driver."""
    size, stream = options.elements * 4 // 16 * 16, device.stream()
    source, target = device.allocate(size), device.allocate(size)
    device.clear(source.address, size, stream)
    kernel = device.kernels(common_source() + _COPY)("copy_quads")
    arguments = (np.uint64(source.address), np.uint64(target.address), np.int64(size // 16))
    ways: dict[str, Callable[[], None]] = {
        f"kernel with {grid} blocks": partial(device.launch, kernel, grid, THREADS, arguments, stream)
        for grid in _GRIDS
        if grid * THREADS * 16 <= max(size, _GRIDS[0] * THREADS * 16)
    }
    if isinstance(device, CudaDevice):
        runtime = import_module("cupy").cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        ways["driver"] = partial(runtime.memcpyAsync, target.address, source.address, size, kind, stream.ptr)
    rows = []
    for what, work in ways.items():
        seconds = median_seconds(work, partial(device.wait, stream), options.rounds, options.times)
        rows.append({"what": what, "seconds": seconds, "bytes_per_second": 2 * size / seconds})
    return rows


def update_bandwidth(device: Device, options: argparse.Namespace) -> Rows:
    """One update by one float32 contribution on the device."""
    elements, stream, rows = options.elements, device.stream(), []
    find = device.kernels(update_source(*UPDATES))
    staged, header = device.allocate(256 + 4 * elements), np.zeros(256, np.uint8)
    header[:16] = np.array([256, 0], np.uint64).view(np.uint8)
    device.clear(staged.address, staged.size, stream)
    device.copy_in(staged.address, header, stream)
    for name, kernel in UPDATES.items():
        count = kernel.element.__code__.co_argcount - kernel.signature.args[-1].count - 1
        arrays = [device.allocate(4 * elements) for _ in range(count)]
        for array in arrays:
            device.clear(array.address, array.size, stream)
        addresses = [np.uint64(array.address) for array in arrays] + [np.uint64(0)] * (ARRAYS - count)
        given = (np.int64(elements), np.uint64(staged.address), np.uint64(16), np.int64(1))
        division = (np.float32(0), np.float32(1), np.uint64(0))
        arguments = (*addresses, *given, *division, *[np.float32(0.5)] * SCALARS)
        work = partial(device.launch, find(f"update_{name}"), -(-elements // BLOCK), THREADS, arguments, stream)
        seconds = median_seconds(work, partial(device.wait, stream), options.rounds, options.times)
        moved = 4 * elements * (1 + 2 * count)
        rows.append({"what": name, "seconds": seconds, "bytes": moved, "bytes_per_second": moved / seconds})
    return rows


def torch_adam(device: Device, options: argparse.Namespace) -> Rows:
    """Torch's fused Adam."""
    try:
        torch = import_module("torch")
    except ImportError:
        return [{"what": "adam", "seconds": None, "note": "there is no torch"}]
    if not isinstance(device, CudaDevice) or not torch.cuda.is_available():
        return [{"what": "adam", "seconds": None, "note": "this torch has no CUDA"}]
    where = torch.device(options.device)
    weights = torch.nn.Parameter(torch.zeros(options.elements, device=where))
    weights.grad = torch.full((options.elements,), 0.5, device=where)
    optimizer = torch.optim.Adam([weights], lr=1e-3, fused=True)
    seconds = median_seconds(optimizer.step, torch.cuda.synchronize, options.rounds, options.times)
    return [{"what": "adam", "seconds": seconds, "bytes_per_second": 28 * options.elements / seconds}]


def server_updates(device: Device, options: argparse.Namespace) -> Rows:
    """Step of a server with Adam, whose contributions lie on the host."""
    rows = []
    for workers in (1, 2):
        dense = _filled(DeviceParameters(_entry(optim.Adam(), options.elements), Lanes(device)))
        gradients = [np.full(options.elements, 0.5, np.float32) for _ in range(workers)]
        with ThreadPoolExecutor(options.threads) as pool:
            steps = iter(range(1 << 30))
            work = partial(_server_step, dense, gradients, pool, steps)
            seconds = median_seconds(work, lambda: None, min(options.rounds, 3), 2)
        moved = 4 * options.elements * workers
        rows.append({"what": f"{workers} workers", "seconds": seconds, "contributed_bytes_per_second": moved / seconds})
        dense.close()
    return rows


def memory(device: Device, options: argparse.Namespace) -> Rows:
    """Return a server's device memory with Adam after a step on all of its threads."""
    before, (free_before, _) = device.allocated, device.memory()
    dense = _filled(DeviceParameters(_entry(optim.Adam(), options.elements), Lanes(device)))
    with ThreadPoolExecutor(options.threads) as pool:
        _server_step(dense, [np.full(options.elements, 0.5, np.float32)], pool, iter([0]))
    dense.read(0, "bfloat16")
    taken, (free, _) = device.allocated - before, device.memory()
    dense.close()
    return [{"what": "adam", "elements": options.elements, "bytes": taken, "bytes_by_the_driver": free_before - free}]


def exactness(device: Device, options: argparse.Namespace) -> Rows:
    """Make 100 steps of each optimizer, and compare them with the processor's."""
    rows = []
    for name, spec in EXACT.items():
        entry = _entry(spec, _EXACT_ELEMENTS, _EXACT_SLICE)
        both = [_filled(DenseParameters(entry)), _filled(DeviceParameters(entry, Lanes(device)))]
        rng = np.random.default_rng(11)
        for step in range(_EXACT_STEPS):
            for index in both[0].indices:
                size = both[0].slicing.size(index)
                parts = [rng.standard_normal(size, np.float32), rng.standard_normal(size).astype(np.float16)]
                for dense in both:
                    dense.apply([Update(index, step, parts)])
        pairs = [pair for index in both[0].indices for pair in zip(*(one.export(index) for one in both), strict=True)]
        identical = all(one.tobytes() == other.tobytes() for one, other in pairs)
        rows.append({"what": name, "identical": identical, "relative": max(relative(*pair) for pair in pairs)})
        for dense in both:
            dense.close()
    return rows


def relative(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the largest difference of two elements, over the larger of both."""
    size = np.maximum(np.abs(one), np.abs(other)).astype(np.float64)
    difference = np.abs(one.astype(np.float64) - other)
    return float(np.max(np.divide(difference, size, out=np.zeros_like(difference), where=size > 0), initial=0.0))


def _server_step(dense: DenseParameters, gradients: list[Any], pool: ThreadPoolExecutor, steps: Any) -> None:
    step = next(steps)

    def update(index: int) -> None:
        start, stop = dense.slicing.bounds(index)
        dense.apply([Update(index, step, [gradient[start:stop] for gradient in gradients])])

    list(pool.map(update, dense.indices))


def _filled(dense: DenseParameters) -> DenseParameters:
    dense.hold(range(dense.slicing.count))
    for index in dense.indices:
        dense.install(index, np.linspace(-1, 1, dense.slicing.size(index), dtype=np.float32))
    return dense


def _entry(spec: optim.Optimizer, elements: int, slice_elements: int = 1 << 20) -> ParametersEntry:
    made = ParametersSpec("p", spec, BSP(), slice_elements=slice_elements)
    return ParametersEntry(spec=made, total=elements, shards=(Shard(Replica("server-0", 1)),) * 4, ready=True)
