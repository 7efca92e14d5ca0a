"""Codecs beside numpy, torch and a copy of memory, one thread: ``python -m benchmarks.codecs``.

For each codec it measures the time to encode a gradient, slice by slice, without and with error feedback (adding the
old residual and storing the new one); to check it; and to decode and accumulate it, into the whole vector and into a
scratch of one slice, as a server does. Hand-written code with numpy and torch is measured beside it. It asserts
nothing, and its figures are those of this machine at this moment.

All take turns, round by round, so that a noisy moment affects all equally; medians and the best rounds are shown. GB/s
counts the gradient's bytes as float32, once, however often they are read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.codec_choice import CODECS, COLUMNS, Encoder
from benchmarks.turns import in_turns
from psdist.compression import Chain, Codec, Compressor, Int8, TopK
from psdist.compression.segments import accumulate, check

Floats = NDArray[np.float32]
Work = Callable[[], object]

MEASURED: dict[str, Codec] = {
    **{name: codec for name, codec in CODECS.items() if isinstance(codec, Compressor)},
    "Int8(stochastic=True)": Int8(stochastic=True),
    "Chain(TopK(0.01), Int8())": Chain(TopK(0.01), Int8()),
}
#: Read when numpy and torch are imported.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_SLICE = 1 << 20
_BLOCK = 256


def works_of(codec: Codec, gradient: Floats, residual: Floats, total: Floats) -> tuple[dict[str, Work], float]:
    """Return the operations of a codec to measure, and its bytes for each element."""
    n = gradient.size
    bounds = [(start, min(start + _SLICE, n)) for start in range(0, n, _SLICE)]
    encoder, scratch = Encoder(codec, bounds), np.zeros(_SLICE, np.float32)
    payloads: list[NDArray[np.uint8]] = []
    encoder.encode(gradient, payloads=payloads)

    def each(do: Callable[[NDArray[np.uint8], int, int], object]) -> None:
        for payload, (start, stop) in zip(payloads, bounds, strict=True):
            do(payload, start, stop)

    works: dict[str, Work] = {
        "encode": lambda: encoder.encode(gradient),
        "encode, residual": lambda: encoder.encode(gradient, residual),
        "check": lambda: each(lambda payload, start, stop: check(payload, stop - start)),
        "accumulate": lambda: each(lambda payload, start, stop: accumulate(payload, total[start:stop])),
        "accumulate, scratch": lambda: each(lambda payload, start, stop: accumulate(payload, scratch[: stop - start])),
    }
    return works, sum(payload.size for payload in payloads) / n


def references(gradient: Floats, other: Floats) -> dict[str, Work]:
    """Return hand-written operations for comparison."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, in a process that has one thread."""
    if not ONE_THREAD.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.codecs", *sys.argv[1:]], os.environ | ONE_THREAD)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs")
    parser.add_argument("codecs", nargs="*", help=f"names of codecs: {', '.join(MEASURED)}; default: all")
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    n = options.elements // COLUMNS * COLUMNS
    gradient = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    residual, total = np.zeros_like(gradient), np.zeros_like(gradient)
    works, sizes = references(gradient, residual), {}
    for name in options.codecs or MEASURED:
        found, sizes[name] = works_of(MEASURED[name], gradient, residual, total)
        works |= {f"{name}: {what}": work for what, work in found.items()}
    times = in_turns(works, options.rounds)
    print(f"{n} elements, one thread, {options.rounds} rounds in turns\n")
    print(f"{'':50} {'GB/s':>8} {'best':>8} {'to copy':>8}")
    copy = statistics.median(times["copy of memory"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        gigabytes = [f"{4 * n / one / 1e9:8.2f}" for one in (median, min(seconds))]
        print(f"{name:50} {' '.join(gigabytes)} {median / copy:8.2f}")
    print()
    for name, size in sizes.items():
        print(f"{name:30} {size:.4f} bytes for each element, {4 / size:.1f} times fewer")


if __name__ == "__main__":
    main()
