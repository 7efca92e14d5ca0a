"""Gradients with different weights: the exact bytes of the weighted sum in one process, over each transport, with and
without compression and clipping, and in buckets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from psdist.compression import BFloat16, Float32, TopK
from psdist.consistency import ASP, SSP
from psdist.errors import InvalidArgumentError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from tests.support.compressed_runs import ADAM, WORKERS, Workers, encoded
from tests.support.exact_runs import gradient, joined, reference_run, split
from tests.support.weighted_pushes import PLAIN, in_buckets, in_one

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: The weight of each rank, by step; 0 contributes nothing.
WEIGHTS = [(3.0, 1.0), (1.0, 1.0), (0.0, 7.5), (1000.0, 24.0), (1e-3, 0.25), (0.0, 0.0), (12345.0, 54321.0)]


CASES = {
    "plain": (PLAIN, ADAM),
    "cast": ((BFloat16(), Float32()), ADAM),
    "compressed": ((TopK(0.05), Float32()), ADAM),
    "clipped": (PLAIN, replace(ADAM, max_grad_norm=10.0)),
}


@pytest.mark.parametrize("transport", ["tcp", "grpc", "shm"])
@pytest.mark.parametrize("case", [*("plain", "compressed", "clipped"), pytest.param("cast", marks=pytest.mark.long)])
async def test_weights_are_those_of_the_weighted_sum(
    cluster: EmbeddedCluster, case: str, transport: TransportName
) -> None:
    codecs, optimizer = CASES[case]
    pushed = [encoded(codecs)] * len(WEIGHTS)
    expected = reference_run(optimizer, steps=len(WEIGHTS), pushed=pushed, weights=WEIGHTS)
    async with Workers(cluster, transport) as workers:
        await workers.open(codecs, optimizer=optimizer)
        for step, given in enumerate(WEIGHTS):
            push = in_buckets if step % 2 else in_one
            results = await asyncio.gather(
                *(push(handle, split(gradient(step, rank)), given[rank]) for rank, handle in enumerate(workers.handles))
            )
            assert results == [expected[step]] * WORKERS, f"step {step}"
        assert [handle.statistics().abstained for handle in workers.handles] == [2, 1]


async def test_what_cannot_be_a_weight_is_refused(cluster: EmbeddedCluster) -> None:
    async with Workers(cluster) as workers:
        await workers.open(PLAIN)
        handle, values = workers.handles[0], split(gradient(0, 0))
        for weight in (-1.0, float("nan"), float("inf"), 1e19, 1e-19, "3", None, True, False, np.True_, 1j):
            with pytest.raises(InvalidArgumentError, match="out of range"):
                await handle.push(values, weight=weight)
        names = list(values)
        await handle.push_pull_async({names[0]: values[names[0]]}, weight=2.0)
        with pytest.raises(InvalidArgumentError, match="begun with weight=2"):
            await handle.push_pull_async({names[1]: values[names[1]]})
        for name in names[1:]:
            await handle.push_pull_async({name: values[name]}, weight=2.0)
        await workers.handles[1].push(split(gradient(0, 1)))


@pytest.mark.parametrize("consistency", [ASP(), SSP(2)])
async def test_a_push_that_is_applied_alone_has_no_weight(cluster: EmbeddedCluster, consistency: ASP | SSP) -> None:
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, consistency)
        with pytest.raises(InvalidArgumentError, match="there is no mean"):
            await workers.handles[0].push(split(gradient(0, 0)), weight=2.0)
        before = joined(await workers.handles[0].pull())
        await workers.handles[0].push(split(gradient(0, 0)), weight=0.0)
        assert joined(await workers.handles[0].pull()) == before
        await workers.handles[0].push(split(gradient(0, 0)), weight=1.0)
        assert joined(await workers.handles[0].pull()) != before
