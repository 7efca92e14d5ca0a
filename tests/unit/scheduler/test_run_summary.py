"""Summary of a run: bounded curves, its JSON form and files, and a storage that fails."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path

import pytest

from psdist.errors import SnapshotCorruptError, StorageError
from psdist.monitoring import run_summary as form
from psdist.monitoring.run_json import status_json
from psdist.snapshots.storage import LocalStorage
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler.decide.cluster_state import EventRecord
from psdist_scheduler.run_status import SummaryKeeper, SummaryWriter, load


def sample(time: float, pushes: tuple[int, ...] = (2, 3), loss: float = 1.0, name: str = "model") -> pb.RunSample:
    workers = [
        pb.WorkerSample(
            worker_id=f"worker-{rank}",
            seconds=1.0,
            compute_seconds=0.75,
            wait_seconds=0.25,
            pushes={name: count},
            traffic=[pb.WorkerTotals.Traffic(transport="tcp", push_bytes=100, pull_bytes=50)],
            reported={"loss": loss},
            samples_per_second=32.0,
        )
        for rank, count in enumerate(pushes)
    ]
    return pb.RunSample(time=time, workers=workers)


def keeper(previous: form.Summary | None = None) -> SummaryKeeper:
    return SummaryKeeper("digits", 1000.0, previous)


def document(kept: SummaryKeeper, events: int = 0, state: str = "running") -> form.Summary:
    records = [EventRecord(n + 1, 1000.0 + n, "note", False, f"event {n}") for n in range(events)]
    answer = pb.GetStatusResponse(run_id="digits", workers_min=2)
    answer.members.add(member_id="worker-0", role=pb.ROLE_WORKER, state="live", host="node")
    answer.parameters.add(state="ready").entry.spec.name = "model"
    answer.snapshots.storage = "/storage"
    answer.snapshots.committed.add(directory="one", steps={"model": 5}, bytes=10)
    return form.parse(kept.document(status_json(answer), records, 2000.0, state), "test")


def test_a_summary_has_curves_workers_and_configuration() -> None:
    kept = keeper()
    assert kept.is_empty
    kept.add(sample(1001.0, loss=2.0), {"model": "bsp"})
    kept.add(sample(1002.0, loss=math.nan), {"model": "asp"})
    kept.add(pb.RunSample(time=1003.0), {})
    found = document(kept, events=3)
    first, second = found.curves.points
    assert (first.steps, second.steps) == ({"model": 3.0}, {"model": 5.0})
    assert (first.samples, first.bytes, first.reported["loss"].value) == (64.0, 300.0, 2.0)
    assert not second.reported
    worker = found.workers["worker-1"]
    assert (worker.phases.compute, worker.phases.wait, worker.pushes, worker.push_bytes) == (1.5, 0.5, 6.0, 200.0)
    assert found.configuration["workers_min"] == 2 and found.configuration["storage"] == "/storage"
    assert (found.members[0].host, found.parameters[0].name, found.snapshots[0].steps) == (
        "node",
        "model",
        {"model": 5},
    )
    assert [one.number for one in found.history.events] == [1, 2, 3] and found.environment["Python"]


def test_a_run_without_servers_is_at_the_newest_version_that_is_known() -> None:
    kept = keeper()
    assert document(kept).parameters[0].version_max == 5, "as in its snapshot"
    answer = pb.GetStatusResponse(run_id="digits")
    entry = answer.parameters.add(state="ready").entry
    entry.spec.name = "model"
    entry.shards.add().primary.server_id = "server-0"
    statistics = answer.members.add(member_id="server-0", role=pb.ROLE_SERVER, state="live").statistics
    statistics.parameters.add(parameters="model", version_min=7, version_max=7)
    kept.document(status_json(answer), [], 2000.0)
    assert document(kept).parameters[0].version_max == 7


def test_a_long_run_has_fewer_points_of_the_same_sums() -> None:
    kept = keeper()
    seconds = 5 * form.POINTS_KEPT
    for second in range(seconds):
        kept.add(sample(1000.0 + second, loss=float(second)), {"model": "bsp"})
    found = document(kept, events=form.EVENTS_KEPT + 10)
    assert form.POINTS_KEPT // 4 < len(found.curves.points) <= form.POINTS_KEPT
    assert found.curves.period_seconds == 8.0
    assert sum(point.steps["model"] for point in found.curves.points) == 3 * seconds
    weights = [point.reported["loss"].weight for point in found.curves.points]
    means = [point.reported["loss"].value for point in found.curves.points]
    assert sum(weights) == 2 * seconds
    assert sum(w * m for w, m in zip(weights, means, strict=True)) == pytest.approx(sum(range(seconds)) * 2)
    assert (len(found.history.events), found.history.omitted, found.history.events[0].number) == (
        form.EVENTS_KEPT,
        10,
        11,
    )


def test_points_far_apart_are_bounded_too() -> None:
    kept = keeper()
    for number in range(2 * form.POINTS_KEPT):
        kept.add(sample(1000.0 + 60 * number), {})
    assert len(document(kept).curves.points) <= form.POINTS_KEPT


def test_names_and_members_are_limited() -> None:
    kept = keeper()
    for number in range(form.NAMES_KEPT + 5):
        kept.add(sample(1000.0, name=f"model-{number}"), {})
    big = pb.RunSample(time=2000.0)
    for number in range(form.MEMBERS_KEPT + 5):
        big.workers.add(worker_id=f"worker-{number}", seconds=1.0, pushes={"model": 1})
    kept.add(big, {})
    found = document(kept)
    assert max(len(point.steps) for point in found.curves.points) <= form.NAMES_KEPT
    assert len(found.workers) == form.MEMBERS_KEPT


def test_other_bytes_are_no_summary() -> None:
    for data in [
        b"",
        b"[]",
        b"{}",
        b'{"format": true}',
        b'{"format": 1}',
        b'{"format": 1, "run_id": 5}',
        b"[" * 100_000,
    ]:
        with pytest.raises(SnapshotCorruptError, match="file is not what was written"):
            form.parse(data, "file")


def test_a_newer_format_is_refused_with_the_remedy() -> None:
    with pytest.raises(StorageError, match="format 9, but this psdist reads up to 1: use the psdist that wrote it"):
        form.parse(b'{"format": 9}', "file")


async def test_a_restarted_scheduler_continues_the_summary(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    assert await load(storage, "digits") is None
    kept = keeper()
    kept.add(sample(1001.0), {})
    writer = SummaryWriter(storage, "digits", lambda last: form.to_bytes(document(kept)))
    await writer.write()
    await writer.write_last()
    ((number, path),) = await form.paths(storage, "digits")
    assert number == 2 and await form.runs(storage) == ["digits"]
    found = await load(storage, "digits")
    following = keeper(found)
    following.add(sample(1050.0), {})
    after = document(following, state="ended")
    assert (len(after.curves.points), after.schedulers, after.state, after.started) == (2, 2, "ended", 1000.0)
    assert after.workers["worker-0"].pushes == 4.0
    assert await load(storage, "another") is None
    # A damaged one is skipped, and the run continues without it.
    (tmp_path / path).write_bytes((tmp_path / path).read_bytes().replace(b"1001", b"1009"))
    with pytest.raises(SnapshotCorruptError, match="its digest is not the one in its name"):
        await form.read(storage, path)
    assert await load(storage, "digits") is None


async def test_a_storage_that_fails_or_hangs_is_only_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = LocalStorage(str(tmp_path))

    async def full(path: str, data: bytes) -> None:
        raise StorageError("the disk is full")

    writer = SummaryWriter(storage, "digits", lambda last: b"{}")
    monkeypatch.setattr(storage, "create", full)
    with caplog.at_level(logging.WARNING):
        await writer.write()
        await writer.write()
    assert caplog.text.count("the disk is full") == 1

    async def hangs(prefix: str = "") -> list[object]:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(storage, "list", hangs)
    monkeypatch.setattr("psdist_scheduler.run_status.STORAGE_SECONDS", 0.01)
    assert await load(storage, "digits") is None
    await writer.write_last()


async def test_nothing_is_written_before_a_worker_has_trained(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    await SummaryWriter(storage, "digits", lambda last: None).write()
    assert await storage.list() == []


def test_a_clock_that_is_set_back_again_and_again_leaves_the_curves_limited() -> None:
    kept = keeper()
    for number in range(2 * form.POINTS_KEPT):
        kept.add(sample(1e6 - 10 * number), {})
    points = document(kept).curves.points
    assert len(points) <= form.POINTS_KEPT and sum(point.steps["model"] for point in points) == 10 * form.POINTS_KEPT


def test_means_of_the_largest_numbers_can_be_read_again() -> None:
    kept = keeper()
    for loss in (1.7e308, -1.7e308, 1.7e308):
        kept.add(sample(1000.0, loss=loss), {})
    assert abs(document(kept).curves.points[0].reported["loss"].value) < 1.7e308


def test_a_summary_with_an_impossible_period_is_refused() -> None:
    with pytest.raises(SnapshotCorruptError, match="period_seconds"):
        form.parse(b'{"format": 1, "run_id": "r", "started": 0, "written": 0, "curves": {"period_seconds": 0}}', "file")
