"""Snapshots for tests of the reader: a storage in a dict, and files as the servers and the scheduler write them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from psdist import optim
from psdist.consistency import BSP
from psdist.errors import StorageError, UnknownSnapshotError
from psdist.snapshots import format as layouts
from psdist.snapshots.format import CommitRecord, DatasetState, Manifest, ParametersState, ShardFile, WorkerState
from psdist.snapshots.storage import Buffer, Storage, StoredFile
from psdist.types import DataPosition, DatasetSpec, Layout, ParametersSpec, Slicing, TensorSpec

Floats = NDArray[np.float32]
Tables = dict[str, list[Floats]]

LAYOUT = Layout((TensorSpec("w", (2, 2)), TensorSpec("b", (1,), "bfloat16")))
SPEC = ParametersSpec("net", optim.SGD(lr=0.5, momentum=0.9), BSP(), slice_elements=2)
DATASET = DatasetState(DatasetSpec("d", 10, 2), DataPosition(0, ((0, 2),)))


class Writing:
    """File being written."""

    def __init__(self) -> None:
        self.data = bytearray()

    async def write(self, buffer: Buffer) -> None:
        self.data += memoryview(buffer).cast("B")


class DictStorage:
    """Storage in a dict.

    files: content by path.
    fail: paths whose reading raises this error.
    reads: paths that were read.
    """

    url = "dict://"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fail: dict[str, Exception] = {}
        self.reads: list[str] = []

    async def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self.reads.append(path)
        if path in self.fail:
            raise self.fail[path]
        if path not in self.files:
            raise UnknownSnapshotError(f"there is no {path}")
        return self.files[path][start : None if length is None else start + length]

    async def list(self, prefix: str = "") -> list[StoredFile]:
        below = f"{prefix}/" if prefix else ""
        return [StoredFile(path, len(data), 0.0) for path, data in sorted(self.files.items()) if path.startswith(below)]

    async def create(self, path: str, data: bytes) -> None:
        if path in self.files:
            raise FileExistsError(path)
        self.files[path] = bytes(data)

    @asynccontextmanager
    async def writer(self, path: str) -> AsyncIterator[Writing]:
        if path in self.files:
            raise StorageError(f"{path} exists already")
        file = Writing()
        yield file
        self.files[path] = bytes(file.data)

    async def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.files.pop(path, None)


def state_of(
    spec: ParametersSpec = SPEC, layout: Layout = LAYOUT, state_names: tuple[str, ...] = ("momentum",), step: int = 7
) -> ParametersState:
    """Return parameters with one shard, still without content."""
    count = Slicing(layout.total, spec.slice_elements).count
    file = ShardFile(layouts.shard_file_name(0, 0, 1), 0, "0" * 32, (step,) * count, ("0" * 32,) * count)
    return ParametersState(spec, layout, 1, state_names, step, (), (file,))


def table_of(state: ParametersState, seed: int = 0) -> list[Floats]:
    """Return random values for all of ``state``: float32[total] weights, and as many for each state array."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(state.layout.total, np.float32) for _ in range(1 + len(state.state_names))]


async def write_snapshot(
    storage: Storage,
    states: Sequence[ParametersState],
    tables: Tables,
    *,
    sequence: int = 1,
    shards: int = 2,
    run_id: str = "run",
    datasets: tuple[DatasetState, ...] = (DATASET,),
    own: bytes = b"",
) -> tuple[CommitRecord, Manifest]:
    """Write and commit a snapshot.

    tables: values by parameter set, each divided into ``shards`` shards.
    own: state of the worker of rank 0 for the first parameter set.
    """
    step = max((state.step for state in states), default=0)
    directory = layouts.directory_name(step, 1, sequence, f"{sequence:06x}")
    written = [
        await _write_parameters(storage, directory, number, state, tables[state.spec.name], shards)
        for number, state in enumerate(states)
    ]
    mine = []
    if own:
        name = layouts.state_file_name(0, 0)
        mine.append(WorkerState(states[0].spec.name, 0, step, name, len(own), layouts.digest_of(own)))
        await storage.create(layouts.file_path(directory, name), own)
    manifest = Manifest(
        run_id, directory, 3, 1.5, "test", {"seed": 1}, tuple(written), datasets, "0.1.0", states=tuple(mine)
    )
    data = manifest.to_bytes()
    await storage.create(layouts.manifest_path(directory), data)
    commit = commit_of(manifest, data, sequence)
    await storage.create(commit.path, commit.to_bytes())
    return commit, manifest


def commit_of(manifest: Manifest, data: bytes, sequence: int) -> CommitRecord:
    """Return the record that commits ``manifest``, whose bytes are ``data``."""
    return CommitRecord(
        *(sequence, manifest.run_id, manifest.directory, 3, 2.5, 0.25, "test"),
        *(len(data), layouts.digest_of(data), manifest.steps, manifest.bytes),
    )


async def _write_parameters(
    storage: Storage, directory: str, number: int, state: ParametersState, table: list[Floats], shards: int
) -> ParametersState:
    files = []
    for shard in range(shards):
        slices = layouts.shard_slices(shard, shards, state.slicing.count)
        parts = [b"".join(array[slice(*state.slicing.bounds(i))].tobytes() for array in table) for i in slices]
        header = layouts.shard_header(slices, [state.slicing.size(i) for i in slices], state.state_names)
        whole, name = header + b"".join(parts), layouts.shard_file_name(number, shard, shards)
        async with storage.writer(layouts.file_path(directory, name)) as file:
            await file.write(header)
            for part in parts:
                await file.write(part)
        digests = tuple(layouts.digest_of(part) for part in parts)
        files.append(ShardFile(name, len(whole), layouts.digest_of(whole), (state.step,) * len(slices), digests))
    return replace(state, shards=tuple(files))
