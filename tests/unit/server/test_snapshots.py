"""A server's part in snapshots: the files written during training, the ends of an attempt, and loading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from psdist import optim
from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.errors import InvalidArgumentError, StorageError
from psdist.snapshots.format import Manifest
from psdist.snapshots.reader import SliceReader, verify
from psdist.snapshots.storage import Storage, Writer
from psdist.types import ParametersEntry, Restore
from psdist_server import snapshots
from psdist_server.kernels.optimizers import Rule
from psdist_server.snapshots import ShardLoaded, ShardLoadFailed
from psdist_server.store import gradients, snapshot_cut
from tests.support import reference
from tests.support.server_driver import Driver, Floats, answered, entry_of, memory

TOTAL = 50_000
RNG = np.random.default_rng(1)
Arrays = dict[int, list[bytes]]


@pytest.fixture
async def driver() -> AsyncIterator[Driver]:
    made = Driver(memory())
    yield made
    await made.close()


def noise() -> Floats:
    return RNG.standard_normal(TOTAL).astype(np.float32)


async def assert_holds(driver: Driver, manifest: Manifest, wanted: Arrays) -> None:
    """The snapshot is whole, and has these bytes."""
    await verify(driver.storage, manifest)
    reader = SliceReader(driver.storage, manifest)
    for index, arrays in wanted.items():
        read = await reader.slice(manifest.parameters[0], index)
        assert [array.tobytes() for array in read] == arrays


async def begin(driver: Driver, step: int, attempt: int = 1, directory: str = "one") -> None:
    """Begin an attempt that cuts "p" at ``step``."""
    driver.prepare(attempt, {"p": step}, directory)
    driver.cut(attempt, {} if step else {"p": {}})
    assert (await driver.report()).prepared.accepted


def limit_room(driver: Driver, room: int) -> None:
    """Let copies of slices take this many bytes."""
    driver.host.snapshot_writer = snapshots.SnapshotWriter(
        driver.host.stores.get, lambda: driver.storage, driver.reports.put_nowait, room
    )


async def save(driver: Driver, entry: ParametersEntry, step: int, attempt: int = 1) -> tuple[Manifest, Restore]:
    """Take a snapshot of the current state."""
    directory = f"attempt-{attempt}"
    await begin(driver, step, attempt, directory)
    files = await driver.written(len(entry.shards))
    driver.end(attempt)
    return await driver.commit([entry], files, directory)


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_elements", [4096, 1 << 15 | 1], ids=["on the loop", "in threads"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("ahead", [True, False], ids=["copied ahead", "copied by updates"])
async def test_what_was_trained_meanwhile_is_not_in_the_snapshot(
    driver: Driver, slice_elements: int, clip: float, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ahead:
        monkeypatch.setattr(snapshot_cut, "ACTIVE_SECONDS", 0.0)
    entry = entry_of(slice_elements=slice_elements, optimizer=optim.Adam(lr=0.1, max_grad_norm=clip), workers=2)
    entry = await driver.create(entry, noise())
    await driver.train(entry, 0, noise())
    wanted = driver.arrays()
    driver.prepare(1, {"p": 1})
    prepared = (await driver.report()).prepared
    assert prepared.accepted and dict(prepared.steps_next) == {"p": 1}
    driver.cut(1)
    for step in range(1, 4):
        await driver.train(entry, step, noise())
    files = await driver.written(3)
    driver.end(1)
    assert driver.arrays() != wanted
    assert {version for file in files for version in file.versions} == {1}
    manifest, _ = await driver.commit([entry], files)
    await assert_holds(driver, manifest, wanted)


@pytest.mark.parametrize("ahead", [True, False], ids=["copied ahead", "copied by updates"])
async def test_lags_are_those_at_the_cut_and_come_back(
    driver: Driver, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ahead:
        monkeypatch.setattr(snapshot_cut, "ACTIVE_SECONDS", 0.0)
    entry = await driver.create(entry_of(optimizer=optim.Adam(lr=0.1), workers=2), noise())
    dense = driver.host.admission.store("p").dense
    absent = ((100, 5000), (20_000, 20_001))
    await driver.train(entry, 0, np.zeros(TOTAL, np.float32), absent)
    wanted, lags = driver.arrays(), dense.lags.rows(dense.indices)
    assert lags[0] == (0, 100, 4096, 1)
    await begin(driver, 1)
    for step in range(1, 4):
        await driver.train(entry, step, np.zeros(TOTAL, np.float32), ((0, TOTAL),))
    files = await driver.written(3)
    driver.end(1)
    manifest, restore = await driver.commit([entry], files)
    assert manifest.format == 5
    assert dense.lags.rows(dense.indices) != lags
    other = Driver(driver.storage)
    await other.follow(loading(restore, 1, optimizer=optim.Adam(lr=0.1)))
    await until(other, lambda: len(other.host.reports()) == 3)
    assert other.arrays() == wanted
    assert other.host.admission.store("p").dense.lags.rows(dense.indices) == lags
    await other.close()


@pytest.mark.parametrize("consistency", [BSP(), ASP()], ids=["bsp", "asp"])
async def test_a_tensor_that_one_worker_has_a_gradient_for_is_updated(driver: Driver, consistency: Consistency) -> None:
    """In ASP each push decides alone."""
    entry = entry_of(workers=2, optimizer=optim.SGD(lr=1.0), consistency=consistency)
    entry = await driver.create(entry, np.zeros(TOTAL, np.float32))
    gradient = np.full(TOTAL, 2.0, np.float32)
    calls = [
        driver.push(entry, 0, 0, gradient, absent=((0, 10), (20, 30))),
        driver.push(entry, 1, 0, gradient, absent=((5, 25),)),
    ]
    for call in calls:
        await answered(call)
    weights = driver.host.admission.store("p").dense.export(0)[0]
    lags = driver.host.admission.store("p").dense.lags.of(0)
    if isinstance(consistency, BSP):
        assert lags == ((5, 10, 1), (20, 25, 1))
        assert weights[[0, 5, 10, 20, 25]].tolist() == [-2.0, 0.0, -2.0, 0.0, -2.0]
    else:
        assert lags == ((0, 5, 1), (5, 10, 2), (10, 20, 1), (20, 25, 2), (25, 30, 1))
        assert weights[[0, 5, 10, 20, 25, 30]].tolist() == [-2.0, 0.0, -2.0, 0.0, -2.0, -4.0]


async def test_ranges_beyond_the_vector_are_refused(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    with pytest.raises(InvalidArgumentError, match=f"name whole values of its {TOTAL} elements"):
        driver.push(entry, 0, 0, noise(), absent=((0, TOTAL + 1),))


async def test_ever_new_ranges_are_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would divide slices into ever more pieces."""
    monkeypatch.setattr(gradients, "TENSORS_MAX", 2)
    entry = await driver.create(entry_of(), noise())
    await driver.train(entry, 0, noise(), ((0, 10), (20, 30)))
    await driver.train(entry, 1, noise(), ((0, 10),))
    with pytest.raises(InvalidArgumentError, match=r"have 5 ends: name whole tensors, at most 2"):
        driver.push(entry, 0, 2, noise(), absent=((0, 11),))


async def test_a_cut_is_armed_before_it_is_reached(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    driver.prepare(1, {"p": 3})
    assert dict((await driver.report()).prepared.steps_next) == {"p": 0}
    driver.cut(1)
    for step in range(3):
        await driver.train(entry, step, noise())
    wanted = driver.arrays()
    for step in range(3, 5):
        await driver.train(entry, step, noise())
    manifest, _ = await driver.commit([entry], await driver.written(3))
    await assert_holds(driver, manifest, wanted)


async def test_a_step_that_a_slice_has_passed_is_refused(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    await driver.train(entry, 0, noise())
    driver.push(entry, 0, 1, noise(), slices=[2])
    driver.prepare(1, {"p": 1})
    prepared = (await driver.report()).prepared
    assert not prepared.accepted and dict(prepared.steps_next) == {"p": 2}
    driver.prepare(2, {"p": 2})
    assert (await driver.report()).prepared.accepted


@pytest.mark.parametrize("consistency", [ASP(), SSP(staleness=3)])
async def test_marked_pushes_are_not_in_the_snapshot(driver: Driver, consistency: Consistency) -> None:
    """Worker 0 is before its mark and has sent half of its push; worker 1 is past it and has sent all of its next."""
    entry = entry_of(workers=2, consistency=consistency, optimizer=optim.SGD(lr=1.0))
    entry = await driver.create(entry, np.zeros(TOTAL, np.float32))
    one, other = np.full(TOTAL, 1.0, np.float32), np.full(TOTAL, 100.0, np.float32)
    await answered(driver.push(entry, 1, 0, one))
    count = entry.slicing.count
    first = driver.push(entry, 0, 0, one, slices=range(count // 2))
    await answered(first)
    driver.prepare(1, {"p": 0})
    assert (await driver.report()).prepared.accepted
    marked = driver.push(entry, 1, 1, other, mark=1)
    driver.cut(1, {"p": {"worker-0": 1, "worker-1": 1}})
    await answered(driver.push(entry, 0, 0, one, slices=range(count // 2, count)))
    await answered(marked)
    files = await driver.written(3)
    assert {version for file in files for version in file.versions} == {2}
    manifest, _ = await driver.commit([entry], files)
    wanted = {index: [np.full(entry.slicing.size(index), -2, np.float32).tobytes()] for index in range(count)}
    await assert_holds(driver, manifest, wanted)
    assert driver.arrays() == {
        index: [np.full(entry.slicing.size(index), -102, np.float32).tobytes()] for index in range(count)
    }


async def test_marked_pushes_go_on_when_the_attempt_is_over(driver: Driver) -> None:
    entry = await driver.create(entry_of(consistency=ASP()), noise())
    driver.prepare(1, {"p": 0})
    held = driver.push(entry, 0, 0, noise(), mark=1)
    assert "snapshot" in driver.host.waiting_for(held)
    driver.end(1, committed=False)
    await answered(held)
    driver.prepare(2, {"p": 0})
    held = driver.push(entry, 0, 1, noise(), mark=2)
    driver.host.snapshot_writer.session_ended()
    await answered(held)
    await answered(driver.push(entry, 0, 2, noise(), mark=1))


async def test_a_worker_that_goes_ends_an_attempt_that_marks_pushes(driver: Driver) -> None:
    entry = await driver.create(entry_of(consistency=ASP(), workers=2), noise())
    driver.prepare(1, {"p": 0})
    assert (await driver.report()).prepared.accepted
    await driver.follow(replace(entry, members=entry.members[:1]))
    assert "worker" in (await driver.report()).failed.error.message


async def test_a_shard_that_goes_ends_the_attempt(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    driver.prepare(1, {"p": 5})
    assert (await driver.report()).prepared.accepted
    elsewhere = replace(entry.shards[1], primary=replace(entry.shards[1].primary, server_id="server-1"), term=2)
    await driver.follow(replace(entry, shards=(entry.shards[0], elsewhere, entry.shards[2])))
    assert (await driver.report()).failed.error.code == "snapshot_failed"


async def test_a_copy_that_ends_late_does_not_touch_those_of_the_next_attempt(driver: Driver) -> None:
    entry = await driver.create(entry_of(slice_elements=1 << 15 | 1), noise())
    driver.prepare(1, {"p": 0})
    driver.push(entry, 0, 0, noise())
    late = driver.host.admission.store("p").cuts.current
    driver.end(1, committed=False)
    driver.prepare(2, {"p": 1})
    current = driver.host.admission.store("p").cuts.current
    assert late is not None and current is not None
    assert late.pool.is_used and current.pool is not late.pool


class Gated:
    """A storage whose writers wait for ``gate`` at each slice, and may fail."""

    def __init__(self, inner: Storage) -> None:
        self.url = inner.url
        self.read, self.list, self.create, self.delete = inner.read, inner.list, inner.create, inner.delete
        self._inner = inner
        self.gate = asyncio.Semaphore(0)
        self.error: StorageError | None = None

    def writer(self, path: str) -> AbstractAsyncContextManager[Writer]:
        return self._writer(path)

    @asynccontextmanager
    async def _writer(self, path: str) -> AsyncIterator[Writer]:
        async with self._inner.writer(path) as file:
            self._file = file
            yield _GatedWriter(self, file)


@pytest.fixture
async def gated() -> AsyncIterator[Driver]:
    """Return a server whose storage is ``Gated``."""
    made = Driver(Gated(memory()))
    yield made
    await made.close()


class _GatedWriter:
    def __init__(self, storage: Gated, file: Writer) -> None:
        self._storage, self._file = storage, file

    async def write(self, buffer: bytes | bytearray | memoryview) -> None:
        await self._storage.gate.acquire()
        if self._storage.error is not None:
            raise self._storage.error
        await self._file.write(buffer)


async def test_a_storage_that_fails_ends_the_attempt_and_nothing_else(gated: Driver) -> None:
    driver, storage = gated, gated.storage
    entry = await driver.create(entry_of(), noise())
    storage.error = StorageError("the disk is full")
    storage.gate.release()
    await begin(driver, 0)
    assert (await driver.report()).failed.error.message == "the disk is full"
    await driver.train(entry, 0, noise())
    storage.error, storage.gate = None, asyncio.Semaphore(1000)
    wanted = driver.arrays()
    manifest, _ = await save(driver, entry, 1, attempt=2)
    await assert_holds(driver, manifest, wanted)


async def test_updates_wait_where_there_is_no_room_for_copies(gated: Driver) -> None:
    driver, storage = gated, gated.storage
    room = 4 * 4096 * 3 * 5
    limit_room(driver, room)
    entry = await driver.create(entry_of(), noise())
    wanted = driver.arrays()
    await begin(driver, 0)
    call = driver.push(entry, 0, 0, noise())
    progress = driver.host.snapshot_progress()
    assert progress is not None and progress.bytes_aside == room
    assert len(call.outstanding) == entry.slicing.count - 5 and "snapshot" in driver.host.waiting_for(call)
    for _ in range(1000):
        storage.gate.release()
    await answered(call)
    manifest, _ = await driver.commit([entry], await driver.written(3))
    await assert_holds(driver, manifest, wanted)


@pytest.mark.parametrize("room", [1 << 20, 4 * 100 * 3 * 9], ids=["room", "little room"])
async def test_many_small_slices(driver: Driver, room: int) -> None:
    """Follow-up effects are not nested calls."""
    limit_room(driver, room)
    entry = await driver.create(entry_of(slice_elements=100), noise())
    await driver.train(entry, 0, noise())
    wanted = driver.arrays()
    await begin(driver, 1)
    await driver.train(entry, 1, noise())
    manifest, _ = await driver.commit([entry], await driver.written(3))
    await assert_holds(driver, manifest, wanted)


async def test_a_storage_that_takes_nothing_does_not_stop_training(
    gated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "STALL_SECONDS", 0.05)
    driver = gated
    room = 4 * 4096 * 3 * 5
    limit_room(driver, room)
    entry = await driver.create(entry_of(), noise())
    await begin(driver, 0)
    await driver.train(entry, 0, noise())
    assert (await driver.report()).failed.error.code == "storage"


# --- loading ----------------------------------------------------------------------------------------------------------


async def until(driver: Driver, enough: Callable[[], bool]) -> None:
    """Wait until the server's reports are sufficient."""
    async with asyncio.timeout(60):
        while not enough():
            await driver.changed.wait()
            driver.changed.clear()


def loading(restore: Restore, step: int, shards: int = 3, **settings: Any) -> ParametersEntry:
    entry = entry_of(shards=shards, **settings)
    return replace(entry, restore=restore, members=(replace(entry.members[0], first_step=step),))


async def load_failure(driver: Driver, entry: ParametersEntry) -> ShardLoadFailed:
    """Return the first report of another server that cannot load."""
    other = Driver(driver.storage)
    await other.follow(entry)
    await until(other, lambda: any(isinstance(report, ShardLoadFailed) for report in other.host.reports()))
    (failed,) = other.host.reports()
    await other.close()
    return failed


async def test_values_come_back_on_another_number_of_shards(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    for step in range(3):
        await driver.train(entry, step, noise())
    _, restore = await save(driver, entry, 3)
    wanted, gradient = driver.arrays(), noise()
    await driver.train(entry, 3, gradient)
    after = driver.arrays()
    other = Driver(driver.storage)
    entry = loading(restore, 3, shards=5)
    await other.follow(entry)
    await until(other, lambda: len(other.host.reports()) == 5)
    assert set(other.host.reports()) == {ShardLoaded("p", 0, shard, 1) for shard in range(5)}
    assert other.arrays() == wanted
    await other.follow(replace(entry, ready=True))
    assert other.host.reports() == []
    await other.train(entry, 3, gradient)
    assert other.arrays() == after
    await other.close()


@pytest.mark.parametrize(
    "after",
    [
        optim.Adam(lr=0.1),
        optim.SGD(lr=0.1),
        optim.SGD(lr=0.1, momentum=0.9, dampening=0.5),
        optim.RMSprop(momentum=0.9, centered=True),
        optim.Adagrad(lr=0.1, lr_decay=0.5, initial_accumulator_value=0.5),
        optim.FTRL(lr=0.5, l1=0.1),
    ],
    ids=lambda spec: spec.kind,
)
async def test_an_optimizer_begins_anew_at_the_weights_of_a_snapshot(driver: Driver, after: optim.Optimizer) -> None:
    entry = await driver.create(entry_of(), noise())
    for step in range(3):
        await driver.train(entry, step, noise())
    _, restore = await save(driver, entry, 3)
    other = Driver(driver.storage)
    entry = replace(loading(replace(restore, weights_only=True), 3, optimizer=after), state_since=3)
    await other.follow(entry)
    await until(other, lambda: len(other.host.reports()) == 3)
    weights = driver.host.admission.store("p").dense.weights.array.copy()
    states = [np.zeros(TOTAL, np.float32) for _ in after.state_names]
    Rule(after).initialize(weights, states, [(0, weights.size, 0)])
    for step in range(3, 6):
        store = other.host.admission.store("p")
        assert {one.version for shard in store.router.machines.values() for one in shard.slices.values()} == {step}
        assert set(store.dense.weights.sequence.tolist()) == {2 * step}, "who reads in place goes by it"
        assert [array.tobytes() for array in (store.dense.weights.array, *store.dense.states)] == [
            array.tobytes() for array in (weights, *states)
        ]
        gradient = noise()
        await other.follow(replace(entry, ready=True))
        await other.train(entry, step, gradient)
        reference.update(after, after.values(), weights, states, gradient, step, 1.0, 3)
    await other.close()


async def test_a_state_of_other_arrays_is_not_loaded(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    _, restore = await save(driver, entry, 0)
    failed = await load_failure(driver, loading(restore, 0, optimizer=optim.Lion()))
    assert "has exp_avg state arrays, and exp_avg, exp_avg_sq" in failed.error.message


async def test_a_higher_generation_begins_anew_from_the_snapshot(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    await driver.train(entry, 0, noise())
    _, restore = await save(driver, entry, 1)
    wanted = driver.arrays()
    gradient = noise()
    await driver.train(entry, 1, gradient)
    after = driver.arrays()
    waiting = driver.push(entry, 0, 2, noise(), slices=[0, 1])
    again = replace(loading(restore, 1), generation=1)
    again = replace(again, members=(replace(again.members[0], incarnation=2),))
    await driver.follow(again)
    await answered(waiting)
    await until(driver, lambda: len(driver.host.reports()) == 3)
    assert driver.arrays() == wanted
    again = replace(again, ready=True)
    await driver.follow(again)
    await driver.train(again, 1, gradient)
    assert driver.arrays() == after


async def test_a_corrupt_file_is_reported_by_its_name(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    manifest, restore = await save(driver, entry, 0)
    name = manifest.parameters[0].shards[1].file
    path = f"snapshots/attempt-1/{name}"
    data = bytearray(await driver.storage.read(path))
    data[-1] ^= 1
    await driver.storage.delete([path])
    await driver.storage.create(path, bytes(data))
    failed = await load_failure(driver, loading(restore, 0))
    assert failed.error.code == "snapshot_corrupt" and name in failed.error.message
    assert failed.restore == restore


async def test_other_parameters_are_not_loaded(driver: Driver) -> None:
    entry = await driver.create(entry_of(), noise())
    _, restore = await save(driver, entry, 0)
    failed = await load_failure(driver, loading(restore, 0, total=TOTAL + 1))
    assert str(TOTAL + 1) in failed.error.message


async def test_a_storage_that_does_not_answer_is_asked_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psdist_server.snapshots._RETRY_MIN_SECONDS", 0.001)
    entry = await driver.create(entry_of(), noise())
    _, restore = await save(driver, entry, 0)
    refused, read = asyncio.Event(), driver.storage.read
    answers = iter([True, False, True])

    async def refuse(path: str, start: int = 0, length: int | None = None) -> bytes:
        if next(answers, False):
            refused.set()
            raise StorageError("no connection")
        return await read(path, start, length)

    monkeypatch.setattr(driver.storage, "read", refuse)
    other = Driver(driver.storage)
    await other.follow(loading(restore, 0))
    await refused.wait()
    await asyncio.sleep(0)
    progress = other.host.snapshot_progress()
    assert progress is not None and progress.loading and progress.waiting_for == "no connection"
    await until(other, lambda: len(other.host.reports()) == 3)
    assert other.arrays() == driver.arrays()
    await other.close()
