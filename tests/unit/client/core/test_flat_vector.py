"""Errors of invalid tensors, before anything is sent: the name, the given value, and the expected one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psdist import errors
from psdist.client.core import flat_vector

LAYOUT = flat_vector.layout_of({"w": np.zeros((2, 3), np.float32), "b": np.zeros(3), "s": 0.5, "e": np.zeros((0, 4))})
GOOD = {"w": np.ones((2, 3)), "b": [1.0, 2.0, 3.0], "s": 2.5, "e": np.zeros((0, 4), np.float16)}


def test_layout_keeps_order_shapes_and_dtypes() -> None:
    assert [(t.name, t.shape, t.dtype) for t in LAYOUT.tensors] == [
        ("w", (2, 3), "float32"),
        ("b", (3,), "float64"),
        ("s", (), "float64"),
        ("e", (0, 4), "float64"),
    ]
    assert LAYOUT.offsets == (0, 6, 9, 10, 10)


def test_python_numbers_and_lists_are_taken() -> None:
    assert flat_vector.flatten(LAYOUT, GOOD).tolist() == [1.0] * 6 + [1.0, 2.0, 3.0, 2.5]


def test_bad_gradients() -> None:
    for change, error, words in [
        ({"w": np.zeros((3, 2))}, errors.ShapeMismatchError, ["'w'", "(3, 2)", "expected (2, 3)"]),
        ({"s": np.zeros(1)}, errors.ShapeMismatchError, ["'s'", "(1,)", "expected ()"]),
        ({"w": np.zeros((2, 3), np.int64)}, errors.DTypeMismatchError, ["'w'", "int64", "astype"]),
        ({"s": 3}, errors.DTypeMismatchError, ["'s'", "int64"]),
        ({"b": [True, False, True]}, errors.DTypeMismatchError, ["'b'", "bool"]),
        ({"b": np.zeros(3, complex)}, errors.DTypeMismatchError, ["'b'", "complex128"]),
        ({"b": np.zeros(3, np.longdouble)}, errors.DTypeMismatchError, ["'b'", "float128"]),
        ({"b": ["x", "y", "z"]}, errors.DTypeMismatchError, ["'b'"]),
        ({"b": None}, errors.DTypeMismatchError, ["'b' is None", "the loss does not depend on"]),
        ({"b": [[1.0], [1.0, 2.0]]}, errors.InvalidArgumentError, ["'b'"]),
        ({"extra": np.zeros(1)}, errors.UnknownTensorError, ["'extra'", "w, b, s, e"]),
    ]:
        with pytest.raises(error) as raised:
            flat_vector.flatten(LAYOUT, GOOD | change)
        assert all(word in str(raised.value) for word in words), str(raised.value)


def test_missing_tensor() -> None:
    rest = {name: value for name, value in GOOD.items() if name != "s"}
    with pytest.raises(errors.MissingTensorError, match=r"'s' is missing: give all of w, b, s, e$"):
        flat_vector.flatten(LAYOUT, rest)


def test_a_misspelled_tensor_is_named() -> None:
    misspelled = {name if name != "s" else "S": value for name, value in GOOD.items()}
    with pytest.raises(errors.MissingTensorError, match=r"'s' is missing: .*; 'S' was given, which they do not have"):
        flat_vector.flatten(LAYOUT, misspelled)


def test_no_dict() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="dict"):
        flat_vector.flatten(LAYOUT, [np.zeros(3)])


def test_bad_init() -> None:
    for init, error in [
        ({}, errors.InvalidArgumentError),
        ({"a\nb": np.zeros(1)}, errors.InvalidNameError),
        ({"\u202e": np.zeros(1)}, errors.InvalidNameError),
        ({"é" * 129: np.zeros(1)}, errors.InvalidNameError),
        ({"": np.zeros(1)}, errors.InvalidNameError),
        ({1: np.zeros(1)}, errors.InvalidNameError),
        ({"w": np.zeros(1, np.int32)}, errors.DTypeMismatchError),
        ([np.zeros(1)], errors.InvalidArgumentError),
    ]:
        with pytest.raises(error):
            flat_vector.layout_of(init)


def test_values_that_asarray_converts_are_copied() -> None:
    """Check values that asarray converts: flatten frees the converted array when it returns, so sharing its memory
    would read freed memory."""

    class Fresh:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.ones(4, np.float32)

    layout = flat_vector.layout_of({"a": np.zeros(4, np.float32)})
    flat = flat_vector.flatten(layout, {"a": Fresh()})
    assert flat.base is None and flat.tolist() == [1.0] * 4


def test_bad_out() -> None:
    for out in [
        {"a": np.zeros(3, np.float32)},
        {"a": np.zeros(4, np.float64)},
        {"a": [0.0] * 4},
        {},
        {"a": np.zeros(4, np.float32), "b": np.zeros(1)},
        {"a": np.broadcast_to(np.float32(0), (4,))},
    ]:
        with pytest.raises(errors.InvalidArgumentError):
            flat_vector.check_out(flat_vector.layout_of({"a": np.zeros(4, np.float32)}), out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_names_the_tensor_and_the_count(bad: float) -> None:
    values = {"w": np.ones((2, 3), np.float32), "b": np.ones(3), "s": 1.0, "e": np.zeros((0, 4))}
    values["b"][1:] = bad
    flat = flat_vector.flatten(LAYOUT, values)
    assert not flat_vector.is_finite(flat, "float32")
    with pytest.raises(errors.NonFiniteGradientError, match=r"'b' holds 2 NaN or Inf of 3 elements(: | as float32)"):
        raise flat_vector.non_finite(LAYOUT, flat, "float32")


def test_overflow_of_the_cast_is_found() -> None:
    layout = flat_vector.layout_of({"w": np.zeros(2, np.float32)})
    flat = np.array([1.0, 65520.0], np.float32)
    assert flat_vector.is_finite(flat, "float32") and flat_vector.is_finite(flat, "bfloat16")
    assert not flat_vector.is_finite(flat, "float16")
    assert "after the cast to float16" in str(flat_vector.non_finite(layout, flat, "float16"))


def test_float64_beyond_float32_is_found() -> None:
    layout = flat_vector.layout_of({"w": np.zeros(1)})
    flat = flat_vector.flatten(layout, {"w": np.array([1e300])})
    assert not flat_vector.is_finite(flat, "float32")
    said = "holds 1 NaN or Inf of 1 elements as float32, whose largest number is 3.4e+38: nothing"
    assert said in str(flat_vector.non_finite(layout, flat, "float32"))
    flat[0] = np.nan
    assert "1 elements: nothing" in str(flat_vector.non_finite(layout, flat, "float32"))


def test_grad_norm_adds_slices_in_order() -> None:
    flat = np.arange(10, dtype=np.float32)
    assert flat_vector.grad_norm(flat, 3) == pytest.approx(np.sqrt(285.0), rel=1e-15)
    assert flat_vector.grad_norm(flat[:0], 3) == 0.0


def test_a_bad_element_is_found_wherever_it_is() -> None:
    for dtype in ["float32", "bfloat16", "float16"]:
        for size in [1, 2, 3, 1000, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 100_003]:
            rng = np.random.default_rng(size)
            flat = rng.normal(size=size).astype(np.float32)
            assert flat_vector.is_finite(flat, dtype)
            limit = {"float32": np.inf, "bfloat16": 3.3961776e38, "float16": 65520.0}[dtype]
            for place in {0, size // 2, size - 1, int(rng.integers(size))}:
                for bad in (np.nan, np.inf, -np.inf, limit, -limit):
                    with_bad = flat.copy()
                    with_bad[place] = bad
                    assert not flat_vector.is_finite(with_bad, dtype), (place, bad)


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 3.4e38), ("bfloat16", 3.39e38), ("float16", 65519.0)])
def test_largest_numbers_are_no_alarm(dtype: str, largest: float) -> None:
    flat = np.full(100_000, largest, np.float32)
    flat[::3] *= -1
    assert flat_vector.is_finite(flat, dtype)


def test_arrays_that_lie_in_the_vector_already_may_be_in_each_others_places() -> None:
    layout = flat_vector.layout_of({"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32), "c": np.zeros(2)})
    into = np.arange(8, dtype=np.float32)
    places = flat_vector.split(layout, into)
    flat_vector.flatten_some(layout, [0, 1], {"a": places["b"], "b": places["a"]}, into)
    assert into.tolist() == [3, 4, 5, 0, 1, 2, 6, 7]
    flat = flat_vector.flatten(layout, places, into)
    assert flat.ctypes.data == into.ctypes.data and flat.tolist() == into.tolist()
    flat_vector.flatten_some(layout, [2], {"c": places["c"]}, into)
    assert into.tolist() == [3, 4, 5, 0, 1, 2, 6, 7]


def test_a_bucket_with_a_bad_shape_writes_nothing() -> None:
    into = np.zeros(LAYOUT.total, np.float32)
    with pytest.raises(errors.ShapeMismatchError, match="'b'"):
        flat_vector.flatten_some(LAYOUT, [0, 1], {"w": np.ones((2, 3)), "b": np.ones(2)}, into)
    assert not into.any()


def test_views_are_read_only_and_conversions_use_their_memory_again() -> None:
    flat, converted = np.arange(10, dtype=np.float32), {}
    first = flat_vector.views(LAYOUT, [0, 1], flat, converted)
    assert set(first) == {"w", "b"} and np.shares_memory(first["w"], flat)
    assert first["b"].dtype == np.float64 and first["b"].tolist() == [6, 7, 8]
    flat += 1
    again = flat_vector.views(LAYOUT, [0, 1], flat, converted)
    assert np.shares_memory(again["b"], first["b"]) and again["b"].tolist() == [7, 8, 9]
    for array in again.values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    flat += 1  # The vector itself stays writable.


# --- torch, and initial values ---------------------------------------------------------------------------------------


def test_torch_tensors_are_taken_as_they_are() -> None:
    values = {
        "grad": torch.arange(3.0, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2, 2).T),
        "brain": torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
        "half": torch.tensor([0.5], dtype=torch.float16),
    }
    layout = flat_vector.layout_of(values)
    assert [tensor.dtype for tensor in layout.tensors] == ["float32", "float32", "bfloat16", "float16"]
    assert flat_vector.flatten(layout, values).tolist() == [0, 1, 2, 1, 1, 1, 1, 1, -2.5, 0.5]


def test_what_is_no_array_is_refused_with_the_name() -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(errors.InvalidArgumentError, match="tensor 'w': Tensor is no array: "):
        flat_vector.layout_of({"w": sparse})


def test_initial_values_must_be_finite() -> None:
    for value in [np.nan, np.inf, -np.inf, 1e300]:
        values = {"a": np.zeros(3), "b": np.array([[1.0, value], [value, 1.0]])}
        layout = flat_vector.layout_of(values)
        with pytest.raises(errors.InvalidArgumentError, match="init 'b' holds 2 NaN or Inf of 4 elements"):
            flat_vector.check_initial(layout, flat_vector.flatten(layout, values))
        values["b"] = np.full((2, 2), 3e38)
        flat_vector.check_initial(layout, flat_vector.flatten(layout, values))
