"""Encoded payloads written by hand, as docs/internals/payload-format.md specifies them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_RAW = {"float32": (1, 32), "float16": (2, 16), "bfloat16": (3, 16)}
_INTEGER, _SPARSE = 4, 5


def segment(kind: int, bits: int, elements: int, body: bytes, parameter: int = 0, phase: int = 0) -> bytes:
    """Return a segment: header, and body with padding."""
    header = struct.pack("<BBHIII", kind, bits, phase, elements, len(body), parameter)
    return header + body + bytes(-len(body) % 4)


def raw(values: NDArray[np.generic]) -> bytes:
    """Encode elements as float32, float16 or bfloat16."""
    kind, bits = _RAW[values.dtype.name]
    return segment(kind, bits, values.size, values.tobytes())


def integers(codes: Sequence[int], scales: Sequence[float], bits: int = 8, block: int = 16) -> bytes:
    """Encode integers times the scale of their block."""
    fields = np.asarray(codes, np.int64) & ((1 << bits) - 1)
    per_byte = 8 // bits
    fields = np.concatenate([fields, np.zeros(-fields.size % per_byte, np.int64)]).reshape(-1, per_byte)
    packed = (fields << (bits * np.arange(per_byte))).sum(axis=1).astype(np.uint8)
    body = np.asarray(scales, np.float32).tobytes() + packed.tobytes()
    return segment(_INTEGER, bits, len(codes), body, parameter=block)


def sparse(elements: int, places: Sequence[int], values: Sequence[float]) -> bytes:
    """Encode float32 values at ascending positions, zeros elsewhere."""
    gaps = bytearray()
    previous = -1
    for place in places:
        gap = place - previous - 1
        gaps += b"\xff" * (gap // 255) + bytes([gap % 255])
        previous = place
    body = struct.pack("<I", len(values)) + np.asarray(values, np.float32).tobytes() + gaps
    return segment(_SPARSE, 32, elements, body)
