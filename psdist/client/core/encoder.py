"""Encoding of gradients with error feedback: the residual of one push is added to the next. Pure.

The flat vector has regions, each with one codec (``psdist.compression.specifications``). The gradient of a push is
processed region by region, as its slices are encoded: the residual is added, the sum is encoded, and the part that was
not sent is the next residual. The previous residual stays in a vector of its own, because a snapshot may need it.

``DifferenceEncoder`` encodes gradients as differences to an estimate that worker and servers share, which starts as
zeros. Both add the decoded difference to it; the sum is the gradient that counts. Nothing is lost for good: the next
difference contains everything that a push lacked. Servers may hold another estimate, or none: after a failover, for a
slice that moved to another server, or after a dropped push. They report this, and receive the whole sum. A snapshot
contains only the worker's estimate, so the first push after it is whole. The gradients that count are the same either
way. Source: Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback" (arXiv 2106.05203), algorithm 2.

Invariants: A slice of a push is encoded once, or abstains once. Its residual changes in the first case only. The sum of
everything sent and the residual is therefore the sum of all gradients that did not abstain, up to rounding. All bytes
follow from the gradients, the rank and the state, so a run that resumes from a state produces the same bytes. The
estimate changes in encoded slices, by their decoded values, in float32.

Not here: threads, and start and end of a push (``encoding``); the bytes (``psdist.compression.segments``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.flat_vector import Flat, grad_norm
from psdist.client.core.push_sequence import ReadySlices
from psdist.compression import Chain, Codec, Compressor, Float32, TopK, segments
from psdist.compression.specifications import Region, regions, send_differences
from psdist.errors import InternalError, NonFiniteGradientError
from psdist.types import GradientDifference, Layout, Slicing

State = dict[str, NDArray[Any]]
Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]

#: Prefix of the names of codec state.
_KEPT: Final = "kept."
_NOTHING: Final = np.empty(0)


@dataclass
class EncodedSlices:
    """Slices of one push, as far as it is encoded.

    prepared: regions whose values are all known, by number.
    payloads: encoded slices.
    abstained: slices that are sent without values.
    absent: (start, stop): elements without a gradient: their residual waits for the next one.
    """

    slicing: Slicing
    prepared: dict[int, segments.PreparedRegion] = field(default_factory=dict)
    payloads: dict[int, bytes | memoryview] = field(default_factory=dict)
    abstained: set[int] = field(default_factory=set)
    absent: tuple[tuple[int, int], ...] = ()

    def absent_within(self, start: int, stop: int) -> list[slice]:
        """Return the elements of [start, stop) without a gradient, relative to ``start``."""
        first = bisect_right(self.absent, start, key=lambda one: one[1])
        last = bisect_left(self.absent, stop, first, key=lambda one: one[0])
        return [slice(max(low, start) - start, min(high, stop) - start) for low, high in self.absent[first:last]]

    def decide(self, ready: ReadySlices) -> ReadySlices:
        """Return how ``ready`` slices are sent. Slices that were decided before are sent in the same way again."""
        abstaining = {index for index in ready.abstaining if index not in self.payloads}
        abstaining.update(index for index in ready.valued if index in self.abstained)
        self.abstained |= abstaining
        valued = {*ready.valued, *ready.abstaining} - abstaining
        return ReadySlices(tuple(sorted(valued)), tuple(sorted(abstaining)))

    def forget(self, numbers: Iterable[int], slices: Iterable[int]) -> None:
        """Discard regions and slices that were not sent."""
        for number in numbers:
            self.prepared.pop(number, None)
        for index in slices:
            self.payloads.pop(index, None)

    def difference(self, slices: Collection[int]) -> GradientDifference | None:
        """Return the reference of the payloads of ``slices``; None if they are gradients."""
        return None

    def send_whole(self, slices: Iterable[int]) -> None:
        """Replace the payloads of ``slices`` by whole gradients. Raises InternalError if they already are whole."""
        raise InternalError("a server takes a gradient for a difference")

    def payload(self, index: int) -> memoryview:
        """Return the payload of a slice."""
        return memoryview(self.payloads[index])

    def decode_into(self, index: int, out: Flat) -> None:
        """Write a slice as a server decodes it."""
        out.fill(0.0)
        segments.accumulate(self.payloads[index], out)

    def unencoded(self) -> list[slice]:
        """Return the ranges of the slices without a payload."""
        missing = sorted(set(range(self.slicing.count)).difference(self.payloads))
        return [slice(*self.slicing.bounds(index)) for index in missing]

    def norm(self) -> float:
        """Return the L2 norm of the decoded push: squares in float64, summed by slice, then over slices in order."""
        total, decoded = 0.0, np.empty(self.slicing.slice_elements, np.float32)
        for index in sorted(self.payloads):
            part = decoded[: self.slicing.size(index)]
            self.decode_into(index, part)
            total += float(np.square(part, dtype=np.float64).sum())
        return float(np.sqrt(total))


@dataclass
class Totals:
    """Totals of everything encoded so far.

    overflows: residuals that were reset, because the next gradient made them infinite.
    """

    elements: int = 0
    bytes: int = 0
    overflows: int = 0

    def add(self, push: EncodedSlices) -> None:
        """Add a finished push."""
        self.elements += sum(push.slicing.size(index) for index in push.payloads)
        self.bytes += sum(len(payload) for payload in push.payloads.values())

    @property
    def ratio(self) -> float:
        """Compression ratio: bytes of the gradients per encoded byte; 1 before the first push."""
        return 4 * self.elements / self.bytes if self.bytes else 1.0


class DoubleBuffer:
    """Vector that each push changes, in two copies.

    before: the vector before the push under way.
    after: the vector after it, valid in encoded slices only. The end of the push swaps the two.
    """

    def __init__(self, size: int) -> None:
        self.before: Flat = np.zeros(size, np.float32)
        self.after: Flat = np.zeros(size, np.float32)

    def __bool__(self) -> bool:
        return self.before.size > 0

    def keep(self, parts: Iterable[slice]) -> None:
        """Leave these ranges as they were before the push."""
        if self:
            for part in parts:
                self.after[part] = self.before[part]

    def end_push(self, unchanged: Iterable[slice]) -> None:
        """Finish the push. unchanged: ranges without a payload."""
        if self:
            self.keep(unchanged)
            self.before, self.after = self.after, self.before

    def restore(self, values: NDArray[Any]) -> None:
        """Load these values, or zeros if their size differs."""
        fits = values.shape == self.before.shape
        self.before = values.astype(np.float32) if fits else np.zeros_like(self.before)


class GradientEncoder:
    """Encoder of one worker's pushes.

    rank: rank of the worker; random choices differ between ranks. It may change between pushes.
    """

    #: Device of its gradients: None is the host.
    device: None = None

    def __init__(self, codec: Codec, layout: Layout, slicing: Slicing, rank: int) -> None:
        self.slicing = slicing
        self._regions = regions(layout.tensors, codec)
        self._starts = [region.start for region in self._regions]
        self.rank = rank
        self._name = np.frombuffer(repr(codec).encode(), np.uint8)
        #: True if a residual of one push is added to the next.
        self.feeds_back = any(_feedback(region) for region in self._regions)
        size = slicing.total if self.feeds_back else 0
        #: Residual, and the accumulated gradients of a codec with momentum.
        self._residual = DoubleBuffer(size)
        self._velocity = DoubleBuffer(size if any(_momentum(region) for region in self._regions) else 0)
        #: Sums of gradient and residual, for codecs that cannot use the next residual's memory for them.
        self._sums = np.zeros(size if any(map(_needs_sums, self._regions)) else 0, np.float32)
        #: Number of pushes with a payload, and codec state after the last one, by region.
        self._ordinal = 0
        self._kept: dict[int, NDArray[Any]] = {}
        self._push: EncodedSlices | None = None
        self.totals = Totals()
        #: Scratch memory for payloads, one per concurrent encoder.
        self._spare: list[NDArray[np.uint8]] = []

    # --- a push -------------------------------------------------------------------------------------------------------

    def begin_push(self) -> EncodedSlices:
        """Return the push under way, or start the next one."""
        if self._push is None:
            self._push = EncodedSlices(self.slicing)
        return self._push

    def encode(self, push: EncodedSlices, flat: Flat, slices: Iterable[int], run: Run = map) -> bool:
        """Encode the new ones of ``slices``. Returns False if the push is over.

        flat: complete and finite in all tensors that touch the slices.
        run: like ``map``; may run several calls concurrently.

        Raises NonFiniteGradientError for values that a codec cannot represent.
        """
        if push is not self._push:
            return False
        todo = [index for index in slices if index not in push.payloads]
        numbers = {number for index in todo for number in self._regions_of(index)}.difference(push.prepared)
        try:
            for number, prepared in run(lambda number: (number, self._prepared(push, flat, number)), sorted(numbers)):
                push.prepared[number] = prepared
            for index, payload in run(lambda index: (index, self._encode_slice(push, index)), todo):
                push.payloads[index] = payload
        except BaseException:  # Nothing was sent, and the next call may bring another gradient.
            push.forget(numbers.union(self._unfinished(push)), todo)
            raise
        return True

    def _unfinished(self, push: EncodedSlices) -> Iterable[int]:
        """Return the regions of unencoded slices that are read from the gradient at encoding time."""
        missing = set(range(self.slicing.count)).difference(push.payloads)
        numbers = {number for index in missing for number in self._regions_of(index)}
        return (number for number in numbers if not _feedback(self._regions[number]))

    def _regions_of(self, index: int) -> range:
        start, stop = self.slicing.bounds(index)
        return range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop))

    def _encode_slice(self, push: EncodedSlices, index: int) -> bytes:
        start, stop = self.slicing.bounds(index)
        prepared = [push.prepared[number] for number in self._regions_of(index)]
        residual = self._residual.after if self.feeds_back else None
        payload = self._payload(prepared, start, stop, residual)
        if residual is not None:
            for one in prepared:
                self._leave_out(one, max(start, one.region.start), min(stop, one.region.stop))
            kept = [slice(part.start + start, part.stop + start) for part in push.absent_within(start, stop)]
            self._residual.keep(kept)
            self._velocity.keep(kept)
        return payload

    def _payload(
        self, prepared: Sequence[segments.PreparedRegion], start: int, stop: int, residual: Flat | None
    ) -> bytes:
        """Return the payload of elements [start, stop). residual: receives theirs."""
        try:
            out = self._spare.pop()
        except IndexError:
            out = np.empty(segments.payload_limit(self.slicing.slice_elements), np.uint8)
        size = segments.encode(prepared, start, stop, out, residual)
        payload = out[:size].tobytes()
        self._spare.append(out)
        return payload

    def _leave_out(self, one: segments.PreparedRegion, start: int, stop: int) -> None:
        """Update residual and velocity after elements [start, stop) of a region were encoded."""
        region = one.region
        if not _feedback(region):
            self._residual.after[start:stop] = 0.0
        elif _momentum(region) and isinstance(one, segments.PreparedSparse):  # Restart the sent elements.
            part, at = slice(region.start, region.stop), region.start
            sent = one.sent(start - at, stop - at, self._residual.after[part])
            self._velocity.after[part][sent] = 0.0

    def _prepared(self, push: EncodedSlices, flat: Flat, number: int) -> segments.PreparedRegion:
        """Return a region with its values. A region without a residual is read when its slices are encoded."""
        region, about = self._regions[number], segments.PushNumber(self.rank, self._ordinal)
        part, state = slice(region.start, region.stop), self._kept.get(region.start)
        values = flat[part]
        if not _feedback(region):
            return segments.prepare(region, values, about, state)
        assert isinstance(region.codec, Compressor)
        absent = push.absent_within(region.start, region.stop)
        if momentum := _momentum(region):
            before, after = self._velocity.before[part], self._velocity.after[part]
            if not segments.add_decayed(values, before, momentum, after):
                after[...] = values
                self.totals.overflows += 1
            values = _without(after, absent, after)
        # If only some values are sent, the others already are the next residual.
        sums = (self._sums if _needs_sums(region) else self._residual.after)[part]
        left_out, decay = _without(self._residual.before[part], absent), region.codec.residual_decay
        prepared = segments.prepare_sum(region, values, left_out, decay, sums, about, state)
        if prepared is None:
            sums[...] = values
            self.totals.overflows += 1
            prepared = segments.prepare(region, sums, about, state)
        return prepared

    def discard_push(self) -> None:
        """Discard the push under way. Nothing of it was sent."""
        self._push = None

    def end_push(self) -> bool:
        """Finish the push under way: its payloads count as sent. Returns True if there are any."""
        push, self._push = self._push, None
        if push is None or not push.payloads:
            return False
        self.totals.add(push)
        self._ordinal += 1
        kept = {one.region.start: one.next_state for one in push.prepared.values() if one.next_state is not None}
        self._kept = self._kept | kept
        unchanged = push.unencoded()
        self._residual.end_push(unchanged)
        self._velocity.end_push(unchanged)
        return True

    # --- the state ----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the state before the next push. The arrays do not change until the push after that starts."""
        kept = {f"{_KEPT}{start}": array for start, array in self._kept.items()}
        ordinal = np.array([self._ordinal], np.int64)
        vectors = {"residual": self._residual.before, "velocity": self._velocity.before}
        return {"ordinal": ordinal, "codec": self._name, **vectors, **kept}

    def restore(self, state: State) -> None:
        """Continue from a state, or from the beginning if it is empty. Discards a push under way.

        The state may come from another codec: its residual is kept if this codec has one.
        """
        self._push = None
        self._ordinal = int(state["ordinal"].sum()) if "ordinal" in state else 0
        self._residual.restore(state.get("residual", _NOTHING))
        self._velocity.restore(state.get("velocity", _NOTHING))
        is_mine = np.array_equal(state.get("codec", _NOTHING), self._name)
        kept = {name: array for name, array in state.items() if name.startswith(_KEPT) and is_mine}
        self._kept = {int(name.removeprefix(_KEPT)): array for name, array in kept.items()}

    # --- what there is to know ----------------------------------------------------------------------------------------

    @property
    def sends_meanwhile(self) -> bool:
        """True if slices may be sent before all of them are encoded.

        That needs regions that are summed first, which no codec with a residual refuses, or sent as they are. With
        other codecs a gradient may still be refused, or a slice may be encoded by a block that starts in the previous
        slice, whose memory the user may have given for the answer.
        """
        return all(_feedback(region) or region.codec == Float32() for region in self._regions)

    @property
    def residual(self) -> Flat:
        """Residual of the pushes before the one under way."""
        return self._residual.before

    @property
    def residual_norm(self) -> float:
        """L2 norm of the residual."""
        return grad_norm(self.residual, self.slicing.slice_elements)


def _momentum(region: Region) -> float:
    """Return the momentum of deep gradient compression; 0 for none."""
    sparse = region.codec.sparse if isinstance(region.codec, Chain) else region.codec
    return sparse.momentum if isinstance(sparse, TopK) and _feedback(region) else 0.0


def _needs_sums(region: Region) -> bool:
    """Return True if a region's sum of gradient and residual must not change while slices of it are encoded."""
    return _feedback(region) and not segments.selects_places(region.codec)


def _feedback(region: Region) -> bool:
    """Return True if a region has a residual."""
    return isinstance(region.codec, Compressor) and region.codec.feedback is True


def _without(values: Flat, absent: Sequence[slice], out: Flat | None = None) -> Flat:
    """Return ``values`` with zeros for the elements without a gradient: a copy if there are any, unless in ``out``."""
    if not absent:
        return values
    changed = values.copy() if out is None else out
    for part in absent:
        changed[part] = 0.0
    return changed


# --- differences to an estimate ---------------------------------------------------------------------------------------


_LARGEST: Final = np.finfo(np.float32).max


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
