"""Compressed all-reduces: their plan, and the residuals that one call leaves for the next.

Each rank encodes its contribution once. Contributions to a slice are decoded and added to zeros in rank order, as on a
server. Either every rank does so for all slices, or each slice has an owner, which encodes the result again and sends
it to the others. All ranks decode the same bytes.

Invariants: Each slice of each rank is received once. Nothing is decoded before it was checked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.encoder import GradientEncoder
from psdist.collectives.core.plans import Array, Bytes, Header, Outgoing, Plan
from psdist.collectives.core.reductions import QUIET
from psdist.compression import Auto, Codec, PerTensor, resolve, segments
from psdist.compression.regions import MIN_ELEMENTS, send_differences
from psdist.compression.specifications import Integers, OneBit
from psdist.errors import DTypeMismatchError, InvalidArgumentError, NonFiniteGradientError
from psdist.types import Layout, Slicing, TensorSpec

Floats = NDArray[np.float32]
#: Encodes the result of a slice, which is in its place, by its number.
EncodeResult = Callable[[int], bytes]

#: Elements of a slice, whose payload is at most one part.
SLICE_ELEMENTS: Final = 1 << 17
#: Number of ranks from which a result is encoded again: fewer receive no less by contributions alone.
_RANKS_MIN: Final = 3
_LABEL: Final = 100


class CompressedPlan(Plan):
    """All-reduce of encoded float32 arrays. Part 2 i is a contribution to slice i, part 2 i + 1 its result.

    call: the header, without sizes.
    payloads: this rank's contribution, by slice.
    out: memory for the result, float32[n].
    divisor: the number that the sum is divided by.
    encode_result: None if every rank adds up all slices.
    """

    def __init__(
        self,
        call: Header,
        rank: int,
        peers: Sequence[int],
        payloads: Sequence[Bytes],
        out: Floats,
        *,
        divisor: int = 1,
        encode_result: EncodeResult | None = None,
    ) -> None:
        self._ranks = sorted((rank, *peers))
        self._rank = rank
        self._payloads = payloads
        self._out = out
        self._divisor = divisor
        self._encode_result = encode_result
        self._slicing = Slicing(out.size, SLICE_ELEMENTS)
        #: By slice, the contributions that have arrived, by rank.
        self._arrived: dict[int, dict[int, Bytes]] = {}
        #: Bytes of the part that was checked last, and parts that are being received.
        self._checked = 0
        self._received: dict[tuple[int, int], Bytes] = {}
        super().__init__(call, peers, {}, {})

    def _owner(self, index: int) -> int:
        return self._ranks[index % len(self._ranks)]

    def _slices_for(self, rank: int) -> Iterable[int]:
        """Return the slices that a rank adds up."""
        slices = range(self._slicing.count)
        return slices if self._encode_result is None else (i for i in slices if self._owner(i) == rank)

    def _expected(self, peer: int) -> set[int]:
        expected = {2 * index for index in self._slices_for(self._rank)}
        if self._encode_result is not None:
            expected |= {2 * index + 1 for index in self._slices_for(peer)}
        return expected

    def initial(self, peer: int) -> Iterable[Outgoing]:
        return [Outgoing(peer, 2 * index, self._payloads[index]) for index in self._slices_for(peer)]

    def check(self, peer: int, part: int, size: int) -> None:
        if part not in self.missing[peer] or not 0 < size <= segments.payload_limit(self._slicing.size(part // 2)):
            raise InvalidArgumentError(f"rank {peer} sent an unexpected part {part} of {size} bytes of {self.call}")
        self._checked = size

    def place(self, peer: int, part: int) -> Bytes:
        memory = self._received[peer, part] = np.empty(self._checked, np.uint8)
        return memory

    def start(self) -> None:
        if not self.peers:
            for index in range(self._slicing.count):
                self._decode(index, [self._payloads[index]], self._divisor)

    def received(self, peer: int, part: int) -> Iterable[Outgoing]:
        super().received(peer, part)
        index, payload = part // 2, self._received.pop((peer, part))
        segments.check(payload, self._slicing.size(index))
        if part % 2:
            self._decode(index, [payload])
            return ()
        arrived = self._arrived.setdefault(index, {self._rank: self._payloads[index]})
        arrived[peer] = payload
        if len(arrived) < len(self._ranks):
            return ()
        del self._arrived[index]
        return self._add_up(index, [arrived[rank] for rank in self._ranks])

    def _add_up(self, index: int, payloads: Sequence[Bytes]) -> Iterable[Outgoing]:
        self._decode(index, payloads, self._divisor)
        if self._encode_result is None:
            return ()
        encoded = np.frombuffer(self._encode_result(index), np.uint8)
        self._decode(index, [encoded])
        return [Outgoing(peer, 2 * index + 1, encoded) for peer in self.peers]

    @QUIET
    def _decode(self, index: int, payloads: Sequence[Bytes], divisor: int = 1) -> None:
        """Write the sum of encoded values, divided, to a slice of the result."""
        out = self._out[slice(*self._slicing.bounds(index))]
        out.fill(0.0)
        for payload in payloads:
            segments.accumulate(payload, out)
        if divisor != 1:
            np.true_divide(out, divisor, out=out)


class AllReduceCompression:
    """Compression of one array that a script reduces again and again: its codec, and the residual.

    compression: a codec or its name, as for pushes. The part that a codec leaves out of an array is added to the next
        one (error feedback). With ``Auto`` and error feedback "ef21" it raises UnknownCodecError or
        InvalidArgumentError.
    shapes: shapes of the tensors that the array holds one after another, which are encoded separately; None for one
        tensor. As with pushes, small tensors and vectors are sent whole (see ``PerTensor``).

    The result is the sum or mean of the decoded contributions, in rank order. From three ranks on, dense codecs (Int8,
    Int4, Int2 and OneBit) also encode the results, with a residual of their own, so that each rank receives less.
    """

    def __init__(self, compression: Codec | str, shapes: Sequence[Sequence[int]] | None = None) -> None:
        self.codec = resolve(compression)
        if isinstance(self.codec, Auto):
            raise InvalidArgumentError(
                "compression='auto' cannot be used in an all-reduce: name a codec, such as 'int8'"
            )
        if send_differences(_parts(self.codec)):
            raise InvalidArgumentError(
                f'{self.codec!r:.80} has error_feedback="ef21", whose estimates are on servers: use error_feedback=True'
            )
        self._shapes = None if shapes is None else tuple(tuple(shape) for shape in shapes)
        self._layout: Layout | None = None
        self._encoder: GradientEncoder | None = None
        self._results: GradientEncoder | None = None
        #: Place in the group of ``_results``.
        self._group = (0, 0)
        self._is_used = False
        #: Residual to start with; empty for zeros.
        self._first = np.empty(0, np.float32)

    @property
    def label(self) -> str:
        """Text by which the ranks compare their codecs."""
        text = repr(self.codec)
        return (
            text
            if len(text) <= _LABEL
            else f"{text[:_LABEL]}... {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        )

    @property
    def residual_norm(self) -> float:
        """L2 norm of the residual of this rank's contributions."""
        return 0.0 if self._encoder is None else self._encoder.residual_norm

    def residuals(self) -> list[Floats]:
        """Return the residual of each tensor, flat."""
        layout, encoder = self._layout, self._encoder
        if layout is None or encoder is None or not encoder.feeds_back:
            return [np.zeros(math.prod(shape), np.float32) for shape in self._shapes or ()]
        return [encoder.residual[start:stop].copy() for start, stop in pairwise(layout.offsets)]

    def continue_with(self, residuals: Sequence[Floats]) -> None:
        """Start with the residuals of tensors, flat."""
        self._first = np.concatenate(residuals)

    def check(self, array: Array, shape: tuple[int, ...], op: str) -> None:
        """Raise an error unless an array can be reduced: DTypeMismatchError, InvalidArgumentError for another operation
        or shape than before."""
        if array.dtype != np.float32:
            raise DTypeMismatchError(
                f"an array of {array.dtype.name} cannot be compressed: convert it to float32, or leave compression out"
            )
        if op not in ("sum", "avg"):
            raise InvalidArgumentError(f"op={op!r:.60} cannot be compressed: use 'sum' or 'avg'")
        shapes = self._shapes or (shape,)
        layout = Layout(tuple(TensorSpec(f"tensor{number}", shape) for number, shape in enumerate(shapes)))
        if layout.total != array.size or (self._layout is not None and layout != self._layout):
            held = f"shapes {self._shapes}" if self._layout is None else "another shape before"
            raise InvalidArgumentError(
                f"an array of shape {shape} is given to a compression of {held}: make one AllReduceCompression "
                "for each array"
            )
        self._layout = layout

    @contextmanager
    def used(self) -> Iterator[None]:
        """Return a context for one call. Unless ``end`` is called in it, the residuals are then as before.

        Raises InvalidArgumentError if another call uses the object.
        """
        if self._is_used:
            raise InvalidArgumentError("an AllReduceCompression is in use by another call: make one for each array")
        self._is_used = True
        try:
            yield
        finally:
            for one in (self._encoder, self._results):
                if one is not None:
                    one.discard_push()
            self._is_used = False

    @QUIET
    def encode(self, flat: Floats, rank: int, size: int) -> list[Bytes]:
        """Return the payloads of a checked array, by slice. rank, size: place in the group.

        Raises NonFiniteGradientError.
        """
        if not np.isfinite(flat).all():
            raise NonFiniteGradientError("the array holds NaN or Inf, which cannot be compressed")
        encoder = self._open(rank, size)
        push = encoder.begin_push()
        encoder.encode(push, flat, range(encoder.slicing.count))
        return [np.frombuffer(push.payload(index), np.uint8) for index in range(encoder.slicing.count)]

    def _open(self, rank: int, size: int) -> GradientEncoder:
        assert self._layout is not None
        slicing = Slicing(self._layout.total, SLICE_ELEMENTS)
        if self._encoder is None:
            self._encoder = GradientEncoder(self.codec, self._layout, slicing, rank)
            self._encoder.restore({"residual": self._first})
        self._encoder.rank = rank
        if self._group != (rank, size):  # The residual of results belongs to the slices of this rank.
            self._group, self._results = (rank, size), None
            codecs = list(_parts(self.codec))
            if size >= _RANKS_MIN and len(codecs) == 1 and isinstance(codecs[0], Integers | OneBit):
                whole = PerTensor({"*": codecs[0]}, MIN_ELEMENTS, MIN_ELEMENTS)
                self._results = GradientEncoder(whole, _layout_of(slicing), slicing, rank)
        return self._encoder

    def result_encoder(self, out: Floats) -> EncodeResult | None:
        """Return the encoder of results, which are in ``out``; None if they are sent by nobody."""
        if (results := self._results) is None:
            return None

        @QUIET
        def encode(index: int) -> bytes:
            push = results.begin_push()
            results.encode(push, out, [index])
            return bytes(push.payload(index))

        return encode

    def end(self) -> None:
        """Keep the residuals of a call that has its result."""
        for one in (self._encoder, self._results):
            if one is not None:
                one.end_push()


def _parts(codec: Codec) -> Iterable[Codec]:
    return codec.codecs.values() if isinstance(codec, PerTensor) else (codec,)


def _layout_of(slicing: Slicing) -> Layout:
    """Return the layout in which each slice is a tensor, so that it is encoded once it is complete."""
    return Layout(tuple(TensorSpec(f"slice{index}", (slicing.size(index),)) for index in range(slicing.count)))


def as_compression(given: AllReduceCompression | Codec | str) -> AllReduceCompression:
    """Return the object for a call. Raises UnknownCodecError."""
    return given if isinstance(given, AllReduceCompression) else AllReduceCompression(given)
