"""TCP connections over TLS with real processes: training, copies and collectives have the bytes of plaintext."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from psdist import BSP, AsyncParameters, optim
from psdist.client.transport.tcp import TcpConnection
from psdist.collectives.mesh import Mesh
from psdist.launcher.embedded import EmbeddedCluster
from psdist.link.tls_layer import TlsLayer
from psdist.security.certificates import KeyPair
from psdist.security.tls import TlsFiles
from tests.support.certificates import make_ca, write_tls
from tests.support.clients import connected
from tests.support.collective_run import SIZE as RANKS
from tests.support.collective_run import Run, arrays

WORKERS, STEPS, KILLED_AT, SIZE = 2, 10, 4, 60_000


def over_tcp() -> dict[str, str]:
    """Return the environment of servers that replicate over TCP, though all are on this host."""
    return {**os.environ, "PSDIST_TRANSPORT": "tcp"}


@pytest.fixture(scope="module")
def ca() -> KeyPair:
    return make_ca()


@pytest.fixture(scope="module")
def files(ca: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Identity of the workers."""
    return write_tls(tmp_path_factory.mktemp("worker"), ca)


@pytest.fixture(scope="module")
def encrypted(ca: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Three servers, which replicate over TCP."""
    files = write_tls(tmp_path_factory.mktemp("server"), ca, "server")
    cluster = EmbeddedCluster(servers=3, environ=over_tcp(), replicas=2, failure_timeout=6.0, tls=files)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def plaintext() -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(servers=2)
    yield cluster
    cluster.close()


def streams(handle: AsyncParameters) -> list[TcpConnection]:
    return list(handle.participation.tcp.connections.values())


async def train(cluster: EmbeddedCluster, tls: TlsFiles | None, *, kill: bool = False) -> bytes:
    """Train, with a server killed on the way. Returns the weights."""
    async with connected(cluster, *["tcp"] * WORKERS, tls=tls or False) as clients:
        init = {"w": np.zeros(SIZE, np.float32)}
        optimizer = optim.Adam(lr=0.01, max_grad_norm=5.0)
        handles = await asyncio.gather(
            *(
                client.parameters("model", init=init, optimizer=optimizer, consistency=BSP(), slice_elements=1 << 12)
                for client in clients
            )
        )
        await asyncio.gather(*(work(cluster, handle, rank, kill) for rank, handle in enumerate(handles)))
        for handle in handles:
            assert handle.statistics().transport == "tcp"
            transports = [one.connection._transport for one in streams(handle) if one.broken is None]
            assert len(transports) >= 2 and all(isinstance(one, TlsLayer) is bool(tls) for one in transports)
        return (await handles[0].pull())["w"].tobytes()


async def work(cluster: EmbeddedCluster, handle: AsyncParameters, rank: int, kill: bool) -> None:
    rng = np.random.default_rng(rank)
    for step in range(STEPS):
        if kill and rank == 0 and step == KILLED_AT:
            cluster.processes[1].send_signal(signal.SIGKILL)  # The first one is the scheduler.
        # Whole numbers: their sums do not depend on the order in which they are added.
        await handle.push_pull({"w": rng.integers(-8, 9, SIZE).astype(np.float32)})


async def test_collectives_over_tls(
    encrypted: EmbeddedCluster, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mesh, "shares", False)
    async with connected(encrypted, *["tcp"] * RANKS, tls=files) as clients:
        run, given = Run(clients), arrays(1_000_003)
        total = (given[0] + given[1] + given[2]).tobytes()
        for count in (1_000_003, 100):
            expected = total if count > 100 else (given[0][:100] + given[1][:100] + given[2][:100]).tobytes()
            results = await run.all(lambda group, count=count: group.all_reduce(given[group.rank][:count]))
            assert [one.tobytes() for one in results] == [expected] * RANKS


async def test_training_over_tls_has_the_bytes_of_plaintext_though_a_server_is_killed(
    encrypted: EmbeddedCluster, plaintext: EmbeddedCluster, files: TlsFiles
) -> None:
    expected = await train(plaintext, None)
    assert np.any(np.frombuffer(expected, np.float32))
    assert await train(encrypted, files, kill=True) == expected
