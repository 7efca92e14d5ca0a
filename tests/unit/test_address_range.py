"""Address ranges: content, and release by the right thread."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from psdist import address_range
from psdist.address_range import CHUNK_BYTES, LARGE_BYTES, AddressRange

PAGE = 4096


class Unmapped:
    """Substitute for the unmapping thread."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.is_started = False

    def start(self) -> None:
        self.is_started = True

    def unmap(self, address: int, size: int) -> None:
        self.ranges.append((address, size))


def is_mapped(address: int) -> bool:
    """True if something is mapped at an address of this process."""
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_a_range_is_zeros_until_it_is_written_and_after_it_is_given_back() -> None:
    memory = AddressRange(3 * PAGE)
    floats = memory.view(np.dtype(np.float32), PAGE, 2 * PAGE // 4)
    assert not floats.any()
    floats[...] = 1.0
    assert memory.bytes[PAGE:].any() and not memory.bytes[:PAGE].any()
    memory.give_back(PAGE, PAGE)
    assert floats.tolist() == [0.0] * (PAGE // 4) + [1.0] * (PAGE // 4)
    memory.clear(2 * PAGE)
    assert not floats.any()


def test_a_range_that_is_read_only_cannot_be_written() -> None:
    assert not AddressRange(PAGE, writable=False).bytes.flags.writeable


def test_populated_pages_keep_what_they_hold() -> None:
    memory = AddressRange(2 * CHUNK_BYTES + PAGE)
    memory.bytes[CHUNK_BYTES] = 7
    if not memory.populate(0, memory.size):
        pytest.skip("this kernel cannot populate memory")
    assert memory.bytes[CHUNK_BYTES] == 7 and np.count_nonzero(memory.bytes) == 1


def test_a_file_of_several_chunks_is_placed_whole_and_kept_as_it_is() -> None:
    size = CHUNK_BYTES + 3 * PAGE
    fd = os.memfd_create("test")
    os.ftruncate(fd, PAGE + size)
    theirs = AddressRange(PAGE + size)
    theirs.place(fd)
    mine = AddressRange(size, writable=False)
    mine.place(fd, offset=PAGE, prefault=False)
    numbers = np.arange(size // 4, dtype=np.uint32)
    theirs.view(np.dtype(np.uint32), PAGE, size // 4)[...] = numbers
    view = mine.view(np.dtype(np.uint32), 0, size // 4)
    assert (view == numbers).all()
    mine.make_private(PAGE, CHUNK_BYTES + PAGE)
    theirs.bytes[...] = 0
    os.close(fd)
    kept = slice(PAGE // 4, (CHUNK_BYTES + 2 * PAGE) // 4)
    assert (view[kept] == numbers[kept]).all() and not view[: PAGE // 4].any() and not view[kept.stop :].any()


def test_a_small_range_ends_with_its_last_array() -> None:
    memory = AddressRange(PAGE)
    address, array = memory.address, memory.bytes[10:20]
    del memory
    assert is_mapped(address) and not array.any()
    del array
    assert not is_mapped(address)


def test_a_large_range_is_unmapped_by_a_thread_and_not_by_its_last_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    unmapped = Unmapped()
    monkeypatch.setattr(address_range, "_unmapper", unmapped)
    small = AddressRange(LARGE_BYTES)
    assert not unmapped.is_started
    memory = AddressRange(LARGE_BYTES + PAGE)
    address, array = memory.address, memory.view(np.dtype(np.float32), 0, 100)
    assert unmapped.is_started
    del memory
    assert not unmapped.ranges
    del array
    assert unmapped.ranges == [(address, LARGE_BYTES + PAGE)]
    address_range._libc.munmap(*unmapped.ranges[0])
    del small
    address_range._libc.munmap(*unmapped.ranges[1])
