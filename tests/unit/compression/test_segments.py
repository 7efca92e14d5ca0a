"""Segments: their golden bytes, what is decoded of them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist.compression import Codec, Int8, PerTensor
from psdist.compression.segments import PushNumber, accumulate, check, encode, payload_limit, prepare, regions
from psdist.compression.segments.warm_up import KERNELS
from psdist.errors import MalformedPayloadError, NonFiniteGradientError
from psdist.types import TensorSpec


@pytest.fixture(params=["compiled", "interpreted"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_current", kernel.interpreted if request.param == "interpreted" else None)
    yield request.param


def encoded(values: NDArray[np.float32], codec: Codec) -> bytes:
    """The payload of one tensor, which is compressed whatever its shape."""
    policy = PerTensor({"*": codec}, min_elements=64, min_vector=64)
    prepared = [
        prepare(r, values[r.start : r.stop], PushNumber(1, 2)) for r in regions([TensorSpec("w", values.shape)], policy)
    ]
    out = np.empty(payload_limit(values.size), np.uint8)
    return out[: encode(prepared, 0, values.size, out)].tobytes()


def decoded(payload: bytes, elements: int) -> NDArray[np.float32]:
    out = np.zeros(elements, np.float32)
    check(payload, elements)
    accumulate(payload, out)
    return out


def test_float32_is_raw() -> None:
    payload = encoded(np.float32([1, -2]), Int8())
    assert payload == bytes.fromhex("01200000 02000000 08000000 00000000 0000803f 000000c0")
    assert decoded(payload, 2).tolist() == [1, -2]


def test_int8() -> None:
    payload = encoded(np.arange(-32, 33, dtype=np.float32) * 127 / 32, Int8(block=64))
    head, scales, codes = payload[:16], payload[16:24], payload[24:]
    assert head == bytes.fromhex("04080000 41000000 49000000 40000000")
    assert scales == np.float32([1, 1]).tobytes()
    assert codes[:4] == bytes([0x81, 0x85, 0x89, 0x8D]) and codes[64:] == bytes([0x7F, 0, 0, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [3, 500])
def test_what_is_not_finite_is_not_encoded(bad: float, size: int) -> None:
    values = np.ones(size, np.float32)
    values[2] = bad
    with pytest.raises(NonFiniteGradientError, match="have NaN or Inf"):
        encoded(values, Int8())


def test_what_is_not_finite_is_refused() -> None:
    payload = bytearray(encoded(np.ones(100, np.float32), Int8()))
    payload[16:20] = np.float32(np.inf).tobytes()
    with pytest.raises(NonFiniteGradientError, match="from byte 0 on"):
        check(payload, 100)


@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"\0", lambda p: b"\xff" + p[1:], lambda p: p * 2])
def test_what_is_malformed_is_refused(change) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MalformedPayloadError):
        check(change(encoded(np.ones(100, np.float32), Int8())), 100)


def test_nothing_encodes_nothing() -> None:
    assert encoded(np.empty(0, np.float32), Int8()) == b""
    check(b"", 0)
    with pytest.raises(MalformedPayloadError):
        check(b"", 1)
