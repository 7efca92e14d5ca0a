"""Codecs: how gradients are encoded for the wire.

A codec is a frozen dataclass that a user writes (``compression=psdist.compression.BFloat16()``) or names
(``compression="bfloat16"``). It turns a float32 slice into a payload; the server turns the payload back into float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from psdist.compression import payloads
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import UnknownCodecError
from psdist.types import DType


@dataclass(frozen=True)
class Cast:
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


#: Codecs by the names users may give instead.
CODECS: dict[str, type[Cast]] = {"none": Float32, "float32": Float32, "float16": Float16, "bfloat16": BFloat16}


def resolve(compression: Cast | str | None) -> Cast:
    """The codec for a codec, its name, or None (no compression). Raises UnknownCodecError."""
    if compression is None:
        return Float32()
    if isinstance(compression, Cast):
        return compression
    if isinstance(compression, str) and compression in CODECS:
        return CODECS[compression]()
    raise UnknownCodecError(f"codec {compression!r:.60} is unknown: use one of {', '.join(sorted(CODECS))}")
