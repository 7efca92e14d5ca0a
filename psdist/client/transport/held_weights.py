"""Weights of one handle that match a version at the servers, for servers that send differences (``pull_compression``).

Invariant: A slice with a version here has the bytes of that version at the servers. It loses the version before
anything else is written to it. All slices lose theirs when the parameter set restarts from a snapshot.

``results`` builds the user's arrays, and ``psdist_server.kernels.published`` computes differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.flat_vector import Flat
from psdist.client.process import codec_kernels
from psdist.errors import InternalError
from psdist.types import Slicing
from psdist.v1 import server_pb2
from psdist.wire.limits import DIFFERENCES_MAX


class HeldWeights:
    """float32[total] ``vector`` and the versions of its slices, as received from the servers."""

    def __init__(self, slicing: Slicing, vector: Flat) -> None:
        codec_kernels.prepare(slicing.total)
        self.vector = vector
        self._slicing = slicing
        #: Generation of the parameter set and version, by slice.
        self._versions: dict[int, tuple[int, int]] = {}
        #: Generation in the map that the latest request for a slice was based on.
        self._asked: dict[int, int] = {}

    def message(self, slices: Sequence[int], generation: int) -> server_pb2.HeldWeights:
        """Return the held versions of ``slices``, for a request based on a map with this generation of the parameter
        set."""
        self._asked.update(dict.fromkeys(slices, generation))
        held = [index for index in slices if self._versions.get(index, (-1, 0))[0] == generation]
        versions = [self._versions[index][1] for index in held]
        if versions and min(versions) == max(versions):
            versions = versions[:1]
        return server_pb2.HeldWeights(generation=generation, slices=held, versions=versions)

    def forget(self, index: int) -> None:
        """Drop the version of a slice that is about to change."""
        self._versions.pop(index, None)

    def take(self, index: int, version: int) -> None:
        """Record the version of a requested slice that was received whole."""
        self._versions[index] = self._asked[index], version

    def add(self, index: int, version: int, payload: NDArray[np.uint8], sizes: Sequence[int], peer: str) -> None:
        """Add the differences that lead to ``version`` of a slice. The payload is their concatenation.

        Raises InternalError, MalformedPayloadError or NonFiniteGradientError for invalid differences, and changes
        nothing.
        """
        from psdist.compression import segments

        if self._versions.get(index, (-1, 0))[0] != self._asked[index]:
            raise InternalError(f"{peer} sent differences of slice {index}, but this worker holds no weights of it")
        if len(sizes) > DIFFERENCES_MAX or sum(sizes) != payload.size:
            raise InternalError(f"{peer} sent {len(sizes)} differences of {sum(sizes)} bytes in {payload.size} bytes")
        start, stop = self._slicing.bounds(index)
        parts = [payload[first:last] for first, last in pairwise(accumulate([0, *sizes]))]
        for part in parts:
            segments.check(part, stop - start)
        for part in parts:
            segments.accumulate(part, self.vector[start:stop])
        self.take(index, version)
