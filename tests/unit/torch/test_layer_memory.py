"""Pages of layers: they move between layers, no other layer keeps any, and freed memory cannot be read."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from psdist.errors import LimitExceededError
from psdist.torch import offloaded_memory
from psdist.torch.offloaded_memory import MovedPages, PagePool, ResizedStorage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages move on Linux")

LARGE = (5 << 20) + 12
SMALL = 3 * mmap.PAGESIZE


def resident(region: MovedPages) -> int:
    """Bytes of the region that have pages."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        first = line.split(None, 1)[0]
        if not first.endswith(":"):
            start, stop = (int(one, 16) for one in first.split("-"))
            counts = region.address <= start and stop <= region.address + region.bytes
        elif first == "Rss:" and counts:
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("size", [LARGE, SMALL, 1])
def test_the_pages_of_one_are_those_of_the_next(size: int) -> None:
    pool = PagePool()
    first, second = MovedPages(size, pool), MovedPages(size, pool)
    assert first.address % (2 << 20) == 0
    first.acquire()
    first.array()[:] = 7
    first.release()
    assert resident(first) == first.bytes
    second.acquire()
    assert (second.array() == 7).all(), "they moved, and nobody cleared them"
    assert resident(first) == 0 and resident(second) == second.bytes


def test_what_comes_back_at_once_keeps_its_pages() -> None:
    region = MovedPages(LARGE, PagePool())
    region.acquire()
    region.array()[:] = 3
    region.release()
    region.acquire()
    assert (region.array() == 3).all()


@pytest.mark.parametrize(("first", "second"), [(LARGE, SMALL), (SMALL, LARGE)])
def test_sizes_may_differ(first: int, second: int) -> None:
    pool = PagePool()
    one, other = MovedPages(first, pool), MovedPages(second, pool)
    one.acquire()
    one.array()[:] = 5
    one.release()
    other.acquire()
    kept = min(one.bytes, other.bytes)
    assert (other.array()[:kept] == 5).all() and not other.array()[kept:].any()
    assert resident(one) == 0, "what is too much went back"


def test_only_one_that_is_away_has_pages() -> None:
    pool = PagePool()
    regions = [MovedPages(LARGE, pool) for _ in range(3)]
    for region in regions:
        region.acquire()
        region.array()[:] = 1
    for region in regions:
        region.release()
        region.release()
    assert [resident(region) for region in regions] == [0, 0, regions[2].bytes]
    regions[0].close()
    assert resident(regions[2]) == 0


def test_a_system_that_cannot_move_them_gives_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.7 refuses the flags."""
    refused: list[Any] = []

    class Library:
        def mremap(self, *arguments: Any) -> int:
            refused.append(arguments)
            return -1

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = offloaded_memory._library()
    monkeypatch.setattr(offloaded_memory, "_library", lambda: Library())
    pool = PagePool()
    first, second = MovedPages(LARGE, pool), MovedPages(LARGE, pool)
    first.acquire()
    first.array()[:] = 7
    first.release()
    second.acquire()
    assert refused and not second.array().any()
    assert resident(first) == 0


def test_more_mappings_than_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    region = MovedPages(LARGE, PagePool())
    library = offloaded_memory._library()
    monkeypatch.setattr(library, "mprotect", lambda *arguments: -1)
    with pytest.raises(LimitExceededError, match=r"memory of a layer of 524\d+ bytes .* vm\.max_map_count"):
        region.acquire()
    monkeypatch.undo()
    region.acquire()
    region.array()[:] = 1


def test_what_is_away_is_not_read() -> None:
    script = """
from psdist.torch.offloaded_memory import MovedPages, PagePool
region = MovedPages(100, PagePool())
region.acquire()
region.array()[:] = 1
print(region.array().sum(), flush=True)
region.release()
print(region.array().sum(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "100\n"), done.stderr


def test_tensors_keep_the_addresses() -> None:
    region = MovedPages(64, PagePool())
    tensor = torch.empty(0).set_(region.storage, 0, (16,), (1,))
    address = region.address
    region.acquire()
    del region
    tensor.fill_(2.0)
    assert tensor.data_ptr() == address and float(tensor.sum()) == 32.0


def test_torch_gives_the_memory_elsewhere() -> None:
    region = ResizedStorage(64, torch.device("cpu"))
    region.release()
    assert region.storage.nbytes() == 0
    region.acquire()
    array = region.array()
    assert array is not None and array.size == region.storage.nbytes() == 64
    array[:] = 3
    assert torch.empty(0, dtype=torch.uint8).set_(region.storage, 0, (64,), (1,)).sum() == 192
    assert ResizedStorage(8, torch.device("meta")).array() is None
