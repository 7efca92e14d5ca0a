"""Codecs beside numpy, torch and a copy of memory, one thread: ``python -m benchmarks.codecs``.

What it is: for each codec, the time to encode a gradient, slice by slice, with and without the residual of an error
feedback; to check it; and to decode and accumulate it, into the whole vector and into a scratch of one slice, as a
server does. Beside it what one writes by hand with numpy and torch. What it is not: a test; it asserts nothing, and its
figures are those of this machine at this moment.

All take turns, round by round, so that a noisy moment hits all alike; medians and the best rounds are shown. GB/s
counts the gradient's bytes as float32, once, however often they are read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy and torch are imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from psdist.compression import (  # noqa: E402
    Chain,
    ChunkedTopK,
    Codec,
    Int2,
    Int4,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
)
from psdist.compression.segments import (  # noqa: E402
    PushNumber,
    accumulate,
    check,
    encode,
    payload_limit,
    prepare,
    regions,
)
from psdist.types import TensorSpec  # noqa: E402

Floats = NDArray[np.float32]
Work = Callable[[], object]

CODECS: dict[str, Codec] = {
    "Int8": Int8(),
    "Int8 stochastic": Int8(stochastic=True),
    "Int4": Int4(),
    "Int2": Int2(),
    "OneBit": OneBit(),
    "TopK(0.01)": TopK(0.01),
    "TopK(0.01), Int8": Chain(TopK(0.01), Int8()),
    "ChunkedTopK": ChunkedTopK(),
    "ChunkedTopK 2-bit": ChunkedTopK(bits=2),
    "RandomK(0.01)": RandomK(0.01),
    "PowerSGD(4)": PowerSGD(4),
}
_SLICE = 1 << 20
_COLUMNS = 1000
_BLOCK = 256


def works_of(codec: Codec, gradient: Floats, residual: Floats, total: Floats) -> tuple[dict[str, Work], float]:
    """What is measured of a codec, and its bytes for each element."""
    n = gradient.size
    cut = regions([TensorSpec("w", (n // _COLUMNS, _COLUMNS))], codec)
    slices = [(start, min(start + _SLICE, n)) for start in range(0, n, _SLICE)]
    out, scratch = np.zeros(payload_limit(_SLICE), np.uint8), np.zeros(_SLICE, np.float32)

    def write(rest: Floats | None, keep: list[NDArray[np.uint8]] | None = None) -> None:
        prepared = [prepare(r, gradient[r.start : r.stop], PushNumber(0, 0)) for r in cut]
        for start, stop in slices:
            size = encode(prepared, start, stop, out, rest)
            if keep is not None:
                keep.append(out[:size].copy())

    payloads: list[NDArray[np.uint8]] = []
    write(None, payloads)

    def each(do: Callable[[NDArray[np.uint8], int, int], object]) -> None:
        for payload, (start, stop) in zip(payloads, slices, strict=True):
            do(payload, start, stop)

    works: dict[str, Work] = {
        "encode": lambda: write(None),
        "encode, residual": lambda: write(residual),
        "check": lambda: each(lambda payload, start, stop: check(payload, stop - start)),
        "accumulate": lambda: each(lambda payload, start, stop: accumulate(payload, total[start:stop])),
        "accumulate, scratch": lambda: each(lambda payload, start, stop: accumulate(payload, scratch[: stop - start])),
    }
    return works, sum(payload.size for payload in payloads) / n


def references(gradient: Floats, other: Floats) -> dict[str, Work]:
    """What one writes by hand."""
    tensor, kept = torch.from_numpy(gradient), gradient.size // 100
    blocks = gradient[: gradient.size // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    of_torch = torch.from_numpy(blocks)

    def int8_by_numpy() -> object:
        scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        return np.rint(blocks / scales).astype(np.int8)

    def int8_by_torch() -> object:
        scales = of_torch.abs().amax(dim=1, keepdim=True) / 127
        return (of_torch / scales).round_().to(torch.int8)

    return {
        "copy of memory": lambda: np.copyto(other, gradient),
        "add to memory": lambda: np.add(other, gradient, out=other),
        "Int8 by numpy": int8_by_numpy,
        "Int8 by torch": int8_by_torch,
        "torch.topk": lambda: torch.topk(tensor.abs(), kept, sorted=False),
        "numpy.argpartition": lambda: np.argpartition(np.abs(gradient), gradient.size - kept),
    }


def measure(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turns. The first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            if number:
                times[name].append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs")
    parser.add_argument("codecs", nargs="*", help=f"names of codecs: {', '.join(CODECS)}; default: all")
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    n = options.elements // _COLUMNS * _COLUMNS
    gradient = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    residual, total = np.zeros_like(gradient), np.zeros_like(gradient)
    works, sizes = references(gradient, residual), {}
    for name in options.codecs or CODECS:
        found, sizes[name] = works_of(CODECS[name], gradient, residual, total)
        works |= {f"{name}: {what}": work for what, work in found.items()}
    times = measure(works, options.rounds)
    print(f"{n} elements, one thread, {options.rounds} rounds in turns\n")
    print(f"{'':38} {'GB/s':>8} {'best':>8} {'to copy':>8}")
    copy = statistics.median(times["copy of memory"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        gigabytes = [f"{4 * n / one / 1e9:8.2f}" for one in (median, min(seconds))]
        print(f"{name:38} {' '.join(gigabytes)} {median / copy:8.2f}")
    print()
    for name, size in sizes.items():
        print(f"{name:24} {size:.4f} bytes for each element, {4 / size:.1f} times fewer")


if __name__ == "__main__":
    main()
