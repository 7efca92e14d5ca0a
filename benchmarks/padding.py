"""The share of padding in batches, and the throughput that it costs: ``DynamicBatcher`` against plain batches.

    OMP_NUM_THREADS=1 python -m benchmarks.padding [SAMPLES]

Lengths are lognormal, as those of sentences (median 64, sigma 0.8, at most 1,024). A step stands for a model whose time
grows with the elements of a batch: two products of matrices. The table is Markdown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.data import Batch, DynamicBatcher
from psdist.data.batches import pad

_WIDTH: Final = 64
_BATCH: Final = 64
_MEDIAN, _SIGMA, _LONGEST = 64, 0.8, 1024


def samples_of(count: int) -> list[NDArray[np.int64]]:
    """Samples with lognormal lengths."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(_MEDIAN), _SIGMA, count), 1, _LONGEST).astype(int)
    return [rng.integers(0, 1000, length) for length in lengths]


def plain(samples: list[NDArray[np.int64]]) -> Iterator[Batch]:
    """Batches in the order of the samples, padded to the longest."""
    for start in range(0, len(samples), _BATCH):
        chosen = samples[start : start + _BATCH]
        numbers = range(start, start + len(chosen))
        yield pad([{"": sample} for sample in chosen], numbers, max(map(len, chosen)), 0)


def dynamic(samples: list[NDArray[np.int64]], **options: Any) -> Iterator[Batch]:
    """Batches of a ``DynamicBatcher``."""
    return DynamicBatcher(_BATCH, **options).batches(samples)


def measure(batches: Iterable[Batch]) -> tuple[int, int, float, float]:
    """Return the number of batches, their elements, and the seconds of batching and of steps."""
    rng = np.random.default_rng(1)
    table, inner = rng.random((1000, _WIDTH), np.float32), rng.random((_WIDTH, 4 * _WIDTH), np.float32)
    count = elements = 0
    stepping, start = 0.0, time.perf_counter()
    for batch in batches:
        begun = time.perf_counter()
        np.maximum(table[batch.values] @ inner, 0) @ inner.T
        stepping += time.perf_counter() - begun
        count, elements = count + 1, elements + batch.mask.size
    return count, elements, time.perf_counter() - start - stepping, stepping


def main(count: int) -> None:
    """Print the table."""
    samples = samples_of(count)
    tokens = sum(map(len, samples))
    contenders = {
        "in order, padded to the longest": plain,
        "`DynamicBatcher()`": dynamic,
        '`padding="bucket"`': lambda given: dynamic(given, padding="bucket"),
        "`max_tokens=8192`": lambda given: dynamic(given, max_tokens=8192),
        "`buckets=(64, 128, 256, 1024)`": lambda given: dynamic(given, buckets=(64, 128, 256, 1024)),
    }
    print("| batches | number | padding | tokens/s | batching, samples/s |\n|---|---|---|---|---|")
    for name, make in contenders.items():
        number, elements, batching, stepping = measure(make(samples))
        padding, speed = 100 * (1 - tokens / elements), tokens / (batching + stepping)
        print(f"| {name} | {number:,} | {padding:.1f} % | {speed / 1e6:.2f} M | {count / batching:,.0f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
