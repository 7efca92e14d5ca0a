"""Published weights: the weights that workers hold if they receive compressed differences (``pull_compression``).

After each update of a slice, the codec encodes the difference between the weights and the published ones. The decoded
difference is added to the published weights, on the server and on the workers, so both have the same bytes. Whatever
the codec loses is part of the next difference, which is the error feedback of EF21-P (Gruntkowska, Tyurin, Richtarik,
"EF21-P and Friends", 2023). The latest differences are stored for workers that hold an earlier version.

Invariants: Published weights depend only on the weights and versions of the slice, so all copies of a slice have the
same. They are finite, or equal to the weights themselves. ``publish`` may run in a kernel thread, at most one per
slice at a time, and nothing else uses the slice meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression import Codec, Float32, segments
from psdist.compression.specifications import MIN_ELEMENTS, Region
from psdist.errors import NonFiniteGradientError
from psdist.types import Slicing
from psdist.wire.limits import DIFFERENCES_MAX
from psdist_server.kernels.memory import WeightsMemory

Floats = NDArray[np.float32]

#: Codec of slices too small to compress.
_FLOAT32: Final = Float32()
#: Stored differences take at most this many bytes per element, half of the slice; beyond that the weights themselves
#: are sent.
_KEPT_BYTES: Final = 2


class PublishedWeights:
    """The published weights of one server's slices. memory: the arrays that hold them."""

    def __init__(self, codec: Codec, slicing: Slicing, memory: WeightsMemory) -> None:
        self._codec = codec
        self._slicing = slicing
        self._weights = memory
        #: By slice: payloads that led to its newest version, newest last; an empty payload if nothing changed.
        self._kept: dict[int, deque[bytes]] = {}
        self._thread = threading.local()

    def begin(self, index: int, weights: Floats) -> None:
        """Start a slice with these weights, which are sent uncompressed."""
        self.part(index)[...] = weights
        self.forget([index])

    def part(self, index: int) -> Floats:
        """Return a view of the published weights of a slice."""
        start, stop = self._slicing.bounds(index)
        return self._weights.array[start:stop]

    def forget(self, indices: Iterable[int]) -> None:
        """Discard the stored differences of these slices, whose published weights were replaced or released."""
        for index in indices:
            self._kept.pop(index, None)

    def publish(self, index: int, version: int, weights: Floats) -> None:
        """Publish a slice's new weights, at ``version``."""
        payload = self._difference(index, version, weights)
        if payload is None:  # The weights diverged, or returned from divergence.
            self.begin(index, weights)
            return
        segments.accumulate(payload, self.part(index))
        self._keep(index, payload)

    def _difference(self, index: int, version: int, weights: Floats) -> bytes | None:
        """Encode the difference between the weights and the published ones. Returns None if it cannot be encoded."""
        difference, out = self._memory()
        start, stop = self._slicing.bounds(index)
        codec = self._codec if weights.size >= MIN_ELEMENTS else _FLOAT32
        region, number = Region(start, stop, codec, (weights.size,)), segments.PushNumber(0, version)
        difference = difference[: weights.size]
        prepared = segments.prepare_sum(region, weights, self.part(index), -1.0, difference, number)
        if prepared is None:
            return None
        try:
            return out[: segments.encode([prepared], start, stop, out)].tobytes()
        except NonFiniteGradientError:
            return None

    def unchanged(self, index: int) -> None:
        """Record that the next version of a slice has the same weights."""
        self._keep(index, b"")

    def _keep(self, index: int, payload: bytes) -> None:
        kept = self._kept.setdefault(index, deque(maxlen=DIFFERENCES_MAX))
        kept.append(payload)
        room = _KEPT_BYTES * self._slicing.size(index)
        while sum(map(len, kept)) > room and len(kept) > 1:
            kept.popleft()

    def differences(self, index: int, held: int, version: int) -> list[bytes] | None:
        """Return the differences that lead from version ``held`` of a slice to ``version``, its newest, in order.
        Returns None if they are not known, or larger than the weights."""
        kept, count = self._kept.get(index, ()), version - held
        if not 0 <= count <= len(kept):
            return None
        found = [payload for payload in list(kept)[len(kept) - count :] if payload]
        return found if sum(map(len, found)) < 4 * self._slicing.size(index) else None

    def _memory(self) -> tuple[Floats, NDArray[np.uint8]]:
        """Return this kernel thread's working memory, a difference and a payload, so that the steady state allocates
        nothing."""
        memory: tuple[Floats, NDArray[np.uint8]] | None = getattr(self._thread, "memory", None)
        if memory is None:
            elements = min(self._slicing.slice_elements, self._slicing.total)
            memory = np.empty(elements, np.float32), np.empty(segments.payload_limit(elements), np.uint8)
            self._thread.memory = memory
        return memory
