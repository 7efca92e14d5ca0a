"""A chaos run: starts real processes, injects faults by a seed, waits for recovery each time, and counts at the end.

Read ``ChaosRun.run`` first. The faults are in ``injections``, the processes in ``cluster``, and the count in
``oracle``.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from psdist.chaos import oracle
from psdist.chaos.cluster import ChaosCluster, ChaosClusterSettings
from psdist.chaos.fills import Role
from psdist.chaos.load import BackgroundLoad
from psdist.chaos.oracle import Verdict
from psdist.chaos.pauses import longest_pauses
from psdist.chaos.refusals import count_refusals
from psdist.chaos.report import ChaosReport, Injected
from psdist.chaos.workload import EventReader, Mode, WorkloadSettings
from psdist.errors import InternalError, PsdistError
from psdist.settings.config import TransportName
from psdist.settings.exit_codes import INFRASTRUCTURE
from psdist.settings.programs import RunSettings
from psdist.types import ParametersEntry
from psdist.v1 import scheduler_pb2
from psdist.wire import convert

if TYPE_CHECKING:
    from psdist.chaos.injections import Injection

_READY_SECONDS: Final = 60.0
_RECOVER_SECONDS: Final = 60.0
_END_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
_WARM_PUSHES: Final = 20
#: Lead time for announcing the final BSP step to workers, so that none has passed it.
_AHEAD_SECONDS: Final = 1.0
_AHEAD_STEPS: Final = 20
#: The longest random pause before a fault, so that faults hit every part of a step.
_PAUSE_SECONDS: Final = 0.5
_MAP_ATTEMPTS: Final = 10
_SLOTS_MAX: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """Settings of a chaos run.

    fault, kills: a key of ``injections.FAULTS``, and the number of times it is injected.
    down_seconds: time for which a scheduler stays down and a worker is busy; longest time for which others are frozen
        or disconnected after they were replaced.
    load: busy processes for each core, beside the run.
    compare: True to also make an undisturbed run of as many steps, and compare the bytes.
    """

    fault: str = "server-kill"
    kills: int = 100
    mode: Mode = "bsp"
    servers: int = 3
    workers: int = 2
    replicas: int = 2
    lease_seconds: float = 2.0
    down_seconds: float = 4.0
    seed: int = 0
    pace_seconds: float = 0.002
    transport: TransportName = "auto"
    load: int = 0
    compare: bool = True

    @property
    def compares(self) -> bool:
        """True if the bytes can be compared: BSP is exact as long as the same workers take part in every step."""
        return self.compare and self.mode == "bsp" and not self.expels

    @property
    def expels(self) -> bool:
        """True if the fault expels workers."""
        return self.injection.expels

    @property
    def injection(self) -> Injection:
        """The kind of fault."""
        from psdist.chaos.injections import FAULTS

        return FAULTS[self.fault]

    @property
    def dense(self) -> int:
        """Elements of the parameter set that is trained with Adam."""
        return self.injection.dense if self.compares or self.injection.needs_dense else 0

    @property
    def slots(self) -> int:
        """Places of a slice. In BSP with workers that leave and join, each step needs places of its own."""
        if self.mode != "bsp" or not self.expels:
            return 4096
        steps = (self.kills + 3) * (self.down_seconds + 10.0) / self.pace_seconds
        return int(min(_SLOTS_MAX, 1 << int(steps * self.workers).bit_length()))


class ChaosRun:
    """One run. ``progress`` is called with a sentence after each fault."""

    def __init__(self, settings: ChaosSettings, progress: Callable[[str], None]) -> None:
        self.settings = settings
        self.rng = random.Random(settings.seed)
        self.directory = Path(tempfile.mkdtemp(prefix="psdist-chaos-"))
        self.report = ChaosReport(
            f"{settings.fault} x {settings.kills}, {settings.mode}, replicas={settings.replicas}", asdict(settings)
        )
        self.cluster: ChaosCluster = ChaosCluster(self._cluster_settings(), self.directory, self.rng)
        self.workload = self._workload_settings(self.cluster)
        self.readers = [EventReader(self.workload.log(rank)) for rank in range(settings.workers)]
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
            settings.injection.reach,
            settings.transport,
        )

    def _workload_settings(self, cluster: ChaosCluster) -> WorkloadSettings:
        return WorkloadSettings(
            directory=str(cluster.directory),
            scheduler=cluster.address,
            workers=self.settings.workers,
            mode=self.settings.mode,
            slices=self.settings.injection.slices,
            slots=self.settings.slots,
            dense=self.settings.dense,
            pace_seconds=self.settings.pace_seconds,
            busy_seconds=self.settings.down_seconds,
            transport=cluster.settings.worker_transport,
        )

    # --- the course of the run ---

    async def run(self) -> ChaosReport:
        """Run to the end. The report lists all problems. Afterwards all processes are gone."""
        begin = time.monotonic()
        try:
            with self._load:
                await self._run()
            if self.settings.compares and not self.settings.injection.ends_the_run:
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
        fault = self.settings.injection
        await self.cluster.start(self.workload)
        await self.recovered(_READY_SECONDS, since=0.0, pushes=_WARM_PUSHES)
        self._progress("the run is up; faults begin")
        while len(self.report.faults) < self.settings.kills:
            await asyncio.sleep(self.rng.random() * _PAUSE_SECONDS)
            await fault.inject(self)
            recovery = self._measure(until=time.monotonic())
            if fault.ends_the_run:
                return
            self._progress(f"{len(self.report.faults)} of {self.settings.kills}: {recovery}")
        await self.recovered(since=0.0)
        await self._end()

    def _refusals(self) -> Counter[str]:
        return count_refusals(path.read_text("utf-8", "replace") for path in self.directory.glob("server-*.log"))

    async def _end(self) -> None:
        """Tell the workers to stop, and count."""
        pushes = [reader.pushes for reader in self.read()]
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
                raise InternalError(f"worker-{rank} ended with {status}: {self.readers[rank].errors}")
        self.report.verdict = verdict = self._judge()
        if verdict.dropped and not self.settings.expels:
            self.report.problems.append(f"{verdict.dropped} pushes were dropped")

    def _judge(self) -> Verdict:
        settings, pushes = self.settings, {rank: reader.pushes for rank, reader in enumerate(self.read())}
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

    # --- waiting ---

    async def until(self, what: str, seconds: float, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a condition. Raises InternalError after ``seconds``, or when a worker ends by itself."""
        deadline = time.monotonic() + seconds
        while not await condition():
            for rank, reader in enumerate(self.read()):
                status = self.cluster.processes[f"worker-{rank}"].status
                if status not in (None, -signal.SIGKILL):
                    self.report.runs_ended = 1
                    raise InternalError(f"worker-{rank} ended with {status}: {reader.errors[-1:]}")
            if time.monotonic() > deadline:
                raise InternalError(f"{what}: not within {seconds:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    async def recovered(
        self, seconds: float = _RECOVER_SECONDS, *, since: float, pushes: int = 1, starting: int = 0
    ) -> None:
        """Wait until every worker has acknowledged pushes that started after ``since``, all members are live, and every
        shard has its copies.

        starting: servers that may still be missing; then copies may still be moving, too.
        """

        async def all_well() -> bool:
            self.restart_servers()
            if not self._push_again(since, range(self.settings.workers)):
                return False
            if min(len(reader.pushes) for reader in self.readers) < pushes:
                return False
            status = await self.cluster.fetch()
            return status is not None and self._is_whole(status, starting)

        await self.until("all members there, all shards with their copies, all workers pushing", seconds, all_well)

    def restart_servers(self) -> None:
        """Restart servers that were expelled without a fault of their own, as a launcher does."""
        for name, process in self.cluster.processes.items():
            unforeseen = name.startswith("server") and name not in self.cluster.awaited
            if unforeseen and process.status == INFRASTRUCTURE:
                self.report.expelled += 1
                self.cluster.launch(name)

    async def resumed(self, moment: float, workers: range | list[int]) -> None:
        """Wait until each of these workers has an acknowledged push that started after ``moment``."""

        async def pushing() -> bool:
            return self._push_again(moment, workers)

        await self.until(f"workers {list(workers)} push again", _RECOVER_SECONDS, pushing)

    def _push_again(self, moment: float, workers: range | list[int]) -> bool:
        readers = self.read()
        return all(readers[rank].acknowledged_since(moment) is not None for rank in workers)

    def read(self) -> list[EventReader]:
        """Read the new lines of the workers' logs. Returns the readers by rank."""
        for reader in self.readers:
            reader.read()
        return self.readers

    async def entries(self) -> list[ParametersEntry]:
        """Return the parameter sets of the scheduler's newest map. Raises InternalError if the scheduler does not
        answer."""
        for _ in range(_MAP_ATTEMPTS):
            if (status := await self.cluster.fetch()) is not None:
                return [convert.entry_from_proto(one.entry) for one in status.parameters]
        raise InternalError(f"the scheduler did not answer {_MAP_ATTEMPTS} calls")

    def _is_whole(self, status: scheduler_pb2.GetStatusResponse, starting: int) -> bool:
        live = [member.role for member in status.members if member.state == "live"]
        shards = [shard for one in status.parameters for shard in one.entry.shards]
        return (
            live.count(scheduler_pb2.ROLE_SERVER) >= self.settings.servers - starting
            and live.count(scheduler_pb2.ROLE_WORKER) == self.settings.workers
            and all(one.state == "ready" for one in status.parameters)
            and all(1 + len(shard.backups) >= self.settings.replicas for shard in shards)
            and (starting > 0 or not any(shard.filling for shard in shards))
        )

    # --- measuring ---

    def injected(self, kind: str, target: str, moment: float, fill_role: Role | None = None) -> None:
        """Record a fault that was injected at ``moment``."""
        self.report.faults.append(Injected(kind, target, moment, fill_role=fill_role))

    def _measure(self, until: float) -> str:
        """Measure the recovery from each new fault; all effects were over at ``until``. Returns it as text."""
        first, self._measured = self._measured, len(self.report.faults)
        faults = [self._recovery(fault) for fault in self.report.faults[first:]]
        for rank, reader in enumerate(self.read()):
            if any(fault.target == f"worker-{rank}" for fault in faults):
                continue
            moments = [push.end for push in reader.pushes if push.outcome == "acknowledged"]
            for number, pause in enumerate(longest_pauses(moments, faults, until)):
                faults[number] = replace(faults[number], pause_seconds=max(pause, faults[number].pause_seconds))
        self.report.faults[first:] = faults
        return "; ".join(map(_sentence, faults))

    def _recovery(self, fault: Injected) -> Injected:
        """Return ``fault`` with the longest recovery of the workers that were not its target."""
        others = [reader for rank, reader in enumerate(self.read()) if fault.target != f"worker-{rank}"]
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
