"""Gradients with different weights: the exact bytes of the weighted sum in one process, over each transport, with and
without compression and clipping, in buckets, through the loss of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from psdist import optim
from psdist.client.core.encoder import GradientEncoder
from psdist.compression import BFloat16, Codec, Float32, TopK
from psdist.consistency import ASP, SSP
from psdist.errors import InvalidArgumentError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from psdist_server.kernels.optimizers import clip_factor
from tests.support import reference
from tests.support.compressed_runs import ADAM, LAYOUT, SLICING, WORKERS, Workers, decoded
from tests.support.exact_runs import TOTAL, gradient, initial, joined, split
from tests.support.weighted_pushes import PLAIN, in_buckets, in_one

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: The weight of each rank, by step; 0 contributes nothing.
WEIGHTS = [(3.0, 1.0), (1.0, 1.0), (0.0, 7.5), (1000.0, 24.0), (1e-3, 0.25), (0.0, 0.0), (12345.0, 54321.0)]


def reference_run(codecs: Sequence[Codec], optimizer: optim.Optimizer = ADAM) -> list[bytes]:
    """Return the weights after every step, in one process."""
    encoders = [GradientEncoder(codec, LAYOUT, SLICING, rank) for rank, codec in enumerate(codecs)]
    weights = initial()
    states = tuple(np.zeros_like(weights) for _ in optimizer.state_names)
    history = []
    for step, given in enumerate(WEIGHTS):
        total, counted = np.zeros(TOTAL, np.float32), 0.0
        for rank, weight in enumerate(given):
            if weight:
                total += np.float32(weight) * sent(codecs[rank], encoders[rank], gradient(step, rank))
                counted += weight
        if counted:
            mean, factor = total / np.float32(counted), None
            if optimizer.max_grad_norm:
                squares = [float(reference.sum_squares(mean[slice(*SLICING.bounds(i))])) for i in range(SLICING.count)]
                factor = clip_factor(float(np.sqrt(sum(squares))), optimizer.max_grad_norm)
            if factor is not None:
                mean *= np.float32(factor)
            reference.update(optimizer, optimizer.group_values(0), weights, states, mean, step, 1.0)
        history.append(weights.tobytes())
    return history


def sent(codec: Codec, encoder: GradientEncoder, flat: np.ndarray) -> np.ndarray:
    """Return a gradient as servers decode it."""
    if isinstance(codec, BFloat16):
        rounded: np.ndarray = flat.astype(ml_dtypes.bfloat16).astype(np.float32)
        return rounded
    return flat if isinstance(codec, Float32) else decoded(encoder, flat)


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
    workers, expected = Workers(cluster, transport), reference_run(codecs, optimizer)
    try:
        await workers.open(codecs, optimizer=optimizer)
        for step, given in enumerate(WEIGHTS):
            push = in_buckets if step % 2 else in_one
            results = await asyncio.gather(
                *(push(handle, split(gradient(step, rank)), given[rank]) for rank, handle in enumerate(workers.handles))
            )
            assert results == [expected[step]] * WORKERS, f"step {step}"
        assert [handle.statistics().abstained for handle in workers.handles] == [2, 1]
    finally:
        await workers.close()


async def test_a_killed_server_changes_not_a_bit() -> None:
    expected = reference_run(PLAIN)
    cluster = await asyncio.to_thread(EmbeddedCluster, 3, replicas=2)
    workers = Workers(cluster, "tcp")
    try:
        await workers.open(PLAIN)
        for step, given in enumerate(WEIGHTS):
            stepping = asyncio.gather(
                *(
                    handle.push_pull(split(gradient(step, rank)), weight=given[rank])
                    for rank, handle in enumerate(workers.handles)
                )
            )
            if step == 3:
                await asyncio.sleep(0)
                cluster.processes[2].kill()
            assert [joined(one) for one in await stepping] == [expected[step]] * WORKERS, f"step {step}"
    finally:
        await workers.close()
        await asyncio.to_thread(cluster.close)


async def test_what_cannot_be_a_weight_is_refused(cluster: EmbeddedCluster) -> None:
    workers = Workers(cluster)
    try:
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
    finally:
        await workers.close()


@pytest.mark.parametrize("consistency", [ASP(), SSP(2)])
async def test_a_push_that_is_applied_alone_has_no_weight(cluster: EmbeddedCluster, consistency: ASP | SSP) -> None:
    workers = Workers(cluster)
    try:
        await workers.open(PLAIN, consistency)
        with pytest.raises(InvalidArgumentError, match="there is no mean"):
            await workers.handles[0].push(split(gradient(0, 0)), weight=2.0)
        before = joined(await workers.handles[0].pull())
        await workers.handles[0].push(split(gradient(0, 0)), weight=0.0)
        assert joined(await workers.handles[0].pull()) == before
        await workers.handles[0].push(split(gradient(0, 0)), weight=1.0)
        assert joined(await workers.handles[0].pull()) != before
    finally:
        await workers.close()
