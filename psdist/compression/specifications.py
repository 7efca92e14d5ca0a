"""The codecs as a user writes them: frozen dataclasses, whose arguments are checked.

``Cast`` is for a whole gradient, as it lies. A ``Compressor`` is for one tensor at a time, in segments
(``psdist.compression.segments``), and may have an error feedback: what it left out of one push is added to the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from psdist.compression import payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import InvalidArgumentError, check_integer
from psdist.types import DType

ErrorFeedback = bool | Literal["ef21"]

_SEED_LAST = 2**63 - 1
_BLOCK_LAST = 65536
_WARM_UP_RATIO = 0.25
#: With a momentum of 1 nothing would ever be forgotten.
_MOMENTUM_LAST = 0.9999


@dataclass(frozen=True)
class Codec:
    """How gradients are encoded for the wire."""


@dataclass(frozen=True)
class Cast(Codec):
    """Elements cast to ``dtype``, one after another (CODEC_RAW on the wire)."""

    dtype: ClassVar[DType]

    def encode(self, values: NDArray[np.float32], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The elements in the wire's dtype: ``values`` itself where no cast is needed, else in ``out`` or a new array.

        out: contiguous, of the wire's dtype and the length of ``values``.
        """
        if self.dtype == "float32":
            return values
        if out is None:
            out = np.empty(values.size, NUMPY_DTYPES[self.dtype])
        payloads.narrow(values, out)
        return out


@dataclass(frozen=True)
class Float32(Cast):
    """No compression: the gradients as they are."""

    dtype: ClassVar[DType] = "float32"


@dataclass(frozen=True)
class Float16(Cast):
    """Half the bytes, with 5 exponent bits: large gradients overflow to Inf, which the server rejects."""

    dtype: ClassVar[DType] = "float16"


@dataclass(frozen=True)
class BFloat16(Cast):
    """Half the bytes, with the range of float32 and 8 bits of precision."""

    dtype: ClassVar[DType] = "bfloat16"


@dataclass(frozen=True)
class Auto(Codec):
    """The codec that makes pushes shortest, of those with which training goes as without: it is chosen when the
    parameters are opened, by the speed of the links and of encoding (``automatic``)."""


@dataclass(frozen=True)
class Compressor(Codec):
    """A codec of tensors.

    error_feedback: True adds what was left out to the next push, False forgets it. None is True for a biased codec.
        "ef21" encodes the difference between the gradient and an estimate that worker and servers have, which is the
        gradient that counts after it (Richtarik et al., arXiv 2106.05203). Servers keep an estimate for each worker,
        float32. All codecs of a parameter set have it, or none.
    residual_decay: what the residual is multiplied by, in (0, 1], before it is added.
    """

    error_feedback: ErrorFeedback | None = field(default=None, kw_only=True)
    residual_decay: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        given: object = self.error_feedback
        if not (given is None or isinstance(given, bool) or (isinstance(given, str) and given == "ef21")):
            raise InvalidArgumentError(f'error_feedback={self.error_feedback!r:.40}: use True, False, "ef21" or None')
        check_number("residual_decay", self.residual_decay, 0.0, 1.0)
        if self.residual_decay != 1.0 and self.feedback is not True:
            raise InvalidArgumentError(
                f"residual_decay={self.residual_decay!r:.40} needs error feedback that has a residual: "
                "error_feedback=True"
            )

    @property
    def is_biased(self) -> bool:
        """Whether the mean of what is decoded differs from what was encoded."""
        return True

    @property
    def feedback(self) -> ErrorFeedback:
        """The error feedback that is used."""
        return self.is_biased if self.error_feedback is None else self.error_feedback


@dataclass(frozen=True)
class Integers(Compressor):
    """Whole numbers of ``bits`` bits, with one scale for each ``block`` elements of a tensor.

    stochastic: rounds up or down by chance, so that the mean is right. seed: of that.
    """

    bits: ClassVar[int]
    block: int = 256
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("block", self.block, 16, _BLOCK_LAST)
        check_integer("seed", self.seed, 0, _SEED_LAST)
        if not isinstance(self.stochastic, bool):
            raise InvalidArgumentError(f"stochastic={self.stochastic!r:.40}: use True or False")

    @property
    def is_biased(self) -> bool:
        """Rounding by chance is right in the mean."""
        return not self.stochastic


@dataclass(frozen=True)
class Int8(Integers):
    """A quarter of the bytes: whole numbers from -127 to 127 times the block's scale."""

    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(Integers):
    """An eighth of the bytes: whole numbers from -7 to 7 times the block's scale."""

    bits: ClassVar[int] = 4
    block: int = 128


@dataclass(frozen=True)
class Int2(Integers):
    """A sixteenth of the bytes, and the scales: -1, 0 or 1 times the block's largest magnitude."""

    bits: ClassVar[int] = 2
    block: int = 64


@dataclass(frozen=True)
class TopK(Compressor):
    """The ``ratio`` of a tensor's elements that are the largest in magnitude, as they are.

    warm_up: over so many pushes of the worker the ratio falls from a quarter, by the same factor in each. In a run that
        goes on from a snapshot those before it count, whichever codec they had.
    momentum: of deep gradient compression: the worker sums up its gradients with this momentum before it selects from
        them, and forgets it for elements that were sent. 0 is none.
    """

    ratio: float = 0.01
    momentum: float = 0.0
    warm_up: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ratio", self.ratio, 0.0, 1.0)
        check_integer("warm_up", self.warm_up, 0, _SEED_LAST)
        if self.momentum != 0.0:
            check_number("momentum", self.momentum, 0.0, _MOMENTUM_LAST)
            check_momentum(self, self)

    def ratio_at(self, ordinal: int) -> float:
        """The ratio of push number ``ordinal``, from 0."""
        if ordinal >= self.warm_up or self.ratio >= _WARM_UP_RATIO:
            return self.ratio
        return float(_WARM_UP_RATIO * (self.ratio / _WARM_UP_RATIO) ** (ordinal / self.warm_up))


@dataclass(frozen=True)
class ChunkedTopK(Compressor):
    """The ``k`` elements of each ``chunk`` of a tensor that are the largest in magnitude.

    bits: of their values. 32: as they are. 16: bfloat16. 8: whole numbers times the chunk's scale. 2: the sign, and
        whether it is the chunk's scale or twice that.
    """

    k: int = 64
    chunk: int = 4096
    bits: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("chunk", self.chunk, 16, _BLOCK_LAST)
        check_integer("k", self.k, 1, self.chunk)
        if self.bits not in (32, 16, 8, 2):
            raise InvalidArgumentError(f"bits={self.bits!r:.40}: use 32, 16, 8 or 2")


@dataclass(frozen=True)
class RandomK(Compressor):
    """One element of each 1 / ``ratio`` of a tensor, at a place that is drawn anew for each push, and not sent.

    Without an error feedback values are divided by the ratio, so that their mean is right.
    """

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ratio", self.ratio, 0.0, 1.0)
        check_integer("1 / ratio", self.period, 1, _BLOCK_LAST)
        check_integer("seed", self.seed, 0, _SEED_LAST)

    @property
    def period(self) -> int:
        """The elements of which one is sent."""
        return round(min(1.0 / self.ratio, 2.0**31))  # 1 / ratio may be infinite.


@dataclass(frozen=True)
class OneBit(Compressor):
    """The signs, times the mean magnitude of each ``block`` elements of a tensor."""

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("block", self.block, 16, _BLOCK_LAST)


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Matrices as products of two thin ones, of ``rank`` columns each: one step of power iteration for each push.

    A tensor of more dimensions is taken as a matrix with its first one as rows. A tensor that would not get smaller is
    sent as it is. seed: of where the iteration begins.
    """

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("rank", self.rank, 1, 255)
        check_integer("seed", self.seed, 0, _SEED_LAST)


@dataclass(frozen=True)
class Chain(Compressor):
    """The elements that ``sparse`` selects, their values as ``values`` encodes them: BFloat16(), Int8() or Int2().

    chunk: elements of the tensor, kept or not, that one scale stands for; ChunkedTopK has its own. The error feedback
    and its residual's decay are arguments of the chain.
    """

    sparse: TopK | ChunkedTopK | RandomK
    values: Codec
    chunk: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("chunk", self.chunk, 16, _BLOCK_LAST)
        if not isinstance(self.sparse, TopK | ChunkedTopK | RandomK):
            raise InvalidArgumentError(f"sparse={self.sparse!r:.60}: use TopK, ChunkedTopK or RandomK")
        if isinstance(self.sparse, RandomK) and type(self.values) is not BFloat16:
            raise InvalidArgumentError(f"values={self.values!r:.60}: use BFloat16() with RandomK")
        if type(self.values) not in _VALUE_BITS or self.values != type(self.values)():
            raise InvalidArgumentError(f"values={self.values!r:.60}: use plain BFloat16(), Int8() or Int2()")
        if self.sparse.error_feedback is not None or self.sparse.residual_decay != 1.0:
            raise InvalidArgumentError(f"sparse={self.sparse!r:.60}: error_feedback and residual_decay are the chain's")
        if isinstance(self.sparse, ChunkedTopK) and self.sparse.bits != 32:
            raise InvalidArgumentError(f"bits={self.sparse.bits} of a ChunkedTopK in a chain: leave it out")
        if isinstance(self.sparse, TopK):
            check_momentum(self.sparse, self)

    @property
    def bits(self) -> int:
        """The width of each value."""
        return _VALUE_BITS[type(self.values)]


_VALUE_BITS: dict[type[Codec], int] = {BFloat16: 16, Int8: 8, Int2: 2}


def check_momentum(sparse: TopK, whole: Compressor) -> None:
    """Raises InvalidArgumentError where ``sparse`` has momentum and ``whole``, which it is part of, no residual: there
    is nothing to sum up then."""
    if sparse.momentum and whole.feedback is not True:
        raise InvalidArgumentError(
            f"momentum={sparse.momentum!r:.40} needs error feedback, for what is not sent yet: error_feedback=True"
        )


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raises InvalidArgumentError unless ``value`` is a number in (low, high]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low < value <= high or math.isnan(value):
        raise InvalidArgumentError(f"{name}={value!r:.40} is out of range: use a number above {low:g}, up to {high:g}")
