"""Shared memory between workers and servers gives the exact bytes of gRPC and of the reference, and status shows it.

Real scheduler and servers. Every test asserts that memory was shared where expected: a fallback would pass as well.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import count
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import AsyncClient, AsyncParameters
from psdist.cli.status import print_status
from psdist.client.transport.shm import ShmConnection
from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.launcher.embedded import EmbeddedCluster
from psdist.link import processes
from psdist.monitoring.run_json import status_json
from psdist.settings.config import TransportName
from psdist.v1 import scheduler_pb2
from tests.support.clients import connected
from tests.support.exact_runs import (
    OPTIMIZERS,
    STEPS,
    TOTAL,
    gradient,
    initial,
    joined,
    reference_run,
    split,
)

SGD = psdist.optim.SGD(lr=1.0)
#: Optimizers that take different paths through the kernels.
SOME = ("adam", "nesterov", "overrides", "lion-warm-clipped")


# Three servers have a different number of slices each. Other numbers cover no further case.
@pytest.fixture(
    scope="module",
    params=[3, *(pytest.param(servers, marks=pytest.mark.long) for servers in (1, 2))],
    ids=lambda servers: f"S{servers}",
)
def cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(servers=request.param)
    yield cluster
    cluster.close()
    assert not list(processes.DIRECTORY.glob("psdist-*"))


async def opened(clients: list[AsyncClient], name: str, **settings: Any) -> list[AsyncParameters]:
    given: dict[str, Any] = {"init": split(initial()), "optimizer": SGD} | settings
    return list(await asyncio.gather(*(client.parameters(name, **given) for client in clients)))


def check_transports(
    clients: list[AsyncClient], handles: list[AsyncParameters], transports: list[TransportName]
) -> None:
    for handle, transport in zip(handles, transports, strict=True):
        assert handle.statistics().transport == ("shm" if transport == "auto" else transport), handle.statistics()


# --- the same bytes ---------------------------------------------------------------------------------------------------

MIXES: tuple[list[TransportName], ...] = (
    ["shm"],
    ["tcp"],
    ["shm", "shm"],
    ["grpc", "shm"],
    ["tcp", "tcp"],
    ["shm", "auto", "tcp", "grpc"],
)


@pytest.mark.parametrize(
    ("transports", "slice_elements"),
    [
        pytest.param(mix, size, marks=[] if brief or mix == MIXES[-1] else [pytest.mark.long])
        for mix in MIXES
        for size, brief in ((4096, True), (1000, False))
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
async def test_bytes_are_those_of_the_reference(
    cluster: EmbeddedCluster, transports: list[TransportName], slice_elements: int
) -> None:
    # Clipping adds the slices' squares in order, so the reference is for one slice size.
    names = [name for name in SOME if slice_elements == 4096 or "clipped" not in name]
    async with connected(cluster, *transports) as clients:
        for name in names:
            title = f"{name}-{slice_elements}-{'-'.join(transports)}"
            handles = await opened(clients, title, optimizer=OPTIMIZERS[name], slice_elements=slice_elements)
            expected = reference_run(OPTIMIZERS[name], len(transports))
            assert joined(await handles[-1].pull()) == initial().tobytes()
            for step in range(STEPS):
                results = await asyncio.gather(
                    # Results that are views of the servers' memory, and results that are copies.
                    *(
                        handle.push_pull(split(gradient(step, rank)), copy=bool(rank % 2))
                        for rank, handle in enumerate(handles)
                    )
                )
                assert all(joined(values) == expected[step] for values in results), f"{title}, step {step}"
            check_transports(clients, handles, transports)


@pytest.mark.parametrize(
    ("compression", "pull_dtype"),
    [("float16", "float32"), ("bfloat16", "float32"), (None, "bfloat16"), ("bfloat16", "float16")],
)
async def test_bytes_are_those_of_grpc_in_fewer_bits(
    cluster: EmbeddedCluster, compression: str | None, pull_dtype: str
) -> None:
    async with connected(cluster, "shm", "grpc", "tcp") as clients:
        results = []
        # The same training twice: each worker by its transport, then with the ranks' gradients exchanged.
        for turn in (0, 1):
            handles = await opened(
                clients,
                f"bits-{compression}-{pull_dtype}-{turn}",
                optimizer=psdist.optim.Adam(lr=0.01),
                compression=compression,
                pull_dtype=pull_dtype,
                slice_elements=5000,
            )
            for step in range(3):
                values = await asyncio.gather(
                    *(handle.push_pull(split(gradient(step, 1))) for rank, handle in enumerate(handles))
                )
            check_transports(clients, handles, ["shm", "grpc", "tcp"])
            results += [joined(value) for value in values]
            results += [joined(await handle.pull(copy=False)) for handle in handles]
            sent = [handle.statistics().push_bytes for handle in handles]
            assert sent[0] == sent[1] == sent[2] == 3 * TOTAL * (2 if compression else 4)
        assert len(set(results)) == 1


async def test_gradients_in_the_arena_and_weights_in_place(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "shm", "shm") as clients:
        handles = await opened(clients, "in-place", optimizer=OPTIMIZERS["adam"], slice_elements=4096)
        buffers = [await handle.gradient_buffers() for handle in handles]
        expected = reference_run(OPTIMIZERS["adam"], 2)
        addresses = set()
        for step in range(STEPS):
            for rank, buffer in enumerate(buffers):
                for name, values in split(gradient(step, rank)).items():
                    buffer[name][...] = values
            results = await asyncio.gather(
                *(handle.push_pull(buffer, copy=False) for handle, buffer in zip(handles, buffers, strict=True))
            )
            assert [joined(values) for values in results] == [expected[step]] * 2
            assert not any(values["w2"].flags.writeable for values in results)
            addresses.add(results[0]["w2"].__array_interface__["data"][0])
        # Always the same memory, which the servers write.
        assert len(addresses) == 1


# --- asynchronous -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", [ASP(), SSP(2), BSP(backup_workers=1)], ids=["asp", "ssp", "backup"])
async def test_every_push_counts_once_and_versions_are_told(cluster: EmbeddedCluster, consistency: Consistency) -> None:
    async with connected(cluster, "shm", "grpc", "tcp") as clients:
        handles = await opened(
            clients, f"moving-{type(consistency).__name__}", init={"w": np.zeros(9000, np.float32)},
            consistency=consistency, slice_elements=1 << 12,
        )  # fmt: skip

        async def train(handle: AsyncParameters) -> None:
            while handle.step < 20:
                values = (await handle.push_pull({"w": np.full(9000, -1.0, np.float32)}))["w"]
                assert values.min() >= handle.version
                assert handle.version <= values.max()

        await asyncio.gather(*(train(handle) for handle in handles))
        check_transports(clients, handles, ["shm", "grpc", "tcp"])
        final = (await handles[0].pull())["w"]
        if isinstance(consistency, BSP):
            assert set(final.tolist()) <= {float(v) for v in range(20, 61)}
        else:
            assert set(final.tolist()) == {60.0} and handles[0].version == 60


async def test_who_only_reads_shares_weights(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "shm") as clients:
        (trained,) = await opened(clients, "read")
        expected = joined(await trained.push_pull(split(gradient(0, 0))))
        async with AsyncClient(cluster.address, cluster.token, rank=1, transport="shm") as reader:
            read = await reader.parameters("read")
            assert joined(await read.pull()) == expected and joined(await read.pull(copy=False)) == expected
            check_transports([*clients, reader], [trained, read], ["shm", "shm"])


async def torn_pulls(clients: list[AsyncClient], name: str, pulls: int) -> int:
    """Pull in one worker while two others push. Returns how many pulls held a slice with mixed versions."""
    size, cut = 1 << 20, 1 << 18
    handles = await opened(clients, name, init={"w": np.zeros(size, np.float32)}, consistency=ASP(), slice_elements=cut)
    ending = False

    async def push(handle: AsyncParameters) -> None:
        buffer = await handle.gradient_buffers()
        buffer["w"][...] = -1.0
        while not ending:
            await handle.push(buffer)

    pushing = [asyncio.create_task(push(handle)) for handle in handles[1:]]
    torn, moved = 0, set()
    for _ in range(pulls):
        values = (await handles[0].pull(copy=False))["w"]
        slices = [values[start : start + cut] for start in range(0, size, cut)]
        torn += any(part.min() != part.max() for part in slices)
        moved.add(float(values[0]))
        if not torn:  # Each push adds 1 to all weights.
            assert handles[0].version == min(part[-1] for part in slices)
    ending = True
    await asyncio.gather(*pushing)
    assert len(moved) > 10, "nothing was pushed meanwhile"
    check_transports(clients, handles, ["shm", "shm", "shm"])
    return torn


async def test_no_read_is_torn(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(cluster, "shm", "shm", "shm") as clients:
        assert await torn_pulls(clients, "whole", 150) == 0

        async def careless(self: ShmConnection, index: int, target: np.ndarray) -> int:
            target[...] = self.view(index)
            return int(target[-1])

        monkeypatch.setattr(ShmConnection, "copy_moving", careless)
        tries = count()
        while not await torn_pulls(clients, f"torn-{next(tries)}", 150):
            """A busy machine may give each its turn between the others' copies."""


# --- statistics -------------------------------------------------------------------------------------------------------


async def test_status_shows_each_connection_and_why(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto", "grpc") as clients:
        handles = await opened(clients, "shown")
        await asyncio.gather(*(handle.pull() for handle in handles))
        servers = sorted(handles[0].statistics().transports)
        while True:
            report = await clients[0].status()
            shown = {member.member_id: member.connections for member in report.members}
            told = [one for one in shown["worker-0"] if one.transport == "shm"]
            if len(told) == len(servers) and shown["worker-1"]:
                break
            # Heartbeats report it, every 2.5 s.
            await clients[0].session.membership.view.changed(0.1)
        assert sorted(one.server_id for one in told) == servers
        assert {one.parameters for one in told} == {"shown"}
        assert [one.transport for one in shown["worker-1"]] == ["grpc"] * len(servers)
        assert {one.reason for one in shown["worker-1"]} == {"the transport is 'grpc'"}

        answer = await clients[0].session.calls.stub.GetStatus(
            scheduler_pb2.GetStatusRequest(),
            metadata=clients[0].session.calls.metadata,
        )
        form = status_json(answer)
        (mine,) = [member for member in form["members"] if member["id"] == "worker-0"]
        shared = {"server": servers[0], "parameters": "shown", "transport": "shm", "reason": "", "compression": ""}
        assert shared in mine["connections"]
        with redirect_stdout(io.StringIO()) as text:
            print_status(answer)
        assert f"worker-0 - {servers[0]}" in text.getvalue() and "the transport is 'grpc'" in text.getvalue()
