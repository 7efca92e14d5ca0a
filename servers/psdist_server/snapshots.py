"""This server's part in taking snapshots, from the scheduler's commands to durable files.

There is one attempt at a time. ``Prepare`` arms the cut in the parameter stores (``snapshot_cut``). ``Cut`` starts a
writer for each store, which writes one file for each primary shard of this server. ``End`` discards whatever is left.
An error is reported and ends the attempt here immediately; training continues. An attempt belongs to one session with
the scheduler. If the session breaks, both sides abandon the attempt.

The scheduler decides when snapshots are taken and when one is complete. ``psdist.snapshots`` defines their bytes.

``SnapshotLoader`` loads this server's primary shards from a snapshot, if the map asks for it. Slices are read from the
files of any number of earlier servers, verified against the digests of the manifest, and installed, a few at a time. If
the storage does not answer, the loader retries and reports the wait, for up to ``PATIENCE_SECONDS`` since the last
slice that it returned. After that, and if a snapshot is corrupt or belongs to another parameter set, the failure is
reported, and the scheduler decides how to continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

import numpy as np
import structlog
import xxhash

from psdist.consistency import BSP
from psdist.errors import (
    InternalError,
    PsdistError,
    SettingsMismatchError,
    SnapshotFailedError,
    StorageError,
    UnknownSnapshotError,
)
from psdist.snapshots import format as layout
from psdist.snapshots import format as layouts
from psdist.snapshots import reader
from psdist.snapshots.format import Manifest, ParametersState, corrupt
from psdist.snapshots.reader import SliceReader
from psdist.snapshots.storage import Storage, Writer
from psdist.types import Restore
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert, status
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.cut_state import CopyBudget, CutState
from psdist_server.kernels.arrays import PUBLISHED, Array
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.snapshot_cut import SliceCopies

logger = structlog.get_logger("psdist.server")

#: Limit on the bytes of copies held for a snapshot. Updates that need more wait for the writer.
COPY_BYTES_MAX: Final = 256 << 20
#: Files of a parameter set written concurrently.
FILES_AT_A_TIME: Final = 4
#: Small slices are batched up to this many bytes per write.
_BATCH_BYTES: Final = 1 << 20
#: An attempt fails if updates wait for copies to be written and none was written for one to two of these periods.
STALL_SECONDS: Final = 15.0
#: Longest wait of a server that ends for writers whose storage does not answer. Launchers allow 5 s in all.
_END_SECONDS: Final = 2.0


@dataclass(slots=True)
class _Part:
    """One parameter set of an attempt. number: its position in the attempt."""

    number: int
    store: ParameterStore
    copies: SliceCopies
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Attempt:
    number: int
    directory: str
    parts: dict[str, _Part] = field(default_factory=dict)
    bytes: int = 0
    bytes_written: int = 0
    bytes_confirmed: int = 0
    #: At the last check, training was waiting and nothing had been written since the previous check.
    is_stalled: bool = False

    @property
    def bytes_done(self) -> int:
        """Progress in bytes. Half of a byte's work is to write it, and half to read it back."""
        return min(self.bytes, (self.bytes_written + self.bytes_confirmed) // 2)

    def add_confirmed(self, size: int) -> None:
        """Add bytes that were read back."""
        self.bytes_confirmed += size


class SnapshotWriter:
    """Takes this server's part in snapshots.

    store: returns the parameter store of a name, or None.
    storage: opens the run's storage.
    send: sends a report to the scheduler.
    copy_bytes_max: limit on the bytes of held copies.
    """

    def __init__(
        self,
        store: Callable[[str], ParameterStore | None],
        storage: Callable[[], Storage],
        send: Callable[[pb.SnapshotReport], None],
        copy_bytes_max: int = COPY_BYTES_MAX,
    ) -> None:
        self._store = store
        self._open_storage = storage
        self._send = send
        self._budget_bytes = copy_bytes_max
        self.attempt: _Attempt | None = None
        self._newest = 0
        #: For hashing, so that the kernels of updates do not wait for it.
        self._thread = ThreadPoolExecutor(1, "snapshot")
        #: Writers of discarded attempts that have not ended yet.
        self._ending: set[asyncio.Task[None]] = set()

    def command(self, command: pb.SnapshotCommand) -> None:
        """Carry out a command of the scheduler."""
        kind = command.WhichOneof("kind")
        if kind == "prepare" and command.attempt > self._newest:
            self._newest = command.attempt
            self._discard()
            self._prepare(command.attempt, command.prepare)
        elif self.attempt is None or command.attempt != self.attempt.number:
            return
        elif kind == "cut":
            self._begin(self.attempt, command.cut)
        elif kind == "end":
            logger.info("snapshot ended", attempt=command.attempt, committed=command.end.committed)
            self._discard()

    def session_ended(self) -> None:
        """Discard the attempt, because the session with the scheduler broke."""
        self._discard()

    def _prepare(self, number: int, prepare: pb.SnapshotCommand.Prepare) -> None:
        found = [(place, wanted, self._store(wanted.parameters)) for place, wanted in enumerate(prepare.parameters)]
        here = [(place, wanted, store) for place, wanted, store in found if store is not None and store.router.machines]
        steps = {wanted.parameters: h.router.step_next for _, wanted, h in here if _is_stepped(h)}
        try:
            for _, _, store in here:
                store.check_installed()
        except PsdistError as error:
            self._report(number, _failed(error))
            return
        accepted = all(steps.get(wanted.parameters, 0) <= wanted.step for _, wanted, _ in here)
        if accepted:
            attempt = self.attempt = _Attempt(number, prepare.directory)
            budget = CopyBudget(self._budget_bytes)
            for place, wanted, store in here:
                state = CutState(wanted.step if _is_stepped(store) else None, _sizes(store), budget)
                copies = store.cuts.arm(number, state, self._failer(number))
                attempt.parts[wanted.parameters] = _Part(place, store, copies)
                attempt.bytes += sum(state.sizes.values())
        prepared = pb.SnapshotReport.Prepared(accepted=accepted, steps_next=steps)
        self._report(number, pb.SnapshotReport(prepared=prepared))

    def _failer(self, number: int) -> Callable[[str], None]:
        return lambda why: self._fail(number, SnapshotFailedError(why))

    def _begin(self, attempt: _Attempt, cut: pb.SnapshotCommand.Cut) -> None:
        for agreed in cut.parameters:
            if (part := attempt.parts.get(agreed.parameters)) is not None:
                following = {(p.life.worker_id, p.life.incarnation): p.next for p in agreed.producers}
                part.store.cuts.agree(part.copies, following)
                if agreed.final_step:
                    part.store.cuts.end_steps(agreed.final_step)
        for part in list(attempt.parts.values()):
            if self.attempt is attempt and part.task is None:
                part.task = asyncio.create_task(self._write(attempt, part))
                part.task.add_done_callback(partial(self._written, attempt))
        self._watch(attempt, -1)

    def _written(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        """End the attempt if a writer failed."""
        self._ending.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, PsdistError):
            logger.error("writing a snapshot failed", attempt=attempt.number, exc_info=error)
            error = InternalError(f"writing the snapshot failed: {error!r}")
        self._fail(attempt.number, error)

    def _fail(self, number: int, error: PsdistError) -> None:
        """End the attempt here and report the error."""
        if self.attempt is None or self.attempt.number != number:
            return
        logger.warning("gave up a snapshot", attempt=number, reason=str(error))
        self._discard()
        self._report(number, _failed(error))

    def _discard(self) -> None:
        """Discard the attempt: cancel its writers, release its copies, resume the updates that wait for it."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        for part in attempt.parts.values():
            if part.task is not None and not part.task.done():
                self._ending.add(part.task)
                part.task.cancel()
            part.store.cuts.disarm(part.copies)

    def _report(self, number: int, report: pb.SnapshotReport) -> None:
        report.attempt = number
        self._send(report)

    def progress(self) -> pb.SnapshotProgress | None:
        """Return the progress of the attempt, or None if there is none."""
        attempt = self.attempt
        if attempt is None:
            return None
        parts = attempt.parts.values()
        waits = [wait for part in parts if part.task is not None and (wait := part.copies.waiting_for())]
        return pb.SnapshotProgress(
            attempt=attempt.number,
            bytes_done=attempt.bytes_done,
            bytes=attempt.bytes,
            bytes_aside=sum(part.copies.state.copied_bytes for part in parts),
            waiting_for=waits[0] if waits else "",
        )

    def _watch(self, attempt: _Attempt, before: int) -> None:
        """Check regularly whether training is waiting for a storage that writes nothing. If so, fail the attempt."""
        if self.attempt is not attempt:
            return
        stalls = attempt.bytes_done == before and any(
            part.store.cuts.delays_training for part in attempt.parts.values()
        )
        if stalls and attempt.is_stalled:
            seconds = 2 * STALL_SECONDS
            error = StorageError(f"the storage accepted nothing for {seconds:.0f} s while training waited for it")
            self._fail(attempt.number, error)
            return
        attempt.is_stalled = stalls
        asyncio.get_running_loop().call_later(STALL_SECONDS, self._watch, attempt, attempt.bytes_done)

    async def close(self) -> None:
        """Discard the attempt, and wait until its writers have ended, unless the storage does not answer them: what
        they leave behind belongs to no snapshot."""
        self._discard()
        if self._ending:
            await asyncio.wait(self._ending, timeout=_END_SECONDS)
        self._thread.shutdown(wait=False)

    async def _write(self, attempt: _Attempt, part: _Part) -> None:
        """Write the files of all shards of a parameter set, several at a time: while one is being made durable, the
        next is written."""
        storage = await asyncio.get_running_loop().run_in_executor(self._thread, self._open_storage)
        pending = iter(sorted(part.store.replicator.machines))

        async def write() -> None:
            for shard in pending:
                await self._write_shard(attempt, part, storage, shard)

        await together(write() for _ in range(FILES_AT_A_TIME))
        part.store.cuts.disarm(part.copies)

    async def _write_shard(self, attempt: _Attempt, part: _Part, storage: Storage, shard: int) -> None:
        """Stream one file, and read it back. While a slice is written, it is hashed and the next one is copied."""
        store, machine = part.store, part.store.replicator.machines[shard]
        slices, term, state_names = machine.slices, machine.term, store.dense.state_names
        name = layout.shard_file_name(part.number, shard, len(store.entry.shards))
        header = layout.shard_header(slices, [store.dense.slicing.size(index) for index in slices], state_names)
        hashes = _Hashes(header)
        for index in slices[:1]:  # Open the file only once the cut is reached.
            await part.copies.take(index)
            await part.copies.rest()
        path = layout.file_path(attempt.directory, name)
        async with storage.writer(path) as file:
            await file.write(header)
            batch: list[int] = []
            arrays: list[Array] = []
            size = 0
            for position, index in enumerate(slices):
                await part.copies.rest()
                batch.append(index)
                arrays.append(await part.copies.take(index))
                size += arrays[-1].nbytes
                if size >= _BATCH_BYTES or index == slices[-1]:
                    part.copies.prefetch(slices[position + 1 : position + 2])
                    await self._write_batch(file, hashes, arrays)
                    for one in batch:
                        part.copies.written(one)
                    attempt.bytes_written += size
                    batch, arrays, size = [], [], 0
        await reader.confirm(storage, path, hashes.length, hashes.whole.digest(), attempt.add_confirmed)
        written = pb.SnapshotReport.Written(
            parameters=store.entry.spec.name,
            shard=shard,
            term=term,
            file=name,
            length=hashes.length,
            digest=hashes.whole.digest(),
            versions=part.copies.versions(slices),
            digests=b"".join(hashes.parts),
            state_names=state_names,
            lags=convert.lags_to_proto(part.copies.lags.rows(slices)),
        )
        self._report(attempt.number, pb.SnapshotReport(written=written))

    async def _write_batch(self, file: Writer, hashes: _Hashes, arrays: list[Array]) -> None:
        hashing = asyncio.get_running_loop().run_in_executor(self._thread, hashes.add, arrays)
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        await together((file.write(whole.data.cast("B")), _done(hashing)))


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all works concurrently, and wait until all have ended. If one raises, or the caller is cancelled, cancel the
    others and wait for them before passing that on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failed(error: PsdistError) -> pb.SnapshotReport:
    return pb.SnapshotReport(failed=pb.SnapshotReport.Failed(error=status.to_detail(error)))


async def _done(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)  # A running thread cannot be cancelled.


class _Hashes:
    """Digests of a file that starts with ``header``, and of each slice in it."""

    def __init__(self, header: bytes) -> None:
        self.whole = xxhash.xxh3_128(header)
        self.length = len(header)
        self.parts: list[bytes] = []

    def add(self, arrays: Sequence[Array]) -> None:
        """Add the next slices. Called in a thread."""
        for array in arrays:
            self.whole.update(array.data)
            self.parts.append(xxhash.xxh3_128_digest(array.data))
            self.length += array.nbytes


def _is_stepped(store: ParameterStore) -> bool:
    """True if the store's cut is at a step."""
    return isinstance(store.entry.spec.consistency, BSP)


def _sizes(store: ParameterStore) -> dict[int, int]:
    """Return the total bytes of each slice's arrays."""
    arrays = store.dense.array_count
    return {index: 4 * store.dense.slicing.size(index) * arrays for index in store.router.indices}


# --- loading ----------------------------------------------------------------------------------------------------------


_AT_A_TIME: Final = 4
_RETRY_MIN_SECONDS: Final = 0.2
_RETRY_MAX_SECONDS: Final = 5.0
#: The same time as the scheduler waits for its own reads of the storage.
PATIENCE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """The shard has its values, under this term."""

    parameters: str
    generation: int
    shard: int
    term: int


@dataclass(frozen=True, slots=True)
class ShardLoadFailed:
    """The values of a shard cannot be loaded from the snapshot that ``restore`` names."""

    parameters: str
    generation: int
    restore: Restore
    error: PsdistError


LoadReport = ShardLoaded | ShardLoadFailed


@dataclass(slots=True)
class _Load:
    """The loading of one parameter store. arrays: number of arrays of each slice in the files."""

    store: ParameterStore
    restore: Restore
    arrays: int
    task: asyncio.Task[None] | None = None
    bytes_done: int = 0
    waiting_for: str = ""
    failed: ShardLoadFailed | None = None


class SnapshotLoader:
    """Loads the parameter stores of one server.

    storage: opens the run's storage; may block, and raise StorageError.
    report: called when ``reports`` has something new.
    """

    def __init__(self, storage: Callable[[], Storage], report: Callable[[], None], rng: Random) -> None:
        self._open_storage = storage
        self._report = report
        self._rng = rng
        self.loads: dict[str, _Load] = {}

    def update_loads(self, stores: Iterable[ParameterStore]) -> None:
        """Adopt a new map: start the loads that it asks for, and stop the others."""
        wanted = {h.entry.spec.name: h for h in stores if h.entry.restore is not None and not h.entry.ready}
        for name in [name for name, load in self.loads.items() if wanted.get(name) is not load.store]:
            self._end(self.loads.pop(name))
        for name, store in wanted.items():
            assert store.entry.restore is not None
            load = self.loads.setdefault(name, _Load(store, store.entry.restore, store.dense.array_count))
            if (load.task is None or load.task.done()) and load.failed is None and self._missing(load):
                load.task = asyncio.create_task(self._run(load))
                load.task.add_done_callback(partial(self._ended, load))

    def reports(self) -> list[LoadReport]:
        """Return the loaded shards and the failed loads, until the parameter set is ready."""
        found: list[LoadReport] = []
        for load in self.loads.values():
            name, generation = load.store.entry.spec.name, load.store.entry.generation
            if load.failed is not None:
                found.append(load.failed)
                continue
            for number, machine in sorted(load.store.replicator.machines.items()):
                if number not in load.store.router.unloaded:
                    found.append(ShardLoaded(name, generation, number, machine.term))
        return found

    def progress(self) -> pb.SnapshotProgress | None:
        """Return the progress of loading, or None if nothing is being loaded."""
        loads = [load for load in self.loads.values() if load.task is not None and not load.task.done()]
        if not loads:
            return None
        return pb.SnapshotProgress(
            bytes_done=sum(load.bytes_done for load in loads),
            bytes=sum(_bytes_of(load) for load in loads),
            waiting_for=next((load.waiting_for for load in loads if load.waiting_for), ""),
            loading=True,
        )

    async def close(self) -> None:
        """Stop all loading."""
        loads, self.loads = list(self.loads.values()), {}
        for load in loads:
            self._end(load)
        await asyncio.gather(*(load.task for load in loads if load.task is not None), return_exceptions=True)

    @staticmethod
    def _end(load: _Load) -> None:
        if load.task is not None:
            load.task.cancel()

    @staticmethod
    def _missing(load: _Load) -> list[tuple[int, BspShard | AsyncShard]]:
        return [(number, load.store.router.machines[number]) for number in sorted(load.store.router.unloaded)]

    def _ended(self, load: _Load, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, PsdistError):
            logger.error("loading failed", exc_info=error)
            error = InternalError(f"loading from a snapshot failed: {error!r}")
        entry = load.store.entry
        logger.error("cannot load", parameters=entry.spec.name, snapshot=load.restore.directory, reason=str(error))
        load.failed = ShardLoadFailed(entry.spec.name, entry.generation, load.restore, error)
        self._report()

    async def _run(self, load: _Load) -> None:
        """Load until nothing is missing, including shards that arrive meanwhile. Raises errors that a retry cannot
        fix."""
        delay = _RETRY_MIN_SECONDS
        clock = asyncio.get_running_loop().time
        answered, bytes_before = clock(), 0
        while self._missing(load):
            try:
                await self._load(load)
                delay, answered = _RETRY_MIN_SECONDS, clock()
            except StorageError as error:
                if load.bytes_done > bytes_before:
                    answered = clock()
                bytes_before = load.bytes_done
                if clock() - answered >= PATIENCE_SECONDS:
                    raise
                if load.waiting_for != error.message:
                    logger.warning(
                        "cannot load yet, retrying", parameters=load.store.entry.spec.name, reason=str(error)
                    )
                load.waiting_for = error.message
                await asyncio.sleep(delay * self._rng.uniform(0.5, 1.0))
                delay = min(_RETRY_MAX_SECONDS, delay * 2)

    async def _load(self, load: _Load) -> None:
        loop = asyncio.get_running_loop()
        storage = await loop.run_in_executor(None, self._open_storage)
        manifest = await _manifest(storage, load.restore)
        state = _state(manifest, load.store)
        reader = SliceReader(storage, manifest)
        load.bytes_done, load.waiting_for, load.arrays = 0, "", 1 + len(state.state_names)
        for number, machine in self._missing(load):
            pending = iter(machine.slices)
            await together(_load_slices(load, reader, state, number, pending) for _ in range(_AT_A_TIME))
            if load.store.router.machines.get(number) is machine:
                load.store.router.loaded(number)
                logger.info("loaded", parameters=state.spec.name, shard=number, snapshot=manifest.directory)
                self._report()


async def _load_slices(
    load: _Load, reader: SliceReader, state: ParametersState, number: int, pending: Iterator[int]
) -> None:
    """Load slices of shard ``number`` until none is pending, or the shard moves to another server."""
    machine = load.store.router.machines.get(number)
    for index in pending:
        arrays = await reader.slice(state, index)
        if machine is None or load.store.router.machines.get(number) is not machine:
            return
        position, shard = divmod(index, len(state.shards))
        file = state.shards[shard]
        await load.store.load(index, _fitting(arrays, state, load.store), file.versions[position], file.lags_of(index))
        load.bytes_done += sum(array.nbytes for array in arrays)


async def _manifest(storage: Storage, restore: Restore) -> Manifest:
    """Read the manifest that ``restore`` names. Raises SnapshotCorruptError if its digest differs."""
    path = layouts.manifest_path(restore.directory)
    try:
        data = await storage.read(path)
    except UnknownSnapshotError:
        raise corrupt(path, "it is missing") from None
    if xxhash.xxh3_128_digest(data) != restore.manifest_digest:
        raise corrupt(path, "its digest is not that in its commit record")
    return await asyncio.to_thread(Manifest.from_bytes, data, path)  # It grows with the number of tensors.


def _state(manifest: Manifest, store: ParameterStore) -> ParametersState:
    """Return the snapshot's description of a store's parameter set. Raises SettingsMismatchError if it does not fit."""
    entry = store.entry
    state = manifest.state(entry.spec.name)
    if state is None:
        raise SettingsMismatchError(f"{entry.spec.name!r} is not in snapshot {manifest.directory}")
    names, saved = store.dense.rule.state_names, [name for name in state.state_names if name != PUBLISHED]
    weights_only = entry.restore is not None and entry.restore.weights_only
    for what, mine, theirs in (
        ("elements", entry.total, state.layout.total),
        ("elements of a slice", entry.spec.slice_elements, state.spec.slice_elements),
        ("state arrays", ", ".join(names) or "none", ", ".join(saved) or "none"),
    ):
        if mine != theirs and not (weights_only and what == "state arrays"):
            raise SettingsMismatchError(
                f"{entry.spec.name!r} has {mine} {what}, and {theirs} in snapshot {manifest.directory}"
            )
    return state


def _fitting(arrays: list[Array], state: ParametersState, store: ParameterStore) -> list[Array]:
    """Adapt a slice's arrays from a snapshot to the store: drop the published weights, or add them, as needed. Added
    published weights start equal to the weights."""
    own = arrays[: 1 + len(state.state_names) - (PUBLISHED in state.state_names)]
    if store.dense.published is None:
        return own
    return [*own, arrays[-1] if PUBLISHED in state.state_names else own[0]]


def _bytes_of(load: _Load) -> int:
    return 4 * load.arrays * sum(load.store.dense.slicing.size(index) for index in load.store.router.indices)
