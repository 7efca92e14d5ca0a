"""Memory of a server: 12 bytes per parameter with Adam, two slices per connected worker (over tcp four), and 150 MB for
everything else.

Workers that share memory also lend it the memory of their gradients; every process that reads it counts it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from psdist import AsyncClient, optim
from psdist.compression.kernel_runtime import LARGE_ELEMENTS
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from psdist.types import choose_slice_elements
from psdist.wire import limits

ELEMENTS = 8_000_000
OTHER_BYTES = 150_000_000


def peak_bytes(pid: int) -> int:
    """Return the most memory that the process ever had in RAM (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def has_mapped(pid: int, library: str) -> bool:
    """True if the process has loaded a library."""
    return library in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("transport", ["grpc", *(pytest.param(one, marks=pytest.mark.long) for one in ("tcp", "shm"))])
# One worker needs less of it.
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 4])
async def test_server_memory_stays_within_its_bound(workers: int, transport: TransportName) -> None:
    cluster = EmbeddedCluster(servers=1)
    clients = [AsyncClient(cluster.address, cluster.token, rank=rank, transport=transport) for rank in range(workers)]
    try:
        await asyncio.gather(*(client.connect() for client in clients))
        init = {"w": np.ones(ELEMENTS, np.float32)}
        handles = await asyncio.gather(
            *(client.parameters("p", init=init, optimizer=optim.Adam()) for client in clients)
        )
        for _ in range(5):
            await asyncio.gather(*(handle.push_pull(init) for handle in handles))
        status = await clients[0].status()
        (server,) = [member for member in status.members if member.member_id == "server-0"]
        lent = 4 * ELEMENTS * workers if transport == "shm" else 0
        slices = limits.TCP_WINDOW_SLICES if transport == "tcp" else limits.HELD_SLICES_MAX
        bound = 12 * ELEMENTS + slices * workers * choose_slice_elements(ELEMENTS) * 4 + OTHER_BYTES + lent
        peak = peak_bytes(server.pid)
        print(f"peak {peak / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB")
        assert peak <= bound
    finally:
        await asyncio.gather(*(client.close() for client in clients))
        cluster.close()


async def test_a_server_of_small_vectors_does_without_the_compiler() -> None:
    """Check that it saves the compiler's memory, and half a second at its start."""
    cluster = EmbeddedCluster(servers=1)
    client = AsyncClient(cluster.address, cluster.token)
    try:
        await client.connect()
        loaded = []
        for name, elements in ("small", 1000), ("large", LARGE_ELEMENTS):
            values = {"w": np.ones(elements, np.float32)}
            handle = await client.parameters(name, init=values, optimizer=optim.Adam())
            await handle.push_pull(values)
            status = await client.status()
            (server,) = [member for member in status.members if member.member_id == "server-0"]
            loaded.append(has_mapped(server.pid, "llvmlite"))
        assert loaded == [False, True]
    finally:
        await client.close()
        cluster.close()
