"""Dense parameters: contributions that are not finite stay out of the weights, and the arena tells versions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist import BSP, optim
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server import kernels
from psdist_server.dense import DenseParameters, Update

ELEMENTS = 10_000


def entry(optimizer: optim.Optimizer) -> ParametersEntry:
    spec = ParametersSpec("p", optimizer, BSP(), slice_elements=4096)
    return ParametersEntry(spec=spec, total=ELEMENTS, shards=(Shard(Replica("server-0", 1)),), ready=True)


@pytest.fixture
def dense() -> Iterator[DenseParameters]:
    made = DenseParameters(entry(optim.SGD(lr=1.0)), "server-0")
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
    assert dense.arena is not None and dense.arena.sequence[1] == 2


def test_an_overflow_of_finite_parts_is_not_their_fault_and_changes_nothing(dense: DenseParameters) -> None:
    huge = part(3e38)
    assert dense.apply([Update(0, 0, [huge, huge])]) == [()]
    assert (weights(dense, 0) == 1.0).all()


def test_the_arena_tells_twice_the_version_of_each_slice(dense: DenseParameters) -> None:
    assert dense.arena is not None
    assert dense.arena.sequence.tolist() == [0, 0, 0]
    dense.apply([Update(1, 0, [part(1.0)]), Update(2, 0, [part(1.0, ELEMENTS - 2 * 4096)])])
    dense.apply([Update(1, 1, [])])
    assert dense.arena.sequence.tolist() == [0, 4, 2]
    assert (dense.arena.weights[:4096] == 1.0).all() and (dense.arena.weights[4096:8192] == 0.0).all()


def test_clipping_leaves_parts_out_too() -> None:
    clipped = DenseParameters(entry(optim.SGD(lr=1.0, max_grad_norm=1e9)), "server-0")
    clipped.install(0, part(1.0))
    square, bad = clipped.aggregate(0, [part(np.nan), part(2.0)])
    assert bad == (0,) and square == 4.0 * 4096
    clipped.apply_aggregated(0, 0, 1.0)
    assert (weights(clipped, 0) == -1.0).all()
    assert clipped.aggregate(0, [part(np.nan)]) == (0.0, (0,))
    clipped.apply_aggregated(0, 1, 0.0)
    assert (weights(clipped, 0) == -1.0).all()
    assert clipped.apply_clipped(0, 2, part(np.inf), 1.0, 1.0) == (0,)
    assert clipped.arena is not None and clipped.arena.sequence[0] == 6
    clipped.close()


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_combine_says_whether_its_result_is_finite(count: int, dtype: str) -> None:
    out = np.empty(9000, np.float32)
    parts = [np.full(9000, 2.0, kernels.DTYPES[dtype]) for _ in range(count)]
    assert kernels.combine(out, parts, count) and (out == 2.0).all()
    for place in range(count):
        for position in (0, 4095, 4096, 8999):
            parts[place][position] = np.nan
            assert not kernels.combine(out, parts, count)
            parts[place][position] = 2.0
