"""A chaos run: starts real processes, injects faults by a seed, waits for recovery each time, and counts at the end.

Read ``ChaosRun.run`` first. The faults are in ``injections``, which act on a ``LiveRun``; the count is in
``oracle``.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np

from psdist.errors import InternalError, PsdistError
from psdist.settings.programs import RunSettings
from tests.support.chaos import oracle
from tests.support.chaos.cluster import ChaosCluster, ChaosClusterSettings
from tests.support.chaos.faults import BackgroundLoad
from tests.support.chaos.injections import FAULTS
from tests.support.chaos.live_run import LiveRun
from tests.support.chaos.oracle import Verdict
from tests.support.chaos.report import ChaosReport, Injected, count_refusals, longest_pauses
from tests.support.chaos.settings import ChaosSettings
from tests.support.chaos.workload import WorkloadSettings

_READY_SECONDS: Final = 60.0
_END_SECONDS: Final = 60.0
_WARM_PUSHES: Final = 20
#: Lead time for announcing the final BSP step to workers, so that none has passed it.
_AHEAD_SECONDS: Final = 1.0
_AHEAD_STEPS: Final = 20
#: The longest random pause before a fault, so that faults hit every part of a step.
_PAUSE_SECONDS: Final = 0.5
_SLOTS_MAX: Final = 1 << 18


class ChaosRun:
    """One run. ``progress`` is called with a sentence after each fault."""

    def __init__(self, settings: ChaosSettings, progress: Callable[[str], None]) -> None:
        self.settings = settings
        self.fault = FAULTS[settings.fault]
        #: BSP is exact as long as the same workers take part in every step.
        self.compares = settings.compare and settings.mode == "bsp" and not self.fault.expels
        self.rng = random.Random(settings.seed)
        self.directory = Path(tempfile.mkdtemp(prefix="psdist-chaos-"))
        self.report = ChaosReport(
            f"{settings.fault} x {settings.kills}, {settings.mode}, replicas={settings.replicas}", asdict(settings)
        )
        self.cluster: ChaosCluster = ChaosCluster(self._cluster_settings(), self.directory, self.rng)
        self.workload = self._workload_settings(self.cluster)
        self.live = LiveRun(settings, self.cluster, self.workload, self.report, self.rng)
        self._load = BackgroundLoad(settings.load)
        self._measured = 0
        self._progress = progress

    def _cluster_settings(self) -> ChaosClusterSettings:
        settings = self.settings
        return ChaosClusterSettings(
            settings.servers,
            settings.workers,
            settings.replicas,
            settings.lease_seconds,
            settings.lease_seconds if settings.fault == "worker-freeze" else RunSettings.worker_timeout_seconds,
            self.fault.reach,
            settings.transport,
        )

    def _workload_settings(self, cluster: ChaosCluster) -> WorkloadSettings:
        return WorkloadSettings(
            directory=str(cluster.directory),
            scheduler=cluster.address,
            workers=self.settings.workers,
            mode=self.settings.mode,
            slices=self.fault.slices,
            slots=self._slots(),
            dense=self.fault.dense if self.compares or self.fault.needs_dense else 0,
            pace_seconds=self.settings.pace_seconds,
            busy_seconds=self.settings.down_seconds,
            transport=cluster.settings.worker_transport,
        )

    def _slots(self) -> int:
        """Return the places of a slice. In BSP with workers that leave and join, each step needs places of its own."""
        settings = self.settings
        if settings.mode != "bsp" or not self.fault.expels:
            return 4096
        steps = (settings.kills + 3) * (settings.down_seconds + 10.0) / settings.pace_seconds
        return int(min(_SLOTS_MAX, 1 << int(steps * settings.workers).bit_length()))

    # --- the course of the run ---

    async def run(self) -> ChaosReport:
        """Run to the end. The report lists all problems. Afterwards all processes are gone."""
        begin = time.monotonic()
        try:
            with self._load:
                await self._run()
            if self.compares and not self.fault.ends_the_run:
                self._progress("faults are over; the undisturbed run begins")
                self.report.equal = await self._compare()
        except PsdistError as error:
            self.report.problems.append(f"{type(error).__name__}: {error}")
            self.report.problems += await self._last_words()
        finally:
            await self.cluster.close()
            self.report.refusals = self._refusals()
            self.report.seconds = time.monotonic() - begin
        if self.report.good:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            self.report.problems.append(f"logs are in {self.directory}")
        return self.report

    async def _run(self) -> None:
        await self.cluster.start(self.workload)
        await self.live.wait_recovered(_READY_SECONDS, since=0.0, pushes=_WARM_PUSHES)
        self._progress("the run is up; faults begin")
        while len(self.report.faults) < self.settings.kills:
            await asyncio.sleep(self.rng.random() * _PAUSE_SECONDS)
            await self.fault.inject(self.live)
            recovery = self._measure(until=time.monotonic())
            if self.fault.ends_the_run:
                return
            self._progress(f"{len(self.report.faults)} of {self.settings.kills}: {recovery}")
        await self.live.wait_recovered(since=0.0)
        await self._end()

    def _refusals(self) -> Counter[str]:
        return count_refusals(path.read_text("utf-8", "replace") for path in self.directory.glob("server-*.log"))

    async def _end(self) -> None:
        """Tell the workers to stop, and count."""
        pushes = [reader.pushes for reader in self.live.read()]
        since = time.monotonic() - _AHEAD_SECONDS
        recent = max(sum(push.begin > since for push in mine) for mine in pushes)
        stop = max(mine[-1].number for mine in pushes) + recent + _AHEAD_STEPS
        unfinished = self.directory / "stop.unfinished"
        unfinished.write_text(str(stop))
        unfinished.replace(self.workload.stop_file)
        for rank in range(self.settings.workers):
            status = await self.cluster.ended(f"worker-{rank}", _END_SECONDS)
            if status != 0:
                self.report.runs_ended = 1
                raise InternalError(f"worker-{rank} ended with {status}: {self.live.readers[rank].errors}")
        self.report.verdict = verdict = self._judge()
        if verdict.dropped and not self.fault.expels:
            self.report.problems.append(f"{verdict.dropped} pushes were dropped")

    def _judge(self) -> Verdict:
        settings, pushes = self.settings, {rank: reader.pushes for rank, reader in enumerate(self.live.read())}
        seen = [self.workload.final(rank, "counts").read_bytes() for rank in range(settings.workers)]
        if len(set(seen)) > 1:
            self.report.problems.append("workers see different weights at the end")
        acknowledged = [push.end for mine in pushes.values() for push in mine if push.outcome == "acknowledged"]
        self.report.steps_per_second = len(acknowledged) / (max(acknowledged) - min(acknowledged)) / settings.workers
        weights = np.frombuffer(seen[0], np.float32).reshape(self.workload.slices, self.workload.slots)
        return oracle.judge(pushes, weights, settings.workers, synchronous=settings.mode == "bsp")

    async def _compare(self) -> bool:
        """Run as many steps without faults, on one server without replicas, and compare every byte."""
        settings = ChaosClusterSettings(1, self.settings.workers, 1)
        directory = self.directory / "undisturbed"
        directory.mkdir()
        cluster = ChaosCluster(settings, directory, self.rng)
        workload = replace(self.workload, directory=str(directory), scheduler=cluster.address, pace_seconds=0.0)
        workload.stop_file.write_text(self.workload.stop_file.read_text())
        try:
            await cluster.start(workload)
            for rank in range(settings.workers):
                await cluster.ended(f"worker-{rank}", 10 * _END_SECONDS)
        finally:
            await cluster.close()
        return all(
            workload.final(rank, what).read_bytes() == self.workload.final(rank, what).read_bytes()
            for rank in range(settings.workers)
            for what in ("counts", "dense")
        )

    # --- measuring ---

    def _measure(self, until: float) -> str:
        """Measure the recovery from each new fault; all effects were over at ``until``. Returns it as text."""
        first, self._measured = self._measured, len(self.report.faults)
        faults = [self._recovery(fault) for fault in self.report.faults[first:]]
        for rank, reader in enumerate(self.live.read()):
            if any(fault.target == f"worker-{rank}" for fault in faults):
                continue
            moments = [push.end for push in reader.pushes if push.outcome == "acknowledged"]
            for number, pause in enumerate(longest_pauses(moments, faults, until)):
                faults[number] = replace(faults[number], pause_seconds=max(pause, faults[number].pause_seconds))
        self.report.faults[first:] = faults
        return "; ".join(map(_sentence, faults))

    def _recovery(self, fault: Injected) -> Injected:
        """Return ``fault`` with the longest recovery of the workers that were not its target."""
        others = [reader for rank, reader in enumerate(self.live.read()) if fault.target != f"worker-{rank}"]
        found = [push.end - fault.at for reader in others if (push := reader.acknowledged_since(fault.at)) is not None]
        return replace(fault, recovery_seconds=max(found, default=None))

    async def _last_words(self) -> list[str]:
        status = await self.cluster.fetch()
        words: list[str] = []
        if status is not None:
            words += [f"scheduler: {status.phase}; {'; '.join(status.waiting_for)}"]
            words += [f"scheduler: {event.text}" for event in list(status.events)[-6:]]
        return words + [tail for name in self.cluster.processes if (tail := self.cluster.tail(name, 4))]


def _sentence(fault: Injected) -> str:
    after = "" if fault.recovery_seconds is None else f", recovered after {1e3 * fault.recovery_seconds:.0f} ms"
    during = f" ({fault.fill_role} of a copy being filled)" if fault.fill_role else ""
    return f"{fault.kind} of {fault.target}{during}{after}"
