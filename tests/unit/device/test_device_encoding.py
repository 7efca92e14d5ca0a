"""Gradients on a device are encoded like those on the host, byte for byte, with equal residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.compression import BFloat16, ChunkedTopK, Codec, Float16, Float32, Int2, Int4, Int8, PerTensor, TopK
from psdist.compression.specifications import Region
from psdist.device.coders import SegmentRange, table
from psdist.device.memory import Launcher
from psdist.errors import NonFiniteGradientError
from tests.support.device_encoders import CODECS, LAYOUT, BothEncoders, each_tensor, layout_of, on_device, worst_cases
from tests.support.host_device import HostDevice, needs_compiler

pytestmark = needs_compiler

SHORT = repr


@pytest.mark.parametrize("codec", CODECS, ids=SHORT)
@pytest.mark.parametrize("slice_elements", [500, pytest.param(1 << 12, marks=pytest.mark.long)])
def test_pushes_are_those_of_the_host(codec: Codec, slice_elements: int) -> None:
    both = BothEncoders(each_tensor(codec), LAYOUT, slice_elements)
    for seed in range(3):
        both.push(np.random.default_rng(seed).standard_normal(LAYOUT.total).astype(np.float32))
    for seed in range(3):
        both.push(worst_cases(LAYOUT.total, seed))


def test_the_order_of_threads_changes_nothing() -> None:
    for codec in CODECS:
        both = BothEncoders(each_tensor(codec), LAYOUT, 500, descending=True)
        both.push(worst_cases(LAYOUT.total, 7))


@settings(max_examples=30, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    sizes=st.lists(st.sampled_from([0, 1, 2, 15, 16, 63, 64, 65, 255, 256, 257, 1000]), min_size=1, max_size=5),
    slice_elements=st.integers(60, 700),
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    seed=st.integers(0, 2**16),
)
def test_any_values_in_any_slices(
    codec: Codec, sizes: list[int], slice_elements: int, bits: list[int], seed: int
) -> None:
    layout = layout_of((*sizes, 64))
    drawn = np.array(bits, np.uint32).view(np.float32)
    drawn = np.where(np.isfinite(drawn), drawn, np.float32(0))
    values = np.random.default_rng(seed).choice(drawn, layout.total).astype(np.float32)
    both = BothEncoders(each_tensor(codec), layout, slice_elements)
    both.push(values)
    both.push(np.roll(values, 1))


def test_large_tensors() -> None:
    for codec in [TopK(0.5), TopK(0.001), ChunkedTopK(3, 65536), ChunkedTopK(900, 40000)]:
        for kind in ["random", "equal", "few"]:
            layout = layout_of((64, 70_001))
            values = np.random.default_rng(1).standard_normal(layout.total).astype(np.float32)
            if kind == "equal":
                values = np.copysign(np.float32(0.25), values)
            elif kind == "few":
                values[np.random.default_rng(2).random(layout.total) < 0.9999] = 0.0
            both = BothEncoders(each_tensor(codec), layout, 1 << 15)
            both.push(values)


@pytest.mark.parametrize("codec", [Float32(), Float16(), BFloat16()], ids=SHORT)
def test_tensors_that_are_cast(codec: Codec) -> None:
    mixed = PerTensor({"t0": codec, "t5": Int8(block=32), "*": codec}, min_elements=64, min_vector=64)
    both = BothEncoders(mixed, LAYOUT, 333)
    values = np.random.default_rng(0).standard_normal(LAYOUT.total).astype(np.float32)
    values[:40] = np.array([0.0, -0.0, 1e-45, 6e-8, 65504.0, 5.9e-8, 1e-41, 2048.5], np.float32).repeat(5)
    both.push(values)
    both.push(-values)


def test_a_value_that_cannot_be_sent_is_refused() -> None:
    for bad in [np.nan, np.inf, -np.inf, 65520.0]:
        codec = Float16() if np.isfinite(bad) else Int8(error_feedback=False)
        both = BothEncoders(each_tensor(codec), LAYOUT, 500)
        values = np.ones(LAYOUT.total, np.float32)
        values[2000] = bad
        with pytest.raises(NonFiniteGradientError):
            both.push(values)
        push = both.other.begin_push()
        with pytest.raises(NonFiniteGradientError, match="NaN or Inf"):
            both.other.encode(push, on_device(both.device, values), range(both.slicing.count))
        assert not push.payloads


def test_a_rest_that_makes_a_sum_infinite_is_forgotten_in_its_region() -> None:
    both = BothEncoders(each_tensor(Int2(block=64)), LAYOUT, 500)
    values = np.zeros(LAYOUT.total, np.float32)
    values[2100:2164] = np.linspace(1e38, 3.4e38, 64, dtype=np.float32)
    both.push(values)
    both.push(values)
    both.push(values)
    assert both.host.totals.overflows


def test_a_rest_is_forgotten_in_the_slices_that_come_first_too() -> None:
    both = BothEncoders(each_tensor(Int2(block=64)), layout_of((2000,)), 500)
    values = np.linspace(0.1, 1.0, 2000, dtype=np.float32)
    values[1900:1964] = np.linspace(1e38, 3.4e38, 64, dtype=np.float32)
    both.push(values)
    values[:1900] *= np.float32(0.7)
    both.push(values, [[0], [1, 2], [3]])
    assert both.host.totals.overflows == 1


@pytest.mark.parametrize("parts", [None, [[0], [1, 2], [3]]], ids=["together", "in parts"])
def test_a_velocity_that_makes_a_sum_infinite_is_forgotten_in_its_region(parts: list[list[int]] | None) -> None:
    both = BothEncoders(each_tensor(TopK(0.01, momentum=0.9)), layout_of((2000, 2000)), 1000)
    values = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    values[1900:1964] = np.linspace(1e38, 1.7e38, 64, dtype=np.float32)
    for _ in range(4):  # The residual overflows, too.
        both.push(values, parts)
    assert both.host.totals.overflows >= 2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_that_is_refused_forgets_nothing(momentum: float) -> None:
    codec = PerTensor({"t0": TopK(0.01, momentum=momentum), "t1": Float16()}, min_elements=64, min_vector=64)
    both = BothEncoders(codec, layout_of((2000, 100)), 700)
    values = np.zeros(2100, np.float32)
    values[:64] = np.linspace(1.5e38, 2e38, 64, dtype=np.float32)
    both.push(values)
    large = values * np.float32(1.6)
    large[2050] = 1e6
    host, other = both.host.begin_push(), both.other.begin_push()
    for encoder, push, vector in ((both.host, host, large), (both.other, other, on_device(both.device, large))):
        with pytest.raises(NonFiniteGradientError):
            encoder.encode(push, vector, range(both.slicing.count))
    both.host.totals.overflows = both.other.totals.overflows = 0  # The counts differ for rejected pushes.
    both.push(np.zeros(2100, np.float32))
    assert both.host.residual.any()


@pytest.mark.parametrize(
    ("codec", "calls"),
    [
        (TopK(0.01, momentum=0.9), [None, [[1, 2]], None]),
        (Int4(block=64), [None, [[1, 2]], None]),
        (Int8(block=64), [[[2, 5], [0], [1, 3, 4], range(6, 11)]] * 3),
    ],
    ids=["velocity of what abstains", "residual of what abstains", "several calls"],
)
def test_slices_that_are_encoded_in_part(codec: Codec, calls: list[Any]) -> None:
    both = BothEncoders(each_tensor(codec), LAYOUT, 500)
    for seed, parts in enumerate(calls):
        both.push(worst_cases(LAYOUT.total, seed), parts)


def test_gaps_of_any_length() -> None:
    for gap in [1, 253, 254, 255, 256, 509, 510, 511, 4095, 4096]:
        for codec in [TopK(0.001), ChunkedTopK(2, 5000)]:
            both = BothEncoders(each_tensor(codec), layout_of((10_000,)), 10_000)
            values = np.zeros(10_000, np.float32)
            values[:: gap + 1] = 1.0
            both.push(values)


@pytest.mark.parametrize("counted", [0, 2], ids=["no tile", "the last tile"])
def test_ties_that_are_overwritten_while_they_are_looked_for_lead_nowhere_else(counted: int) -> None:
    """A script that overwrites its gradient too early sends other values, but no kernel hangs."""
    run = Launcher(HostDevice())
    region = Region(0, 20_000, TopK(0.1), (20_000,))
    rows = table([SegmentRange(0, region, 0, region.size)], [2]).rows
    fields = [("prefix", "<u4"), ("remaining", "<u4"), ("ties", "<u4"), ("unused", "<u4"), ("stop", "<u8")]
    search = np.zeros(1, np.dtype(fields))
    search["prefix"], search["remaining"], search["ties"] = np.float32(2.0).view(np.uint32), 1, 9
    values, forgotten = run.upload(np.ones(region.size, np.float32)), run.upload(np.zeros(1, np.uint32))
    searches, counts = run.upload(search), run.upload(np.array([0, counted], np.uint32))
    addresses = [np.uint64(one) for one in (values, 0, run.upload(rows), forgotten, searches, counts)]
    run.launch("find_ties_stop", 1, 256, *addresses, np.float32(1.0), np.uint64(0), np.float32(0.0))
    run.copy_out(search, searches)
    run.wait()
    assert search["stop"] == region.size
