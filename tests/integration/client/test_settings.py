"""Hyperparameters that pushes carry: the exact bytes of the same settings in one process, by group and over each
transport, clipped, compressed and in buckets, through the loss of a server and of all processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from psdist import AsyncClient, AsyncParameters, optim
from psdist.client.core.push_sequence import PushOptions
from psdist.consistency import ASP, BSP, SSP
from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.hyperparameters import Setting
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from tests.support.compressed_runs import WORKERS, Workers
from tests.support.exact_runs import SHAPES, TOTAL, Reference, gradient, initial, joined, reference_run, split
from tests.support.weighted_pushes import PLAIN, check_run, check_run_of_copies

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: Group 1 of each optimizer has these tensors.
OVERRIDES = (optim.override("w*", lr=0.02),)
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "sgd": optim.SGD(lr=0.1, momentum=0.9, dampening=0.5, overrides=OVERRIDES),
    "adam": optim.AdamW(lr=0.01, overrides=OVERRIDES),
    "clipped": optim.AdamW(lr=0.01, overrides=OVERRIDES, max_grad_norm=10.0),
    "schedule": optim.Adam(lr=0.01, overrides=OVERRIDES, schedule=optim.Cosine(20, warmup_steps=3)),
    "asgd": optim.ASGD(lr=0.01, lambd=0.1, overrides=OVERRIDES),
}
STEPS = 6


def settings(optimizer: optim.Optimizer, step: int) -> dict[int, dict[str, float]]:
    """Return settings by step: of no group, of one or of both."""
    names = [name for name in ("momentum", "beta1", "weight_decay", "lambd", "lr") if name in optimizer.values()]
    values = {name: optimizer.values()[name] * (0.9 - 0.1 * step) for name in names}
    other = {"lr": 0.5 ** (step + 1), "weight_decay": 0.01 * step}
    return [{}, {0: values}, {1: other}, {0: values, 1: other}, {0: {"lr": 0.0}}, {1: values}][step]


async def prepare(handle: AsyncParameters, step: int) -> None:
    handle.settings = settings(handle.spec.optimizer, step)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
async def test_each_step_has_the_settings_that_its_pushes_carry(
    cluster: EmbeddedCluster, optimizer: optim.Optimizer
) -> None:
    expected = reference_run(optimizer, steps=STEPS, settings=[settings(optimizer, step) for step in range(STEPS)])
    assert len(set(expected)) == STEPS
    await check_run(Workers(cluster), expected, prepare, optimizer)


#: All that the pushes of a step may carry, by step: factors, values written before, and the weight of each rank.
CARRIED: dict[str, list[Any]] = {
    "factor": [1.0, 0.25, 3.0, 1 / 3, 1e-4, 1.0],
    "written": [{"w1": np.full(SHAPES["w1"], step, np.float32)} if step % 2 else {} for step in range(STEPS)],
    "weights": [(3.0, 1.0), (1.0, 1.0), (0.0, 7.5), (1000.0, 24.0), (0.0, 0.0), (1e-3, 0.25)],
}


async def prepare_all(handle: AsyncParameters, step: int) -> None:
    await prepare(handle, step)
    handle.lr_factor = CARRIED["factor"][step]
    await handle.assign(CARRIED["written"][step])


@pytest.mark.parametrize(("transport", "killed"), [("grpc", -1), ("tcp", 3)])
async def test_a_push_carries_all_over_other_transports_and_past_a_killed_server(
    transport: TransportName, killed: int
) -> None:
    optimizer = OPTIMIZERS["sgd"]
    carried = {"settings": [settings(optimizer, step) for step in range(STEPS)]} | CARRIED
    expected = reference_run(optimizer, steps=STEPS, **carried)
    run = {"prepare": prepare_all, "optimizer": optimizer, "weights": CARRIED["weights"]}
    await check_run_of_copies(expected, transport, killed, **run)


@pytest.mark.parametrize("consistency", [ASP(), SSP(2)])
async def test_a_push_that_is_applied_alone_has_its_own(cluster: EmbeddedCluster, consistency: ASP | SSP) -> None:
    spec = optim.SGD(lr=0.5)
    expected = Reference(spec, workers=1)
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, consistency, spec)
        for step, decay in enumerate((0.0, 0.25, 0.5, 0.125)):
            handle = workers.handles[step % WORKERS]
            await handle.pull()  # So that its gradient is not stale.
            handle.settings = {0: {"weight_decay": decay}}
            await handle.push(split(gradient(step, 0)))
            assert joined(await handle.pull()) == expected.train(settings=handle.settings), f"push {step}"


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e9])
async def test_workers_of_a_step_that_differ_are_told(cluster: EmbeddedCluster, max_grad_norm: float) -> None:
    """Check that the step has the settings of the lowest rank, and the others may continue."""
    async with Workers(cluster) as workers:
        await workers.open(PLAIN, BSP(), optim.SGD(lr=1.0, max_grad_norm=max_grad_norm))
        workers.handles[0].settings, workers.handles[1].settings = {0: {"lr": 0.5}}, {}
        pushes = [handle.push(split(np.ones(TOTAL, np.float32))) for handle in workers.handles]
        first, second = await asyncio.gather(*pushes, return_exceptions=True)
        assert first is None
        with pytest.raises(InvalidArgumentError, match=r"lr=1\.0 of group 0 in step 0 .* lr=0\.5, set by worker-"):
            raise second  # type: ignore[misc]  # an exception, as the check shows
        workers.handles[1].settings = None
        await workers.handles[1].push(split(np.ones(TOTAL, np.float32)))  # The same step, which was made.
        await asyncio.gather(*(handle.push(split(np.ones(TOTAL, np.float32))) for handle in workers.handles))
        weights = joined(await workers.handles[0].pull())
        assert weights == (initial() - np.float32(0.5) - np.float32(0.5)).tobytes()


async def test_a_setting_stays_until_it_is_set_again(cluster: EmbeddedCluster) -> None:
    async with AsyncClient(cluster.address, cluster.token, rank=0) as client:
        values = {"w": np.zeros(4, np.float32)}
        handle = await client.parameters("stays", values, optim.SGD(lr=1.0))
        assert handle.settings is None
        handle.settings = {0: {"lr": 0.25, "weight_decay": 0.0}}
        assert handle.settings == {0: {"lr": 0.25}}
        for _ in range(2):
            await handle.push({"w": np.ones(4, np.float32)})
        handle.settings = {}
        await handle.push({"w": np.ones(4, np.float32)})
        assert (await handle.pull())["w"].tolist() == [-1.5] * 4


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ((Setting(0, "lr", -1.0),), "sgd lr=-1.0 is out of range"),
        ((Setting(0, "lr", float("nan")),), "sgd lr=nan is out of range"),
        ((Setting(0, "beta1", 0.5),), "SGD has no hyperparameter 'beta1'"),
        ((Setting(7, "lr", 0.5),), "settings of group 7"),
        ((Setting(0, "momentum", 0.5),), "momentum cannot change from 0 to 0.5"),
        ((Setting(0, "lr", 0.5),) * 2, "is given twice"),
        ((Setting(0, "lr", 0.5),) * 5000, "5000 settings in one message: send .* at most 4096"),
    ],
)
@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_what_cannot_be_set_is_refused(
    cluster: EmbeddedCluster, transport: TransportName, sent: Any, said: str
) -> None:
    """Check that servers refuse it from callers without the client's check. The step is not made, and can be made
    afterwards."""
    async with AsyncClient(cluster.address, cluster.token, rank=0, transport=transport) as client:
        values = {"w": np.zeros(4, np.float32)}
        handle = await client.parameters("refused", values, optim.SGD(lr=0.5))
        step = handle.step
        handle.participation.push_options = PushOptions(settings=sent)
        with pytest.raises((InvalidArgumentError, LimitExceededError), match=said):
            await handle.push({"w": np.ones(4, np.float32)})
        handle.settings = None
        await handle.push({"w": np.ones(4, np.float32)})
        assert handle.step == step + 1
        with pytest.raises(InvalidArgumentError, match="settings of group 1"):
            handle.settings = {1: {"lr": 0.5}}
        assert handle.settings is None


async def test_a_rate_and_a_factor_that_no_float32_holds_are_refused(cluster: EmbeddedCluster) -> None:
    async with AsyncClient(cluster.address, cluster.token, rank=0) as client:
        handle = await client.parameters("large", {"w": np.zeros(4, np.float32)}, optim.SGD(lr=0.5))
        handle.settings = {0: {"lr": 1e35}}
        with pytest.raises(InvalidArgumentError, match=r"lr=1e\+35 of group 0 times it is beyond float32"):
            handle.lr_factor = 1e9
        handle.settings = None
        handle.lr_factor = 1e9
        with pytest.raises(InvalidArgumentError, match=r"lr=1e\+35 of group 0 times it is beyond float32"):
            handle.settings = {0: {"lr": 1e35}}


async def test_the_bytes_are_those_of_float64_too(cluster: EmbeddedCluster) -> None:
    async with AsyncClient(cluster.address, cluster.token, rank=0) as client:
        spec = replace(OPTIMIZERS["sgd"], overrides=())
        values = {"w": np.linspace(-1, 1, 8)}
        handle = await client.parameters("double", values, spec, master_dtype="float64")
        weights, buffer = values["w"].copy(), np.zeros(8)
        for step, momentum in enumerate((0.9, 0.5, 0.7)):
            handle.settings = {0: {"momentum": momentum, "weight_decay": 0.1 * step}}
            await handle.push({"w": np.ones(8)})
            buffer = momentum * buffer + (0.5 if step else 1.0) * (1.0 + (0.1 * step) * weights)
            weights = weights - 0.1 * buffer
        assert (await handle.pull())["w"].tobytes() == weights.tobytes()
