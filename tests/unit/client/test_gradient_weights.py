"""Allowed weights of a gradient in the mean of its step."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import psdist
from psdist.consistency import check_weight
from psdist.errors import InvalidArgumentError


def test_any_real_number_is_a_weight() -> None:
    for weight in [
        3,
        3.0,
        Fraction(3),
        np.int64(3),
        np.uint8(3),
        np.float16(3),
        np.float32(3),
        np.float64(3),
        np.longdouble(3),
        np.array(3),
        np.array(3, np.float32),
        np.array([True, True, True, False]).sum(),
    ]:
        checked = check_weight(weight, psdist.BSP())
        assert (type(checked), checked) == (float, 3.0)


def test_what_is_no_number_in_range_is_no_weight() -> None:
    for weight in [
        True,
        False,
        np.True_,
        np.False_,
        np.array(True),
        np.array([3.0]),
        np.array([3.0, 1.0]),
        np.complex64(3),
        np.float32("nan"),
        np.int64(-1),
        np.float64(1e19),
        np.array(None),
        10**400,
        "3",
        None,
    ]:
        with pytest.raises(InvalidArgumentError, match="out of range: use a number from 1e-18 to 1e18, or 0"):
            check_weight(weight, psdist.BSP())


def test_only_0_and_1_are_weights_where_there_is_no_mean() -> None:
    assert [check_weight(weight, psdist.ASP()) for weight in (0, 1, np.int64(1), np.array(0.0))] == [0.0, 1.0, 1.0, 0.0]
    for weight in (2.0, np.int64(2), True, np.True_):
        with pytest.raises(InvalidArgumentError, match="ASP applies each push by itself"):
            check_weight(weight, psdist.ASP())
