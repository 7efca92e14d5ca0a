"""Dense parameters: contributions that are not finite stay out of the weights, the arena tells versions, and slices
come and go with their memory."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist import BSP, optim
from psdist.errors import InternalError, InvalidArgumentError, LimitExceededError
from psdist.link import arenas
from psdist.types import GroupRange, ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels import means
from psdist_server.kernels.arrays import DenseParameters, Update, _runs_of
from psdist_server.kernels.interpreted import DTYPES

ELEMENTS = 10_000


def entry(optimizer: optim.Optimizer) -> ParametersEntry:
    spec = ParametersSpec("p", optimizer, BSP(), slice_elements=4096)
    return ParametersEntry(spec=spec, total=ELEMENTS, shards=(Shard(Replica("server-0", 1)),), ready=True)


@pytest.fixture
def dense() -> Iterator[DenseParameters]:
    made = DenseParameters(entry(optim.SGD(lr=1.0)))
    made.hold(range(made.slicing.count))
    for index in made.indices:
        made.install(index, np.ones(made.slicing.size(index), np.float32))
    yield made
    made.close()


def part(value: float, size: int = 4096) -> NDArray[np.float32]:
    return np.full(size, value, np.float32)


def weights(dense: DenseParameters, index: int) -> NDArray[np.float32]:
    return np.frombuffer(bytes(dense.read(index, "float32")), np.float32)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_part_that_is_not_finite_is_left_out(dense: DenseParameters, poison: float, place: int) -> None:
    parts = [part(0.5), part(0.25)]
    bad = part(0.0)
    bad[1234] = poison
    parts.insert(place, bad)
    assert dense.apply([Update(0, 0, parts)]) == [(place,)]
    # The mean is over those that count.
    assert (weights(dense, 0) == np.float32(1.0 - 0.375)).all()


def test_without_a_finite_part_nothing_is_updated_but_the_version(dense: DenseParameters) -> None:
    assert dense.apply([Update(1, 0, [part(np.nan), part(np.inf)])]) == [(0, 1)]
    assert (weights(dense, 1) == 1.0).all()
    assert dense.weights.arena is not None and dense.weights.arena.sequence[1] == 2


def test_an_overflow_of_finite_parts_is_not_their_fault_and_changes_nothing(dense: DenseParameters) -> None:
    huge = part(3e38)
    assert dense.apply([Update(0, 0, [huge, huge])]) == [()]
    assert (weights(dense, 0) == 1.0).all()


def test_the_arena_tells_twice_the_version_of_each_slice(dense: DenseParameters) -> None:
    assert dense.weights.arena.sequence.tolist() == [0, 0, 0]
    dense.apply([Update(1, 0, [part(1.0)]), Update(2, 0, [part(1.0, ELEMENTS - 2 * 4096)])])
    dense.apply([Update(1, 1, [])])
    assert dense.weights.arena.sequence.tolist() == [0, 4, 2]
    assert (dense.weights.arena.weights[:4096] == 1.0).all() and (dense.weights.arena.weights[4096:8192] == 0.0).all()


def test_clipping_leaves_parts_out_too() -> None:
    clipped = DenseParameters(entry(optim.SGD(lr=1.0, max_grad_norm=1e9)))
    clipped.hold(range(clipped.slicing.count))
    clipped.install(0, part(1.0))
    mean, square, bad = clipped.combine(0, [part(np.nan), part(2.0)])
    assert mean is not None and bad == (0,) and square == 4.0 * 4096
    clipped.apply([Update(0, 0, [mean], factor=1.0)])
    assert (weights(clipped, 0) == -1.0).all()
    assert clipped.combine(0, [part(np.nan)]) == (None, 0.0, (0,)) and clipped.combine(0, []) == (None, 0.0, ())
    assert clipped.apply([Update(0, 1, [part(np.inf)], factor=1.0)]) == [(0,)]
    assert (weights(clipped, 0) == -1.0).all()
    assert clipped.weights.arena is not None and clipped.weights.arena.sequence[0] == 4
    clipped.close()


def test_combine_says_whether_its_result_is_finite() -> None:
    for count in range(1, 6):
        for dtype in ["float32", "float16", "bfloat16"]:
            out = np.empty(9000, np.float32)
            parts = [np.full(9000, 2.0, DTYPES[dtype]) for _ in range(count)]
            assert means.combine(out, parts, count) and (out == 2.0).all()
            for place in range(count):
                for position in (0, 4095, 4096, 8999):
                    parts[place][position] = np.nan
                    assert not means.combine(out, parts, count)
                    parts[place][position] = 2.0


# --- slices that come and go ------------------------------------------------------------------------------------------

BIG = 1 << 18  # elements of a slice: 1 MiB


def big(count: int = 4) -> DenseParameters:
    """Return parameters with Adam that hold no slice yet."""
    spec = ParametersSpec("p", optim.Adam(), BSP(), slice_elements=BIG)
    return DenseParameters(ParametersEntry(spec=spec, total=count * BIG, shards=(Shard(Replica("server-0", 1)),)))


def resident(dense: DenseParameters) -> tuple[int, int]:
    """KiB of memory that this process's parameters have: the file's, and that of the two states."""
    file = os.fstat(dense.weights.arena.fd).st_blocks // 2 - dense.weights.arena.offset // 1024
    wanted = {state.ctypes.data for state in dense.states}
    states, inside, size = 0, False, dense.states[0].nbytes
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            start = int(fields[0].split("-")[0], 16)
            inside = any(address <= start < address + size for address in wanted)
        elif inside and fields[0] == "Rss:":
            states += int(fields[1])
    return file, states


def filled(dense: DenseParameters, index: int, value: float) -> None:
    for number in range(dense.array_count):
        dense.install_state(index, number, np.full(BIG, value + number, np.float32), version=5)


def test_only_slices_that_are_held_take_memory_and_give_it_back() -> None:
    dense = big()
    assert not dense.indices and resident(dense) == (0, 0)
    dense.hold([1, 3])
    assert dense.held == {1, 3} and dense.indices == (1, 3)
    for index in (1, 3):
        filled(dense, index, 1.0)
    assert resident(dense) == (2048, 4096)
    dense.release([1, 2])
    assert dense.indices == (3,) and dense.installed == {3}
    # Who reads the weights in place still can, until nobody does.
    assert resident(dense) == (2048, 2048) and (dense.weights.array[BIG : 2 * BIG] == 1.0).all()
    dense.reclaim([1, 2, 3])
    assert dense.weights.arena is not None and dense.weights.arena.sequence.tolist() == [0, 1, 1, 10]
    assert resident(dense) == (1024, 2048) and (dense.export(3)[0] == 1.0).all()
    dense.hold([1, 3])
    assert [array.any() for array in dense.export(1)] == [False, False, False]
    dense.release([1, 3])
    dense.close()
    dense.reclaim([1, 3])  # The file's number may be another's now.


def test_a_slice_that_comes_back_starts_from_nothing_but_its_new_content() -> None:
    dense = big(2)
    dense.hold([0])
    filled(dense, 0, 2.0)
    dense.release([0])
    dense.hold([0])
    dense.reclaim([0])  # is held again
    dense.install(0, np.ones(BIG, np.float32))
    weights, *states = dense.export(0)
    assert (weights == 1.0).all() and not any(state.any() for state in states)
    assert dense.weights.arena is not None and dense.weights.arena.sequence[0] == 0
    dense.close()


def test_a_copied_slice_is_installed_with_its_last_array_at_its_version() -> None:
    dense = big(2)
    dense.hold([1])
    for number in (2, 0, 1):
        assert 1 not in dense.installed
        dense.install_state(1, number, np.full(BIG, number, np.float32), version=5)
    assert dense.installed == {1} and [array[0] for array in dense.export(1)] == [0.0, 1.0, 2.0]
    assert dense.weights.arena is not None and dense.weights.arena.sequence.tolist() == [0, 10]
    for number, values in (
        (3, np.zeros(BIG, np.float32)),
        (-1, np.zeros(BIG, np.float32)),
        (0, np.zeros(1, np.float32)),
    ):
        with pytest.raises(InvalidArgumentError, match="arrays of"):
            dense.install_state(1, number, values, version=6)
    with pytest.raises(InternalError, match="not held"):
        dense.install_state(0, 0, np.zeros(BIG, np.float32), version=6)
    dense.close()


@pytest.mark.parametrize("array", [0, 1, 2])
def test_a_digest_tells_one_bit_in_any_array(array: int) -> None:
    dense, other = big(1), big(1)
    for one in (dense, other):
        one.hold([0])
        filled(one, 0, 1.0)
    assert dense.digest(0) == other.digest(0) and len(dense.digest(0)) == 16
    other.export(0)[array].view(np.uint32)[12345] ^= 1
    assert dense.digest(0) != other.digest(0)
    dense.close()
    other.close()


def test_where_there_is_no_room_for_the_first_slices_all_of_them_lie_in_plain_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = big()

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    dense.hold([1])
    assert dense.weights.arena is None and "no room" in dense.weights.arena_error
    filled(dense, 1, 1.0)
    assert dense.apply([Update(1, 5, [part(1.0, BIG)])]) == [()] and (dense.export(1)[0] != 1.0).any()
    dense.release([1])
    dense.reclaim([1])
    assert not dense.weights.array.any()
    dense.close()


def test_memory_that_was_made_ahead_is_not_made_again_nor_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hold`` runs on the event loop, and takes no time for such slices."""
    dense = big()
    dense.weights.make_room([1, 3])
    assert resident(dense)[0] == 2048 and not dense.held
    dense.reclaim([1, 2])  # Late, of an earlier time in which this server held them.
    assert resident(dense)[0] == 2048
    monkeypatch.setattr(os, "posix_fallocate", None)
    dense.hold([1, 3])
    filled(dense, 1, 1.0)
    assert dense.held == {1, 3}
    dense.close()


def test_the_groups_of_slices_are_those_of_their_elements() -> None:
    """Found by bisection among many ranges, with gaps, across slices and at their ends."""
    rng = np.random.default_rng(7)
    for _ in range(50):
        groups = np.repeat(rng.integers(0, 3, 40), rng.integers(1, 9, 40))
        ends = np.flatnonzero(np.diff(groups, prepend=-1, append=-1))
        ranges = [
            GroupRange(int(start), int(stop), int(groups[start]))
            for start, stop in itertools.pairwise(ends)
            if groups[start]
        ]
        start, stop = sorted(rng.choice(len(groups) + 1, 2, replace=False).tolist())
        found = np.concatenate([np.full(high - low, group) for low, high, group in _runs_of(ranges, start, stop)])
        assert (found == groups[start:stop]).all()


def test_where_there_is_no_room_for_more_slices_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = big()
    dense.hold([1])
    filled(dense, 1, 1.0)
    monkeypatch.setattr(arenas.machine, "available_memory", lambda: 1)
    with pytest.raises(LimitExceededError, match="1 are available"):
        dense.hold([0, 2])
    assert dense.held == {1} and dense.weights.arena is not None and (dense.export(1)[0] == 1.0).all()
    dense.close()
