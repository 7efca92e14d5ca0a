"""Workers in one process whose weights are compared with a reference, in one push or in buckets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest_asyncio

from psdist import AsyncClient, AsyncParameters, optim
from psdist.client.core import flat_vector
from psdist.client.core.encoder import GradientEncoder
from psdist.compression import (
    Codec,
)
from psdist.compression.background_compiler import LARGE_ELEMENTS
from psdist.consistency import BSP, Consistency
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from psdist.types import Slicing
from tests.support.exact_runs import SLICE, TOTAL, gradient, initial, joined, split

ADAM = optim.Adam(lr=1e-2)
WORKERS, STEPS = 2, 4
LAYOUT = flat_vector.layout_of(split(initial()))
SLICING = Slicing(TOTAL, SLICE)
_numbers = itertools.count()


def decoded(encoder: GradientEncoder | None, flat: np.ndarray) -> np.ndarray:
    """Return a gradient as servers decode it."""
    if encoder is None:
        return flat
    push, out = encoder.begin_push(), np.empty(TOTAL, np.float32)
    assert encoder.encode(push, flat, range(SLICING.count))
    for index in range(SLICING.count):
        start, stop = SLICING.bounds(index)
        push.decode_into(index, out[start:stop])
    encoder.end_push()
    return out


class Workers:
    """The workers of a cluster, in this process."""

    def __init__(self, cluster: EmbeddedCluster, transport: TransportName = "auto") -> None:
        self.clients = [
            AsyncClient(cluster.address, cluster.token, rank=rank, transport=transport) for rank in range(WORKERS)
        ]
        self.handles: list[AsyncParameters] = []

    async def open(
        self,
        codecs: Sequence[Codec],
        consistency: Consistency | None = None,
        optimizer: optim.Optimizer = ADAM,
        pull: Codec | None = None,
    ) -> None:
        await asyncio.gather(*(client.connect() for client in self.clients))
        name = f"p-{next(_numbers)}" if not self.handles else self.handles[0].name
        self.handles = await asyncio.gather(
            *(
                client.parameters(
                    name, split(initial()), optimizer, consistency or BSP(), codec, slice_elements=SLICE,
                    non_finite="skip", pull_compression=pull,
                )
                for client, codec in zip(self.clients, codecs, strict=True)
            )
        )  # fmt: skip

    async def load_kernels(self) -> None:
        """Make servers load compiled kernels, by a large set. Otherwise numpy does their work, with the same bytes."""
        await asyncio.gather(*(client.connect() for client in self.clients))
        large = {"w": np.zeros(LARGE_ELEMENTS, np.float32)}
        await asyncio.gather(*(client.parameters("large", large, ADAM) for client in self.clients))

    async def step(self, step: int) -> bytes:
        results = await asyncio.gather(
            *(handle.push_pull(split(gradient(step, rank))) for rank, handle in enumerate(self.handles))
        )
        assert joined(results[0]) == joined(results[1])
        return joined(results[0])

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    cluster = await asyncio.to_thread(EmbeddedCluster, 2)
    yield cluster
    await asyncio.to_thread(cluster.close)


async def in_buckets(handle: AsyncParameters, values: dict[str, np.ndarray]) -> bytes:
    """Make a step in buckets: the last layers first."""
    buckets = [await handle.push_pull_async({name: values[name]}) for name in reversed(values)]
    weights: dict[str, np.ndarray] = {}
    for bucket in buckets:
        weights |= {name: array.copy() for name, array in (await bucket).items()}
    return joined(weights)


async def in_buffers(handle: AsyncParameters, values: dict[str, np.ndarray]) -> bytes:
    """Make a step of the gradient buffers, which stay unchanged."""
    buffers = await handle.gradient_buffers()
    for name, array in buffers.items():
        array[...] = values[name]
    weights = await handle.push_pull(buffers)
    assert all((buffers[name] == values[name]).all() for name in buffers)
    return joined(weights)


async def psdist_close(client: AsyncClient) -> None:
    """Leave without another snapshot."""
    if client.snapshots is not None:
        client.snapshots.close()
    await client.close()
