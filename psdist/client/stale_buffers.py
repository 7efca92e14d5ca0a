"""Warning about gradient buffers that nobody writes to: training with them learns nothing.

The usual cause is torch's ``zero_grad()``, which sets ``grad`` to None: the next backward pass makes new arrays, and
the buffers keep their old content. A push cannot see who wrote to memory, so the contents of successive pushes are
compared. That must cost next to nothing. A sample of some elements is read at each push. Only if it is unchanged is the
whole vector hashed, which costs less than the search for NaN that each push makes anyway.

Equal gradients are possible (all zeros, or a constant). So this is a warning, logged once after several pushes in a
row, and never an error. A single changed element prevents the warning.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import xxhash

from psdist.client.core.flat_vector import Flat

logger = logging.getLogger("psdist")

#: Pushes in a row with the same content, before a warning.
_REPEATS: Final = 5
#: Elements of the sample.
_SAMPLED: Final = 256
#: Vectors hashed in vain before the check gives up: the sample says nothing about these gradients.
_GIVE_UP: Final = 16


class StaleBufferCheck:
    """Compares the content of one handle's gradient buffers from push to push. name: name of the parameter set."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._push = -1
        self._sample = b""
        #: Digest of the whole vector; empty if the sample has changed.
        self._digest = b""
        self._repeats = 0
        self._misses = 0
        self._is_over = False

    def stop(self) -> None:
        """Stop checking: the caller always writes to the buffers."""
        self._is_over = True

    def on_push(self, number: int, vector: Flat) -> None:
        """Check the buffers, ``vector``, before push ``number`` sends them. A repeated push does not count."""
        if self._is_over or number == self._push or not vector.size:
            return
        self._push = number
        sample = _sample(vector)
        if sample != self._sample:
            self._sample, self._digest, self._repeats = sample, b"", 0
            return
        digest = xxhash.xxh3_128_digest(vector.data)
        if digest == self._digest:
            self._repeats += 1
        else:
            # At the first equal sample the previous vector was not hashed.
            self._misses += self._digest != b""
            self._digest, self._repeats = digest, 1
        self._is_over = self._repeats >= _REPEATS or self._misses >= _GIVE_UP
        if self._repeats >= _REPEATS:
            self._warn()

    def _warn(self) -> None:
        logger.warning(
            "the gradient_buffers() of %r held the same values in %d pushes in a row: nothing may be writing to them, "
            "and then nothing is trained. With torch, zero_grad() takes gradients out of the buffers: call "
            "zero_grad(set_to_none=False), or pass the gradients themselves. If these gradients are meant to be the "
            "same, ignore this; it is not said again",
            self._name,
            self._repeats,
        )


def _sample(vector: Flat) -> bytes:
    """Return elements at even distances."""
    return np.ascontiguousarray(vector[:: max(1, vector.size // _SAMPLED)]).tobytes()
