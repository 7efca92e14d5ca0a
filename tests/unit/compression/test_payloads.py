"""The client's casts: the same bytes by numpy and by the compiled kernels, on any values."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.compression import casts, payloads, resolve
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.payloads import Casts

DTYPES = ["float16", "bfloat16"]


def by_numpy() -> Casts:
    """Casts that cannot be loaded."""

    def fail() -> Any:
        raise ImportError("no numba")

    made = Casts(fail)
    made.prepare().join()
    return made


@given(st.integers(0, 5000), st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_both_casts_give_the_same_bytes(size: int, seed: int, dtype: str) -> None:
    values = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    values = np.where(np.isnan(values), np.float32(1), values)
    ours, theirs = np.empty(size, NUMPY_DTYPES[dtype]), np.empty(size, NUMPY_DTYPES[dtype])
    casts.narrow(values, ours)
    by_numpy().narrow(values, theirs)
    assert ours.tobytes() == theirs.tobytes()
    with np.errstate(over="ignore"):
        assert ours.tobytes() == values.astype(NUMPY_DTYPES[dtype]).tobytes()
    back, again = np.empty(size, np.float32), np.empty(size, np.float32)
    casts.widen(ours, back)
    by_numpy().widen(ours, again)
    assert back.tobytes() == again.tobytes() == ours.astype(np.float32).tobytes()


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
def test_numba_is_loaded_only_for_16_bit_payloads(codec: str | None) -> None:
    code = (
        "import sys, numpy as np\nimport psdist.client.transport.requests\n"
        "from psdist.compression import payloads, resolve\n"
        f"resolve({codec!r}).encode(np.ones(3, np.float32))\n"
        f"{'payloads.prepare().join()' if codec else ''}\nprint('numba' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(codec is not None)


def test_what_was_loaded_is_used() -> None:
    calls: list[str] = []
    made = Casts(lambda: (lambda values, out: calls.append("narrow"), lambda values, out: calls.append("widen")))
    made.prepare().join()
    made.narrow(np.ones(1, np.float32), np.ones(1, np.float16))
    made.widen(np.ones(1, np.float16), np.ones(1, np.float32))
    assert calls == ["narrow", "widen"]
    assert payloads.prepare() is payloads.prepare()
