"""A gradient that was cast to 16 bits on a device, and is sent as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist.errors import InternalError
from psdist.types import Slicing


class CastGradient:
    """An ``EncodedGradient`` of plain elements. values: in the wire's dtype, as long as the flat vector."""

    #: Its payloads are no segments.
    is_raw = True

    def __init__(self, values: NDArray[Any], slicing: Slicing) -> None:
        self._values = values
        self._slicing = slicing

    async def ready(self, index: int) -> None:
        """All of its slices are."""

    def difference(self, slices: Sequence[int]) -> None:
        """Its payloads are gradients."""

    def send_whole(self, slices: Sequence[int]) -> None:
        """Its payloads are whole gradients."""
        raise InternalError("a server takes a gradient for a difference")

    def payload(self, index: int) -> memoryview:
        """A slice as it is sent."""
        start, stop = self._slicing.bounds(index)
        return self._values[start:stop].view(np.uint8).data

    def decode_into(self, index: int, out: NDArray[Any]) -> None:
        """Writes a slice as a server takes it into shared memory: in its own dtype."""
        start, stop = self._slicing.bounds(index)
        out[...] = self._values[start:stop]
