"""Server side of segment payloads: ``check`` a payload on arrival, then ``accumulate`` it into a sum."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import check_output, check_vector
from psdist.compression.segments import decoding
from psdist.compression.segments.format import payload_limit
from psdist.compression.segments.numpy_decoding import Defect
from psdist.errors import DTypeMismatchError, MalformedPayloadError, NonFiniteGradientError, ShapeMismatchError

_REASONS: Final = {
    Defect.LENGTH: "the segments do not cover the elements and the bytes exactly",
    Defect.HEADER: "the header names no known encoding",
    Defect.BODY: "the body does not have the size that its header implies",
    Defect.PADDING: "bits that must be zero are not",
    Defect.VALUE: "a scale or a count is not in its range",
}


def check(payload: memoryview | bytes | NDArray[np.uint8], elements: int) -> None:
    """Check that ``payload`` is exactly a valid encoding of ``elements`` finite float32 values. Changes nothing.

    Raises MalformedPayloadError, or NonFiniteGradientError if a NaN or Inf is the only defect.
    """
    data = _as_bytes(payload)
    if data.size > payload_limit(elements):
        limit = payload_limit(elements)
        raise MalformedPayloadError(
            f"an encoded payload of {data.size} bytes for {elements} elements is too long: at most {limit} are allowed",
            bytes=data.size,
            elements=elements,
        )
    result = int(decoding.check_payload(data, elements))
    at, defect = result // 256, Defect(result % 256)
    if defect == Defect.NON_FINITE:
        raise NonFiniteGradientError(f"an encoded payload for {elements} elements has NaN or Inf, from byte {at} on")
    if defect != Defect.NONE:
        raise MalformedPayloadError(
            f"an encoded payload of {data.size} bytes for {elements} elements is malformed in the segment at byte "
            f"{at}: {_REASONS[defect]}",
            bytes=data.size,
            elements=elements,
        )


def accumulate(payload: memoryview | bytes | NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Add the values of ``payload`` to float32[elements] ``out``. Elements that were not sent are unchanged.

    The payload must have passed ``check``. If it changed since, only ``out`` is written to, and MalformedPayloadError
    may be raised after part of it was added.
    """
    check_vector("out", out, _FLOAT32, out.size)
    check_output("out", out)
    if not decoding.add_payload(_as_bytes(payload), out):
        raise MalformedPayloadError(f"an encoded payload for {out.size} elements changed after it was checked")


def _as_bytes(payload: Any) -> NDArray[np.uint8]:
    """Return the payload as a contiguous uint8[n]."""
    if not isinstance(payload, np.ndarray):
        return np.frombuffer(payload, np.uint8)
    if payload.dtype != np.uint8:
        raise DTypeMismatchError(f"an encoded payload has dtype {payload.dtype}, not uint8", dtype=payload.dtype)
    if payload.ndim != 1 or not payload.flags.c_contiguous:
        raise ShapeMismatchError(f"an encoded payload has shape {payload.shape}: pass one contiguous vector of bytes")
    return payload


_FLOAT32: Final = np.dtype(np.float32)
