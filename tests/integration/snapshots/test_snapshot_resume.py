"""A run that ends and resumes from its newest snapshot makes the exact bytes of a run that never ended. Covered are
every optimizer, data leases and other numbers of servers each time; the loss of a server; and a storage that is full,
or cannot be written. Real processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import numpy as np
import pytest

from psdist import AsyncClient, AsyncParameters, optim
from psdist.consistency import ASP, BSP, SSP
from psdist.errors import SnapshotFailedError
from psdist.optim import Optimizer
from tests.support.clients import cluster_of
from tests.support.exact_runs import (
    OPTIMIZERS,
    SLICE,
    TOTAL,
    gradient,
    initial,
    joined,
    reference_run,
    split,
)
from tests.support.launched import Run
from tests.support.mounted import Mount

WORKERS = 2
RUN_ID = "resumed"
#: Values that a resumed run must not use: initial values that are given again do not count.
_OTHER = np.full(TOTAL, 77.0, np.float32)


@asynccontextmanager
async def life(storage: Path, servers: int) -> AsyncIterator[list[AsyncClient]]:
    """One life of the run: a cluster of its own, and its workers."""
    async with cluster_of("auto", "auto", servers=servers, storage=storage, run_id=RUN_ID) as (_, clients):
        yield clients


async def opened(clients: list[AsyncClient], name: str, spec: Optimizer, values: np.ndarray) -> list[AsyncParameters]:
    return await asyncio.gather(
        *(client.parameters(name, split(values), spec, BSP(), slice_elements=SLICE) for client in clients)
    )


async def _step(handles: Sequence[AsyncParameters], step: int) -> bytes:
    results = await asyncio.gather(*(h.push_pull(split(gradient(step, rank))) for rank, h in enumerate(handles)))
    assert joined(results[0]) == joined(results[1])
    return joined(results[0])


async def _train_one_step(
    clients: list[AsyncClient], step: int, expected: dict[str, list[bytes]], optimizers: dict[str, Optimizer]
) -> list[int]:
    """Make one step of all parameters, in which each worker uses a range of data, and then a snapshot. Returns the
    samples."""
    values = _OTHER if step else initial()
    handles_of = {name: await opened(clients, name, spec, values) for name, spec in optimizers.items()}
    data = await asyncio.gather(
        *(client.dataset("train", size=40, range_size=4, data_epochs=1, shuffle=True) for client in clients)
    )
    held = [await part.next() for part in data]
    for name, handles in handles_of.items():
        assert [handle.step for handle in handles] == [step] * WORKERS, name
        before = expected[name][step - 1] if step else initial().tobytes()
        assert joined(await handles[1].pull()) == before, f"{name} begins step {step} with other weights"
        assert await _step(handles, step) == expected[name][step], f"{name}, step {step}"
    for part in data:
        part.done()
    infos = await asyncio.gather(*(client.snapshot(timeout=60) for client in clients))
    assert infos[-1].steps == dict.fromkeys(optimizers, step + 1)
    return [int(index) for part in held if part is not None for index in part.indices]


async def _chain(storage: Path, numbers: Sequence[int], optimizers: dict[str, Optimizer]) -> None:
    """Make a run of many lives of one step each, on these numbers of servers."""
    expected = {name: reference_run(spec, WORKERS) for name, spec in optimizers.items()}
    samples: list[int] = []
    for step, servers in enumerate(numbers):
        async with life(storage, servers) as clients:
            samples += await _train_one_step(clients, step, expected, optimizers)
    assert len(samples) == len(set(samples)) == 4 * WORKERS * len(numbers), "a range was used twice"


async def test_a_resumed_run_makes_the_bytes_of_one_that_never_ended(tmp_path: Path) -> None:
    names = ("nesterov", "adam-warm-clipped", "rmsprop-full", "ftrl")
    await _chain(tmp_path / "storage", (2, 3), {name: OPTIMIZERS[name] for name in names})


@pytest.mark.long
async def test_every_optimizer_goes_on_on_other_numbers_of_servers(tmp_path: Path) -> None:
    await _chain(tmp_path / "storage", (2, 5, 1, 3), OPTIMIZERS)


_SLOTS = 24


async def _push_each(clients: list[AsyncClient], name: str, consistency: SSP | ASP, life: int) -> list[float]:
    """Make six pushes in each worker, with elements of their own. Returns the weights after them."""
    zeros = {"w": np.zeros(_SLOTS, np.float32)}
    opening = (client.parameters(name, zeros, optim.SGD(lr=1.0), consistency, slice_elements=8) for client in clients)
    handles = await asyncio.gather(*opening)

    async def push(rank: int, handle: AsyncParameters) -> None:
        for number in range(6):
            gradient = np.zeros(_SLOTS, np.float32)
            gradient[12 * life + 6 * rank + number] = -1.0
            await handle.push_pull({"w": gradient})

    await asyncio.gather(*(push(rank, handle) for rank, handle in enumerate(handles)))
    return [float(value) for value in (await handles[0].pull())["w"]]


@pytest.mark.long
async def test_every_push_before_a_snapshot_is_there_once_after_it(tmp_path: Path) -> None:
    for number, servers in enumerate((1, 2)):
        async with life(tmp_path / "storage", servers) as clients:
            for name, consistency in (("ssp", SSP(1)), ("asp", ASP())):
                weights = await _push_each(clients, name, consistency, number)
                assert weights == [1.0] * 12 * (1 + number) + [0.0] * 12 * (1 - number)
            await clients[0].snapshot(timeout=60)


_SCRIPT = """
import pathlib
import sys

import numpy as np

import psdist

run = psdist.init()
steps = int(sys.argv[1])
initial = {"w": np.zeros(20_000, np.float32)}
weights = run.client.parameters("p", initial, psdist.optim.Adam(lr=0.01), slice_elements=4096)
print(f"rank {run.rank} begins at {weights.step}", flush=True)
told = False
while weights.step < steps:
    # A function of the step alone: a step that is made again is the same.
    gradient = np.random.default_rng([weights.step, run.rank]).standard_normal(20_000).astype(np.float32)
    weights.push_pull({"w": gradient})
    if run.rank == 0 and weights.step == 3:
        run.client.snapshot()
        print("rank 0 has a snapshot", flush=True)
    while weights.step == 8 and not pathlib.Path("go").exists():
        weights.pull()
        if not told:
            print(f"rank {run.rank} waits", flush=True)
            told = True
if weights.statistics().rolled_back:
    print(f"rank {run.rank} went back", flush=True)
if run.rank == 0:
    np.save("result.npy", weights.pull()["w"])
"""


def _expected(steps: int) -> np.ndarray:
    from tests.support import reference

    spec = optim.Adam(lr=0.01)
    weights, mean = np.zeros(20_000, np.float32), np.empty(20_000, np.float32)
    states = (np.zeros_like(weights), np.zeros_like(weights))
    for step in range(steps):
        parts = [np.random.default_rng([step, rank]).standard_normal(20_000).astype(np.float32) for rank in range(2)]
        reference.combine(mean, parts, 2)
        reference.update(spec, spec.group_values(0), weights, states, mean, step, 1.0)
    return weights


def test_a_lost_server_takes_the_run_back_to_its_snapshot_and_the_same_command_goes_on(
    tmp_path: Path, runs: list[Run]
) -> None:
    flags = ("--storage-path", "storage", "--run-id", RUN_ID)
    run = Run(tmp_path, _SCRIPT, "12", flags=flags)
    runs.append(run)
    run.until("rank . waits", count=2)
    run.child("psdist_server").send_signal(signal.SIGKILL)
    run.until("went back|goes back|rolled back|back to")
    (tmp_path / "go").touch()
    status, text = run.end()
    text = "".join(run.seen) + text
    assert status == 0, text
    assert text.count("went back") >= 2, text
    assert np.load(tmp_path / "result.npy").tobytes() == _expected(12).tobytes()
    again = Run(tmp_path, _SCRIPT, "15", flags=(*flags, "--nservers", "3"))
    runs.append(again)
    again.until("begins at 12", count=2)
    status, text = again.end()
    assert status == 0, text
    assert np.load(tmp_path / "result.npy").tobytes() == _expected(15).tobytes()


async def test_a_full_or_read_only_storage_fails_an_attempt_and_training_goes_on(tmp_path: Path) -> None:
    with closing(Mount(tmp_path / "small", "size=64k")) as mount:
        async with life(mount.path / "storage", 2) as clients:
            client = clients[0]
            handles = await opened(clients, "p", OPTIMIZERS["adam"], initial())
            expected = reference_run(OPTIMIZERS["adam"], WORKERS)
            assert await _step(handles, 0) == expected[0]
            with pytest.raises(SnapshotFailedError, match="No space left"):
                await client.snapshot(timeout=60)
            assert await _step(handles, 1) == expected[1]
            # The other server may be about to close its step.
            async with asyncio.timeout(60):
                while not mount.remount("size=64m", readonly=True):
                    await client.status()
            with pytest.raises(SnapshotFailedError, match=r"[Rr]ead-only"):
                await client.snapshot(timeout=60)
            assert await _step(handles, 2) == expected[2]
            assert mount.remount("size=64m")
            info = await client.snapshot(timeout=60)
            assert info.steps == {"p": 3}
            assert len(list((mount.path / "storage" / "commits").iterdir())) == 1
            # Files that could not be removed earlier are removed after this one is answered.
            async with asyncio.timeout(60):
                while [path.name for path in (mount.path / "storage" / "snapshots").iterdir()] != [info.directory]:
                    await client.status()
