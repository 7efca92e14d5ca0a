"""Ranges of a data set leased by real workers of real runs: which worker uses which samples, with and without deaths.

In ASP with SGD of rate 1 each push adds 1 to the weights of the samples it used, so the weights count the uses.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import psdist
from psdist import errors
from psdist.data import DataPosition, RangeOrder
from psdist.launcher.embedded import EmbeddedCluster
from tests.support.launched import Run

#: Of the cluster.
SERVERS = 1

_SCRIPT = """
import os, pathlib, signal, sys
import numpy as np
import psdist
from psdist.data import DataPosition

rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
consistency, what, size, data_epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = psdist.init().client
data = client.dataset("train", size, range_size=5, seed=3, data_epochs=data_epochs)
weights = client.parameters(
    "uses", {"w": np.zeros(size, np.float32)}, psdist.optim.SGD(lr=1.0), getattr(psdist, consistency)())
kept = pathlib.Path("position.json")

def die(when):
    if (what, rank, life, count) == (when, 1, 0, 3):
        os.kill(os.getpid(), signal.SIGKILL)

if what == "resume":
    if rank == 0:
        data.set_position(DataPosition.from_json(kept.read_text()))
    client.barrier("position")
for count, indices in enumerate(data):
    die("before")
    if (what, rank, count) == ("freeze", 1, 3):
        print("stops as", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    gradient = np.zeros(size, np.float32)
    gradient[indices] = -1
    weights.push_pull({"w": gradient})
    print("data epoch", data.data_epoch, "used", *indices, flush=True)
    die("after")
    if what == "stop" and count == 6 + rank:
        data.done()
        break
if consistency == "ASP":
    client.barrier("end")
    if what == "stop" and rank == 0:
        kept.write_text(data.position().to_json())
    counts = weights.pull()["w"]
    print("uses", *counts.astype(int), "position", data.position().to_json(), flush=True)
print("rank", rank, "repeated", data.repeated, "failed", data.failed)
client.close()
"""


def start(path: Path, runs: list[Run], *arguments: object) -> Run:
    """Start a run of the script with three workers and one server."""
    flags = ("--nservers", "1", "--nproc-per-node", "3")
    runs.append(Run(path, _SCRIPT, *map(str, arguments), flags=flags))
    return runs[-1]


def used(text: str) -> Counter[tuple[int, int]]:
    """Count the uses of each sample in each data epoch, from the workers' files."""
    counts: Counter[tuple[int, int]] = Counter()
    for epoch, samples in re.findall(r"data epoch (\d+) used ([\d ]+)", text):
        counts.update((int(epoch), int(sample)) for sample in samples.split())
    return counts


def uses(text: str) -> list[int]:
    """Count the uses of each sample, from the final weights."""
    return [int(count) for count in re.findall(r"uses ([\d ]+) position", text)[-1].split()]


@pytest.mark.parametrize("consistency", [pytest.param("BSP", marks=pytest.mark.long), "ASP"])
def test_each_sample_is_used_once_in_each_data_epoch(tmp_path: Path, runs: list[Run], consistency: str) -> None:
    """Check a number of ranges that is no multiple of the workers: in BSP the last one's step must not wait for the
    others."""
    run = start(tmp_path, runs, consistency, "plain", 124, 2)
    status, text = run.end()
    assert status == 0, text
    assert used(text) == Counter(itertools.product(range(2), range(124))), text
    assert text.count("repeated 0 failed 0") == 3
    if consistency == "ASP":
        assert uses(text) == [2] * 124


@pytest.mark.parametrize(
    ("consistency", "when"),
    [
        pytest.param("ASP", "after", marks=pytest.mark.long),
        pytest.param("ASP", "before", marks=pytest.mark.long),
        ("BSP", "after"),
    ],
)
def test_what_a_killed_worker_held_is_used_again_and_counted(
    tmp_path: Path, runs: list[Run], consistency: str, when: str
) -> None:
    run = start(tmp_path, runs, consistency, when, 300, 1)
    status, text = run.end()
    assert status == 0, text
    assert text.count("killed by SIGKILL") == 1
    twice = [sample for sample, count in used(text).items() if count != 1]
    assert len(used(text)) == 300 and len(twice) == (5 if when == "after" else 0), text
    assert all(used(text)[sample] == 2 for sample in twice)
    if consistency == "ASP":
        assert Counter(uses(text)) == Counter({1: 300 - len(twice)}) + Counter({2: len(twice)})
        assert text.count("repeated 1 failed 0") == 3, text
    assert "repeated 1 failed 0" in text


@pytest.mark.long
def test_a_killed_scheduler_forgets_no_lease(tmp_path: Path, runs: list[Run]) -> None:
    run = start(tmp_path, runs, "ASP", "plain", 1500, 1)
    run.until("used", 30)
    run.child("psdist_scheduler").kill()
    status, text = run.end()
    assert status == 0, text
    assert used("".join(run.seen) + text) == Counter((0, sample) for sample in range(1500))
    assert uses(text) == [1] * 1500
    assert text.count("repeated 0 failed 0") == 3, text


# --- one client's view ------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def client(cluster: EmbeddedCluster) -> AsyncIterator[psdist.AsyncClient]:
    async with psdist.AsyncClient(cluster.address, cluster.token, connect_timeout=60.0) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """Name of a data set of this test's own: the cluster is shared."""
    return f"data-{next(_numbers)}"


@pytest.mark.asyncio(loop_scope="session")
async def test_leaving_the_loop_gives_the_last_range_back_unless_it_is_done(
    client: psdist.AsyncClient, name: str
) -> None:
    data = await client.dataset(name, size=100, range_size=10)
    ranges = aiter(data)
    await anext(ranges)
    await anext(ranges)
    await ranges.aclose()
    assert await data.position() == DataPosition(0, ((0, 1),))
    ranges = aiter(data)
    given = await anext(ranges)
    assert given.tolist() == RangeOrder(data.spec).indices(0, 1).tolist()
    data.done()
    await ranges.aclose()
    assert await data.position() == DataPosition(0, ((0, 2),))
    assert (data.repeated, data.failed) == (0, 0)


@pytest.mark.asyncio(loop_scope="session")
async def test_all_is_given_once_to_two_who_ask(
    client: psdist.AsyncClient, cluster: EmbeddedCluster, name: str
) -> None:
    async with psdist.AsyncClient(cluster.address, cluster.token) as other:
        both = [await c.dataset(name, size=101, range_size=4, shuffle=False, data_epochs=2) for c in (client, other)]
        seen: list[list[int]] = [[], []]

        async def use(number: int) -> None:
            async for indices in both[number]:
                seen[number] += indices.tolist()

        await asyncio.gather(use(0), use(1))
        assert all(seen) and Counter(seen[0] + seen[1]) == Counter([*range(101), *range(101)])
        assert await both[0].position() == DataPosition(2)
        assert [indices async for indices in both[1]] == []


@pytest.mark.asyncio(loop_scope="session")
async def test_a_client_that_closes_gives_back_what_it_holds(
    client: psdist.AsyncClient, cluster: EmbeddedCluster, name: str
) -> None:
    async with psdist.AsyncClient(cluster.address, cluster.token) as other:
        held = await (await other.dataset(name, 9, 3)).next()
        assert held is not None and held.number == 0
    data = await client.dataset(name, 9, 3)
    again = await data.next()
    assert again is not None and (again.number, again.attempt, data.repeated) == (0, 0, 0)
    await data.leave(again)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_position_that_is_set_voids_leases(client: psdist.AsyncClient, name: str) -> None:
    data = await client.dataset(name, size=100, range_size=10, data_epochs=2)
    held = await data.next()
    await data.set_position(DataPosition(1, ((2, 3), (9, 1)), 7, 1))
    assert (data.repeated, data.failed) == (7, 1)
    numbers = []
    while (held := await data.next(held)) is not None:
        numbers.append((held.data_epoch, held.number))
    assert numbers == [(1, 0), (1, 1), (1, 5), (1, 6), (1, 7), (1, 8)]
    for position in (DataPosition(3), DataPosition(0, ((0, 21),)), DataPosition(0, ((0, 2), (2, 1)))):
        with pytest.raises(errors.InvalidArgumentError, match="position is not valid"):
            await data.set_position(position)
    assert await data.position() == DataPosition(2, (), 7, 1)


@pytest.mark.asyncio(loop_scope="session")
async def test_all_must_agree(client: psdist.AsyncClient, cluster: EmbeddedCluster, name: str) -> None:
    data = await client.dataset(name, 100, 10)
    assert await client.dataset(name, 100, 10) is data
    async with psdist.AsyncClient(cluster.address, cluster.token) as other:
        for one in (client, other):
            with pytest.raises(errors.SettingsMismatchError, match="range_size is 20, not 10"):
                await one.dataset(name, 100, 20)
    for size, range_size in ((0, 1), (10, 0), (1 << 40, 1)):
        with pytest.raises((errors.InvalidArgumentError, errors.LimitExceededError)):
            await client.dataset("bad", size, range_size)


@pytest.mark.asyncio(loop_scope="session")
async def test_large_data_is_shuffled_beside_the_loop(client: psdist.AsyncClient, name: str) -> None:
    data = await client.dataset(name, size=200_000, range_size=100_000, seed=1)
    seen = np.concatenate([indices async for indices in data])
    assert (np.sort(seen) == np.arange(200_000)).all() and (seen[:10] != np.arange(10)).any()
