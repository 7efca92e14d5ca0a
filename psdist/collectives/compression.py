"""Compression of all-reduces, with the residuals that one call leaves for the next."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.client.core.encoder import GradientEncoder
from psdist.collectives.core.compressed_plan import SLICE_ELEMENTS, EncodeResult
from psdist.collectives.core.plan import Array, Bytes
from psdist.collectives.core.reductions import QUIET
from psdist.compression import Auto, Codec, PerTensor, resolve
from psdist.compression.regions import MIN_ELEMENTS, send_differences
from psdist.compression.specifications import Integers, OneBit
from psdist.errors import DTypeMismatchError, InvalidArgumentError, NonFiniteGradientError
from psdist.types import Layout, Slicing, TensorSpec

#: Number of ranks from which a result is encoded again: fewer receive no less by contributions alone.
_RANKS_MIN: Final = 3
_LABEL: Final = 100
Floats = NDArray[np.float32]


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
