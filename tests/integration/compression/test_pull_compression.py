"""Compressed weights with real servers: workers hold the exact bytes of the reference weights that one process
computes, over each transport, in each kind of call, through the loss of a server, and through resumes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from psdist import AsyncClient, AsyncParameters
from psdist.compression import (
    BFloat16,
    ChunkedTopK,
    Codec,
    Float32,
    Int2,
    Int4,
    Int8,
    OneBit,
    PerTensor,
    PowerSGD,
    RandomK,
    TopK,
    segments,
)
from psdist.compression.specifications import Region
from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.errors import InvalidArgumentError, SettingsMismatchError, UnknownCodecError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from tests.support.clients import cluster_of, connected, leave_unsaved
from tests.support.compressed_runs import ADAM, SLICING, WORKERS, Workers
from tests.support.exact_runs import SLICE, TOTAL, Reference, gradient, initial, joined, split
from tests.support.weighted_pushes import PLAIN, check_run_of_copies, in_buckets, in_one

pytestmark = pytest.mark.asyncio(loop_scope="session")

CODECS: dict[str, Codec] = {
    "topk": TopK(0.02),
    "int8": Int8(block=100),
    "chunked": ChunkedTopK(8, 500, bits=2),
    "by chance": Int4(stochastic=True, seed=3),
    "int2": Int2(),
    "signs": OneBit(),
    "random": RandomK(0.1, seed=9),
}
BRIEFLY = [pytest.param(name, marks=[] if name in ("topk", "by chance") else [pytest.mark.long]) for name in CODECS]


class Published(Reference):
    """A run of plain gradients in one process, with the weights that its workers hold."""

    def __init__(self, codec: Codec | None) -> None:
        super().__init__(ADAM)
        self.codec, self.published = codec, initial()

    def next(self) -> bytes:
        """Make the next step. Returns the weights that workers hold after it."""
        self.train()
        for index in range(SLICING.count):
            self._publish(*SLICING.bounds(index))
        return self.published.tobytes()

    def _publish(self, start: int, stop: int) -> None:
        part = slice(start, stop)
        if self.codec is None:
            self.published[part] = self.weights[part]
            return
        codec = self.codec if stop - start >= 64 else Float32()
        region = Region(start, stop, codec, (stop - start,))
        difference = self.weights[part] - self.published[part]
        prepared = segments.prepare(region, difference, segments.PushNumber(0, self.step))
        out = np.empty(segments.payload_limit(stop - start), np.uint8)
        size = segments.encode([prepared], start, stop, out)
        sent = np.zeros(stop - start, np.float32)
        segments.accumulate(out[:size], sent)
        self.published[part] += sent


async def in_place(handle: AsyncParameters, values: dict[str, np.ndarray]) -> bytes:
    """Make a step whose result is read in place."""
    return joined(await handle.push_pull(values, copy=False))


async def into_arrays(handle: AsyncParameters, values: dict[str, np.ndarray]) -> bytes:
    """Push, then pull into arrays of the caller."""
    await handle.push(values)
    out = {name: np.empty_like(array) for name, array in values.items()}
    return joined(await handle.pull(out))


async def as_new_arrays(handle: AsyncParameters, values: dict[str, np.ndarray]) -> bytes:
    """Make a step whose result the caller writes to."""
    result = await handle.push_pull(values)
    found = joined(result)
    for array in result.values():
        array.fill(np.nan)
    return found


@pytest.mark.parametrize("transport", ["tcp", "grpc", "shm"])
@pytest.mark.parametrize("name", BRIEFLY)
async def test_workers_have_the_published_weights(
    cluster: EmbeddedCluster, name: str, transport: TransportName
) -> None:
    expected = Published(CODECS[name])
    async with Workers(cluster, transport) as workers:
        await workers.open(PLAIN, pull=CODECS[name])
        assert joined(await workers.handles[0].pull()) == initial().tobytes()
        before = [handle.statistics().pull_bytes for handle in workers.handles]
        kinds = (in_buckets, in_one, in_place, into_arrays, as_new_arrays, as_new_arrays)
        for step, push in enumerate(kinds):
            results = await asyncio.gather(
                *(push(handle, split(gradient(step, rank))) for rank, handle in enumerate(workers.handles))
            )
            assert results == [expected.next()] * WORKERS, f"step {step}"
        assert workers.handles[0].statistics().transport == transport
        if transport != "shm":  # The first worker had everything before.
            pulled = workers.handles[0].statistics().pull_bytes - before[0]
            assert pulled < 0.55 * 4 * TOTAL * len(kinds)
            again = workers.handles[0].statistics().pull_bytes
            assert joined(await workers.handles[0].pull()) == expected.published.tobytes()
            assert workers.handles[0].statistics().pull_bytes == again, "nothing has changed"


@pytest.mark.parametrize("transport", ["tcp", pytest.param("grpc", marks=pytest.mark.long)])
@pytest.mark.parametrize("consistency", [ASP(), pytest.param(SSP(1), marks=pytest.mark.long)], ids=["asp", "ssp"])
async def test_without_common_steps_all_end_with_the_same(
    cluster: EmbeddedCluster, consistency: Consistency, transport: TransportName
) -> None:
    async with Workers(cluster, transport) as workers:
        await workers.open(PLAIN, consistency, pull=ChunkedTopK(32, 512, bits=8))

        async def train(rank: int, handle: AsyncParameters) -> None:
            for step in range(8):
                await handle.push_pull(split(gradient(step, rank)))

        await asyncio.gather(*(train(rank, handle) for rank, handle in enumerate(workers.handles)))
        pulled = [joined(await handle.pull()) for handle in workers.handles]
        async with AsyncClient(cluster.address, cluster.token, transport="grpc") as reader:
            pulled.append(joined(await (await reader.parameters(workers.handles[0].name)).pull()))
        assert len(set(pulled)) == 1


async def test_a_worker_that_missed_many_steps_is_sent_the_weights(cluster: EmbeddedCluster) -> None:
    """Check one worker that pushes alone: soon the other lacks more bytes than the weights have."""
    async with Workers(cluster, "tcp") as workers:
        await workers.open(PLAIN, ASP(), pull=Int8())
        await asyncio.gather(*(handle.pull() for handle in workers.handles))
        for step in range(6):
            mine = joined(await workers.handles[0].push_pull(split(gradient(step, 0))))
        before = workers.handles[1].statistics().pull_bytes
        assert joined(await workers.handles[1].pull()) == mine
        assert workers.handles[1].statistics().pull_bytes - before == 4 * TOTAL


@pytest.mark.parametrize(
    ("name", "transport"),
    [("topk", "tcp"), *(pytest.param("int8", name, marks=pytest.mark.long) for name in ("grpc", "shm", "tcp"))],
)
async def test_a_killed_server_changes_not_a_bit(name: str, transport: TransportName) -> None:
    expected = Published(CODECS[name])
    await check_run_of_copies([expected.next() for _ in range(12)], transport, pull=CODECS[name])


@pytest.mark.parametrize(
    "lives",
    [
        ((2, "topk"), (3, "topk"), (1, None), (2, "int8"), (1, "topk")),
        pytest.param(((1, "signs"), (2, "signs"), (3, "signs"), (5, "signs")), marks=pytest.mark.long),
    ],
)
async def test_a_resumed_run_goes_on_with_the_published_weights(
    tmp_path: Path, lives: tuple[tuple[int, str | None], ...]
) -> None:
    """Check two lives of two steps each. The snapshot comes after them, and the codec may change in the next life."""
    expected = Published(None)
    for life, (servers, name) in enumerate(lives):
        codec = expected.codec = CODECS[name] if name is not None else None
        if codec is None:
            expected.published[...] = expected.weights
        settings = {"servers": servers, "storage": tmp_path / "storage", "run_id": "resumed"}
        async with cluster_of("tcp", "tcp", leave=leave_unsaved, **settings) as (_, clients):
            handles = await asyncio.gather(
                *(
                    client.parameters("p", split(initial()), ADAM, BSP(), slice_elements=SLICE, pull_compression=codec)
                    for client in clients
                )
            )
            assert joined(await handles[1].pull()) == expected.published.tobytes(), f"life {life}"
            for step in (2 * life, 2 * life + 1):
                values = await asyncio.gather(
                    *(handle.push_pull(split(gradient(step, rank))) for rank, handle in enumerate(handles))
                )
                assert [joined(one) for one in values] == [expected.next()] * WORKERS, f"life {life}, step {step}"
            await asyncio.gather(*(client.snapshot(timeout=60) for client in clients))


async def test_what_cannot_be_is_refused(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto", "auto") as clients:
        first, second = clients
        for codec in (BFloat16(), PowerSGD(2), PerTensor({"*": Int8()}), "float32"):
            with pytest.raises(UnknownCodecError, match="cannot send weights"):
                await first.parameters("r", split(initial()), ADAM, pull_compression=codec)
        for codec in (Int8(error_feedback=False), TopK(residual_decay=0.5), TopK(momentum=0.9), TopK(warm_up=5)):
            with pytest.raises(InvalidArgumentError):
                await first.parameters("r", split(initial()), ADAM, pull_compression=codec)
        with pytest.raises(InvalidArgumentError, match="pass one of them"):
            await first.parameters("r", split(initial()), ADAM, pull_compression="int8", pull_dtype="bfloat16")
        with pytest.raises(InvalidArgumentError, match="pull_compression without init"):
            await first.parameters("r", pull_compression="int8")
        codecs: tuple[Codec, Codec] = (Int8(), Int8(block=32))
        tasks = [
            asyncio.create_task(client.parameters("r", split(initial()), ADAM, pull_compression=codec))
            for client, codec in zip(clients, codecs, strict=True)
        ]
        refused, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(SettingsMismatchError, match="pull_compression"):
            refused.pop().result()
        late, codec = (first, codecs[1]) if tasks[1] in waiting else (second, codecs[0])
        await late.parameters("r", split(initial()), ADAM, pull_compression=codec)
        await waiting.pop()
        async with AsyncClient(cluster.address, cluster.token) as reader:
            with pytest.raises(InvalidArgumentError, match="Leave it out"):
                await reader.parameters("r", pull_dtype="float16")
