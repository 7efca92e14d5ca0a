"""Compressed all-reduces between clients over real links, with a real scheduler. All clients are in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from psdist.collectives.compression import AllReduceCompression
from psdist.compression import Int8, TopK
from psdist.errors import (
    CollectiveMismatchError,
    DTypeMismatchError,
    InvalidArgumentError,
    NonFiniteGradientError,
    UnknownCodecError,
)
from tests.support.collective_run import SIZE, Run, arrays

#: More than one slice, and not a multiple of one.
LARGE = 300_007


async def test_all_ranks_get_the_same_mean_which_has_no_bias(run: Run) -> None:
    """Check this with plain calls before and after each, all in flight together."""
    given, means = arrays(LARGE), np.mean(arrays(LARGE), axis=0)
    compressions = [AllReduceCompression("int8") for _ in range(SIZE)]
    sums = np.zeros(LARGE)
    for _ in range(4):
        found = await run.all(
            lambda group: asyncio.gather(
                group.all_reduce(np.full(5, group.rank), "max"),
                group.all_reduce(given[group.rank], "avg", compression=compressions[group.rank]),
                group.all_reduce(np.full(5, group.rank), "sum"),
            )
        )
        assert all(one[0][0] == SIZE - 1 and one[2][0] == 3 for one in found)
        assert all(one[1].tobytes() == found[0][1].tobytes() for one in found)
        sums += found[0][1]
    np.testing.assert_allclose(sums / 4, means, atol=0.1)
    assert np.abs(found[0][1] - means).max() > 0.0 and compressions[0].residual_norm > 0.0


async def test_an_array_is_reduced_in_place_by_a_codec_alone(run: Run) -> None:
    given = arrays(LARGE)
    mine = [one.copy() for one in given]
    for out in await run.all(
        lambda group: group.all_reduce(mine[group.rank], out=mine[group.rank], compression=Int8())
    ):
        np.testing.assert_allclose(out, given[0] + given[1] + given[2], atol=1.0)
    assert mine[0].tobytes() == mine[2].tobytes()


async def test_ranks_with_different_codecs_learn_of_it(run: Run) -> None:
    codecs: list[Any] = [Int8(), None, Int8()]
    found = await run.all(lambda group: group.all_reduce(arrays(LARGE)[0], compression=codecs[group.rank]))
    assert all(isinstance(one, CollectiveMismatchError) for one in found)
    assert "compression=Int8" in str(found[0])


@pytest.mark.parametrize(
    ("array", "op", "compression", "error", "text"),
    [
        (np.zeros(3, np.int64), "sum", "int8", DTypeMismatchError, "array of int64 cannot be compressed"),
        (np.zeros(3, np.float32), "max", "int8", InvalidArgumentError, "op='max' cannot be compressed"),
        (np.zeros(3, np.float32), "sum", "int3", UnknownCodecError, "codec 'int3' is unknown"),
        (np.zeros(3, np.float32), "sum", "auto", InvalidArgumentError, "compression=.auto. cannot be used"),
        (np.zeros(3, np.float32), "sum", TopK(error_feedback="ef21"), InvalidArgumentError, "estimates are on servers"),
        (np.full(3, np.inf, np.float32), "sum", "int8", NonFiniteGradientError, "holds NaN or Inf"),
        (np.zeros(3, np.float32), "sum", AllReduceCompression("int8", [(2,)]), InvalidArgumentError, "make one All"),
    ],
)
async def test_what_cannot_be_compressed_is_refused_and_the_group_continues(
    run: Run, array: Any, op: str, compression: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await run.groups[0].all_reduce(array, op, compression=compression)
    assert all(await run.all(lambda group: group.all_reduce(np.ones(1), compression=None)))


async def test_an_object_belongs_to_one_array(run: Run) -> None:
    shared = AllReduceCompression("int8")
    await run.all(lambda group: group.all_reduce(arrays(5)[0], compression=shared if group.rank == 0 else "int8"))
    with pytest.raises(InvalidArgumentError, match="another shape before: make one"):
        await run.groups[0].all_reduce(arrays(6)[0], compression=shared)
    waiting = asyncio.create_task(run.groups[0].all_reduce(arrays(5)[0], compression=shared))
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgumentError, match="in use by another call"):
        await run.groups[0].all_reduce(arrays(5)[0], compression=shared)
    await asyncio.gather(waiting, *(one.all_reduce(arrays(5)[0], compression="int8") for one in run.groups[1:]))
