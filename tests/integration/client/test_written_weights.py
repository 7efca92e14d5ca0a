"""Weights that scripts write between two steps: the exact bytes of one process that writes the same, with several
optimizers, clipped, compressed and in buckets. ``test_settings`` has them over other transports and through a loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from psdist import AsyncClient, AsyncParameters, optim
from psdist.compression import Codec, Int8, TopK
from psdist.consistency import ASP, BSP, SSP
from psdist.errors import InvalidArgumentError, ShapeMismatchError, UnknownTensorError, WrittenWeightsError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from tests.support.clients import connected
from tests.support.compressed_runs import ADAM, WORKERS, Workers
from tests.support.exact_runs import SHAPES, TOTAL, gradient, initial, joined, reference_run, split
from tests.support.weighted_pushes import PLAIN, check_run, in_buckets, in_one, make_step

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: Tensors written before each step. The scalar is one element in the middle of a slice.
WRITTEN: list[tuple[str, ...]] = [("w1",), (), ("scale", "b"), tuple(SHAPES), (), ("embed", "w3"), ("none",)]
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "adam": ADAM,
    "clipped": replace(ADAM, max_grad_norm=10.0),
    "momentum": optim.SGD(lr=0.1, momentum=0.9, schedule=optim.Cosine(20, warmup_steps=3)),
}


def values(step: int) -> dict[str, np.ndarray]:
    """Return the values written before a step."""
    flat = np.random.default_rng([step, 99]).standard_normal(TOTAL).astype(np.float32)
    return {name: array for name, array in split(flat).items() if name in WRITTEN[step]}


def write(weights: np.ndarray, written: dict[str, np.ndarray]) -> None:
    """Write to a flat vector in one process."""
    for name, array in split(weights).items():
        if name in written:
            array[...] = written[name]


async def prepare(handle: AsyncParameters, step: int) -> None:
    await handle.assign(values(step))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
async def test_a_step_begins_with_the_written_weights(cluster: EmbeddedCluster, optimizer: optim.Optimizer) -> None:
    written = [values(step) for step in range(len(WRITTEN))]
    expected = reference_run(optimizer, steps=len(WRITTEN), written=written)
    await check_run(Workers(cluster), expected, prepare, optimizer)


@pytest.mark.parametrize("pull", [None, Int8()], ids=["whole", "differences"])
async def test_written_weights_go_beside_compressed_gradients(cluster: EmbeddedCluster, pull: Codec | None) -> None:
    """Check with a rate of 0 that exactly the written values are read, also by workers that read differences."""
    weights = initial()
    async with Workers(cluster) as workers:
        await workers.open((TopK(0.05), TopK(0.05)), optimizer=optim.SGD(lr=0.0), pull=pull)
        for step in range(len(WRITTEN)):
            write(weights, values(step))
            (first, second) = await make_step(workers, step, prepare)
            assert first == second
            assert first == weights.tobytes(), f"step {step}"


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
async def test_workers_that_write_different_values_are_refused(
    cluster: EmbeddedCluster, transport: TransportName
) -> None:
    """Check that nothing is applied, not even to slices that nobody wrote to, and that nothing is left there: the next
    attempt counts with other gradients."""
    async with Workers(cluster, transport) as workers:
        await workers.open(PLAIN, optimizer=optim.SGD(lr=1.0))
        ones = split(np.ones(TOTAL, np.float32))
        await asyncio.gather(*(handle.push(ones) for handle in workers.handles))
        before = joined(await workers.handles[0].pull())
        await workers.handles[0].assign({"b": np.zeros(7, np.float32)})
        errors = await asyncio.gather(*(handle.push(ones) for handle in workers.handles), return_exceptions=True)
        assert [type(error) for error in errors] == [WrittenWeightsError] * WORKERS
        assert all("rank 0 wrote one thing, rank 1 wrote nothing" in str(error) for error in errors), errors
        async with AsyncClient(cluster.address, cluster.token) as reader:
            assert joined(await (await reader.parameters(workers.handles[0].name)).pull()) == before
        await workers.handles[0].assign({})
        twos = split(np.full(TOTAL, 2.0, np.float32))
        await asyncio.gather(in_buckets(workers.handles[0], twos), in_one(workers.handles[1], twos))
        expected = np.frombuffer(before, np.float32) - np.float32(2.0)
        assert joined(await workers.handles[0].pull()) == expected.tobytes()


async def test_a_step_in_buckets_is_refused_as_a_whole(cluster: EmbeddedCluster) -> None:
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, optimizer=optim.SGD(lr=1.0))
        await workers.handles[1].assign({"b": np.zeros(7, np.float32)})
        for value, refused in ((1.0, True), (2.0, False)):
            gradients = split(np.full(TOTAL, value, np.float32))
            steps = [in_buckets(one, gradients) for one in workers.handles]
            results = await asyncio.gather(*steps, return_exceptions=True)
            assert [isinstance(one, WrittenWeightsError) for one in results] == [refused] * WORKERS, results
            await workers.handles[1].assign({})
        assert joined(await workers.handles[0].pull()) == (initial() - np.float32(2.0)).tobytes()


async def test_only_rank_0_writes_before_the_first_step(cluster: EmbeddedCluster) -> None:
    async with Workers(cluster) as workers:
        await workers.open(PLAIN)
        await workers.handles[0].assign({"b": np.zeros(7, np.float32)})
        errors = await asyncio.gather(
            *(one.push(split(gradient(0, 0))) for one in workers.handles), return_exceptions=True
        )
        assert [type(error) for error in errors] == [WrittenWeightsError] * WORKERS


@pytest.mark.parametrize("consistency", [ASP(), SSP(2)])
async def test_the_last_write_wins_without_common_steps(cluster: EmbeddedCluster, consistency: ASP | SSP) -> None:
    weights = initial()
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, consistency, optim.SGD(lr=0.5))
        for step in range(len(WRITTEN)):
            handle: AsyncParameters = workers.handles[step % WORKERS]
            await handle.assign(values(step))
            write(weights, values(step))
            await handle.push(split(gradient(step, 0)), weight=1.0)
            weights -= np.float32(0.5) * gradient(step, 0)
            assert joined(await handle.pull()) == weights.tobytes(), f"push {step}"


async def test_a_worker_that_contributes_nothing_need_not_write(cluster: EmbeddedCluster) -> None:
    """Check also that a step applies what was written if nobody contributes."""
    weights = initial()
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, optimizer=optim.SGD(lr=1.0))
        ones = split(np.ones(TOTAL, np.float32))
        for step, given in ((0, (1.0, 0.0)), (2, (0.0, 0.0))):
            await workers.handles[0].assign(values(step))
            await asyncio.gather(*(one.push(ones, weight) for one, weight in zip(workers.handles, given, strict=True)))
            write(weights, values(step))
            weights -= np.float32(any(given))
            assert joined(await workers.handles[0].pull()) == weights.tobytes(), f"step {step}"


async def test_a_worker_that_joins_need_not_write(cluster: EmbeddedCluster) -> None:
    start, ones = {"w": np.zeros(8, np.float32)}, {"w": np.ones(8, np.float32)}
    async with connected(cluster, "auto") as (old,):
        before = await old.parameters("clamped", start, optim.SGD(lr=1.0))
        await before.push(ones)
        async with connected(cluster, "auto", rank=1) as (new,):
            later = await new.parameters("clamped", start, optim.SGD(lr=1.0))
            while before.step < later.first_step:
                await before.push(ones)
            await before.assign(start)
            await asyncio.gather(later.push(ones), before.push(ones))
            assert (await before.pull())["w"].tolist() == [-1.0] * 8


async def test_values_that_cannot_be_written_are_refused(cluster: EmbeddedCluster) -> None:
    async with Workers(cluster) as workers:
        await workers.open(PLAIN)
        handle = workers.handles[0]
        with pytest.raises(UnknownTensorError, match="'nothing' is unknown"):
            await handle.assign({"nothing": np.zeros(7)})
        with pytest.raises(ShapeMismatchError, match=r"'b' has shape \(8,\), expected \(7,\)"):
            await handle.assign({"b": np.zeros(8)})
        with pytest.raises(InvalidArgumentError, match="'b' hold NaN or Inf"):
            await handle.assign({"b": np.full(7, np.nan)})
        await handle.push_pull_async({"b": np.zeros(7, np.float32)})
        with pytest.raises(InvalidArgumentError, match="in the middle of step 0"):
            await handle.assign({"b": np.zeros(7)})


async def test_values_are_written_in_float64(cluster: EmbeddedCluster) -> None:
    third = {"w": np.full(3, 1 / 3)}
    async with AsyncClient(cluster.address, cluster.token) as client:
        handle = await client.parameters("double", {"w": np.zeros(3)}, optim.SGD(lr=1.0), master_dtype="float64")
        await handle.assign(third)
        assert (await handle.push_pull({"w": np.full(3, 0.25)}))["w"].tolist() == [1 / 3 - 0.25] * 3


async def test_ftrl_computes_its_weights(cluster: EmbeddedCluster) -> None:
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, BSP(), optim.FTRL())
        with pytest.raises(InvalidArgumentError, match="FTRL computes them"):
            await workers.handles[0].assign({"b": np.zeros(7)})
