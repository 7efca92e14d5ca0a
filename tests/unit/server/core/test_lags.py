"""Ranges of skipped elements and their lags: against a count of each element."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from psdist.errors import InvalidArgumentError
from psdist_server.core.lags import Lags, Ranges, advanced, checked, common, pieces, ranges_of, rows, within

SIZE = 40


def elements(ranges: Ranges) -> set[int]:
    return {element for start, stop in ranges for element in range(start, stop)}


def some_ranges(rng: random.Random) -> Ranges:
    edges = sorted(rng.sample(range(SIZE + 1), 2 * rng.randrange(4)))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def test_lags_count_each_element() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        counts, lags = [0] * SIZE, Lags()
        for _ in range(10):
            absent = some_ranges(rng)
            lags = advanced(lags, absent)
            for element in elements(absent):
                counts[element] += 1
            found = {element: lag for start, stop, lag in lags for element in range(start, stop)}
            assert found == {element: count for element, count in enumerate(counts) if count}
            assert not any((one[1], one[2]) == (other[0], other[2]) for one, other in pairwise(lags)), "one range"
            assert all(start < stop for start, stop, _ in lags) and list(lags) == sorted(lags)


def test_pieces_are_all_other_elements() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        absent = some_ranges(rng)
        lags = advanced(advanced((), some_ranges(rng)), some_ranges(rng))
        runs = ((0, 7, 0), (7, 19, 2), (19, SIZE, 1))
        found = {
            element: (group, lag)
            for start, stop, group, lag in pieces(runs, lags, absent)
            for element in range(start, stop)
        }
        lag_of = {element: lag for start, stop, lag in lags for element in range(start, stop)}
        group_of = {element: group for start, stop, group in runs for element in range(start, stop)}
        assert found == {
            element: (group_of[element], lag_of.get(element, 0)) for element in set(range(SIZE)) - elements(absent)
        }


def test_only_elements_without_any_gradient_are_common() -> None:
    assert common([]) == ()
    for seed in range(30):
        rng = random.Random(seed)
        parts = [some_ranges(rng) for _ in range(rng.randrange(1, 4))]
        assert elements(common(parts)) == set.intersection(*map(elements, parts))


def test_a_slice_has_its_part_of_the_ranges() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        ranges = some_ranges(rng)
        start, stop = sorted(rng.sample(range(SIZE), 2))
        assert {start + one for one in elements(within(ranges, start, stop))} == elements(ranges) & set(
            range(start, stop)
        )


def test_ranges_that_a_vector_cannot_have_are_refused() -> None:
    for starts, sizes, text in [
        ([0], [], "1 starts and 0 sizes"),
        ([0, 3], [4, 1], "1 elements from 3 in a header: ranges must ascend"),
        ([5], [0], "none may be empty"),
        ([30], [11], "element 40 in a header: there are 40 elements"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            ranges_of(starts, sizes, SIZE, "a header")


def test_rows_name_the_slices() -> None:
    lags: dict[int, Lags] = {2: ((0, 4, 1),), 0: ((1, 2, 5), (3, 4, 5))}
    assert rows(lags) == ((0, 1, 2, 5), (0, 3, 4, 5), (2, 0, 4, 1))
    assert checked(rows(lags), {0: 4, 2: 4}, "a copy") == lags


def test_lags_that_slices_cannot_have_are_refused() -> None:
    for row in [(1, 0, 4, 1), (0, 0, 5, 1), (0, 2, 2, 1), (0, 0, 1, 0)]:
        with pytest.raises(InvalidArgumentError, match=r"in a copy: lags are at least 1"):
            checked([row], {0: 4}, "a copy")
