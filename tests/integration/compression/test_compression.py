"""Compressed gradients with real servers: the exact bytes of a plain single-process reference that decodes the
encoders' output, over each transport, through the loss of a server, and through a resume with residuals."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Sequence
from contextlib import closing, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from psdist import AsyncClient, AsyncParameters, off_loop, optim
from psdist.cli.status import print_status
from psdist.client import encoding
from psdist.client.core.encoder import EncodedDifferences
from psdist.client.encoding import EncodedPush
from psdist.client.participation import Participation
from psdist.compression import (
    Auto,
    Chain,
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
    specifications,
)
from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.launcher.embedded import EmbeddedCluster
from psdist.monitoring.run_json import status_json
from psdist.settings.config import TransportName
from psdist.v1 import scheduler_pb2
from tests.support.clients import cluster_of, leave_unsaved
from tests.support.compressed_runs import ADAM, SLICING, STEPS, WORKERS, Workers, encoded
from tests.support.exact_runs import SLICE, TOTAL, gradient, initial, joined, reference_run, split
from tests.support.weighted_pushes import check_run_of_copies, in_buckets, in_one

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: The codec of each rank, by name.
CODECS: dict[str, tuple[Codec, Codec]] = {
    "int8": (Int8(), Int8()),
    "by chance": (Int8(stochastic=True, seed=5), Int8(stochastic=True, error_feedback=True)),
    "mixed": (Int8(block=100, residual_decay=0.9), Float32()),
    "topk": (TopK(0.01), TopK(0.05, momentum=0.9, warm_up=3)),
    "chunked": (ChunkedTopK(16, 1024, bits=2), Chain(TopK(0.02), Int8())),
    "int2": (Int2(), Int4(stochastic=True)),
    "differences": (
        TopK(0.02, error_feedback="ef21"),
        PerTensor({"w1": Int8(error_feedback="ef21"), "*": OneBit(error_feedback="ef21")}),
    ),
    "signs and thin": (OneBit(), PerTensor({"w1": PowerSGD(2), "*": RandomK(0.1)})),
}
BRIEFLY = [
    pytest.param(name, marks=[] if name in ("mixed", "topk", "differences") else [pytest.mark.long]) for name in CODECS
]


def references(codecs: Sequence[Codec], steps: int) -> list[bytes]:
    """Return the weights after every step, in one process."""
    return reference_run(ADAM, steps=steps, pushed=[encoded(codecs)] * steps)


@pytest.mark.parametrize("transport", ["tcp", "grpc", "shm"])
@pytest.mark.parametrize("name", BRIEFLY)
async def test_weights_are_the_references(cluster: EmbeddedCluster, name: str, transport: TransportName) -> None:
    expected = references(CODECS[name], STEPS)
    async with Workers(cluster, transport) as workers:
        if transport == "grpc":
            await workers.load_kernels()
        await workers.open(CODECS[name])
        for step, push in enumerate((in_buckets, in_one)):
            results = await asyncio.gather(
                *(push(handle, split(gradient(step, rank))) for rank, handle in enumerate(workers.handles))
            )
            assert results == [expected[step]] * WORKERS, f"step {step}"
        for step in range(2, STEPS):
            assert await workers.step(step) == expected[step], f"step {step}"
        statistics = workers.handles[0].statistics()
        assert statistics.transport == transport and statistics.compression.ratio > 1.5
        if transport != "shm":
            assert statistics.push_bytes == pytest.approx(4 * TOTAL * STEPS / statistics.compression.ratio)


def encode_meanwhile(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Encode slices one by one while earlier ones are sent, as with large gradients. Returns a list that gets one bool
    per push: True if it was encoded this way."""
    monkeypatch.setattr(encoding, "LARGE_ELEMENTS", 1)
    monkeypatch.setattr(off_loop, "LARGE_ELEMENTS", 1)
    monkeypatch.setattr(encoding, "_TOGETHER_ELEMENTS", 1)
    started, start = list[bool](), EncodedPush.start

    def noted(push: EncodedPush, slices: Sequence[int]) -> bool:
        started.append(start(push, slices))
        return started[-1]

    monkeypatch.setattr(EncodedPush, "start", noted)
    return started


@pytest.mark.parametrize("transport", ["tcp", "grpc", "shm"])
async def test_slices_that_are_sent_while_others_are_encoded(
    cluster: EmbeddedCluster, transport: TransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = references(CODECS["topk"], STEPS)
    started = encode_meanwhile(monkeypatch)
    async with Workers(cluster, transport) as workers:
        await workers.open(CODECS["topk"])
        for step in range(STEPS):
            assert await workers.step(step) == expected[step], f"step {step}"
        assert started == [True] * WORKERS * STEPS


async def test_a_worker_that_skips_a_step_keeps_what_was_left_out(cluster: EmbeddedCluster) -> None:
    codecs = CODECS["int8"]
    async with Workers(cluster) as workers:
        await workers.open(codecs)
        await workers.step(0)
        before = workers.handles[0].statistics().compression.residual_norm
        assert before > 0
        broken = gradient(1, 0)
        broken[5] = np.nan
        await asyncio.gather(workers.handles[0].push(split(broken)), workers.handles[1].push(split(gradient(1, 1))))
        statistics = workers.handles[0].statistics()
        assert statistics.abstained == 1 and statistics.compression.residual_norm == before
        await workers.step(2)


@pytest.mark.parametrize("consistency", [ASP(), pytest.param(SSP(1), marks=pytest.mark.long)], ids=["asp", "ssp"])
async def test_every_push_counts_once_without_common_steps(cluster: EmbeddedCluster, consistency: Consistency) -> None:
    async with Workers(cluster) as workers:
        await workers.open(CODECS["int8"], consistency, optim.SGD(lr=1.0))

        async def train(rank: int, handle: AsyncParameters) -> None:
            for step in range(STEPS):
                await handle.push_pull(split(gradient(step, rank)))

        await asyncio.gather(*(train(rank, handle) for rank, handle in enumerate(workers.handles)))
        weights = np.frombuffer(joined(await workers.handles[0].pull()), np.float32)
        pushed = encoded(CODECS["int8"])
        sent = sum(pushed(step, rank).astype(np.float64) for step in range(STEPS) for rank in range(WORKERS))
        np.testing.assert_allclose(weights, initial() - sent, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "transport", "meanwhile"),
    [
        ("topk", "tcp", True),
        *(pytest.param("int8", name, True, marks=pytest.mark.long) for name in ("tcp", "grpc", "shm")),
        *(pytest.param("differences", name, False, marks=pytest.mark.long) for name in ("tcp", "grpc", "shm")),
    ],
)
async def test_a_killed_server_changes_not_a_bit(
    name: str, transport: TransportName, meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if meanwhile:
        encode_meanwhile(monkeypatch)
    await check_run_of_copies(references(CODECS[name], 12), transport, codecs=CODECS[name])


@pytest.mark.parametrize("transport", ["tcp", pytest.param("grpc", marks=pytest.mark.long)])
async def test_a_push_that_is_made_again_after_a_fail_over_may_be_whole_in_part(
    transport: TransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a push that waits for the other worker when it is given up: the slices of the lost server are complete by
    then."""
    wholes: asyncio.Queue[EncodedDifferences] = asyncio.Queue()

    def send_whole(push: EncodedDifferences, slices: Iterable[int]) -> None:
        EncodedDifferences.send_whole(push, slices)
        wholes.put_nowait(push)

    codecs = CODECS["differences"]
    expected = references(codecs, 4)
    with closing(await asyncio.to_thread(EmbeddedCluster, 2, replicas=2)) as cluster:
        async with Workers(cluster, transport) as workers:
            await workers.open(codecs)
            assert await workers.step(0) == expected[0]
            monkeypatch.setattr(EncodedPush, "send_whole", lambda push, slices: send_whole(push._slices, slices))
            pushing = asyncio.create_task(workers.handles[0].push_pull(split(gradient(1, 0))))
            cluster.processes[1].kill()
            push = await wholes.get()
            assert 0 < len(push.whole) < SLICING.count
            pushing.cancel()
            await asyncio.wait({pushing})
            for step in range(1, 4):
                assert await workers.step(step) == expected[step], f"step {step}"


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("differences", (2, 3)), *(pytest.param(name, (1, 2, 3, 5), marks=pytest.mark.long) for name in CODECS)],
)
async def test_a_resumed_run_goes_on_with_what_was_left_out(tmp_path: Path, name: str, numbers: Sequence[int]) -> None:
    """Check two lives of two steps each. The snapshot is of the first step, so the second step is made again."""
    codecs = CODECS[name]
    expected = references(codecs, len(numbers) + 1)
    for life, servers in enumerate(numbers):
        given: list[dict[str, np.ndarray]] = []
        settings = {"servers": servers, "storage": tmp_path / "storage", "run_id": "resumed"}
        async with cluster_of("auto", "auto", leave=leave_unsaved, **settings) as (_, clients):
            handles = await asyncio.gather(
                *(
                    client.parameters("p", split(initial()), ADAM, BSP(), codec, slice_elements=SLICE)
                    for client, codec in zip(clients, codecs, strict=True)
                )
            )
            await handles[1].keep_state(lambda: {"mine": np.ones(3)}, given.append)
            assert [list(state) for state in given] == [["mine"]] * (life > 0)
            for step in (life, life + 1):
                assert {handle.step for handle in handles} == {step}
                values = await asyncio.gather(
                    *(handle.push_pull(split(gradient(step, rank))) for rank, handle in enumerate(handles))
                )
                assert [joined(one) for one in values] == [expected[step]] * WORKERS, f"life {life}, step {step}"
                if step == life:
                    await asyncio.gather(*(client.snapshot(timeout=60) for client in clients))


async def choices(client: AsyncClient) -> set[str]:
    """Return the workers' codecs, with the reasons, as ``psdist status`` shows them."""
    calls = client.session.calls
    answer = await calls.stub.GetStatus(scheduler_pb2.GetStatusRequest(), metadata=calls.metadata)
    with redirect_stdout(io.StringIO()) as text:
        print_status(answer)
    found = {one["compression"] for member in status_json(answer)["members"] for one in member["connections"]}
    assert "compression=" in text.getvalue() or not any(found)
    return found


@pytest.mark.parametrize(("transport", "link", "codec"), [("tcp", 1e6, "Int4"), ("grpc", 1e12, "none")])
async def test_a_codec_is_chosen_by_the_speed_of_the_links(
    cluster: EmbeddedCluster, transport: TransportName, link: float, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[float] = []

    async def measure(part: Participation) -> tuple[float, float]:
        remote, speed = await measure_links(part)
        measured.append(speed)
        return remote, link

    measure_links = encoding._measure_links
    monkeypatch.setattr(encoding, "_measure_links", measure)
    monkeypatch.setattr(specifications, "_SMALL_ELEMENTS", 1)
    codecs = (Int4(), Int4()) if codec == "Int4" else (Float32(), Float32())
    async with Workers(cluster, transport) as workers:
        expected = references(codecs, 2)
        await workers.open((Auto(), Auto()))
        for step in range(2):
            assert await workers.step(step) == expected[step]
        statistics = workers.handles[0].statistics()
        assert statistics.compression.choice.startswith(f"{codec}: a push takes ")
        assert len(measured) == WORKERS and min(measured) > 1e5
        while statistics.compression.choice not in await choices(workers.clients[0]):
            await workers.clients[0].session.membership.view.changed(0.1)  # Heartbeats report it.


async def test_nothing_is_compressed_in_shared_memory(cluster: EmbeddedCluster) -> None:
    async with Workers(cluster, "shm") as workers:
        await workers.open((Auto(), Auto()))
        assert await workers.step(0) == references((Float32(), Float32()), 1)[0]
        assert workers.handles[0].statistics().compression.choice.startswith("none: all servers share memory")
