"""Codecs: how gradients are encoded for the wire.

A codec is a frozen dataclass (``compression=psdist.compression.BFloat16()``) or its name (``compression="bfloat16"``).

- A ``Cast`` encodes a whole float32 slice; the server casts the payload back to float32.
- A ``Compressor`` encodes each tensor separately, in segments (``psdist.compression.segments``).
- ``PerTensor`` assigns codecs to tensors by name.
"""

from __future__ import annotations

from collections.abc import Callable

from psdist.compression.specifications import (
    Auto,
    BFloat16,
    Cast,
    Chain,
    ChunkedTopK,
    Codec,
    Compressor,
    Float16,
    Float32,
    Int2,
    Int4,
    Int8,
    Integers,
    OneBit,
    PerTensor,
    PowerSGD,
    RandomK,
    TopK,
)
from psdist.errors import UnknownCodecError

__all__ = [
    "CODECS", "Auto", "BFloat16", "Cast", "Chain", "ChunkedTopK", "Codec", "Compressor", "Float16", "Float32", "Int2",
    "Int4", "Int8", "OneBit", "PerTensor", "PowerSGD", "RandomK", "TopK", "resolve",
]  # fmt: skip

#: Codecs by the names that users may give instead of an object.
CODECS: dict[str, Callable[[], Codec]] = {
    "auto": Auto,
    "none": Float32,
    "float32": Float32,
    "float16": Float16,
    "bfloat16": BFloat16,
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "topk": TopK,
    "chunked_topk": ChunkedTopK,
    "randomk": RandomK,
    "onebit": OneBit,
    "powersgd": PowerSGD,
}


#: Abstract bases of the codecs: not codecs themselves.
_KINDS = (Codec, Cast, Compressor, Integers)


def resolve(compression: Codec | str | None) -> Codec:
    """Return the codec that ``compression`` stands for.

    compression: a codec, a name in ``CODECS``, or None for no compression.
    Raises UnknownCodecError for anything else.
    """
    if compression is None:
        return Float32()
    if isinstance(compression, Codec) and type(compression) not in _KINDS:
        return compression
    if isinstance(compression, str) and compression in CODECS:
        return CODECS[compression]()
    raise UnknownCodecError(
        f"codec {compression!r:.60} is unknown: use one of {', '.join(sorted(CODECS))}, or an object such as "
        "psdist.compression.TopK(0.01), which takes arguments"
    )
