"""Input that the kernels refuse without changing anything. tests/property/test_kernels.py tests their results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest

from psdist.compression import casts, kernel_runtime
from psdist.compression.kernel_runtime import resolve
from psdist.errors import DTypeMismatchError, InvalidArgumentError, ShapeMismatchError
from psdist_server.kernels import means
from psdist_server.kernels.updates import UPDATES


def floats(size: int, dtype: Any = np.float32) -> Any:
    return np.ones(size, dtype)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda out: means.combine(out, [], 1), InvalidArgumentError, "0 parts"),
        (lambda out: means.combine(out, [floats(3)], 0), InvalidArgumentError, "divisor 0"),
        (lambda out: means.combine(out, [floats(3), floats(4)], 1), ShapeMismatchError, r"\(4,\).*\(3,\)"),
        (lambda out: means.combine(out, [floats(3), floats(6)[::2]], 1), ShapeMismatchError, "contiguous"),
        (lambda out: means.combine(out, [floats(3, np.float64)], 1), DTypeMismatchError, "float64"),
        (lambda out: means.combine(out, [floats(3, np.uint16)], 1), DTypeMismatchError, "uint16"),
        (lambda out: means.combine(out.view(np.int32), [floats(3)], 1), DTypeMismatchError, "int32"),
        (lambda out: means.narrow(floats(4), out.view(np.float16)), ShapeMismatchError, r"\(4,\).*\(6,\)"),
        (lambda out: means.narrow(floats(3), out), DTypeMismatchError, "out has dtype float32"),
        (lambda out: means.cast(out, "float64"), DTypeMismatchError, "'float64' cannot be pulled"),
        (lambda out: means.cast(out.astype(np.float64), "float16"), DTypeMismatchError, "float64"),
        (lambda out: means.sum_squares(out.astype(np.float16)), DTypeMismatchError, "float16"),
        (lambda out: means.all_finite(out.astype(np.int32)), DTypeMismatchError, "int32"),
        (lambda out: means.all_finite(out.reshape(1, 3)), ShapeMismatchError, r"\(1, 3\)"),
    ],
)
def test_refused_and_nothing_changed(call: Callable[[Any], object], error: type[Exception], words: str) -> None:
    out = np.array([1.5, 2.5, 3.5], np.float32)
    with pytest.raises(error, match=words):
        call(out)
    assert out.tolist() == [1.5, 2.5, 3.5]


def test_read_only_memory_is_not_written() -> None:
    out = np.frombuffer(bytes(12), np.float32)
    with pytest.raises(InvalidArgumentError, match="writable"):
        means.combine(out, [floats(3)] * 2, 2)
    assert not out.any()


def test_cast_to_float32_is_no_copy() -> None:
    values = floats(3)
    assert means.cast(values, "float32") is values
    assert means.cast(values, "bfloat16").dtype == ml_dtypes.bfloat16


def test_compiled_once_by_any_number_of_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        compiled = {id(function) for function in pool.map(lambda _: UPDATES["sgd"].compile(), range(8))}
    assert len(compiled) == 1


def test_compiles_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def njit(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", njit)

    def halve(values: Any) -> None:
        for i in range(values.size):
            values[i] = values[i] / np.float32(2.0)

    kernel, values = kernel_runtime.Kernel(halve, (kernel_runtime.OUT,)), floats(3)
    kernel(values)
    assert values.tolist() == [0.5, 0.5, 0.5]


KERNELS = {
    f"{module.__name__}.{one.__name__}": one
    for module in (means, casts)
    for one in vars(module).values()
    if isinstance(one, kernel_runtime.Kernel)
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_loop_is_vectorized(kernel: kernel_runtime.Kernel) -> None:
    """No kernel works on one element at a time: a changed expression easily does that, and costs 4 to 16 times."""
    # Compiled again, because numba cannot show code that it loaded from its cache.
    recompiled = numba.njit([kernel.signature], nogil=True, error_model="numpy")(resolve(kernel.function))
    code = recompiled.inspect_llvm(recompiled.signatures[0])
    assert re.search(r"load <\d+ x (float|i32|i16)>", code)


@pytest.mark.parametrize("name", UPDATES)
def test_update_is_vectorized(name: str) -> None:
    """A fused kernel's work on one block, alone, since the compiled kernel contains other loops, too."""
    element = kernel_runtime.part_of_kernel(UPDATES[name].element).value
    scalars = UPDATES[name].signature.args[-1]
    arrays = element.py_func.__code__.co_argcount - scalars.count

    def one(w: Any, g: Any, s: Any) -> None:
        for i in range(w.size):
            w[i] = element(w[i], g[i], *s)

    def two(w: Any, a: Any, g: Any, s: Any) -> None:
        for i in range(w.size):
            w[i], a[i] = element(w[i], a[i], g[i], *s)

    def three(w: Any, a: Any, b: Any, g: Any, s: Any) -> None:
        for i in range(w.size):
            w[i], a[i], b[i] = element(w[i], a[i], b[i], g[i], *s)

    def four(w: Any, a: Any, b: Any, c: Any, g: Any, s: Any) -> None:
        for i in range(w.size):
            w[i], a[i], b[i], c[i] = element(w[i], a[i], b[i], c[i], g[i], *s)

    loop = {2: one, 3: two, 4: three, 5: four}[arrays]
    signature = kernel_runtime.types.void(*[kernel_runtime.OUT] * arrays, scalars).value
    code = numba.njit([signature], error_model="numpy")(loop).inspect_llvm(signature.args)
    assert re.search(r"load <\d+ x float>", code)


def test_fused_updates_are_vectorized_too() -> None:
    """Not the sum of contributions alone: the root shows it where there is one."""
    for kernel in (UPDATES["adam"], UPDATES["ftrl"]):  # Each takes seconds to compile; the others are made like them.
        recompiled = numba.njit([kernel.signature], nogil=True, error_model="numpy")(resolve(kernel.function))
        assert re.search(r"sqrt\.v\d+f32", recompiled.inspect_llvm(recompiled.signatures[0])), kernel.__name__
