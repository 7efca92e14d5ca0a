"""Slots for gradients that replicas read in place: when they are free again, and when never."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from psdist.errors import SharingUnavailableError
from psdist.link.arenas import PAGE
from psdist.types import Slicing
from psdist.wire.limits import KEPT_BYTES_MAX
from psdist_server.store.replica_carriers import UpdateMemory
from tests.support.replica import SLICE, SLICES, update_memory


@pytest.fixture
def memory() -> Iterator[UpdateMemory]:
    with update_memory() as made:
        yield made


def offsets(memory: UpdateMemory, *gradients: np.ndarray) -> list[int]:
    return [memory.offset_of(memory.arena(), gradient) for gradient in gradients]


def test_slots_are_apart_and_what_has_none_has_memory_of_its_own(memory: UpdateMemory) -> None:
    gradients = [memory.take(SLICE) for _ in range(SLICES + 1)]
    assert sorted(offsets(memory, *gradients)) == [0, *(PAGE + 4 * SLICE * slot for slot in range(SLICES))]
    for number, gradient in enumerate(gradients):
        gradient[:] = number
    assert [gradient[0] for gradient in gradients] == list(range(SLICES + 1))


def test_a_slot_is_taken_again_when_nothing_refers_to_any_part_of_it(memory: UpdateMemory) -> None:
    gradient = memory.take(SLICE - 1)
    where = memory.offset_of(memory.arena(), gradient)
    part = memoryview(gradient.view(np.uint8)[8:]).cast("B")
    del gradient
    others = [memory.take(SLICE) for _ in range(SLICES)]
    assert where not in offsets(memory, *others)
    del part
    assert offsets(memory, memory.take(SLICE)) == [where]


def test_the_slot_that_became_free_last_is_taken_first(memory: UpdateMemory) -> None:
    one, other = memory.take(SLICE), memory.take(SLICE)
    (first,) = offsets(memory, one)
    del other, one
    assert offsets(memory, memory.take(SLICE)) == [first]


def test_what_may_still_be_read_is_never_written_to(memory: UpdateMemory) -> None:
    gradient, own = memory.take(SLICE), np.zeros(SLICE, np.float32)
    (where,) = offsets(memory, gradient)
    assert not memory.lose([gradient, own])
    del gradient
    gc.collect()
    assert where not in offsets(memory, *[memory.take(SLICE) for _ in range(SLICES)])


def test_an_arena_that_has_lost_half_of_its_slots_is_replaced(memory: UpdateMemory) -> None:
    before = memory.arena()
    lost = [memory.take(SLICE) for _ in range(2)]
    assert not memory.lose(lost[:1]) and memory.lose(lost[1:])
    memory.renew()
    assert memory.arena() is not before
    assert len(set(offsets(memory, *[memory.take(SLICE) for _ in range(SLICES)])) - {0}) <= SLICES
    # What is written to the old one now is in no file.
    assert memory.offset_of(before, lost[0]) == 0


def test_the_arena_is_bounded_and_made_when_it_is_asked_for() -> None:
    memory = UpdateMemory(Slicing(1 << 40, 1 << 18), shared=True)
    assert memory.take(4).base is None
    assert memory.arena().flat.nbytes == KEPT_BYTES_MAX
    memory.close()


def test_memory_that_is_not_to_be_shared_is_not() -> None:
    memory = UpdateMemory(Slicing(SLICE, SLICE), shared=False)
    with pytest.raises(SharingUnavailableError):
        memory.arena()
    assert memory.take(SLICE).size == SLICE
