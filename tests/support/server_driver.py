"""One server's host without a network: hand-made maps, calls as the service makes them, snapshot commands."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from psdist import optim
from psdist.consistency import BSP, Consistency
from psdist.security.tls import Credentials
from psdist.snapshots import format as layouts
from psdist.snapshots.format import Manifest, ParametersState, ShardFile
from psdist.snapshots.opening import open_storage
from psdist.snapshots.storage import Storage
from psdist.types import (
    ClusterMap,
    Identity,
    Layout,
    ParametersEntry,
    ParametersMember,
    ParametersSpec,
    Replica,
    Restore,
    ServerEntry,
    Shard,
    TensorSpec,
    WorkerEntry,
)
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import server_pb2
from psdist.wire import convert
from psdist_server.core.lags import Ranges
from psdist_server.server import ParameterServer, ServerRegistration
from psdist_server.store.rpc_call import Call, PushedGradient

ME = Replica("server-0", 1)
RUN = "run"
Floats = NDArray[np.float32]


def entry_of(
    total: int = 50_000,
    slice_elements: int = 4096,
    workers: int = 1,
    shards: int = 3,
    consistency: Consistency | None = None,
    optimizer: optim.Optimizer | None = None,
    name: str = "p",
) -> ParametersEntry:
    """Return parameters whose shards are all on this server."""
    spec = ParametersSpec(name, optimizer or optim.Adam(lr=0.1), consistency or BSP(), slice_elements=slice_elements)
    members = tuple(ParametersMember(f"worker-{rank}", 1, rank) for rank in range(workers))
    return ParametersEntry(spec, total, (Shard(ME),) * shards, members, reference_workers=workers)


def layout_of(entry: ParametersEntry) -> Layout:
    """Return a layout with one tensor for the whole vector."""
    return Layout((TensorSpec("w", (entry.total,), "float32"),))


class Driver:
    """Host under test, its callers, and its reports."""

    def __init__(self, storage: Storage, threads: int = 2) -> None:
        self.storage = storage
        self.host = ParameterServer(
            ServerRegistration(RUN, "server-0", storage=storage.url), Credentials(), threads, opener=lambda url: storage
        )
        self.reports: asyncio.Queue[pb.SnapshotReport] = asyncio.Queue()
        self.changed = asyncio.Event()
        self.host.report_to(self.changed.set, self.reports.put_nowait)
        self.epoch = 0

    async def follow(self, *entries: ParametersEntry) -> None:
        """Apply the next map."""
        self.epoch += 1
        lives = {member for entry in entries for member in entry.members}
        workers = tuple(WorkerEntry(life.worker_id, life.incarnation, life.rank) for life in lives)
        servers = (ServerEntry("server-0", 1, "127.0.0.1:1"),)
        await self.host.adopt_map(ClusterMap(RUN, self.epoch, servers, workers, entries))

    async def create(self, entry: ParametersEntry, values: Floats) -> ParametersEntry:
        """Create parameters with these initial values, ready to train."""
        await self.follow(entry)
        store = self.host.admission.store(entry.spec.name)
        for index in range(entry.slicing.count):
            part = values[slice(*entry.slicing.bounds(index))]
            store.install(index, memoryview(part.tobytes()), self.epoch)
        ready = replace(entry, ready=True)
        await self.follow(ready)
        return ready

    def push(
        self,
        entry: ParametersEntry,
        worker: int,
        step: int,
        gradient: Floats,
        mark: int = 0,
        slices: Iterable[int] | None = None,
        absent: Ranges = (),
    ) -> Call:
        """Start a worker's push of some slices (default: all)."""
        member = entry.members[worker]
        identity = Identity(RUN, member.worker_id, member.incarnation, self.epoch, entry.spec.name)
        call = Call(identity, is_push=True, wants_weights=False, step=step, mark=mark)
        call.gradient = PushedGradient(absent=absent)
        store = self.host.admission.store(entry.spec.name)
        store.gradients.begin_push(call)
        for index in range(entry.slicing.count) if slices is None else slices:
            store.router.push_unchecked(call, index, 0, gradient[slice(*entry.slicing.bounds(index))], is_shared=True)
        call.asked_all()
        return call

    async def train(self, entry: ParametersEntry, step: int, gradient: Floats, absent: Ranges = ()) -> None:
        """Complete one push of each worker."""
        calls = [self.push(entry, worker, step, gradient, absent=absent) for worker in range(len(entry.members))]
        for call in calls:
            await answered(call)

    # --- the scheduler's part -----------------------------------------------------------------------------------------

    def prepare(self, attempt: int, steps: dict[str, int], directory: str = "one") -> None:
        """See SnapshotCommand."""
        parameters = [pb.SnapshotCommand.Prepare.Parameters(parameters=n, step=step) for n, step in steps.items()]
        prepare = pb.SnapshotCommand.Prepare(parameters=parameters, directory=directory)
        self.host.snapshot_writer.command(pb.SnapshotCommand(attempt=attempt, prepare=prepare))

    def cut(self, attempt: int, following: dict[str, dict[str, int]] | None = None) -> None:
        """See SnapshotCommand.

        following: by parameters and worker, its first push after the snapshot.
        """
        parameters = [
            pb.SnapshotCommand.Cut.Parameters(
                parameters=name,
                producers=[
                    server_pb2.ReplicateRequest.Producer(
                        life=server_pb2.Life(worker_id=worker, incarnation=1), next=number
                    )
                    for worker, number in workers.items()
                ],
            )
            for name, workers in (following or {}).items()
        ]
        self.host.snapshot_writer.command(
            pb.SnapshotCommand(attempt=attempt, cut=pb.SnapshotCommand.Cut(parameters=parameters))
        )

    def end(self, attempt: int, committed: bool = True) -> None:
        """See SnapshotCommand."""
        end = pb.SnapshotCommand.End(committed=committed)
        self.host.snapshot_writer.command(pb.SnapshotCommand(attempt=attempt, end=end))

    async def report(self) -> pb.SnapshotReport:
        """Return the server's next report."""
        async with asyncio.timeout(60):
            return await self.reports.get()

    async def written(self, shards: int) -> list[pb.SnapshotReport.Written]:
        """Return the next reports, all about files."""
        reports = [await self.report() for _ in range(shards)]
        assert all(report.HasField("written") for report in reports), reports
        return [report.written for report in reports]

    async def commit(
        self, entries: Iterable[ParametersEntry], files: Iterable[pb.SnapshotReport.Written], directory: str = "one"
    ) -> tuple[Manifest, Restore]:
        """Write the manifest."""
        files = list(files)
        states = []
        for entry in entries:
            mine = {file.shard: file for file in files if file.parameters == entry.spec.name}
            shards = tuple(
                ShardFile(
                    file.file,
                    file.length,
                    file.digest.hex(),
                    tuple(file.versions),
                    tuple(file.digests[i : i + 16].hex() for i in range(0, len(file.digests), 16)),
                    convert.lags_from_proto(file.lags),
                )
                for _, file in sorted(mine.items())
            )
            step = max(version for shard in shards for version in shard.versions)
            names = tuple(mine[0].state_names)
            states.append(ParametersState(entry.spec, layout_of(entry), 1, names, step, (), shards))
        manifest = Manifest(RUN, directory, 1, 0.0, "a test", {}, tuple(states))
        data = manifest.to_bytes()
        await self.storage.create(layouts.manifest_path(directory), data)
        return manifest, Restore(directory, xxhash.xxh3_128_digest(data))

    # --- looking ------------------------------------------------------------------------------------------------------

    def arrays(self, name: str = "p") -> dict[int, list[bytes]]:
        """Return the bytes of each slice on this server, weights and state."""
        dense = self.host.admission.store(name).dense
        return {index: [array.tobytes() for array in dense.export(index)] for index in dense.indices}

    async def close(self) -> None:
        """Close the host."""
        await self.host.close()


async def answered(call: Call) -> int:
    """Return how many slices of a call were answered when it ended."""
    count = 0
    async with asyncio.timeout(60):
        while await call.next_answer() is not None:
            count += 1
    return count


def memory() -> Storage:
    """Return a storage that is not shared."""
    return open_storage(f"memory://{np.random.default_rng().integers(1 << 62)}")


def anything(*_: Any) -> None:
    """Do nothing."""
