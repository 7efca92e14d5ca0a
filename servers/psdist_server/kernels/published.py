"""Published weights: what workers are given where they are sent compressed differences (``pull_compression``).

After each update of a slice the codec encodes what the weights have over the published ones, and what it sends is added
to these, here as at the workers. So what it leaves out is in the next difference, which is the error feedback of
EF21-P (Gruntkowska, Tyurin, Richtarik, "EF21-P and Friends", 2023), and both have the same bytes. The last differences
are kept, for workers that hold the weights of an earlier version.

Invariants: published weights follow from the weights and versions of the slice alone, so that all copies of a slice
have the same. They are finite, or the weights themselves. ``publish`` may run in a kernel thread, at most one for a
slice at a time, and nothing else is asked about the slice meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression import Codec, Float32, segments
from psdist.compression.regions import MIN_ELEMENTS, Region
from psdist.errors import NonFiniteGradientError
from psdist.types import Slicing
from psdist.wire.limits import DIFFERENCES_MAX
from psdist_server.kernels.memory import WeightsMemory

Floats = NDArray[np.float32]

#: Of a vector without a shape.
_FLOAT32: Final = Float32()
#: Differences of a slice are kept up to half its bytes: of more, the weights themselves are sent.
_KEPT_BYTES: Final = 2


class PublishedWeights:
    """The published weights of the slices of one server. memory: where they lie."""

    def __init__(self, codec: Codec, slicing: Slicing, memory: WeightsMemory) -> None:
        self._codec = codec
        self._slicing = slicing
        self._weights = memory
        #: By slice: payloads that led to its newest version, the last one at the end; empty where nothing was sent.
        self._kept: dict[int, deque[bytes]] = {}
        self._thread = threading.local()

    def begin(self, index: int, weights: Floats) -> None:
        """A slice begins with these weights, which are sent as they are."""
        self.part(index)[...] = weights
        self.forget([index])

    def part(self, index: int) -> Floats:
        """The published weights of a slice, where they lie."""
        start, stop = self._slicing.bounds(index)
        return self._weights.array[start:stop]

    def forget(self, indices: Iterable[int]) -> None:
        """Keeps no differences of these slices: the published weights are others, or not held any more."""
        for index in indices:
            self._kept.pop(index, None)

    def publish(self, index: int, version: int, weights: Floats) -> None:
        """A slice has these weights in ``version``."""
        payload = self._difference(index, version, weights)
        if payload is None:  # They have diverged, or did, and come back.
            self.begin(index, weights)
            return
        segments.accumulate(payload, self.part(index))
        self._keep(index, payload)

    def _difference(self, index: int, version: int, weights: Floats) -> bytes | None:
        """What the weights have over the published ones, encoded; None where it cannot be."""
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
        """The next version of a slice has the same weights."""
        self._keep(index, b"")

    def _keep(self, index: int, payload: bytes) -> None:
        kept = self._kept.setdefault(index, deque(maxlen=DIFFERENCES_MAX))
        kept.append(payload)
        room = _KEPT_BYTES * self._slicing.size(index)
        while sum(map(len, kept)) > room and len(kept) > 1:
            kept.popleft()

    def differences(self, index: int, held: int, version: int) -> list[bytes] | None:
        """What is added to version ``held`` of a slice, in this order, to have ``version``, which is its newest. None
        where that is not known, or more than the weights."""
        kept, count = self._kept.get(index, ()), version - held
        if not 0 <= count <= len(kept):
            return None
        found = [payload for payload in list(kept)[len(kept) - count :] if payload]
        return found if sum(map(len, found)) < 4 * self._slicing.size(index) else None

    def _memory(self) -> tuple[Floats, NDArray[np.uint8]]:
        """Working memory of this kernel thread: a difference, and a payload. The steady state allocates none."""
        memory: tuple[Floats, NDArray[np.uint8]] | None = getattr(self._thread, "memory", None)
        if memory is None:
            elements = min(self._slicing.slice_elements, self._slicing.total)
            memory = np.empty(elements, np.float32), np.empty(segments.payload_limit(elements), np.uint8)
            self._thread.memory = memory
        return memory
