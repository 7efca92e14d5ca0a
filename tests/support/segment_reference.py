"""Reference codecs in plain Python and numpy, one element or one block after another.

Shares no code with ``psdist.compression.segments``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_LARGEST = np.finfo(np.float32).max


def blocks(values: Floats, size: int) -> list[Floats]:
    """Divide a tensor into blocks."""
    return [values[at : at + size] for at in range(0, values.size, size)]


def integers(values: Floats, bits: int, block: int) -> Floats:
    """Return the decoded values of INTEGER."""
    limit = 2 ** (bits - 1) - 1
    decoded = []
    for one in blocks(values, block):
        scale = min(np.float32(np.abs(one).max()) / np.float32(limit), _LARGEST / np.float32(limit + 1))
        for value in one:
            code = min(max(round(Fraction(float(value / scale))), -limit), limit) if scale else 0
            decoded.append(np.float32(code) * scale)
    return np.array(decoded, np.float32)


def largest(values: Floats, kept: int) -> list[int]:
    """Return the positions of the largest magnitudes. Ties keep the first; zeros are excluded."""
    order = sorted(range(values.size), key=lambda i: (-abs(values[i]), i))
    return sorted(i for i in order[:kept] if values[i])


def top_k(values: Floats, kept: int, bits: int = 32, chunk: int = 0) -> Floats:
    """Return the decoded values of TopK."""
    return _sparse(values, largest(values, kept), bits, chunk)


def chunked(values: Floats, kept: int, chunk: int, bits: int) -> Floats:
    """Return the decoded values of ChunkedTopK."""
    where: list[int] = []
    for number, one in enumerate(blocks(values, chunk)):
        where += [number * chunk + i for i in largest(one, -(-kept * one.size // chunk))]
    return _sparse(values, where, bits, chunk)


def _sparse(values: Floats, where: list[int], bits: int, chunk: int) -> Floats:
    decoded = np.zeros(values.size, np.float32)
    if bits == 32:
        decoded[where] = values[where]
    elif bits == 16:
        with np.errstate(all="ignore"):
            decoded[where] = [_brain(value) for value in values[where]]
    else:
        for begin in range(0, values.size, chunk):
            inside = [i for i in where if begin <= i < begin + chunk]
            if inside:
                decoded[inside] = (_eight if bits == 8 else _two)(values[inside])
    return decoded


def _brain(value: np.float32) -> np.float32:
    """Return the nearest finite bfloat16."""
    near = np.float32(ml_dtypes.bfloat16(value))
    return near if np.isfinite(near) else np.float32(np.copysign(float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), value))


def _eight(kept: Floats) -> Floats:
    return integers(kept, 8, kept.size)


def _two(kept: Floats) -> Floats:
    """Return once or twice a scale: the least-squares scale if values above 1.2 times the mean count twice."""
    magnitudes = [abs(float(value)) for value in kept]
    split = sum(magnitudes) / len(magnitudes) * 1.2
    factors = [2 if magnitude > split else 1 for magnitude in magnitudes]
    scale = np.float32(sum(m * f for m, f in zip(magnitudes, factors, strict=True)) / sum(f * f for f in factors))
    scale = min(scale, _LARGEST / np.float32(2))
    sizes = [np.float32(2 if abs(value) > np.float32(1.5) * scale else 1) * scale for value in kept]
    return np.copysign(np.array(sizes, np.float32), kept)


def decode(payload: bytes, elements: int) -> Floats:
    """Decode a valid payload according to ``docs/internals/payload-format.md``."""
    out = np.zeros(elements, np.float32)
    at = done = 0
    while at < len(payload):
        kind, bits, phase, count, length, parameter = struct.unpack_from("<BBHIII", payload, at)
        body = payload[at + 16 : at + 16 + length]
        for i, value in enumerate(_DECODERS[kind](body, bits, phase, count, parameter)):
            out[done + i] += value
        done, at = done + count, at + 16 + -(-length // 4) * 4
    assert done == elements
    return out


def _codes(data: bytes, bits: int, count: int) -> list[int]:
    """Return unsigned codes."""
    number = int.from_bytes(data, "little")
    return [number >> bits * i & (1 << bits) - 1 for i in range(count)]


def _signed(code: int, bits: int) -> int:
    return code - (1 << bits) if code >> (bits - 1) else code


def _raw(body: bytes, bits: int, phase: int, count: int, parameter: int) -> list[np.float32]:
    return list(np.frombuffer(body, "<f4"))


def _raw16(body: bytes, bits: int, phase: int, count: int, parameter: int) -> list[np.float32]:
    return list(np.frombuffer(body, "<f2").astype(np.float32))


def _brain16(body: bytes, bits: int, phase: int, count: int, parameter: int) -> list[np.float32]:
    return list(np.frombuffer(body, ml_dtypes.bfloat16).astype(np.float32))


def _integer(body: bytes, bits: int, phase: int, count: int, block: int) -> list[np.float32]:
    scales = np.frombuffer(body[: 4 * (-(-(phase + count) // block))], "<f4")
    codes = _codes(body[scales.nbytes :], bits, count)
    return [np.float32(_signed(code, bits)) * scales[(phase + i) // block] for i, code in enumerate(codes)]


def _sparse_values(body: bytes, bits: int, phase: int, count: int, chunk: int) -> list[np.float32]:
    (kept,) = struct.unpack_from("<I", body)
    scales = np.frombuffer(body[4 : 4 + (4 * -(-(phase + count) // chunk) if chunk else 0)], "<f4")
    values_at = 4 + scales.nbytes
    gaps_at = values_at + -(-kept * bits // 8)
    values, place, out = body[values_at:gaps_at], -1, [np.float32(0)] * count
    codes = iter(_codes(values, bits, kept))
    for gap in body[gaps_at:]:
        place += gap if gap == 255 else gap + 1
        if gap == 255:
            continue
        code = next(codes)
        if bits == 32:
            out[place] = np.frombuffer(struct.pack("<I", code), "<f4")[0]
        elif bits == 16:
            out[place] = np.frombuffer(struct.pack("<I", code << 16), "<f4")[0]
        elif bits == 8:
            out[place] = np.float32(_signed(code, 8)) * scales[(phase + place) // chunk]
        else:
            out[place] = np.float32((1, 2, -1, -2)[code]) * scales[(phase + place) // chunk]
    return out


def _signs(body: bytes, bits: int, phase: int, count: int, block: int) -> list[np.float32]:
    scales = np.frombuffer(body[: 4 * (-(-(phase + count) // block))], "<f4")
    codes = _codes(body[scales.nbytes :], 1, count)
    return [np.float32(-1 if code else 1) * scales[(phase + i) // block] for i, code in enumerate(codes)]


def _draw(key: int, number: int) -> int:
    mask = 0xFFFFFFFF
    x = (number * 0x9E3779B9 + (key & mask) + (number >> 32) * 0x85EBCA6B) & mask
    x = (x ^ x >> 16) * 0x21F0AAAD & mask
    x = x + (key >> 32) & mask
    x = (x ^ x >> 15) * 0x735A2D97 & mask
    return x ^ x >> 15


def _random(body: bytes, bits: int, phase: int, count: int, period: int) -> list[np.float32]:
    key, position = struct.unpack_from("<QQ", body)
    raw = np.frombuffer(body[16:], "<f4" if bits == 32 else ml_dtypes.bfloat16).astype(np.float32)
    values, out = iter(raw), [np.float32(0)] * count
    for number in range(position // period, (position + count - 1) // period + 1):
        place = number * period + (_draw(key, number) * period >> 32) - position
        if 0 <= place < count:
            out[place] = next(values)
    assert next(values, None) is None
    return out


def _low_rank(body: bytes, rank: int, phase: int, count: int, columns: int) -> list[np.float32]:
    (column,) = struct.unpack_from("<I", body)
    rows = -(-(column + count) // columns)
    p = np.frombuffer(body[4 : 4 + 4 * rank * rows], "<f4").reshape(rows, rank)
    q = np.frombuffer(body[4 + 4 * rank * rows :], "<f4").reshape(rank, columns)
    out = []
    for at in range(column, column + count):
        i, j = divmod(at, columns)
        value = p[i, 0] * q[0, j]
        for k in range(1, rank):
            value = value + p[i, k] * q[k, j]
        out.append(value)
    return out


_DECODERS: dict[int, Callable[[bytes, int, int, int, int], list[np.float32]]] = {
    1: _raw,
    2: _raw16,
    3: _brain16,
    4: _integer,
    5: _sparse_values,
    6: _signs,
    7: _random,
    8: _low_rank,
}
