"""Fuzzing of segment decoders: mutated payloads of every kind, and random bytes after a header.

A batch runs in one compiled function, several hundred thousand inputs per second. It checks for each input:

- only ``out`` is written to: the memory before and after it is unchanged;
- ``accumulate`` adds every payload that ``check`` accepts, without producing NaN or Inf;
- neither reads beyond its arrays, if numba checks bounds (NUMBA_BOUNDSCHECK=1).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np

from psdist.compression import (
    BFloat16,
    Chain,
    ChunkedTopK,
    Codec,
    Float16,
    Float32,
    Int2,
    Int4,
    Int8,
    OneBit,
    PerTensor,
    PowerSGD,
    RandomK,
    TopK,
)
from psdist.compression.segments import PushNumber, encode, payload_limit, prepare, regions
from psdist.compression.segments.checking import check_payload
from psdist.compression.segments.decoding import add_payload
from psdist.compression.segments.format import Defect
from psdist.types import TensorSpec

#: By name of the fuzzed codec.
CODECS: Final[dict[str, tuple[Codec, ...]]] = {
    "raw": (Float32(), Float16(), BFloat16()),
    "integer": (Int8(16), Int4(48), Int2(16)),
    "sparse": (TopK(0.1), ChunkedTopK(3, 20, bits=16), ChunkedTopK(5, 64, bits=8), Chain(TopK(0.2), Int2(), chunk=32)),
    "one bit": (OneBit(16), OneBit(100)),
    "random": (RandomK(0.1), Chain(RandomK(0.3, seed=2), BFloat16())),
    "low rank": (PowerSGD(1), PowerSGD(3)),
}

#: Guard elements of ``out`` before and after those of the payload.
_GUARD: Final = 64
_ELEMENTS_LAST: Final = 1024
_BYTES_LAST: Final = 8192
#: Some of the values written to header fields.
_INTERESTING: Final = np.array([0, 1, 2, 3, 4, 15, 16, 17, 255, 256, 65535, 65536, 65537, 2**31 - 1, 2**31, 2**32 - 1])

OK, REFUSED, NON_FINITE, WRONG = range(4)
#: Outcomes of inputs, by the numbers above.
OUTCOMES: Final = ("taken", "refused", "not finite", "WRONG")


def payloads(codec: Codec) -> list[tuple[bytes, int]]:
    """Return valid payloads, and their numbers of elements."""
    found = []
    for seed, shape in enumerate([(8, 9), (1, 64), (20, 20), (31, 13)]):
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32).reshape(-1)
        cut = regions([TensorSpec("w", shape)], PerTensor({"*": codec}, min_elements=64, min_vector=64))
        prepared = [prepare(region, values, PushNumber(0, seed)) for region in cut]
        for start, stop in ((0, values.size), (7, values.size - 3), (0, 1)):
            out = np.empty(payload_limit(stop - start), np.uint8)
            found.append((out[: encode(prepared, start, stop, out)].tobytes(), stop - start))
    return found


def fuzz(codecs: tuple[Codec, ...], inputs: int, seed: int) -> Mapping[str, int]:
    """Run this many inputs of these codecs. Return the count of each outcome. Raises AssertionError for violations."""
    bases = [one for codec in codecs for one in payloads(codec)]
    data = np.frombuffer(b"".join(payload for payload, _ in bases), np.uint8).copy()
    ends = np.cumsum([len(payload) for payload, _ in bases])
    elements = np.array([count for _, count in bases])
    outcomes = np.zeros(len(OUTCOMES), np.int64)
    bad = np.zeros(_BYTES_LAST, np.uint8)
    size = _batch()(np.uint64(seed * 2 + 1), inputs, data, ends, elements, outcomes, bad)
    if outcomes[WRONG]:
        raise AssertionError(f"seed {seed}: wrong for {bad[: size // 65536].tobytes().hex()}, {size % 65536} elements")
    return Counter(dict(zip(OUTCOMES, outcomes.tolist(), strict=True)))


@numba.njit
def _next(state: Any) -> Any:
    """Return a random number by xorshift64*.

    state: one number, in an array.
    """
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(33))


@numba.njit
def _mutate(state: Any, buffer: Any, size: Any) -> Any:
    """Change a payload in one of several ways. Return its new size."""
    way = _next(state) % 8
    if way < 3 and size:
        for _ in range(1 + _next(state) % 4):
            buffer[_next(state) % size] = _next(state) & 255
    elif way < 5 and size >= 16:
        field = _next(state) % 6
        value = _INTERESTING[_next(state) % _INTERESTING.size] + (_next(state) % 3 - 1 if way == 4 else 0)
        start, width = (0, 1, 2, 4, 8, 12)[field], (1, 1, 2, 4, 4, 4)[field]
        for i in range(width):
            buffer[start + i] = (value >> (8 * i)) & 255
    elif way == 5:
        size = _next(state) % (size + 1)
    elif way == 6:
        for _ in range(_next(state) % 32):
            buffer[size] = _next(state) & 255
            size += 1
    else:
        for i in range(min(4, size), size):
            buffer[i] = _next(state) & 255 if _next(state) % 4 else 0
    return size


@numba.njit
def _is_well(out: Any, elements: Any, taken: Any) -> Any:
    """True if the guards are unchanged, and accepted values are finite."""
    for i in range(_GUARD):
        if out[i] != 7.0 or out[_GUARD + elements + i] != 7.0:
            return False
    if taken:
        for i in range(_GUARD, _GUARD + elements):
            if not np.isfinite(out[i]):
                return False
    return True


@functools.cache
def _batch() -> Any:
    """Return the compiled function that runs a batch."""
    check, add = check_payload.compile(), add_payload.compile()
    non_finite, none = int(Defect.NON_FINITE), int(Defect.NONE)

    @numba.njit
    def run(seed: Any, inputs: Any, data: Any, ends: Any, counts: Any, outcomes: Any, bad: Any) -> Any:
        state = np.array([seed], np.uint64)
        buffer = np.empty(_BYTES_LAST, np.uint8)
        out = np.empty(_ELEMENTS_LAST + 2 * _GUARD, np.float32)
        for _ in range(inputs):
            which = _next(state) % ends.size
            start = ends[which - 1] if which else 0
            size, elements = ends[which] - start, counts[which]
            buffer[:size] = data[start : ends[which]]
            for _ in range(_next(state) % 3 + (which % 2)):
                size = _mutate(state, buffer, size)
            if _next(state) % 16 == 0:
                elements = _next(state) % _ELEMENTS_LAST
            # Separate arrays, so that numba's checks see their ends.
            payload, sums = buffer[:size].copy(), out[_GUARD : _GUARD + elements]
            out[:_GUARD] = 7.0
            out[_GUARD + elements : 2 * _GUARD + elements] = 7.0
            sums[:] = 0.0
            defect = check(payload, elements) % 256
            added = add(payload, sums)
            taken = defect == none
            outcome = OK if taken else NON_FINITE if defect == non_finite else REFUSED
            if (taken and not added) or not _is_well(out, elements, taken):
                outcomes[WRONG] += 1
                bad[:size] = payload
                return size * 65536 + elements
            outcomes[outcome] += 1
        return 0

    return run
