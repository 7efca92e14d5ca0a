"""A live run of real processes: waits for its recovery, reads its workers' logs and records the faults.

This is the part of a chaos run that faults (``injections``) work with. ``run`` drives both.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Final

from psdist.errors import InternalError
from psdist.settings.exit_codes import INFRASTRUCTURE
from psdist.types import ParametersEntry
from psdist.v1 import scheduler_pb2
from psdist.wire import convert
from tests.support.chaos.cluster import ChaosCluster
from tests.support.chaos.fills import Role
from tests.support.chaos.report import ChaosReport, Injected
from tests.support.chaos.settings import ChaosSettings
from tests.support.chaos.workload import EventReader, WorkloadSettings

_RECOVER_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
_MAP_ATTEMPTS: Final = 10


class LiveRun:
    """The processes of a run, and the logs of its workers.

    rng: source of targets and moments.
    report: destination of faults and broken promises.
    """

    def __init__(
        self,
        settings: ChaosSettings,
        cluster: ChaosCluster,
        workload: WorkloadSettings,
        report: ChaosReport,
        rng: random.Random,
    ) -> None:
        self.settings = settings
        self.cluster = cluster
        self.report = report
        self.rng = rng
        self.readers = [EventReader(workload.log(rank)) for rank in range(settings.workers)]

    def record_fault(self, kind: str, target: str, moment: float, fill_role: Role | None = None) -> None:
        """Record a fault that was injected at ``moment``."""
        self.report.faults.append(Injected(kind, target, moment, fill_role=fill_role))

    async def wait_until(self, what: str, seconds: float, condition: Callable[[], Awaitable[bool]]) -> None:
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

    async def wait_recovered(
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

        await self.wait_until("all members there, all shards with their copies, all workers pushing", seconds, all_well)

    def restart_servers(self) -> None:
        """Restart servers that were expelled without a fault of their own, as a launcher does."""
        for name, process in self.cluster.processes.items():
            unforeseen = name.startswith("server") and name not in self.cluster.awaited
            if unforeseen and process.status == INFRASTRUCTURE:
                self.report.expelled += 1
                self.cluster.launch(name)

    async def wait_resumed(self, moment: float, workers: range | list[int]) -> None:
        """Wait until each of these workers has an acknowledged push that started after ``moment``."""

        async def pushing() -> bool:
            return self._push_again(moment, workers)

        await self.wait_until(f"workers {list(workers)} push again", _RECOVER_SECONDS, pushing)

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
