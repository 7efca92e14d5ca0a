"""Casts between float32 and the 16-bit types of the wire. Compiled by numba; each is one pass over memory.

The results equal those of numpy and ml_dtypes, byte for byte (NaN stays NaN, with unspecified payload bits). Widening
is exact; narrowing rounds to nearest, ties to even.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.dtypes import NUMPY_DTYPES, check_output, check_vector
from psdist.compression.kernel_runtime import (
    IN_BITS16,
    IN_BITS32,
    OUT,
    OUT_BITS16,
    Kernel,
    kernel,
    part_of_kernel,
    shared_compiler,
)
from psdist.errors import DTypeMismatchError
from psdist.types import DType

Floats = NDArray[np.float32]
AnyArray = NDArray[Any]

# numba has no 16-bit floats on CPUs, so these work on their bits. All constants are uint32: a plain int would make the
# expression 64 bits wide, and half as fast.

_U = np.uint32
_SIGN, INFINITY = _U(0x80000000), _U(0x7F800000)
_HALF_SIGN, _HALF_MAGNITUDE, _HALF_INFINITY = _U(0x8000), _U(0x7FFF), _U(0x7C00)
_ONE, _THIRTEEN, _SIXTEEN = _U(1), _U(13), _U(16)
_HALF_REBIAS = np.float32(2.0**112)  # 127 - 15: from half's exponent bias to single's
_HALF_SHIFTED_INFINITY = _U(0x7C00 << 13)
_HALF_NAN, _HALF_OVERFLOW, _HALF_NORMAL = _U(0x7E00), _U((127 + 16) << 23), _U((127 - 14) << 23)
_HALF_ROUND = _U((((15 - 127) << 23) + 0xFFF) & 0xFFFFFFFF)
_HALF_DENORMAL_BITS = _U((127 - 15 + 23 - 10 + 1) << 23)
_HALF_DENORMAL = _HALF_DENORMAL_BITS.view(np.float32)
_BRAIN_ROUND, _BRAIN_NAN = _U(0x7FFF), _U(0x7FC0)


def _half_to_single(half: Any) -> Any:
    """Widen float16 bits to float32, exactly.

    The bits are shifted into place and multiplied by the difference of the exponent biases, which also normalizes
    denormals.
    """
    half = _U(half)
    shifted = _U((half & _HALF_MAGNITUDE) << _THIRTEEN)
    special = shifted >= _HALF_SHIFTED_INFINITY
    finite = np.float32(shifted.view(np.float32) * _HALF_REBIAS).view(np.uint32)
    magnitude = _U(shifted | INFINITY) if special else finite
    return _U(magnitude | _U(_U(half & _HALF_SIGN) << _SIXTEEN)).view(np.float32)


def _brain_to_single(brain: Any) -> Any:
    """Widen bfloat16 bits to float32, exactly: they are its upper half."""
    return _U(_U(brain) << _SIXTEEN).view(np.float32)


def _single_to_half(bits: Any) -> Any:
    """Narrow float32 bits to float16 bits, to nearest, ties to even. Overflow becomes infinity."""
    sign = _U(bits & _SIGN)
    magnitude = _U(bits ^ sign)
    special = _HALF_NAN if magnitude > INFINITY else _HALF_INFINITY
    # The addition rounds: the last place of its result is the last denormal place of float16.
    denormal = _U(np.float32(magnitude.view(np.float32) + _HALF_DENORMAL).view(np.uint32) - _HALF_DENORMAL_BITS)
    odd = _U(_U(magnitude >> _THIRTEEN) & _ONE)
    normal = _U(_U(magnitude + _HALF_ROUND + odd) >> _THIRTEEN)
    finite = denormal if magnitude < _HALF_NORMAL else normal
    return np.uint16((special if magnitude >= _HALF_OVERFLOW else finite) | _U(sign >> _SIXTEEN))


def _single_to_brain(bits: Any) -> Any:
    """Narrow float32 bits to bfloat16 bits, to nearest, ties to even. NaN keeps its sign."""
    upper = _U(bits >> _SIXTEEN)
    rounded = _U(_U(bits + _BRAIN_ROUND + _U(upper & _ONE)) >> _SIXTEEN)
    nan = _U(_U(upper & _HALF_SIGN) | _BRAIN_NAN)
    return np.uint16(nan if _U(bits & ~_SIGN) > INFINITY else rounded)


widen_half_one = part_of_kernel(_half_to_single)
widen_brain_one = part_of_kernel(_brain_to_single)
narrow_half_one = part_of_kernel(_single_to_half)
narrow_brain_one = part_of_kernel(_single_to_brain)


def narrow_by_numpy(values: Floats, out: AnyArray) -> None:
    """Compute ``narrow`` by numpy."""
    with np.errstate(all="ignore"):  # Non-finite values are checked by the caller, which knows the dtype.
        out[...] = values


def widen_by_numpy(values: AnyArray, out: Floats) -> None:
    """Compute ``widen`` by numpy."""
    if values.dtype == np.float16:
        out[...] = values
        return
    bits = out.view(np.uint32)
    bits[...] = values.view(np.uint16)
    np.left_shift(bits, 16, out=bits)


def _narrow_bits(dtype: np.dtype[Any], bits: AnyArray, out: AnyArray) -> None:
    narrow_by_numpy(bits.view(np.float32), out.view(dtype))


def _widen_bits(dtype: np.dtype[Any], values: AnyArray, out: Floats) -> None:
    widen_by_numpy(values.view(dtype), out)


@kernel(IN_BITS32, OUT_BITS16, interpreted=partial(_narrow_bits, NUMPY_DTYPES["float16"]))
def narrow_half(bits: Any, out: Any) -> None:
    """Narrow float32 bits to float16 bits."""
    for i in range(out.size):
        out[i] = narrow_half_one(bits[i])


@kernel(IN_BITS32, OUT_BITS16, interpreted=partial(_narrow_bits, NUMPY_DTYPES["bfloat16"]))
def narrow_brain(bits: Any, out: Any) -> None:
    """Narrow float32 bits to bfloat16 bits."""
    for i in range(out.size):
        out[i] = narrow_brain_one(bits[i])


@kernel(IN_BITS16, OUT, interpreted=partial(_widen_bits, NUMPY_DTYPES["float16"]))
def widen_half(halves: Any, out: Any) -> None:
    """Widen float16 bits to float32."""
    for i in range(out.size):
        out[i] = widen_half_one(halves[i])


@kernel(IN_BITS16, OUT, interpreted=partial(_widen_bits, NUMPY_DTYPES["bfloat16"]))
def widen_brain(brains: Any, out: Any) -> None:
    """Widen bfloat16 bits to float32."""
    for i in range(out.size):
        out[i] = widen_brain_one(brains[i])


_NARROW: Final[dict[np.dtype[Any], Kernel]] = {
    NUMPY_DTYPES["float16"]: narrow_half,
    NUMPY_DTYPES["bfloat16"]: narrow_brain,
}
_WIDEN: Final[dict[np.dtype[Any], Kernel]] = {
    NUMPY_DTYPES["float16"]: widen_half,
    NUMPY_DTYPES["bfloat16"]: widen_brain,
}


def narrow(values: Floats, out: AnyArray) -> None:
    """Write float32[n] ``values`` to float16[n] or bfloat16[n] ``out``, rounded to nearest, ties to even.

    NaN stays NaN; overflow becomes infinity. Raises DTypeMismatchError and ShapeMismatchError.
    """
    check_vector("values", values, NUMPY_DTYPES["float32"], out.size)
    if out.dtype not in _NARROW:
        raise DTypeMismatchError(f"out has dtype {out.dtype}: use float16 or bfloat16", dtype=out.dtype)
    check_output("out", out)
    _NARROW[out.dtype](values.view(np.uint32), out.view(np.uint16))


def empty(size: int, dtype: DType) -> AnyArray:
    """Return a new array of one of the wire's dtypes."""
    return np.empty(size, NUMPY_DTYPES[dtype])


def widen(values: AnyArray, out: Floats) -> None:
    """Write float16[n] or bfloat16[n] ``values`` to float32[n] ``out``, exactly. Raises the errors of ``narrow``."""
    check_vector("out", out, NUMPY_DTYPES["float32"], values.size)
    check_output("out", out)
    check_vector("values", values, values.dtype, values.size)
    if values.dtype not in _WIDEN:
        raise DTypeMismatchError(f"values have dtype {values.dtype}: use float16 or bfloat16", dtype=values.dtype)
    _WIDEN[values.dtype](values.view(np.uint16), out)


#: Kernels of this module.
KERNELS: Final = (narrow_half, narrow_brain, widen_half, widen_brain)


@cache
def interpret_first() -> None:
    """Let numpy cast in this process until the kernels are compiled in the background. A client calls this before it
    casts: compiling them in its first cast would miss heartbeats."""
    shared_compiler().add(KERNELS, "16-bit payloads")
