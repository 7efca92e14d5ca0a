"""Gradient that was cast to 16 bits on a device, and is sent in that form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist.errors import InternalError
from psdist.types import Slicing


class CastGradient:
    """``EncodedGradient`` of plain elements.

    values: in the wire's dtype, as long as the flat vector.
    """

    #: Payloads are plain elements instead of segments.
    is_raw = True

    def __init__(self, values: NDArray[Any], slicing: Slicing) -> None:
        self._values = values
        self._slicing = slicing

    async def ready(self, index: int) -> None:
        """Return immediately: all slices are ready."""

    def difference(self, slices: Sequence[int]) -> None:
        """Return None: payloads are gradients."""

    def send_whole(self, slices: Sequence[int]) -> None:
        """Raise InternalError: payloads already are whole gradients."""
        raise InternalError("a server takes a gradient for a difference")

    def payload(self, index: int) -> memoryview:
        """Return the payload of a slice."""
        start, stop = self._slicing.bounds(index)
        return self._values[start:stop].view(np.uint8).data

    def decode_into(self, index: int, out: NDArray[Any]) -> None:
        """Write a slice in the form in which a server reads it from shared memory: in its own dtype."""
        start, stop = self._slicing.bounds(index)
        out[...] = self._values[start:stop]
