"""Updates that skip elements: these keep their bytes, and later updates count as if the skipped ones were not made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist import BSP, optim
from psdist.types import GroupRange, ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.core.lags import Ranges
from psdist_server.kernels.arrays import DenseParameters, Update
from psdist_server.kernels.double import DoubleParameters

SIZE = 4096
#: Two tensors of which the second is skipped at times, in the middle of a slice.
ABSENT: Ranges = ((1000, 3000),)
OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "adam": optim.Adam(lr=0.1, weight_decay=0.1),
    "nadam": optim.NAdam(lr=0.1),
    "radam": optim.RAdam(lr=0.1),
    "asgd": optim.ASGD(lr=0.1, t0=1),
    "adagrad": optim.Adagrad(lr=0.1, lr_decay=0.1),
    "groups": optim.Adam(lr=0.1, overrides=(optim.override("b*", lr=0.01),)),
}


def made(optimizer: optim.Optimizer, dtype: str = "float32", **options: Any) -> DenseParameters:
    spec = ParametersSpec("p", optimizer, BSP(), slice_elements=SIZE, dtype=dtype, **options)
    ranges = (GroupRange(2000, 3500, 1),) if optimizer.overrides else ()
    shards = (Shard(Replica("server-0", 1)),)
    entry = ParametersEntry(spec=spec, total=SIZE, shards=shards, ready=True, ranges=ranges)
    dense = DenseParameters(entry) if dtype == "float32" else DoubleParameters(entry)
    dense.hold([0])
    dense.install(0, noise(0).astype(dtype).view(np.float32)[:SIZE])
    return dense


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[DenseParameters, DenseParameters]]:
    both = made(request.param), made(request.param)
    yield both
    for dense in both:
        dense.close()


def noise(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def gradient(seed: int, absent: Ranges) -> NDArray[np.float32]:
    values = noise(seed)
    for start, stop in absent:
        values[start:stop] = 0.0
    return values


def copies(dense: DenseParameters) -> list[NDArray[np.float32]]:
    return [array.copy() for array in dense.export(0)]


@pytest.mark.parametrize("pair", OPTIMIZERS.values(), ids=OPTIMIZERS, indirect=True)
def test_skipped_elements_keep_their_bytes_and_their_own_count(pair: tuple[DenseParameters, DenseParameters]) -> None:
    """The second copy makes only the updates that the elements do not skip."""
    mine, other = pair
    part, made_by_other = slice(1000, 3000), 0
    for step in range(8):
        absent = ABSENT if step % 3 else ()
        before = copies(mine)
        mine.apply([Update(0, step, [gradient(step, absent), gradient(step + 50, absent)], absent=absent)])
        if absent:
            assert all((a[part] == b[part]).all() for a, b in zip(before, copies(mine), strict=True))
            assert not (before[0][:1000] == copies(mine)[0][:1000]).all()
            continue
        other.apply([Update(0, made_by_other, [gradient(step, ()), gradient(step + 50, ())])])
        made_by_other += 1
        assert all((a[part] == b[part]).all() for a, b in zip(copies(mine), copies(other), strict=True))
    assert mine.lags.of(0) == ((1000, 3000, 5),) and other.lags.of(0) == ()


@pytest.mark.parametrize("pair", OPTIMIZERS.values(), ids=OPTIMIZERS, indirect=True)
def test_the_written_mean_gives_the_same_bytes(pair: tuple[DenseParameters, DenseParameters]) -> None:
    mine, replica = pair
    for step in range(4):
        absent = ABSENT if step % 2 else ()
        mean = np.full(SIZE, np.nan, np.float32)
        parts = [gradient(step, absent), gradient(step + 50, absent)]
        mine.apply([Update(0, step, parts, mean=mean, absent=absent)])
        assert np.isfinite(mean).all()
        replica.apply([Update(0, step, [mean], absent=absent)])
        assert mine.digest(0) == replica.digest(0)
    assert mine.lags.of(0) == replica.lags.of(0) != ()


def test_float64_skips_too() -> None:
    mine, other = made(optim.Adam(lr=0.1), "float64"), made(optim.Adam(lr=0.1), "float64")
    values = np.random.default_rng(3).standard_normal(SIZE // 2).view(np.float32)
    absent = np.zeros_like(values)
    mine.apply([Update(0, 0, [absent], absent=((0, SIZE),))])
    assert mine.export(0)[0].tobytes() == other.export(0)[0].tobytes()
    mine.apply([Update(0, 1, [values])])
    other.apply([Update(0, 0, [values])])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(mine.export(0), other.export(0), strict=True))
    mine.close()
    other.close()


@pytest.mark.parametrize("pair", [optim.SGD(lr=0.1)], indirect=True)
def test_a_digest_has_the_lags(pair: tuple[DenseParameters, DenseParameters]) -> None:
    mine, other = pair
    mine.apply([Update(0, 0, [gradient(0, ((0, SIZE),))], absent=((0, SIZE),))])
    other.apply([Update(0, 0, [])])
    assert (mine.export(0)[0] == other.export(0)[0]).all()
    assert mine.digest(0) != other.digest(0)
    other.lags.set(0, mine.lags.of(0))
    assert mine.digest(0) == other.digest(0)


@pytest.mark.parametrize("pair", [optim.SGD(lr=0.1)], indirect=True)
def test_a_slice_that_is_replaced_or_released_loses_its_lags(pair: tuple[DenseParameters, DenseParameters]) -> None:
    for dense, drop in zip(pair, (lambda d: d.install(0, noise(0)), lambda d: d.release([0])), strict=True):
        dense.lags.set(0, ((0, 1, 1),))
        drop(dense)
        assert dense.lags.of(0) == ()
