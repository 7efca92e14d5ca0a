"""Encoding of gradients as differences to an estimate that worker and servers share (EF21). Pure.

The estimate starts as zeros. A push encodes the difference between the gradient and the estimate. Worker and servers
both add the decoded difference to the estimate; the sum is the gradient that counts. Nothing is lost for good: the next
difference contains everything that a push lacked.

Servers may hold another estimate, or none: after a failover, for a slice that moved to another server, or after a
dropped push. They report this, and receive the whole sum. A snapshot contains only the worker's estimate, so the first
push after it is whole. The gradients that count are the same either way.

Source: Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback" (arXiv 2106.05203), algorithm 2.

Invariant: The estimate changes in encoded slices, by their decoded values, in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.encoder import DoubleBuffer, EncodedSlices, GradientEncoder, State
from psdist.client.core.flat_vector import Flat
from psdist.compression import Codec, Float32, segments
from psdist.compression.regions import Region, regions, send_differences
from psdist.errors import InternalError, NonFiniteGradientError
from psdist.types import GradientDifference, Layout, Slicing

_LARGEST: Final = np.finfo(np.float32).max
_NOTHING: Final = np.empty(0)


@dataclass(kw_only=True)
class EncodedDifferences(EncodedSlices):
    """Slices of one push that are differences.

    gradient: the estimate after the push, as far as it is encoded.
    number: see GradientDifference.
    from_zeros: no server holds the previous estimate.
    is_whole: no server holds it, and it is not zeros.
    whole: slices that are sent as whole gradients.
    """

    gradient: Flat
    number: int
    from_zeros: bool
    is_whole: bool
    whole: set[int] = field(default_factory=set)

    def difference(self, slices: Collection[int]) -> GradientDifference:
        """Return the reference of the payloads of ``slices``, which are sent in one call.

        If some were already sent whole, perhaps to another server, all become whole.
        """
        if self.from_zeros or self.whole.isdisjoint(slices):
            return GradientDifference(self.number, self.from_zeros)
        self.send_whole(set(slices) - self.whole)
        return GradientDifference(self.number, from_zeros=True)

    def send_whole(self, slices: Iterable[int]) -> None:
        """Replace the payloads of ``slices`` by whole gradients. Raises InternalError if they already are whole."""
        if self.from_zeros or not self.whole.isdisjoint(slices):
            raise InternalError("a server takes a whole gradient for a difference")
        for index in slices:
            self.whole.add(index)
            self.payloads[index] = self.whole_payload(index)

    def whole_payload(self, index: int) -> bytes:
        """Return the whole gradient of an encoded slice, in float32."""
        values = self.gradient[slice(*self.slicing.bounds(index))]
        region = Region(0, values.size, Float32(), values.shape)
        out = np.empty(segments.payload_limit(values.size), np.uint8)
        size = segments.encode([segments.prepare(region, values, segments.PushNumber(0, 0))], 0, values.size, out)
        return out[:size].tobytes()

    def decode_into(self, index: int, out: Flat) -> None:
        """Write the gradient of a slice, which servers add to the mean."""
        out[...] = self.gradient[slice(*self.slicing.bounds(index))]


class DifferenceEncoder(GradientEncoder):
    """Encoder of one worker's pushes as differences. Arguments as for ``GradientEncoder``."""

    def __init__(self, codec: Codec, layout: Layout, slicing: Slicing, rank: int) -> None:
        super().__init__(codec, layout, slicing, rank)
        self._estimate = DoubleBuffer(slicing.total)
        self._differences = np.zeros(slicing.total, np.float32)
        #: True if the servers held the estimate at the last answer.
        self._is_shared = False

    def begin_push(self) -> EncodedSlices:
        """Return the push under way, or start the next one."""
        if self._push is None:
            self._push = EncodedDifferences(
                self.slicing,
                gradient=self._estimate.after,
                number=self._ordinal,
                from_zeros=not self._is_shared,
                is_whole=not self._is_shared and bool(self._estimate.before.any()),
            )
        return self._push

    def _prepared(self, push: EncodedSlices, flat: Flat, number: int) -> segments.PreparedRegion:
        """Return a region of the difference."""
        region, about = self._regions[number], segments.PushNumber(self.rank, self._ordinal)
        part, state = slice(region.start, region.stop), self._kept.get(region.start)
        gradient, estimate, difference = flat[part], self._estimate.before[part], self._differences[part]
        prepared = segments.prepare_sum(region, gradient, estimate, -1.0, difference, about, state)
        if prepared is None:  # The next pushes carry the rest.
            with np.errstate(over="ignore"):
                np.subtract(gradient, estimate, out=difference)
            np.clip(difference, -_LARGEST, _LARGEST, out=difference)
            prepared = segments.prepare(region, difference, about, state)
        return prepared

    def _encode_slice(self, push: EncodedSlices, index: int) -> bytes:
        assert isinstance(push, EncodedDifferences)
        payload = super()._encode_slice(push, index)
        part = slice(*self.slicing.bounds(index))
        gradient = self._estimate.after[part]
        gradient[...] = self._estimate.before[part]
        segments.accumulate(payload, gradient)
        if not np.isfinite(gradient).all():
            raise NonFiniteGradientError(
                f"elements {part.start} to {part.stop - 1} of the gradient are too large for float32 as they are "
                "decoded: lower the learning rate, or scale the loss"
            )
        return push.whole_payload(index) if push.is_whole else payload

    def end_push(self) -> bool:
        """See ``GradientEncoder``."""
        push = self._push
        if not super().end_push():
            return False
        assert push is not None
        self._estimate.end_push(push.unencoded())
        self._is_shared = True
        return True

    def state(self) -> State:
        """See ``GradientEncoder``."""
        return super().state() | {"estimate": self._estimate.before}

    def restore(self, state: State) -> None:
        """See ``GradientEncoder``. Servers hold no estimate afterwards."""
        super().restore(state)
        estimate: NDArray[Any] = state.get("estimate", _NOTHING)
        self._estimate.restore(estimate)
        self._is_shared = False


def encoder_of(codec: Codec, layout: Layout, slicing: Slicing, rank: int) -> GradientEncoder:
    """Return the encoder of gradients by ``codec``."""
    used = [region.codec for region in regions(layout.tensors, codec)]
    return (DifferenceEncoder if send_differences(used) else GradientEncoder)(codec, layout, slicing, rank)
