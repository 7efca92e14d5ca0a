"""``DynamicBatcher``: padding, passes, places in snapshots, leases and submitted samples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from psdist.data import Batch, DistributedSampler, DynamicBatcher
from psdist.data.batcher import RANGES_HELD
from psdist.errors import (
    ClosedError,
    DTypeMismatchError,
    InvalidArgumentError,
    SettingsMismatchError,
    ShapeMismatchError,
)

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40)


def texts(lengths: list[int]) -> list[NDArray[np.int64]]:
    """Samples of these lengths, whose elements tell them apart."""
    return [np.full(length, number, np.int64) for number, length in enumerate(lengths)]


def small(**options: Any) -> DynamicBatcher:
    return DynamicBatcher(**{"max_batch_size": 3, "buckets": (8, 16, 64), **options})


def same(first: Batch, second: Batch) -> bool:
    return all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in ("values", "mask", "lengths", "indices")
    )


# --- padding ----------------------------------------------------------------------------------------------------------


def test_samples_are_padded_with_a_mask() -> None:
    (batch,) = small(pad_value=-1).batches([[1, 2], np.zeros(0, np.int64), [5, 6, 7]])
    assert batch.values.tolist() == [[1, 2, -1], [-1, -1, -1], [5, 6, 7]]
    assert batch.mask.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert batch.lengths.tolist() == [2, 0, 3] and batch.indices.tolist() == [0, 1, 2]
    assert batch.tokens == 5 and len(batch) == 3
    (wide,) = small(padding="bucket").batches([[1, 2], [3]])
    assert wide.values.shape == wide.mask.shape == (2, 8)


def test_named_arrays_are_padded_each_and_numbers_are_stacked() -> None:
    def sample(length: int) -> dict[str, Any]:
        return {"ids": [1] * length, "frames": np.ones((length, 2), np.float32), "label": length}

    (batch,) = small(pad_value={"ids": -100}).batches([sample(2), sample(1)])
    assert batch.values["ids"].tolist() == [[1, 1], [1, -100]] and batch.values["label"].tolist() == [2, 1]
    assert batch.values["frames"].tolist() == [[[1, 1], [1, 1]], [[1, 1], [0, 0]]]


def test_samples_that_do_not_fit_together_are_refused() -> None:
    for samples, error, text in [
        ([["a", "b"]], InvalidArgumentError, "a sample of type list is no array of numbers"),
        ([{"x": [None]}], InvalidArgumentError, "a sample 'x' of type list is no array of numbers"),
        ([3], ShapeMismatchError, "a sample has no array with an axis"),
        ([{"x": [1], "y": [1, 2]}], ShapeMismatchError, "a sample has arrays of lengths {'x': 1, 'y': 2}"),
        ([[1], [1.5]], DTypeMismatchError, "samples of one batch are int64 and float64: convert"),
        ([[[1, 2]], [[1]]], ShapeMismatchError, r"have the shapes \(1, 2\) and \(1, 1\): they may differ in the first"),
        ([{"x": [1]}, {"y": [1]}], InvalidArgumentError, r"have different names than \['x'\]"),
        ([[1] * 65], InvalidArgumentError, "a sample of length 65 is longer than the last bucket"),
        ([np.ones(2, np.uint8), np.ones(1, np.uint8)], InvalidArgumentError, "pad_value=-1 is no value of uint8"),
    ]:
        with pytest.raises(error, match=text):
            list(small(pad_value=-1).batches(samples))


def test_wrong_options_are_refused() -> None:
    for options, text in [
        ({"max_batch_size": "3"}, "max_batch_size='3' is out of range"),
        ({"timeout_ms": "fast"}, "timeout_ms='fast' is no number"),
        ({"timeout_ms": 0}, "timeout_ms=0 is not possible"),
        ({"capacity": 2}, "capacity=2 is out of range"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            small(**options)


# --- passes and places ------------------------------------------------------------------------------------------------


@given(LENGTHS, st.booleans())
def test_lengths_that_are_known_change_nothing(lengths: list[int], shuffled: bool) -> None:
    samples, order = texts(lengths), list(reversed(range(len(lengths)))) if shuffled else None
    read = list(small().batches(samples, order))
    assert sorted(index for batch in read for index in batch.indices) == list(range(len(lengths)))
    assert all(
        np.array_equal(row[mask], samples[i])
        for b in read
        for row, mask, i in zip(b.values, b.mask, b.indices, strict=True)
    )
    for batch, other in zip(read, small().batches(samples, order, np.array(lengths)), strict=True):
        assert same(batch, other)


@given(LENGTHS, st.integers(0, 40), st.sampled_from(["order", "iterable"]), st.sampled_from([40, 5]))
def test_a_pass_that_is_continued_has_the_same_batches(
    lengths: list[int], place: int, kind: str, capacity: int
) -> None:
    samples = texts(lengths)
    source = (samples, list(reversed(range(len(samples))))) if kind == "order" else (iter(samples),)
    whole = list(small(capacity=capacity, max_tokens=64).batches(*source))
    source = (iter(samples),) if kind == "iterable" else source
    first = small(capacity=capacity, max_tokens=64)
    begun = first.batches(*source)
    place = min(place, len(whole))
    for _ in range(place):
        next(begun)
    second = small(capacity=capacity, max_tokens=64)
    second.load_state_dict(first.state_dict())
    source = (iter(samples),) if kind == "iterable" else source
    rest = list(second.batches(*source))
    assert len(rest) == len(whole) - place and all(map(same, rest, whole[place:]))
    assert second.data_epoch == 1


class Handle:
    """A parameter set that counts pushes and keeps the functions of a state."""

    def keep_state(self, save: Any, restore: Any, *, prefix: str) -> None:
        self.save, self.restore, self.prefix = save, restore, prefix


@given(LENGTHS, st.integers(0, 10), st.booleans(), st.integers(1, 2))
def test_a_snapshot_has_the_place_in_the_call_of_its_last_push(
    lengths: list[int], pushes: int, takes_more: bool, accumulated: int
) -> None:
    samples, handle, batcher = texts(lengths), Handle(), small()
    whole = list(small().batches(samples))
    batcher.keep_in(handle)
    assert handle.prefix == "psdist-batches.batches."
    begun, pushed, saved = batcher.batches(samples), 0, handle.save()
    for _ in range(min(pushes, len(whole) // accumulated)):
        for _ in range(accumulated):
            next(begun)
            pushed += 1
        saved = handle.save()
    if takes_more:
        next(begun, None)
    resumed, again = small(), Handle()
    resumed.keep_in(again)
    again.restore(saved)
    assert resumed.data_epoch == 0
    assert all(map(same, resumed.batches(samples), whole[pushed:])) and len(whole) >= pushed


def test_the_next_batch_after_a_rollback_is_the_one_that_followed_the_snapshot() -> None:
    samples, handle, batcher = texts([3] * 20), Handle(), small()
    batcher.keep_in(handle)
    found = []
    saved: dict[str, Any] = {}
    sampler = DistributedSampler(20, 1, 0, seed=3)
    while batcher.data_epoch < 2:
        sampler.set_epoch(batcher.data_epoch)
        for batch in batcher.batches(samples, sampler):
            found.append((batcher.data_epoch, batch.indices.tolist()))
            if len(found) == 2:
                saved = handle.save()
            if len(found) == 9:
                handle.restore(saved)  # In the second pass, and in the middle of it.
    assert len(found) == 9 + 14 - 2 and found[9:] == found[2:9] + found[16:]
    assert {data_epoch for data_epoch, _ in found[9:14]} == {0}
    with pytest.raises(InvalidArgumentError, match="another batcher is saved as 'batches' already: pass another name="):
        small().keep_in(handle)
    small(name="second").keep_in(handle)


def test_other_data_than_that_of_the_place_is_refused() -> None:
    first = small()
    batches = first.batches(texts([3] * 10), DistributedSampler(10, 1, 0))
    next(batches)
    for order in (DistributedSampler(10, 2, 0), DistributedSampler(10, 1, 0, seed=1), []):
        other = small()
        other.load_state_dict(first.state_dict())
        with pytest.raises(SettingsMismatchError, match="the first 3 samples are not those, in their order"):
            next(other.batches(texts([3] * 10), order))


def test_an_iterator_cannot_go_back() -> None:
    batcher = small()
    batches = batcher.batches(iter(texts([3] * 10)))
    state = batcher.state_dict()
    next(batches)
    batcher.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="a list_iterator can be read only once: pass a list"):
        next(batches)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"taken": np.zeros(1)}, "the state of a DynamicBatcher is incomplete"),
        ({**small().state_dict(), "pending": np.array([1])}, "is wrong: 1 of 0 samples are pending"),
    ],
)
def test_a_wrong_state_is_refused(state: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        small().load_state_dict(state)


def test_arguments_that_do_not_apply_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="samples of type generator have no indices, so order= and lengths="):
        next(small().batches((text for text in texts([1])), [0]))
    with pytest.raises(InvalidArgumentError, match="lengths= has 1 entries for 2 samples"):
        next(small().batches(texts([1, 2]), None, [1]))
    with pytest.raises(ShapeMismatchError, match="sample 0 has the length 1, and lengths= has 2: correct it"):
        next(small().batches(texts([1]), None, [2]))


# --- leases -----------------------------------------------------------------------------------------------------------


class FakeRange:
    def __init__(self, start: int, stop: int) -> None:
        self.indices = np.arange(start, stop)


class FakeLeases:
    """Ranges of four samples; some come back once, as after dropped pushes."""

    def __init__(self, size: int, returned: int = 0) -> None:
        self.spec = SimpleNamespace(size=size)
        self._left = [FakeRange(i, min(i + 4, size)) for i in range(0, size, 4)]
        self._returned = self._left[:returned]
        self.held: list[Any] = []
        self.done: list[int] = []
        #: What was said about the use of returned ranges, by their first sample.
        self.said: dict[int, bool | None] = {}

    def lease(self) -> Any:
        if not self._left:
            self._left, self._returned = self._returned, []
            return None if not self._left else self.lease()
        self.held.append(self._left.pop(0))
        assert len(self.held) <= RANGES_HELD
        return self.held[-1]

    def finish(self, held: Any) -> None:
        if held not in self.held:  # The run rolled back.
            return
        self.held.remove(held)
        self.done.append(int(held.indices[0]))

    def holds(self, held: Any) -> bool:
        return held in self.held

    def give_back(self, held: Any, is_used: bool | None = None) -> None:
        self.said[int(held.indices[0])] = is_used
        if held in self.held:
            self.held.remove(held)

    def roll_back(self) -> None:
        """Lease all ranges that are out again."""
        again = [FakeRange(int(held.indices[0]), int(held.indices[-1]) + 1) for held in self.held]
        self._left, self.held = again + self._left, []


@given(st.lists(st.integers(0, 60), min_size=1, max_size=120), st.integers(0, 2))
def test_all_leased_samples_are_used_and_all_ranges_finished(lengths: list[int], returned: int) -> None:
    leases, used = FakeLeases(len(lengths), returned), list[int]()
    for batch in small(max_batch_size=8).leased(texts(lengths), leases):
        held = {int(index) for each in leases.held for index in each.indices}
        assert set(batch.indices) <= held
        used += batch.indices.tolist()
    repeated = [index for index in range(len(lengths)) if index < 4 * returned]
    assert sorted(used) == sorted([*range(len(lengths)), *repeated])
    assert leases.held == [] and len(leases.done) == -(-len(lengths) // 4) + min(returned, -(-len(lengths) // 4))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=120), st.integers(0, 20))
def test_after_a_rollback_samples_of_lost_ranges_are_in_no_batch(lengths: list[int], after: int) -> None:
    leases, counted = FakeLeases(len(lengths)), list[int]()
    for number, batch in enumerate(small(max_batch_size=8).leased(texts(lengths), leases)):
        held = [index for each in leases.held for index in each.indices.tolist()]
        assert set(batch.indices.tolist()) <= set(held), "a lost range is leased again"
        if number == after:  # The push of this batch is dropped, and earlier ones are in the snapshot if all was used.
            counted = [index for index in counted if index not in held]
            leases.roll_back()
        else:
            counted += batch.indices.tolist()
    assert sorted(counted) == [*range(len(lengths))]
    assert leases.held == [] and len(leases.done) == -(-len(lengths) // 4)


def test_a_loop_that_ends_early_returns_its_ranges_and_says_which_it_used_in_part() -> None:
    leases = FakeLeases(40)
    lengths = [3, 3, 3, 60, 3, 3, 3, 3, 3, 3, 3, 3, *[60] * 28]
    batches: Iterator[Batch] = small(max_batch_size=8).leased(texts(lengths), leases)
    assert next(batches).indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    next(batches)  # Of long ones; the first batch has been used.
    batches.close()  # type: ignore[attr-defined]  # it is a generator
    assert leases.done == [4] and leases.held == []
    assert leases.said == {0: True, 8: True, 12: None, 16: None}


def test_samples_of_another_number_than_the_data_set_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="samples has 3 samples, and the data set was made with size=4"):
        next(small().leased(texts([1] * 3), FakeLeases(4)))


# --- submitted samples ------------------------------------------------------------------------------------------------


async def test_submitted_samples_come_in_batches_or_when_their_time_is_over() -> None:
    batcher = small(timeout_ms=20)
    numbers = [await batcher.submit([1] * length) for length in (3, 20, 4, 5)]
    batches = aiter(batcher)
    assert numbers == [0, 1, 2, 3] and (await anext(batches)).indices.tolist() == [0, 2, 3]
    assert (await anext(batches)).indices.tolist() == [1]  # Nobody submits another.
    await batcher.submit([1])
    await batcher.end()
    assert [batch.indices.tolist() async for batch in batches] == [[4]]
    with pytest.raises(ClosedError, match="takes no more samples"):
        await batcher.submit([1])


async def test_submitting_waits_for_room() -> None:
    batcher = small(timeout_ms=None, capacity=4)
    for length in (3, 20, 12):
        await batcher.submit([1] * length)
    await batcher.submit([1] * 3)  # The fourth sends off the oldest bucket.
    blocked = asyncio.create_task(batcher.submit([1]))
    await asyncio.gather(asyncio.create_task(asyncio.wait_for(asyncio.shield(blocked), 0.01)), return_exceptions=True)
    assert not blocked.done()
    batches = aiter(batcher)
    assert (await anext(batches)).indices.tolist() == [0, 3]
    assert await blocked == 4
    await batcher.end()
    assert [batch.indices.tolist() async for batch in batches] == [[1], [2], [4]]


@given(LENGTHS)
def test_each_submitted_sample_is_in_one_batch(lengths: list[int]) -> None:
    async def run() -> list[int]:
        batcher = small(capacity=5, timeout_ms=None)

        async def submit() -> None:
            for length in lengths:
                await batcher.submit(np.zeros(length))
            await batcher.end()

        submitting = asyncio.create_task(submit())
        found = [index async for batch in batcher for index in batch.indices.tolist()]
        await submitting
        return found

    assert sorted(asyncio.run(run())) == list(range(len(lengths)))
