"""Codecs that benchmarks compare, by the text with which a user would make them, and gradients to encode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from psdist import compression
from psdist.compression import segments
from psdist.compression.segments import PushNumber
from psdist.types import TensorSpec

CODECS: Mapping[str, compression.Codec] = {
    "none": compression.Float32(),
    "bfloat16": compression.BFloat16(),
    "Int8()": compression.Int8(),
    "Int4()": compression.Int4(),
    "Int2()": compression.Int2(),
    "OneBit()": compression.OneBit(),
    "TopK(0.01)": compression.TopK(0.01),
    "ChunkedTopK(64, 4096)": compression.ChunkedTopK(64, 4096),
    "ChunkedTopK(64, 4096, bits=2)": compression.ChunkedTopK(64, 4096, bits=2),
    "RandomK(0.25)": compression.RandomK(0.25),
    "PowerSGD(8)": compression.PowerSGD(8),
}
#: Columns of the gradient's matrix.
COLUMNS = 1000


class Encoder:
    """Encodes a gradient, one matrix whose size is a multiple of COLUMNS, slice by slice, as a worker does.

    bounds: bounds of the slices.
    """

    def __init__(self, codec: compression.Codec, bounds: Sequence[tuple[int, int]], rank: int = 0) -> None:
        elements = bounds[-1][1]
        self._regions = segments.regions([TensorSpec("w", (elements // COLUMNS, COLUMNS))], codec)
        self._bounds = bounds
        self._number = PushNumber(rank, 0)
        self._out = np.zeros(segments.payload_limit(max(stop - start for start, stop in bounds)), np.uint8)
        #: With residuals: the encoded sum, and the next residual; one array if a codec allows it.
        self._sums = np.empty(elements, np.float32)
        self._left_out = self._sums if segments.selects_places(codec) else np.empty(elements, np.float32)

    def encode(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None = None,
        payloads: list[NDArray[np.uint8]] | None = None,
    ) -> None:
        """Encode ``gradient``.

        residual: added first; the new residual is written beside it, as with error feedback.
        payloads: receives a copy of each payload.
        """
        prepared = [self._prepared(one, gradient, residual) for one in self._regions]
        for start, stop in self._bounds:
            size = segments.encode(prepared, start, stop, self._out, None if residual is None else self._left_out)
            if payloads is not None:
                payloads.append(self._out[:size].copy())

    def _prepared(
        self, region: segments.Region, gradient: NDArray[np.float32], residual: NDArray[np.float32] | None
    ) -> segments.PreparedRegion:
        part = slice(region.start, region.stop)
        if residual is None:
            return segments.prepare(region, gradient[part], self._number)
        prepared = segments.prepare_sum(region, gradient[part], residual[part], 1.0, self._sums[part], self._number)
        assert prepared is not None, "all values are finite"
        return prepared
