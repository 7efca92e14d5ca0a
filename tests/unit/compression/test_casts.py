"""Casts of the client: equal bytes from numpy and from the compiled kernels, for any values."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.compression import casts, resolve
from psdist.compression.dtypes import NUMPY_DTYPES

DTYPES = ["float16", "bfloat16"]


@given(st.integers(0, 5000), st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_both_casts_give_the_same_bytes(size: int, seed: int, dtype: str) -> None:
    values = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    values = np.where(np.isnan(values), np.float32(1), values)
    ours, theirs = np.empty(size, NUMPY_DTYPES[dtype]), np.empty(size, NUMPY_DTYPES[dtype])
    casts.narrow(values, ours)
    casts.narrow_by_numpy(values, theirs)
    assert ours.tobytes() == theirs.tobytes()
    with np.errstate(over="ignore"):
        assert ours.tobytes() == values.astype(NUMPY_DTYPES[dtype]).tobytes()
    back, again = np.empty(size, np.float32), np.empty(size, np.float32)
    casts.widen(ours, back)
    casts.widen_by_numpy(ours, again)
    assert back.tobytes() == again.tobytes() == ours.astype(np.float32).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_of_16_bits_is_widened_as_by_numpy(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(NUMPY_DTYPES[dtype])
    ours = np.empty(every.size, np.float32)
    casts.widen(every, ours)
    assert np.array_equal(ours, every.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codec_encodes_into_memory_of_the_caller(dtype: str) -> None:
    values = np.array([1.0, -2.5, 3e-8], np.float32)
    out = np.empty(3, NUMPY_DTYPES[dtype])
    codec = resolve(dtype)
    assert codec.encode(values, out) is out
    assert out.tobytes() == values.astype(NUMPY_DTYPES[dtype]).tobytes() == codec.encode(values).tobytes()


def test_without_a_cast_nothing_is_copied() -> None:
    values = np.ones(3, np.float32)
    assert resolve(None).encode(values) is values


@pytest.mark.parametrize("codec", [None, "bfloat16"])
def test_numba_is_loaded_only_for_many_16_bit_payloads(codec: str | None) -> None:
    code = (
        "import sys, numpy as np, threading\nimport psdist.client.transport.transport\n"
        "from psdist.compression import kernel_runtime, resolve\n"
        f"codec, values = resolve({codec!r}), np.ones(1000, np.float32)\n"
        "first = codec.encode(values).tobytes()\nprint('numba' in sys.modules)\n"
        "kernel_runtime._WORTH_SECONDS = 0\n"
        "assert codec.encode(values).tobytes() == first\n"
        "[one.join() for one in threading.enumerate() if one.name == 'psdist-compile']\n"
        "assert codec.encode(values).tobytes() == first\nprint('numba' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", str(codec is not None)]
