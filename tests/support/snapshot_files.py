"""Small snapshots written into a storage, for tests of readers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from psdist import BSP
from psdist.optim import Adam
from psdist.snapshots import format as layout
from psdist.snapshots.format import CommitRecord, Manifest, ParametersState, ShardFile, WorkerState
from psdist.snapshots.opening import open_storage
from psdist.types import DType, Layout, ParametersSpec, TensorSpec

STATES = ("exp_avg", "exp_avg_sq")


def parameters(
    name: str,
    tensors: Sequence[TensorSpec],
    values: NDArray[np.float32],
    step: int,
    number: int,
    shards: int,
    size: int,
) -> tuple[ParametersState, dict[str, bytes]]:
    """Return parameters with these weights in slices of ``size`` elements, and the content of their files.

    The optimizer's arrays hold the negated and the absolute weights.
    """
    slices: list[list[NDArray[np.float32]]] = [
        [values[i : i + size], -values[i : i + size], np.abs(values[i : i + size])] for i in range(0, len(values), size)
    ]
    files, contents = [], {}
    for shard in range(shards):
        indices = layout.shard_slices(shard, shards, len(slices))
        datas = [b"".join(array.tobytes() for array in slices[index]) for index in indices]
        data = layout.shard_header(indices, [len(slices[index][0]) for index in indices], STATES) + b"".join(datas)
        file = layout.shard_file_name(number, shard, shards)
        contents[file] = data
        digests = tuple(layout.digest_of(one) for one in datas)
        files.append(ShardFile(file, len(data), layout.digest_of(data), (step,) * len(datas), digests))
    spec = ParametersSpec(name, Adam(lr=0.1), BSP(), slice_elements=size)
    return ParametersState(spec, Layout(tuple(tensors)), 2, STATES, step, (), tuple(files)), contents


def write(
    url: str,
    sequence: int,
    step: int,
    tensors: Mapping[str, Mapping[str, tuple[DType, NDArray[np.float32]]]],
    run_id: str = "digits",
    shards: int = 2,
    size: int = 5,
    kept: Mapping[tuple[str, int], bytes] = {},
) -> CommitRecord:
    """Commit a snapshot of parameters by name, each with tensors by name: (declared dtype, values).

    kept: files of worker states, by parameters and rank.
    """
    states: list[ParametersState] = []
    contents: dict[str, bytes] = {}
    for number, (name, own) in enumerate(tensors.items()):
        specs = [TensorSpec(tensor, values.shape, dtype) for tensor, (dtype, values) in own.items()]
        flat = np.concatenate([values.ravel() for _, values in own.values()])
        state, files = parameters(name, specs, flat, step, number, shards, size)
        states.append(state)
        contents |= files
    own_states = []
    for (name, rank), data in kept.items():
        file = layout.state_file_name(list(tensors).index(name), rank)
        own_states.append(WorkerState(name, rank, step, file, len(data), layout.digest_of(data)))
        contents[file] = data
    directory = layout.directory_name(step, 1, sequence, "abcdef")
    manifest = Manifest(
        run_id=run_id,
        directory=directory,
        epoch=1,
        time=1.5e9 + step,
        reason="on demand",
        configuration={"workers": 0, "replicas": 1},
        parameters=tuple(states),
        psdist_version="0.1.0",
        states=tuple(own_states),
    )
    data = manifest.to_bytes()
    commit = CommitRecord(
        sequence=sequence,
        run_id=run_id,
        directory=directory,
        epoch=1,
        time=manifest.time,
        seconds=0.5,
        reason="on demand",
        manifest_length=len(data),
        manifest_digest=layout.digest_of(data),
        steps=manifest.steps,
        bytes=manifest.bytes,
    )

    async def store() -> None:
        storage = open_storage(url)
        for file, content in contents.items():
            await storage.create(layout.file_path(directory, file), content)
        await storage.create(layout.manifest_path(directory), data)
        await storage.create(commit.path, commit.to_bytes())

    asyncio.run(store())
    return commit
