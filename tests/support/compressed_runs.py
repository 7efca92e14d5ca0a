"""Workers in one process whose weights are compared with a reference, in one push or in buckets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from psdist import AsyncClient, AsyncParameters, optim
from psdist.client.core import flat_vector
from psdist.client.core.encoder import GradientEncoder, encoder_of
from psdist.compression import BFloat16, Codec, Float32
from psdist.compression.kernel_runtime import LARGE_ELEMENTS
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


def decoded(codec: Codec, encoder: GradientEncoder, flat: np.ndarray) -> np.ndarray:
    """Return a gradient as servers decode it."""
    if isinstance(codec, Float32 | BFloat16):
        return flat.astype(ml_dtypes.bfloat16).astype(np.float32) if isinstance(codec, BFloat16) else flat
    push, out = encoder.begin_push(), np.empty(TOTAL, np.float32)
    assert encoder.encode(push, flat, range(SLICING.count))
    for index in range(SLICING.count):
        start, stop = SLICING.bounds(index)
        push.decode_into(index, out[start:stop])
    encoder.end_push()
    return out


def encoded(codecs: Sequence[Codec]) -> Callable[[int, int], np.ndarray]:
    """Return the gradient of a step and a rank as servers decode it; ask for each once, in order."""
    encoders = [encoder_of(codec, LAYOUT, SLICING, rank) for rank, codec in enumerate(codecs)]
    return lambda step, rank: decoded(codecs[rank], encoders[rank], gradient(step, rank))


class Workers:
    """The workers of a cluster, in this process."""

    def __init__(self, cluster: EmbeddedCluster, transport: TransportName = "auto") -> None:
        self.cluster = cluster
        self.clients = [
            AsyncClient(cluster.address, cluster.token, rank=rank, transport=transport) for rank in range(WORKERS)
        ]
        self.handles: list[AsyncParameters] = []

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))

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
