"""The codecs that benchmarks compare, by the text with which a user would make them."""

from __future__ import annotations

from collections.abc import Mapping

from psdist import compression

CODECS: Mapping[str, compression.Codec] = {
    "none": compression.Float32(),
    "bfloat16": compression.BFloat16(),
    "Int8()": compression.Int8(),
    "Int4()": compression.Int4(),
    "Int2()": compression.Int2(),
    "OneBit()": compression.OneBit(),
    "TopK(0.01)": compression.TopK(0.01),
    "ChunkedTopK(64, 4096)": compression.ChunkedTopK(64, 4096),
    "ChunkedTopK(64, 4096, bits=2)": compression.ChunkedTopK(64, 4096, bits=2),
    "RandomK(0.05)": compression.RandomK(0.05),
    "PowerSGD(4)": compression.PowerSGD(4),
}
