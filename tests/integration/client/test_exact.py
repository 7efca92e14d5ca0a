"""BSP is exact: W workers and S servers, over each transport and with real server processes, give the exact bytes of a
plain single-process numpy reference that adds the gradients in rank order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from psdist import AsyncClient, AsyncParameters, optim
from psdist.compression.kernel_runtime import LARGE_ELEMENTS
from psdist.consistency import BSP
from psdist.launcher.embedded import EmbeddedCluster
from psdist.optim import Optimizer
from psdist.settings.config import TransportName
from tests.support.clients import connected
from tests.support.exact_runs import OPTIMIZERS, SLICE, STEPS, TOTAL, gradient, initial, joined, reference_run, split

#: Optimizers under make test, whose servers load the kernels of each. The property tests compare all kernels.
_BRIEFLY = ("sgd", "momentum-warm-clipped", "overrides-warm-clipped", "ftrl")
_CASES = [
    # Several workers and servers that do not divide each other.
    pytest.param(3, 2, "auto", _BRIEFLY),
    *(
        pytest.param(*case, tuple(OPTIMIZERS), marks=pytest.mark.long)
        for case in itertools.product((1, 2, 3, 5), (1, 2, 4), ("auto", "tcp"))
    ),
]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(servers=request.param)
    yield cluster
    cluster.close()


async def create(client: AsyncClient, name: str, spec: Optimizer) -> AsyncParameters:
    # Only the values of the lowest rank count.
    values = initial() if client.rank == 0 else np.zeros(TOTAL, np.float32)
    return await client.parameters(name, init=split(values), optimizer=spec, consistency=BSP(), slice_elements=SLICE)


@pytest.mark.parametrize(("cluster", "workers", "transport", "names"), _CASES, indirect=["cluster"], scope="module")
async def test_weights_are_byte_identical_to_the_reference(
    cluster: EmbeddedCluster, workers: int, transport: TransportName, names: Sequence[str]
) -> None:
    async with connected(cluster, *[transport] * workers) as clients:
        if workers > 1:  # Makes servers load compiled kernels; else numpy does their work, with the same bytes.
            large = {"w": np.zeros(LARGE_ELEMENTS, np.float32)}
            await asyncio.gather(
                *(client.parameters("large", init=large, optimizer=optim.SGD(0.1)) for client in clients)
            )
        for name in names:
            spec = OPTIMIZERS[name]
            handles = await asyncio.gather(
                *(create(client, f"{name}-{workers}-{transport}-{len(names)}", spec) for client in clients)
            )
            expected = reference_run(spec, workers)
            assert joined(await handles[-1].pull()) == initial().tobytes()
            for step in range(STEPS):
                results = await asyncio.gather(
                    *(handle.push_pull(split(gradient(step, rank))) for rank, handle in enumerate(handles))
                )
                assert all(joined(values) == expected[step] for values in results), f"{name}, step {step}"
            assert [handle.version for handle in handles] == [STEPS] * workers
