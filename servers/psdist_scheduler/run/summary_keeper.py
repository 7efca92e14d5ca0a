"""Keeps the summary of a run, and writes it into the run's storage every minute and at the end.

Nothing waits for the writes: a storage that fails or hangs is only warned about.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final

import msgspec

from psdist import __version__
from psdist.errors import PsdistError, StorageError
from psdist.machine import usable_cores
from psdist.monitoring import run_summary as form
from psdist.monitoring.run_summary import Summary, WorkerPart
from psdist.snapshots.storage import Storage
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler.decide.cluster_state import EventRecord

logger = logging.getLogger("psdist.scheduler")

#: Time between two writes.
WRITE_SECONDS: Final = 60.0
#: Time for the last write, and for reading the predecessor's summary.
STORAGE_SECONDS: Final = 2.0

_PACKAGES: Final = ("numpy", "numba", "grpcio", "protobuf", "torch", "jax")


class SummaryKeeper:
    """Adds samples to the summary. previous: the summary that a predecessor of this scheduler has kept."""

    def __init__(self, run_id: str, now: float, previous: Summary | None = None) -> None:
        self._summary = previous or Summary(run_id=run_id, started=now, written=now)
        self._summary.state, self._summary.reason = "running", ""
        if previous is not None:
            self._summary.schedulers += 1

    @property
    def is_empty(self) -> bool:
        """True if no worker has trained yet."""
        return not self._summary.curves.points

    def add(self, sample: pb.RunSample, modes: Mapping[str, str]) -> None:
        """Add a sample. modes: kind of consistency by parameter set."""
        if not sample.workers or (self.is_empty and not any(worker.pushes for worker in sample.workers)):
            return
        self._summary.curves.add(form.point_of(sample, modes))
        for worker in sample.workers:
            self._add_worker(worker)

    def _add_worker(self, worker: pb.WorkerSample) -> None:
        parts = self._summary.workers
        if worker.worker_id not in parts and len(parts) >= form.MEMBERS_KEPT:
            return
        part = parts.setdefault(worker.worker_id, WorkerPart())
        for phase in ("compute", "push", "wait", "pull"):
            setattr(part.phases, phase, getattr(part.phases, phase) + getattr(worker, f"{phase}_seconds"))
        part.pushes += sum(worker.pushes.values())
        part.dropped += worker.dropped
        part.push_bytes += sum(each.push_bytes for each in worker.traffic)
        part.pull_bytes += sum(each.pull_bytes for each in worker.traffic)

    def curves(self) -> form.RunCurves:
        """Return a copy of the curves."""
        return msgspec.convert(msgspec.to_builtins(self._summary.curves), form.RunCurves)

    def document(
        self, status: Mapping[str, Any], events: Iterable[EventRecord], now: float, state: str = "", reason: str = ""
    ) -> bytes:
        """Return the summary as it is now. status: ``status_json``. events: all that are kept, oldest first."""
        summary = self._summary
        summary.written = now
        summary.state, summary.reason = state or "running", reason
        summary.configuration = _configuration(status)
        summary.environment = environment()
        summary.members = msgspec.convert(_newest_members(status["members"]), list[form.MemberPart])
        snapshots = status["snapshots"]["committed"] if status["snapshots"] else []
        # Servers report versions, and are gone at the end of a run.
        newest = max(snapshots, key=lambda one: float(one["time"]), default=None)
        versions = dict[str, int](newest["steps"] if newest is not None else {})
        for old in summary.parameters:
            versions[old.name] = max(versions.get(old.name, 0), old.version_max or 0)
        summary.parameters = msgspec.convert(status["parameters"][: form.MEMBERS_KEPT], list[form.ParametersPart])
        for part in summary.parameters:
            if part.version_max is None:
                part.version_max = versions.get(part.name)
        summary.snapshots = msgspec.convert(snapshots[: form.MEMBERS_KEPT], list[form.SnapshotPart])
        summary.history = _history(list(events))
        return form.to_bytes(summary)


def _history(records: list[EventRecord]) -> form.HistoryPart:
    newest = records[-form.EVENTS_KEPT :]
    parts = [form.EventPart(one.number, one.time, one.kind, one.warning, one.text) for one in newest]
    return form.HistoryPart(records[-1].number - len(newest) if records else 0, parts)


def _configuration(status: Mapping[str, Any]) -> dict[str, str | int]:
    names = ("workers_min", "servers_min", "servers_wanted", "replicas")
    snapshots = status["snapshots"]
    storage = {"storage": snapshots["storage"], "snapshots": snapshots["policy"]} if snapshots else {}
    return {name: status[name] for name in names} | storage


def _newest_members(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the live members first, then those that have gone, at most ``MEMBERS_KEPT``."""
    return sorted(members, key=lambda member: member["state"] != "live")[: form.MEMBERS_KEPT]


@cache
def environment() -> dict[str, str]:
    """Return texts about this host and its packages. The first call takes 30 ms, which would delay a run's start."""
    from importlib import metadata

    found = {
        "psdist": __version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "processor": _processor(),
        "cores": f"{usable_cores()} of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
    }
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# --- the storage ------------------------------------------------------------------------------------------------------


async def load(storage: Storage, run_id: str) -> Summary | None:
    """Return the newest readable summary of a run; None without one. A storage that fails is only warned about."""
    try:
        async with asyncio.timeout(STORAGE_SECONDS):
            for _, path in await form.paths(storage, run_id):
                try:
                    return await form.read(storage, path)
                except PsdistError as error:
                    logger.warning("skipped a summary of this run: %s", error)
    except (StorageError, TimeoutError) as error:
        logger.warning("the run's summary is a new one, since the storage cannot be read: %s", error or "no answer")
    return None


class SummaryWriter:
    """Writes summaries, each before its predecessor is removed.

    document: returns the bytes to write, or None if there is nothing to write. True asks for the last ones.
    """

    def __init__(self, storage: Storage, run_id: str, document: Callable[[bool], bytes | None]) -> None:
        self._storage = storage
        self._run_id = run_id
        self._document = document
        self._failing = False
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        """Write once a minute, forever."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()

    async def write(self, *, last: bool = False) -> None:
        """Write the summary now. A failing storage raises nothing: the first of several failures is logged."""
        if (data := self._document(last)) is None:
            return
        try:
            async with self._busy, asyncio.timeout(WRITE_SECONDS):
                old = await form.paths(self._storage, self._run_id)
                await self._storage.create(form.path_of(self._run_id, old[0][0] + 1 if old else 1, data), data)
                await self._storage.delete(path for _, path in old)
            self._failing = False
        except (PsdistError, OSError, TimeoutError) as error:
            if not self._failing:
                logger.warning("the run's summary was not written, and psdist report lacks the newest part: %s", error)
            self._failing = True

    async def write_last(self) -> None:
        """Write the summary for the last time, unless that takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STORAGE_SECONDS):
                await self.write(last=True)
