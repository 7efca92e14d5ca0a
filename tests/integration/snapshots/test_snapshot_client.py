"""Snapshots from a script's side, with real servers: they contain its pushes, each of them whole, and the script
resumes from one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

import psdist
from psdist import errors
from psdist.data import DynamicBatcher
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from psdist.snapshots import reader
from psdist.snapshots.format import Manifest
from psdist.snapshots.opening import open_storage
from tests.support.launched import Run

asynchronous = pytest.mark.asyncio(loop_scope="session")
Start = Callable[..., EmbeddedCluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a cluster of the run, after ending the one before."""
    running: list[EmbeddedCluster] = []

    def start(servers: int, **settings: Any) -> EmbeddedCluster:
        end()
        cluster = EmbeddedCluster(servers, storage=tmp_path / "run", run_id="run", **settings)
        running.append(cluster)
        return cluster

    def end() -> None:
        while running:
            running.pop().close()

    yield start
    end()


def client_of(cluster: EmbeddedCluster, rank: int = 0, transport: TransportName = "auto") -> psdist.AsyncClient:
    return psdist.AsyncClient(cluster.address, cluster.token, rank=rank, transport=transport)


async def newest(path: Path) -> Manifest:
    """Return the newest snapshot, read to the last byte."""
    storage = open_storage(str(path))
    found = await reader.newest(storage)
    assert found is not None
    await reader.verify(storage, found.manifest)
    return found.manifest


def gradients(init: dict[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{name: rng.normal(size=a.shape).astype(np.float32) for name, a in init.items()} for _ in range(count)]


class Batches:
    """State of a script that takes a batch before each push, in place."""

    def __init__(self) -> None:
        self.sum, self.count, self.given = np.zeros(300_000), np.zeros(1, np.int64), list[dict[str, np.ndarray]]()

    def take(self) -> None:
        self.sum += self.count[0]
        self.count += 1

    def save(self) -> dict[str, np.ndarray]:
        return {"sum": self.sum, "count": self.count}


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Check equality to the last bit."""
    return [(n, a.tobytes()) for n, a in one.items()] == [(n, a.tobytes()) for n, a in other.items()]


@asynchronous
async def test_a_script_goes_on_where_the_snapshot_was_cut(start: Start, tmp_path: Path) -> None:
    init = {"w": np.linspace(0, 1, 40_000, dtype=np.float32), "b": np.ones((3, 5), np.float32)}
    grads = gradients(init, 8)
    async with client_of(start(2)) as client:
        with pytest.raises(errors.SnapshotFailedError, match="create them first"):
            await client.snapshot()
        weights = await client.parameters("p", init, psdist.optim.Adam(0.1), slice_elements=4096)
        batches = Batches()
        await weights.keep_state(batches.save, batches.given.append)
        for step in range(5):
            batches.take()
            values = await weights.push_pull(grads[step])
        await client.request_snapshot()
        info = await client.snapshot()
        assert info.steps == {"p": 5} and info.reason == "on demand"
        assert (await client.snapshot()).unchanged
        for step in range(5, 8):
            last = await weights.push_pull(grads[step])
    manifest = await newest(tmp_path / "run")
    assert (manifest.directory, manifest.bytes) == (info.directory, info.bytes)
    assert same(psdist.load_snapshot(str(tmp_path / "run")), values)
    async with client_of(start(1)) as client:
        weights = await client.parameters("p", init, psdist.optim.Adam(0.1), slice_elements=4096)
        assert weights.step == weights.first_step == 5 and weights.restored == info.directory
        assert same(await weights.pull(), values)
        batches = Batches()
        await weights.keep_state(batches.save, batches.given.append)
        [state] = batches.given
        assert state["count"].tolist() == [5] and state["sum"].tolist() == [0.0 + 1 + 2 + 3 + 4] * 300_000
        for step in range(5, 8):
            again = await weights.push_pull(grads[step])
        assert same(again, last)


MODES = {"bsp": psdist.BSP(), "ssp": psdist.SSP(2), "asp": psdist.ASP()}
COUNT, RANKS = 20_000, 2


async def check(path: Path, rank: int, pushed: int) -> None:
    """Check that the newest snapshot has each push whole, and at least ``pushed`` pushes of ``rank``."""
    manifest = await newest(path)
    for state in manifest.parameters:
        name = state.spec.name
        values = psdist.load_snapshot(str(path), parameters=name)["w"]
        own = [set(values[np.arange(COUNT) % RANKS == number].tolist()) for number in range(RANKS)]
        next = {worker: number for worker, _, number in state.next}
        assert own == [{next.get(f"worker-{number}", state.step)} for number in range(RANKS)], f"torn in {name}"
        assert own[rank].pop() >= pushed
        for number in range(RANKS):
            kept = manifest.worker_state(name, number)
            assert kept is not None and kept.next == next.get(f"worker-{number}", state.step)
            file = b"".join([part async for part in reader.read_state(open_storage(str(path)), manifest, kept)])
            assert load(file)["count"].tolist() == [kept.next], f"what {number} keeps is torn from its pushes of {name}"


@asynchronous
@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(name, marks=pytest.mark.long) for name in ("tcp", "grpc"))]
)
async def test_a_snapshot_cuts_between_pushes(start: Start, tmp_path: Path, transport: str) -> None:
    """Check snapshots while each push adds one to all elements of its worker, which are in all slices."""
    cluster = start(2)

    async def train(rank: int) -> None:
        async with client_of(cluster, rank, transport) as client:
            init, mine = {"w": np.zeros(COUNT, np.float32)}, np.arange(COUNT) % RANKS == rank
            all_weights = [
                await client.parameters(name, init, psdist.optim.SGD(RANKS if name == "bsp" else 1), consistency)
                for name, consistency in MODES.items()
            ]
            all_batches = [Batches() for _ in all_weights]
            for weights, batches in zip(all_weights, all_batches, strict=True):
                await weights.keep_state(batches.save, lambda state: None)
            for step in range(30):
                for weights, batches in zip(all_weights, all_batches, strict=True):
                    batches.take()
                    await weights.push_pull({"w": np.where(mine, -1.0, 0.0).astype(np.float32)})
                if (step, rank) in ((10, 0), (20, 1)):
                    await client.snapshot()
                    await check(tmp_path / "run", rank, step + 1)

    await asyncio.gather(*(train(rank) for rank in range(RANKS)))


def test_a_batcher_continues_at_the_batch_that_the_snapshot_does_not_contain(start: Start) -> None:
    texts = [np.full(length, length, np.float32) for length in np.random.default_rng(0).integers(1, 40, 60)]
    expected = [batch.indices.tolist() for batch in DynamicBatcher(4).batches(texts)]

    def train(cluster: EmbeddedCluster, snapshot_before: int) -> list[list[int]]:
        found = []
        with psdist.Client(cluster.address, cluster.token, rank=0) as client:
            weights = client.parameters("p", {"w": np.zeros(4, np.float32)}, psdist.optim.SGD(1.0))
            batcher = DynamicBatcher(4)
            batcher.keep_in(weights)
            for batch in batcher.batches(texts):
                if len(found) == snapshot_before:
                    client.snapshot()
                    return found
                weights.push_pull({"w": np.full(4, batch.values.sum())}, weight=batch.tokens)
                found.append(batch.indices.tolist())
        return found

    first = train(start(1), snapshot_before=5)
    assert first == expected[:5]
    assert train(start(1), snapshot_before=-1) == expected[5:]


@asynchronous
async def test_other_workers_cannot_continue_in_the_middle_of_divided_data(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [np.ones(3)] * 60

    async def train(cluster: EmbeddedCluster, rank: int, workers: int) -> list[int]:
        """Push three batches. Return their samples, once a snapshot has those of two workers."""
        async with client_of(cluster, rank) as client:
            init = {"w": np.zeros(4, np.float32)}
            weights = await client.parameters("p", init, psdist.optim.SGD(1.0), psdist.ASP())
            batcher, found = DynamicBatcher(4), list[int]()
            await batcher.keep_in(weights)
            sampler = psdist.data.DistributedSampler(60, workers, rank)
            for batch in batcher.batches(texts, sampler):
                await weights.push_pull({"w": batch.values.sum(0)[:1].repeat(4)})
                found += batch.indices.tolist()
                if len(found) == 12:
                    break
            if workers == 2:
                await client.barrier("trained")
                await client.snapshot()
                await client.barrier("saved")
            return found

    async def life(workers: int) -> list[list[int] | BaseException]:
        cluster = start(1, workers=workers)
        return await asyncio.gather(*(train(cluster, rank, workers) for rank in range(workers)), return_exceptions=True)

    first = await life(2)
    for workers in (1, 3):
        results = await life(workers)
        refused = [result for result in results if isinstance(result, errors.SettingsMismatchError)]
        assert len(refused) == min(workers, 2) and "the same data, seed and number of" in str(refused[0]), results
    told = [record.getMessage() for record in caplog.records if "is missing at" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("the place of a DynamicBatcher for 'p' is missing"), told
    again = await life(2)
    samples = [sample for part in (*first, *again) for sample in (part if isinstance(part, list) else [])]
    assert len(samples) == 48 and len(set(samples)) == 48, (first, again)


def test_ranges_that_a_resumed_run_reads_again_are_counted(start: Start) -> None:
    texts = [np.full(length, length, np.float32) for length in np.random.default_rng(0).integers(1, 40, 60)]

    def train(cluster: EmbeddedCluster, batches: int) -> tuple[list[int], int]:
        """Return the samples of up to this many batches, and the number of repeated ranges."""
        found: list[int] = []
        with psdist.Client(cluster.address, cluster.token, rank=0) as client:
            weights = client.parameters("p", {"w": np.zeros(4, np.float32)}, psdist.optim.SGD(1.0))
            data = client.dataset("texts", size=len(texts), range_size=6)
            for number, batch in enumerate(DynamicBatcher(4).leased(texts, data), 1):
                weights.push_pull({"w": np.full(4, batch.values.sum())}, weight=batch.tokens)
                found += batch.indices.tolist()
                if number == batches:
                    client.snapshot()
                    break
            return found, data.repeated

    first, repeated = train(start(1), 6)
    assert repeated == 0 and len(set(first)) == len(first)
    second, repeated = train(start(1), 1000)
    assert set(first) | set(second) == set(range(len(texts))) and len(set(second)) == len(second)
    again = set(first) & set(second)
    assert again and -(-len(again) // 6) <= repeated <= len(texts) // 6


_PLACE = """
import json
import os
import pathlib
import signal
import sys
import numpy as np
import psdist

with psdist.init() as context:
    mode = {"bsp": psdist.BSP(), "ssp": psdist.SSP(2), "asp": psdist.ASP()}[sys.argv[1]]
    weights = context.client.parameters("p", {"w": np.zeros(9000, np.float32)}, psdist.optim.SGD(1.0), mode)
    state = {"taken": np.zeros(1), "learned": np.zeros(1)}
    weights.keep_state(lambda: state, state.update)
    context.client.barrier()
    waits_for = {"on demand", "every 6 steps"} if context.rank == 0 else set()
    for number in range(10**9):
        state["taken"] += 1
        if context.rank == 0 and number == 5:
            context.client.request_snapshot()
        if waits_for:
            found = pathlib.Path("snapshots").glob("**/manifest.json")
            waits_for -= {json.loads(text)["reason"] for path in found if (text := path.read_text())}
            if not waits_for:
                os.kill(os.getppid(), signal.SIGTERM)  # The launcher's process.
        weights.push_pull({"w": np.ones(9000, np.float32)})
        state["learned"] += 1
"""


@pytest.mark.parametrize("mode", ["bsp", pytest.param("ssp", marks=pytest.mark.long), "asp"])
def test_a_script_is_in_the_same_place_in_all_snapshots(tmp_path: Path, mode: str) -> None:
    """Check snapshots at intervals, on request and at the end by SIGTERM, while the script computes."""
    flags = ("--storage-path", "snapshots", "--run-id", "place", "--save-interval", "6", "--keep-last", "50")
    _, text = Run.ended(tmp_path, _PLACE, mode, flags=flags)
    reasons = set[str]()
    for path in (tmp_path / "snapshots").glob("**/manifest.json"):
        manifest = json.loads(path.read_text())
        reasons.add(manifest["reason"])
        assert len(manifest["states"]) == 2, text
        for kept in manifest["states"]:
            state = load((path.parent / kept["file"]).read_bytes())
            assert (state["taken"][0], state["learned"][0]) == (kept["next"], max(0, kept["next"] - 1)), manifest
    assert reasons == {"every 6 steps", "on demand", "at the end"}, text


_SCRIPT = """
import pathlib
import sys
import numpy as np
import psdist

until, enough = int(sys.argv[1]), pathlib.Path("enough")
with psdist.init() as context:
    init, kept = {"w": np.zeros(9000, np.float32)}, {"sum": np.zeros(1)}
    weights = context.client.parameters("p", init, psdist.optim.SGD(1.0), slice_elements=1024)
    weights.keep_state(lambda: kept, kept.update)
    print("rank", context.rank, "begins at", weights.step, "with", kept["sum"][0], flush=True)
    back = False
    while weights.step < until and not enough.exists():
        kept["sum"] += weights.step + 100 * context.rank  # In place.
        values = weights.push_pull({"w": np.full(9000, -1, np.float32)})["w"]
        step = weights.step
        assert (values == step).all() and kept["sum"][0] == step * (step - 1) // 2 + 100 * context.rank * step
        if step % 50 == 0:
            print("rank", context.rank, "is at", step, flush=True)
        if weights.statistics().rolled_back and not back:
            back = True
            print("rank", context.rank, "went back to", weights.restored, flush=True)
    if not enough.exists():
        print("rank", context.rank, "saved", context.client.snapshot().directory, flush=True)
"""


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a run of the script, in which each worker keeps a sum that its steps add to."""
    runs: list[Run] = []

    def run_of(until: int, *flags: str) -> Run:
        storage = ("--storage-path", "snapshots", "--run-id", "kept")
        runs.append(Run(tmp_path, _SCRIPT, str(until), flags=(*storage, *flags)))
        return runs[-1]

    yield run_of
    for run in runs:
        run.stop()


@pytest.mark.long
def test_what_workers_keep_outlives_the_run(run_of: Callable[..., Run]) -> None:
    seen = []
    for until in (4, 7, 7):
        status, text = run_of(until).end()
        assert status == 0, text
        [one, other] = re.findall(r"rank \d saved (\S+)", text)
        assert one == other and int(one.partition("-")[0]) == until, "ranks that ask at the same step share one"
        seen.append(sorted(re.findall(r"rank (\d) begins at (\d) with (\S+)", text)))
    sums = {step: [sum(range(step)) + 100.0 * rank * step for rank in (0, 1)] for step in (0, 4, 7)}
    assert seen == [[(str(rank), str(step), str(each[rank])) for rank in (0, 1)] for step, each in sums.items()]


@pytest.mark.long
def test_what_workers_keep_goes_back_with_the_run(run_of: Callable[..., Run], tmp_path: Path) -> None:
    run = run_of(10**9, "--save-interval", "20")
    run.until(r"rank \d is at", 4)
    run.child("psdist_server").kill()
    run.until(r"rank \d went back to", 2)
    run.until(r"rank \d is at", 4)
    (tmp_path / "enough").touch()
    status, text = run.end()
    text = "".join(run.seen) + text
    assert status == 0 and "Traceback" not in text, text
    # Nothing is lost if the server was killed at the very step of the snapshot.
    assert re.search(r"the run rolls back to snapshot .* Lost: (steps? \d+|nothing)", text), text
