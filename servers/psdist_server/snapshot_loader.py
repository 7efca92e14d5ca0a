"""Loads this server's primary shards from a snapshot, if the map asks for it.

Slices are read from the files of any number of earlier servers, verified against the digests of the manifest, and
installed, a few at a time. If the storage does not answer, the loader retries and reports the wait, for up to
``PATIENCE_SECONDS`` since the last slice that it returned. After that, and if a snapshot is corrupt or belongs to
another parameter set, the failure is reported, and the scheduler decides how to continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

import structlog
import xxhash

from psdist.errors import InternalError, PsdistError, SettingsMismatchError, StorageError, UnknownSnapshotError
from psdist.snapshots import format as layouts
from psdist.snapshots.format import Manifest, ParametersState, corrupt
from psdist.snapshots.reader import SliceReader
from psdist.snapshots.storage import Storage
from psdist.types import Restore
from psdist.v1 import scheduler_pb2 as pb
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.kernels.arrays import PUBLISHED, Array
from psdist_server.snapshot_writer import together
from psdist_server.store.parameter_store import ParameterStore

logger = structlog.get_logger("psdist.server")

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
