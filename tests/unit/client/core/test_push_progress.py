"""Plan of a step in buckets: each slice once, after the last of its tensors, for any cut, order and failures."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from psdist.client.core import flat_vector
from psdist.client.core.push_sequence import PushProgress, SliceIndex
from psdist.errors import InvalidArgumentError, UnknownTensorError
from psdist.types import Slicing


def make_cut(sizes: list[int], slice_elements: int) -> SliceIndex:
    layout = flat_vector.layout_of({f"t{number}": np.zeros(size, np.float32) for number, size in enumerate(sizes)})
    return SliceIndex(layout, Slicing(layout.total, slice_elements))


def names(numbers: list[int]) -> list[str]:
    return [f"t{number}" for number in numbers]


SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 8))
@example([0, 3], 2)
def test_a_cut_agrees_with_the_elements(sizes: list[int], slice_elements: int) -> None:
    cut = make_cut(sizes, slice_elements)
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    pairs = {(number, element // slice_elements) for element, number in enumerate(owners)}
    assert {(n, index) for n in range(len(sizes)) for index in cut.slices_of(n)} == pairs
    assert {(n, index) for index in range(cut.slicing.count) for n in cut.tensors_of(index)} == pairs
    assert cut.touching == tuple(len(cut.tensors_of(index)) for index in range(cut.slicing.count))


@given(st.data(), SIZES)
def test_tensors_are_ranges_of_elements(data: st.DataObject, sizes: list[int]) -> None:
    index = make_cut(sizes, 4)
    chosen = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    ranges = index.ranges_of(index.named(names(sorted(chosen))))
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    expected = {element for element, number in enumerate(owners) if number in chosen}
    assert {element for start, stop in ranges for element in range(start, stop)} == expected
    assert all(one[0] < one[1] < other[0] for one, other in pairwise(ranges))
    with pytest.raises(UnknownTensorError, match="tensor 'x' is unknown: these parameters have t0"):
        index.named(["x"])


@given(st.data(), SIZES, st.integers(1, 8))
def test_every_slice_goes_once_after_its_last_tensor(
    data: st.DataObject, sizes: list[int], slice_elements: int
) -> None:
    """Check a worker that gives buckets, servers that answer or break them in any order, and buckets that are given
    again."""
    cut = make_cut(sizes, slice_elements)
    plan = PushProgress(cut, needs_all=False)
    given_now: dict[int, bool] = {}
    under_way: list[tuple[tuple[int, ...], list[int]]] = []
    answered: set[int] = set()
    failures = 3
    while not plan.finished:
        missing = sorted(set(range(len(sizes))) - given_now.keys())
        assert plan.missing == missing
        if missing and (not under_way or data.draw(st.booleans(), "give")):
            chosen = data.draw(st.lists(st.sampled_from(missing), min_size=1, unique=True), "bucket")
            numbers = plan.choose(names(chosen))
            abstain = data.draw(st.booleans(), "abstain")
            given_now |= dict.fromkeys(numbers, abstain)
            ready = plan.give(numbers, abstain=abstain)
            sent = [*ready.valued, *ready.abstaining]
            assert not set(sent) & (answered | {index for _, slices in under_way for index in slices})
            for index in sent:
                assert all(number in given_now for number in cut.tensors_of(index))
                assert (index in ready.abstaining) == any(given_now[number] for number in cut.tensors_of(index))
            if sent:
                under_way.append((numbers, sent))
        else:
            numbers, sent = under_way.pop(data.draw(st.integers(0, len(under_way) - 1), "job"))
            good = len(sent)
            if failures and data.draw(st.booleans(), "breaks"):
                failures, good = failures - 1, data.draw(st.integers(0, len(sent) - 1), "answered")
            plan.answer(sent[:good])
            answered.update(sent[:good])
            if good < len(sent):
                plan.take_back(numbers, sent[good:])
                given_now = {number: how for number, how in given_now.items() if number not in numbers}
        waiting = set(range(cut.slicing.count)) - answered - {index for _, slices in under_way for index in slices}
        for index in waiting:  # Otherwise it would never be sent.
            assert plan.missing_for([index])
    assert answered == set(range(cut.slicing.count))
    assert plan.is_complete(answered) and not under_way and not plan.missing_for(answered)


def test_a_bucket_is_complete_with_its_slices() -> None:
    cut = make_cut([6, 6, 4], 4)  # slices: t0 | t0 t1 | t1 | t2
    plan = PushProgress(cut, needs_all=False)
    assert plan.give(plan.choose(["t2"]), abstain=False).valued == (3,)
    assert plan.give(plan.choose(["t0"]), abstain=False).valued == (0,)
    slices = cut.slices_of_all([0])
    plan.answer([0])
    assert not plan.is_complete(slices) and plan.missing_for(slices) == "t1"
    assert plan.missing_for(cut.slices_of_all([2])) == ""
    assert plan.give(plan.choose(["t1"]), abstain=False).valued == (1, 2)
    assert plan.missing_for(slices) == ""
    plan.answer([1])
    assert plan.is_complete(slices) and not plan.finished


def test_where_servers_want_the_whole_step_every_slice_needs_all_tensors() -> None:
    cut = make_cut([4, 4, 4], 4)
    plan = PushProgress(cut, needs_all=True)
    assert plan.give(plan.choose(["t1"]), abstain=False).valued == (1,)
    assert plan.missing_for([1]) == "t0, t2"
    plan.give(plan.choose(["t2", "t0"]), abstain=False)
    assert plan.missing_for([1]) == ""


@pytest.mark.parametrize("unknown", ["t9", 1, None, np.zeros(2)])
def test_names_that_cannot_be_given(unknown: object) -> None:
    plan = PushProgress(make_cut([4, 4], 4), needs_all=False)
    with pytest.raises(UnknownTensorError, match="these parameters have t0, t1"):
        plan.choose(["t0", unknown])
    with pytest.raises(InvalidArgumentError, match="names no tensor"):
        plan.choose([])
    with pytest.raises(InvalidArgumentError, match="'t0' was given twice"):
        plan.choose(["t0", "t0"])
    plan.give(plan.choose(["t0"]), abstain=False)
    with pytest.raises(InvalidArgumentError, match=r"'t0' was given twice .* misses t1"):
        plan.choose(["t0"])
