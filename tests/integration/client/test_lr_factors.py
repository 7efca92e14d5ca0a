"""Learning-rate factors that pushes carry: the exact bytes of the same rates in one process, with every optimizer and
clipped and in buckets. ``test_settings`` has all that pushes carry over other transports and through a loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from psdist import AsyncParameters, optim
from psdist.client.core.push_sequence import PushOptions
from psdist.consistency import ASP, BSP, SSP
from psdist.errors import InvalidArgumentError
from psdist.launcher.embedded import EmbeddedCluster
from tests.support.clients import connected
from tests.support.compressed_runs import ADAM, WORKERS, Workers
from tests.support.exact_runs import TOTAL, Reference, gradient, initial, joined, reference_run, split
from tests.support.weighted_pushes import PLAIN, check_run

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: Factors by step. The last three belong to a schedule that no specification has.
FACTORS = [1.0, 0.25, 0.0, 3.0, 1 / 3, 1e-4, 1e3]
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "adam": ADAM,
    "clipped": replace(ADAM, max_grad_norm=10.0),
    "schedule": optim.SGD(lr=0.1, momentum=0.9, schedule=optim.Cosine(20, warmup_steps=3)),
    "groups": optim.AdamW(lr=0.01, overrides=(optim.override("*", lr=0.002),)),
    "rmsprop": optim.RMSprop(lr=0.01, centered=True, momentum=0.5),
    "adagrad": optim.Adagrad(lr=0.01, lr_decay=0.1),
    "lion": optim.Lion(lr=0.001),
    "ftrl": optim.FTRL(lr=0.1, l1=0.01, l2=0.01),
    "mean": optim.Mean(),
}


async def prepare(handle: AsyncParameters, step: int) -> None:
    handle.lr_factor = FACTORS[step]


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
async def test_each_step_has_the_rate_that_its_pushes_carry(
    cluster: EmbeddedCluster, optimizer: optim.Optimizer
) -> None:
    expected = reference_run(optimizer, steps=len(FACTORS), factor=FACTORS)
    await check_run(Workers(cluster), expected, prepare, optimizer)


@pytest.mark.parametrize("consistency", [ASP(), SSP(2), ASP(staleness_lr="inverse")])
async def test_a_push_that_is_applied_alone_has_its_own(cluster: EmbeddedCluster, consistency: ASP | SSP) -> None:
    spec = optim.SGD(lr=0.5)
    expected = Reference(spec, workers=1)
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, consistency, spec)
        for step, factor in enumerate((1.0, 0.25, 0.0, 3.0)):
            handle = workers.handles[step % WORKERS]
            await handle.pull()  # So that its gradient is not stale.
            handle.lr_factor = factor
            await handle.push(split(gradient(step, 0)))
            assert joined(await handle.pull()) == expected.train(factor=factor), f"push {step}"


@pytest.mark.parametrize("optimizer", [optim.SGD(lr=1.0), optim.SGD(lr=1.0, max_grad_norm=1e9)])
async def test_workers_of_a_step_that_differ_are_told(cluster: EmbeddedCluster, optimizer: optim.Optimizer) -> None:
    """Check that the step has the factor of the lowest rank, and the others may continue."""
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, BSP(), optimizer)
        workers.handles[0].lr_factor, workers.handles[1].lr_factor = 1.0, 0.5
        pushes = [handle.push(split(np.ones(TOTAL, np.float32))) for handle in workers.handles]
        first, second = await asyncio.gather(*pushes, return_exceptions=True)
        assert first is None
        with pytest.raises(InvalidArgumentError, match=r"lr_factor=0\.5 in step 0 .* lr_factor=1\.0, set by worker-"):
            raise second  # type: ignore[misc]  # an exception, as the check shows
        weights = joined(await workers.handles[0].pull())
        assert weights == (initial() - np.float32(1.0)).tobytes()


@pytest.mark.parametrize("factors", [(0.5, None), (None, 0.5), (0.5, 0.5 + 1e-9)])
async def test_one_that_says_nothing_has_that_of_the_others(
    cluster: EmbeddedCluster, factors: tuple[float | None, float | None]
) -> None:
    """Check also that a difference in the last digits is ignored."""
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, BSP(), optim.SGD(lr=1.0))
        for handle, factor in zip(workers.handles, factors, strict=True):
            handle.lr_factor = factor
        await asyncio.gather(*(handle.push(split(np.ones(TOTAL, np.float32))) for handle in workers.handles))
        assert joined(await workers.handles[0].pull()) == (initial() - np.float32(0.5)).tobytes()


async def test_a_worker_that_joins_later_does_not_decide(cluster: EmbeddedCluster) -> None:
    """Check it for any rank: such a worker, or a restarted script, may not know the run's rate yet."""
    values, ones = {"w": np.zeros(8, np.float32)}, {"w": np.ones(8, np.float32)}
    async with connected(cluster, "auto", rank=1) as (old,):
        before = await old.parameters("later", values, optim.SGD(lr=1.0))
        before.lr_factor = 0.5
        await before.push(ones)
        async with connected(cluster, "auto") as (new,):
            later = await new.parameters("later", values, optim.SGD(lr=1.0))
            later.lr_factor = 1.0
            while before.step < later.first_step:
                await before.push(ones)
            told, kept = await asyncio.gather(later.push(ones), before.push(ones), return_exceptions=True)
            assert isinstance(told, InvalidArgumentError) and kept is None
            assert (await before.pull())["w"].tolist() == [-0.5 * before.step] * 8


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf"), 1e39, 1.1e9, "3", True])
async def test_what_cannot_be_a_factor_is_refused(cluster: EmbeddedCluster, factor: float) -> None:
    """Check that the client refuses it, and servers do for callers without this check. The step is not made, and can be
    made afterwards."""
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, optimizer=optim.SGD(lr=0.5))
        handle, others = workers.handles
        with pytest.raises(InvalidArgumentError, match="lr_factor="):
            handle.lr_factor = factor
        if isinstance(factor, float):
            handle.participation.push_options = PushOptions(factor)
            with pytest.raises(InvalidArgumentError, match="lr_factor="):
                await handle.push(split(gradient(0, 0)))
            handle.lr_factor = 1.0
        await asyncio.gather(handle.push(split(gradient(0, 0))), others.push(split(gradient(0, 1))))
        assert [one.step for one in workers.handles] == [1, 1]


async def test_a_rate_that_no_float32_holds_is_refused(cluster: EmbeddedCluster) -> None:
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, optimizer=optim.SGD(lr=0.5, overrides=(optim.override("w1", lr=1e30),)))
        with pytest.raises(InvalidArgumentError, match=r"use less, as lr=1e\+30 times it is beyond float32"):
            workers.handles[0].lr_factor = 1e9
        assert workers.handles[0].lr_factor is None
