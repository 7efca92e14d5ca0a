"""Reductions of BSP: mean and sum."""

from __future__ import annotations

import pytest

import psdist
from psdist.consistency import with_reduction
from psdist.errors import InvalidArgumentError
from psdist.v1 import common_pb2
from psdist.wire import convert


def test_modes_come_back_from_the_wire() -> None:
    for mode in [psdist.BSP(1, "sqrt"), psdist.BSP(reduction="sum"), psdist.SSP(2), psdist.ASP()]:
        data = convert.consistency_to_proto(mode).SerializeToString()
        assert convert.consistency_from_proto(common_pb2.Consistency.FromString(data)) == mode


def test_a_message_without_a_reduction_means_the_mean() -> None:
    assert convert.consistency_from_proto(common_pb2.Consistency(kind="bsp")) == psdist.BSP()


def test_unknown_reductions_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="reduction='max' is unknown: use 'mean' or 'sum'"):
        convert.consistency_from_proto(common_pb2.Consistency(kind="bsp", reduction="max"))


def test_a_sum_does_not_scale_the_learning_rate_too() -> None:
    with pytest.raises(InvalidArgumentError, match="a sum grows with the number of workers by itself"):
        psdist.BSP(resize_lr="linear", reduction="sum")


def test_the_sum_is_for_bsp() -> None:
    assert with_reduction(psdist.BSP(1), "sum") == psdist.BSP(1, reduction="sum")
    assert with_reduction(psdist.ASP(), "mean") == psdist.ASP()
    with pytest.raises(InvalidArgumentError, match=r"reduction='sum' in SSP, .* leave reduction out, or use BSP"):
        with_reduction(psdist.SSP(1), "sum")
