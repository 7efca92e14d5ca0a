"""The machine that assigns samples to batches, over all sequences of lengths and limits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.data.batches import BatchLimits, BatchMachine, Item, SampleGroup, default_bounds
from psdist.errors import InvalidArgumentError
from psdist.wire.limits import BATCH_TOKENS_MAX

LENGTHS = st.lists(st.integers(0, 40), max_size=60)
GOOD = BatchLimits(4, None, (8, 16, 64), "longest", None, 20)


@st.composite
def limits(draw: st.DrawFn) -> BatchLimits:
    """Limits that every sample of ``LENGTHS`` meets."""
    bounds = draw(st.sampled_from([(), (40,), (5, 10, 64), (1, 2, 3, 40)]))
    padding = draw(st.sampled_from(["longest", "bucket"] if bounds else ["longest"]))
    samples_max = draw(st.integers(1, 6))
    tokens_max = draw(st.none() | st.integers(64, 200))
    return BatchLimits(samples_max, tokens_max, bounds, padding, None, draw(st.integers(samples_max, 12)))


def groups_of(machine: BatchMachine, items: list[Item]) -> list[SampleGroup]:
    """Add the items, and check the invariants after each."""
    groups = []
    for item in items:
        groups += machine.add(item)
        machine.validate()
    return groups


@given(limits(), LENGTHS)
def test_each_sample_is_in_one_batch_within_the_limits(bounds: BatchLimits, lengths: list[int]) -> None:
    machine = BatchMachine(bounds)
    groups = groups_of(machine, [Item(*pair) for pair in enumerate(lengths)]) + machine.flush()
    assert sorted(number for group in groups for number in group.numbers) == list(range(len(lengths)))
    assert machine.waiting == 0 and machine.flush() == machine.take_oldest() == []
    left: dict[int, list[int]] = {}
    for group in groups:
        assert bounds.fits(len(group.numbers), group.width)
        assert max(lengths[number] for number in group.numbers) <= group.width
        (bound,) = {bounds.bound(lengths[number]) for number in group.numbers}
        left.setdefault(bound, []).extend(group.numbers)
    assert all(numbers == sorted(numbers) for numbers in left.values())


@given(limits(), LENGTHS, st.integers(0, 60))
def test_a_machine_with_the_waiting_samples_of_another_continues_as_that_one(
    bounds: BatchLimits, lengths: list[int], place: int
) -> None:
    items, first = [Item(*pair) for pair in enumerate(lengths)], BatchMachine(bounds)
    groups_of(first, items[:place])
    second = BatchMachine(bounds)
    assert groups_of(second, [items[number] for number in first.numbers()]) == []
    rest = items[place:]
    assert groups_of(second, rest) + second.flush() == groups_of(first, rest) + first.flush()


@given(limits(), st.lists(st.tuples(st.integers(0, 40), st.floats(0, 3)), max_size=40))
def test_no_sample_waits_longer_than_its_time(bounds: BatchLimits, arrivals: list[tuple[int, float]]) -> None:
    machine, now, since = BatchMachine(replace(bounds, seconds=2.0)), 0.0, dict[int, float]()
    for number, (length, pause) in enumerate(arrivals):
        now += pause
        early = machine.deadline is None or machine.deadline > now
        groups = machine.on_time(now)
        assert early == (not groups)
        since[number] = now
        groups += machine.add(Item(number, length, now))
        machine.validate()
        for waiting in machine.numbers():
            assert now < since[waiting] + 2.0
        assert machine.deadline is None or machine.deadline == min(since[n] for n in machine.numbers()) + 2.0


def test_the_oldest_bucket_is_sent_off_at_the_capacity() -> None:
    machine = BatchMachine(replace(GOOD, capacity=5))
    assert groups_of(machine, [Item(number, length) for number, length in enumerate((60, 3, 12, 5))]) == []
    assert machine.add(Item(4, 61)) == [SampleGroup((0, 4), 61)]


def test_default_bounds_grow_by_a_quarter() -> None:
    bounds = default_bounds()
    assert bounds[:8] == (8, 16, 24, 32, 40, 56, 72, 96) and bounds[-1] == BATCH_TOKENS_MAX
    assert all(bound % 8 == 0 for bound in bounds)
    assert all(after <= max(bound + 8, bound * 1.25 + 8) for bound, after in itertools.pairwise(bounds))
    assert len(bounds) < 100


def test_wrong_limits_are_refused() -> None:
    for changes, text in [
        ({"samples_max": 0}, "max_batch_size=0 is out of range"),
        ({"tokens_max": 0}, "max_tokens=0 is out of range"),
        ({"capacity": 3}, "capacity=3 is out of range: use a whole number from 4 to"),
        ({"bounds": (8, 8)}, r"buckets=\(8, 8\) do not ascend"),
        ({"bounds": (0,)}, "a bound of buckets=0 is out of range"),
        ({"bounds": (1.5,)}, "a bound of buckets=1.5 is out of range"),
        ({"padding": "left"}, "padding='left' is unknown"),
        ({"padding": "bucket", "bounds": ()}, 'padding="bucket" pads to the bounds of buckets'),
        ({"seconds": 0.0}, "timeout_ms=0 is not possible"),
        ({"seconds": float("nan")}, "timeout_ms=nan is not possible"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            replace(GOOD, **changes)


def test_samples_that_fit_in_no_batch_are_refused_and_change_nothing() -> None:
    machine = BatchMachine(replace(GOOD, tokens_max=50))
    machine.add(Item(0, 3))
    with pytest.raises(InvalidArgumentError, match="length 65 is longer than the last bucket, 64: add a larger bound"):
        machine.add(Item(1, 65))
    with pytest.raises(InvalidArgumentError, match="length 51, padded to 51, is larger than max_tokens=50"):
        machine.add(Item(1, 51))
    with pytest.raises(InvalidArgumentError, match="length 40, padded to 64, is larger than max_tokens=50"):
        replace(GOOD, tokens_max=50, padding="bucket").bound(40)
    machine.validate()
    assert machine.numbers() == [0]
