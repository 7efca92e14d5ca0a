"""A worker with gradients on a device trains like one with the same gradients on the host, over every transport, with
real servers. The device is the processor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import psdist
from psdist import AsyncClient
from psdist.client import device_vectors as device_arrays
from psdist.compression import BFloat16, Codec, Int8, TopK
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from tests.support.host_arrays import HostArray, HostArrays
from tests.support.host_device import needs_compiler

pytestmark = needs_compiler
#: Gives every parameter set a name of its own.
_numbers = count()
INIT = {"w": np.ones((100, 300), np.float32), "b": np.zeros(77, np.float32)}


@pytest_asyncio.fixture(params=["shm", "tcp", "grpc"])
async def client(request: pytest.FixtureRequest, cluster: EmbeddedCluster) -> AsyncIterator[AsyncClient]:
    transport: TransportName = request.param
    client = await AsyncClient(cluster.address, cluster.token, rank=0, transport=transport).connect()
    yield client
    await client.close()


@pytest.mark.parametrize(
    "codec", [None, BFloat16(), Int8(), TopK(0.05, momentum=0.9)], ids=["none", "bfloat16", "int8", "topk"]
)
async def test_training_is_that_of_gradients_on_the_host(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, codec: Codec | None
) -> None:
    made = HostArrays()
    monkeypatch.setattr(device_arrays, "open_arrays", {0: made}.__getitem__)
    settings: dict[str, Any] = {"init": INIT, "optimizer": psdist.optim.Adam(lr=0.01), "compression": codec}
    host, device = [await client.parameters(f"{where}-{next(_numbers)}", **settings) for where in ("host", "device")]
    rng = np.random.default_rng(0)
    for _ in range(4):
        gradient = {name: rng.standard_normal(array.shape).astype(np.float32) for name, array in INIT.items()}
        await host.push(gradient)
        await device.push({name: HostArray(array.copy()) for name, array in gradient.items()})
    expected, found = await host.pull(), await device.pull(device="cuda")
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].values, array)
        assert not np.array_equal(array, INIT[name])
    assert device.statistics().push_bytes == host.statistics().push_bytes
    await device.release_memory()
    assert not made.device.registered
