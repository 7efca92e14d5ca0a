"""Parameters that a hand-written client creates wrongly while others train: settings, commits, initial values.

The workers of the training create them, since a parameter set gathers all live workers.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import psdist
from psdist import errors
from psdist.v1 import common_pb2 as common
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc, server_pb2, server_pb2_grpc
from psdist.wire import auth
from tests.support.wire_peer import INIT, SGD, Peer, Training, check, gradient, refusal
from tests.support.wire_peer import training as training  # the fixture

pytestmark = pytest.mark.asyncio(loop_scope="session")

_numbers = itertools.count()


class Creator(Peer):
    """Peer that creates parameters by hand, as the workers of the training."""

    def who(self, rank: int) -> dict[str, Any]:
        """A worker of the training, as it names itself to the scheduler."""
        client = self.training.clients[rank]
        return {"run_id": client.run_id, "worker_id": client.worker_id, "incarnation": client.incarnation}

    def create(self, rank: int, name: str, optimizer: dict[str, Any] | None = None, **settings: Any) -> Any:
        """Call CreateParameters for a worker of the training, with two slices."""
        sgd = {"kind": "sgd", "values": psdist.optim.SGD().values()}
        spec = {"name": name, "consistency": common.Consistency(kind="bsp"), "slice_elements": 4}
        request = scheduler_pb2.CreateParametersRequest(
            **self.who(rank),
            spec=common.ParametersSpec(**(spec | settings), optimizer=common.Optimizer(**(sgd | (optimizer or {})))),
            layout=common.Layout(tensors=[common.Tensor(name="w", shape=[8], dtype=common.DTYPE_FLOAT32)]),
        )
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel(self.training.cluster.address))
        return stub.CreateParameters(request, metadata=self.metadata)

    async def install(self, cluster: common.ClusterMap, name: str, values: list[float], count: int) -> None:
        """Install the first ``count`` slices that ``create`` created: each has ``values`` four times."""
        entry = next(entry for entry in cluster.parameters if entry.spec.name == name)
        addresses = {server.server_id: server.address for server in cluster.servers}
        for index in range(count):
            address = addresses[entry.shards[index % len(entry.shards)].primary.server_id]
            identity = server_pb2.Identity(**self.who(0), epoch=cluster.epoch, parameters=name)
            request = server_pb2.InstallRequest(
                identity=identity, slice=index, payload=np.array(values * 4, np.float32).tobytes()
            )
            stub = server_pb2_grpc.ServerServiceStub(self.channel(address))
            await stub.Install(iter([request]), metadata=self.metadata)


@pytest_asyncio.fixture(loop_scope="session")
async def creator(training: Training) -> AsyncIterator[Creator]:
    made = Creator(training, auth.metadata(training.cluster.token))
    yield made
    await made.close()


async def until_upload(call: Any) -> AsyncIterator[scheduler_pb2.CreateParametersResponse]:
    """Return the answers to CreateParameters up to the one that asks for the values."""
    async for response in call:
        yield response
        if response.state == response.STATE_UPLOAD:
            return


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"optimizer": {"values": {"lr": 0.5}}},
            "SGD needs momentum, dampening, weight_decay, nesterov, which are missing",
        ),
        (
            {"optimizer": {"kind": "rprop", "values": psdist.optim.Rprop().values() | {"etaplus": 0.5}}},
            "rprop etaplus=0.5 is out of range: use more than 1",
        ),
        (
            {"optimizer": {"overrides": [common.Override(pattern="*", values={"nesterov": 1})]}},
            "nesterov=True needs momentum above 0",
        ),
        (
            {"optimizer": {"overrides": [common.Override(pattern="*", values={"end_factor": 1})]}},
            "end_factor needs a schedule that has one",
        ),
        ({"optimizer": {"schedule": common.Schedule(kind="constant")}}, "Constant needs warmup_steps, warmup_start"),
        ({"non_finite": 77}, "non_finite 77 is unknown"),
        ({"consistency": common.Consistency(kind="asp", staleness_lr=77)}, "staleness_lr 77 is unknown"),
    ],
    ids=["numbers", "range", "group", "end", "schedule", "policy", "enum"],
)
async def test_settings_by_hand_that_are_wrong(
    training: Training, creator: Creator, change: dict[str, Any], words: str
) -> None:
    call = creator.create(0, f"by-hand-{next(_numbers)}", **change)
    refused = await refusal(anext(aiter(call)))
    assert isinstance(refused, errors.InvalidArgumentError) and words in refused.message, refused
    await training.goes_on()


async def test_values_that_nobody_installed_are_not_committed(training: Training, creator: Creator) -> None:
    """Check that the call can be repeated once the values exist. The trainers create the parameters by hand, during
    their training."""
    name = f"by-hand-{next(_numbers)}"
    calls = [creator.create(rank, name) for rank in (0, 1)]
    upload = [response async for response in until_upload(calls[0])][-1]
    commit = scheduler_pb2.CommitParametersRequest(**creator.who(0), parameters=name, epoch=upload.map.epoch)
    scheduler = scheduler_pb2_grpc.SchedulerServiceStub(creator.channel(training.cluster.address))
    for count in (0, 1):
        await creator.install(upload.map, name, [4.0], count)
        refused = await refusal(scheduler.CommitParameters(commit, metadata=creator.metadata))
        missing = (
            rf"server-\d has initial values of [01] of its [12] slices of '{name}': Install all of them, then call"
        )
        assert isinstance(refused, errors.InvalidArgumentError) and re.match(missing, refused.message), refused
        await training.goes_on()
    await creator.install(upload.map, name, [4.0], 2)
    await scheduler.CommitParameters(commit, metadata=creator.metadata)
    for call in calls:
        assert [response async for response in call][-1].state == scheduler_pb2.CreateParametersResponse.STATE_READY
    await training.goes_on()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
async def test_initial_values_that_are_not_finite(training: Training, bad: float) -> None:
    """Check that the other worker waits meanwhile, and gets the values of the second attempt."""
    name = f"other-{next(_numbers)}"
    wrong = INIT | {"w": np.where(np.arange(8910).reshape(90, 99) == 5000, bad, 0).astype(np.float32)}
    waiting = asyncio.create_task(training.clients[1].parameters(name, INIT, SGD))
    with pytest.raises(errors.InvalidArgumentError, match="init 'w' holds 1 NaN or Inf of 8910"):
        await training.clients[0].parameters(name, wrong, SGD)
    await training.goes_on()
    one = await training.clients[0].parameters(name, INIT, SGD)
    two = await waiting
    await asyncio.gather(one.push(gradient()), two.push(gradient()))
    check(await one.pull(), 1)
    check(await two.pull(), 1)
    await training.goes_on()
