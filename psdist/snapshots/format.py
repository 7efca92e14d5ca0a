"""Format of a snapshot: commit record, manifest, file names, and the layout of a shard's file. Pure.

docs/internals/snapshot-format.md is the specification. This module converts between values and bytes, and does no I/O.
``psdist.snapshots.reader`` checks that bytes are those that were committed.

Invariants: A value has exactly one representation, and other bytes are rejected. Every constructible value can be
parsed. A commit record holds its own digest and that of the manifest.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

import xxhash

from psdist.consistency import BSP, sums
from psdist.errors import PsdistError, SnapshotCorruptError, StorageError
from psdist.snapshots.records import (
    check_digest,
    check_number,
    check_text,
    check_time,
    check_unique,
    require,
    spec_from_json,
    spec_to_json,
)
from psdist.types import (
    DataPosition,
    DatasetSpec,
    Layout,
    MasterDType,
    ParametersSpec,
    Slicing,
    TensorSpec,
    check_directory,
    check_name,
    check_tensor_name,
)
from psdist.wire.limits import DIMENSIONS_MAX, MANIFEST_BYTES_MAX

#: Newest versions of manifests and commit records. A manifest gets the lowest version that has all of its fields.
FORMAT: Final = 5
COMMIT_FORMAT: Final = 1
#: Bytes per element in a shard's file, which is float32, little-endian.
ELEMENT_BYTES: Final = 4
#: Name of a slice's first array; the others are the optimizer's.
WEIGHTS: Final = "weights"
COMMITS: Final = "commits"
SNAPSHOTS: Final = "snapshots"

_COMMIT_PATH = re.compile(r"commits/([0-9]{12})\.json")

F = TypeVar("F", "CommitRecord", "Manifest")
#: The type ``bytes``, for classes with an attribute of this name.
_Bytes = bytes


# --- names ------------------------------------------------------------------------------------------------------------


def commit_path(sequence: int) -> str:
    """Return the path of commit record ``sequence`` in the storage."""
    return f"{COMMITS}/{sequence:012d}.json"


def commit_sequence(path: str) -> int | None:
    """Return the number of the commit record at ``path``, or None if no commit record can have this path."""
    found = _COMMIT_PATH.fullmatch(path)
    return int(found[1]) if found else None


def directory_name(step: int, epoch: int, attempt: int, token: str) -> str:
    """Return the name of a snapshot's directory. ``token`` is random, so that no name is used twice."""
    return check_directory(f"{step:012d}-{epoch}-{attempt}-{token}")


def directory_path(directory: str) -> str:
    """Return the path of a snapshot's directory in the storage."""
    return f"{SNAPSHOTS}/{check_directory(directory)}"


def file_path(directory: str, file: str) -> str:
    """Return the path of a snapshot's file in the storage."""
    return f"{directory_path(directory)}/{check_directory(file)}"


def manifest_path(directory: str) -> str:
    """Return the path of a snapshot's manifest in the storage."""
    return file_path(directory, "manifest.json")


def shard_file_name(parameters_number: int, shard: int, shards: int) -> str:
    """Return the file name of shard ``shard`` of ``shards``.

    parameters_number: position of the parameter set in the manifest, from 0.
    """
    return f"parameters-{parameters_number:04d}-{shard:05d}-of-{shards:05d}.safetensors"


def state_file_name(parameters_number: int, rank: int) -> str:
    """Return the name of the file with the worker state that ``rank`` saves for a parameter set."""
    return f"parameters-{parameters_number:04d}-worker-{rank:05d}.safetensors"


# --- a shard's file ---------------------------------------------------------------------------------------------------


def shard_slices(shard: int, shards: int, count: int) -> range:
    """Return the slices in shard ``shard`` of ``shards``, ascending. count: total number of slices."""
    return range(shard, count, shards)


def shard_header(slices: Sequence[int], sizes: Sequence[int], state_names: Sequence[str]) -> bytes:
    """Return the first bytes of a shard's file, up to the first slice's weights: a safetensors header with its length.

    The tensors are ``"<slice>/weights"`` and ``"<slice>/<state name>"``, F32, one-dimensional, in file order. A reader
    can therefore compute every byte of the header.

    slices: ascending numbers.
    sizes: elements of each slice.
    state_names: the optimizer's arrays, in order.
    """
    entries, offset = [], 0
    for index, size in zip(slices, sizes, strict=True):
        for name in (WEIGHTS, *state_names):
            end = offset + size * ELEMENT_BYTES
            entries.append(f'"{index}/{name}":{{"dtype":"F32","shape":[{size}],"data_offsets":[{offset},{end}]}}')
            offset = end
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def slice_offset(header_bytes: int, position: int, slice_elements: int, state_count: int) -> int:
    """Return the offset in a shard's file, in bytes, of the slice at ``position`` (from 0, within the shard).

    The slice's arrays are adjacent, the weights first.

    header_bytes: length of the header, with its length field.
    slice_elements: elements of every slice but the last, which may be shorter.
    state_count: number of the optimizer's arrays.
    """
    return header_bytes + position * (1 + state_count) * slice_elements * ELEMENT_BYTES


# --- the manifest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFile:
    """File of one shard.

    file: name in the snapshot's directory.
    length: size in bytes.
    digest: xxh3_128 of the whole file, hexadecimal.
    versions, digests: one per slice of the shard, ascending. A digest is the xxh3_128 of the slice's weights followed
        by each array of its state.
    lags: (slice, start, stop, number of updates), ascending: elements [start, stop) of the slice skipped so many of its
        updates, because no worker had a gradient for them.
    """

    file: str
    length: int
    digest: str
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    lags: tuple[tuple[int, int, int, int], ...] = ()

    def __post_init__(self) -> None:
        check_directory(self.file)
        check_number("length", self.length)
        check_digest("digest", self.digest)
        require(len(self.versions) == len(self.digests), "digests", len(self.digests), f"{len(self.versions)}")
        for version in self.versions:
            check_number("version", version)
        for digest in self.digests:
            check_digest("digest", digest)
        for before, row in pairwise(((-1, 0, 0, 1), *self.lags)):
            for number in row:
                check_number("lag", number)
            first = before[2] if row[0] == before[0] else 0
            ascends = row[0] >= before[0] and first <= row[1] < row[2] and row[3] > 0
            require(ascends, "lag", row, "after the one before it, of some elements, above 0")

    def lags_of(self, index: int) -> tuple[tuple[int, int, int], ...]:
        """Return the lags of a slice: (start, stop, number of updates)."""
        first, last = bisect_left(self.lags, (index,)), bisect_left(self.lags, (index + 1,))
        return tuple((start, stop, updates) for _, start, stop, updates in self.lags[first:last])


@dataclass(frozen=True)
class ParametersState:
    """Parameter set in a snapshot.

    spec: settings; ``slice_elements`` is never 0.
    reference_workers, state_since: as in ``ParametersEntry``.
    state_names: the optimizer's arrays, in order.
    step: BSP: the cut; the snapshot contains all steps below it. SSP and ASP: the highest version of any slice.
    next: SSP and ASP: (worker_id, incarnation, number of the next push); the snapshot contains lower ones.
    shards: by number; slice i is in shard ``i % len(shards)``.
    """

    spec: ParametersSpec
    layout: Layout
    reference_workers: int
    state_names: tuple[str, ...]
    step: int
    next: tuple[tuple[str, int, int], ...]
    shards: tuple[ShardFile, ...]
    state_since: int = 0

    def __post_init__(self) -> None:
        check_number("slice_elements", self.spec.slice_elements, 1)
        check_number("reference_workers", self.reference_workers)
        check_number("step", self.step)
        for name in self.state_names:
            check_directory(name)
        check_unique("state array", (WEIGHTS, *self.state_names))
        check_unique("tensor", (tensor.name for tensor in self.layout.tensors))
        for worker_id, incarnation, number in self.next:
            check_name(worker_id, "worker id")
            check_number("incarnation", incarnation)
            check_number("next push", number)
        require(bool(self.shards), "number of shards", 0, "1 or more")
        for number, shard in enumerate(self.shards):
            slices = shard_slices(number, len(self.shards), self.slicing.count)
            require(len(shard.versions) == len(slices), shard.file, len(shard.versions), f"of {len(slices)} slices")
            for index, _, stop, updates in shard.lags:
                fits = index in slices and stop <= self.slicing.size(index)
                fits = fits and updates <= shard.versions[slices.index(index)] - self.state_since
                require(fits, f"lag in {shard.file}", (index, stop, updates), "one that its slice can have")
            if isinstance(self.spec.consistency, BSP):
                odd = next((version for version in shard.versions if version != self.step), self.step)
                require(odd == self.step, f"version in {shard.file}", odd, f"the step of the cut, {self.step}")
        check_number("state_since", self.state_since)
        require(self.state_since <= self.version_min, "state_since", self.state_since, f"{self.version_min} or less")

    @property
    def version_min(self) -> int:
        """Lowest version of any slice; ``step`` is the highest."""
        return min((version for shard in self.shards for version in shard.versions), default=self.step)

    @property
    def slicing(self) -> Slicing:
        """Division of the flat vector into slices."""
        return Slicing(self.layout.total, self.spec.slice_elements)

    def next_of(self, incarnation: tuple[str, int]) -> int:
        """Return the first push of a worker's incarnation that is not in the snapshot; 0 if unknown (SSP and ASP)."""
        if isinstance(self.spec.consistency, BSP):
            return self.step
        return next((number for *key, number in self.next if tuple(key) == incarnation), 0)

    def header(self, shard: int) -> bytes:
        """Return the header that the file of ``shard`` must have."""
        slices = shard_slices(shard, len(self.shards), self.slicing.count)
        return shard_header(slices, [self.slicing.size(index) for index in slices], self.state_names)

    def data_bytes(self, shard: int) -> int:
        """Return the size in bytes of the file of ``shard`` after its header."""
        slices = shard_slices(shard, len(self.shards), self.slicing.count)
        elements = sum(self.slicing.size(index) for index in slices)
        return elements * (1 + len(self.state_names)) * ELEMENT_BYTES


@dataclass(frozen=True)
class DatasetState:
    """Data set in a snapshot, and the position at which it resumes."""

    spec: DatasetSpec
    position: DataPosition


@dataclass(frozen=True)
class WorkerState:
    """File of a worker's own state, such as its codec's residual.

    parameters: the parameter set.
    rank: the worker's rank.
    next: the state is that before the push with this number.
    file: name in the snapshot's directory.
    length: size in bytes.
    digest: xxh3_128 of the whole file, hexadecimal.
    """

    parameters: str
    rank: int
    next: int
    file: str
    length: int
    digest: str

    def __post_init__(self) -> None:
        check_name(self.parameters, "parameters name")
        for name in ("rank", "next", "length"):
            check_number(name, getattr(self, name))
        check_directory(self.file)
        check_digest("digest", self.digest)


@dataclass(frozen=True)
class Manifest:
    """Contents of a snapshot.

    directory: name below ``snapshots/``.
    epoch: epoch of the cluster map at the cut.
    time: seconds since 1970 at which the cut was agreed.
    reason: why the snapshot was taken.
    configuration: the run's settings.
    states: files of worker state, at most one per parameter set and rank.
    """

    run_id: str
    directory: str
    epoch: int
    time: float
    reason: str
    configuration: Mapping[str, str | int]
    parameters: tuple[ParametersState, ...]
    datasets: tuple[DatasetState, ...] = ()
    psdist_version: str = ""
    states: tuple[WorkerState, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.run_id, "run id")
        check_directory(self.directory)
        check_number("epoch", self.epoch)
        check_time("time", self.time)
        check_text("reason", self.reason)
        check_text("psdist_version", self.psdist_version)
        for key, value in self.configuration.items():
            check_text("name of a setting", key)
            if type(value) is not int:
                check_text(f"setting {key}", value)
        check_unique("parameters", (state.spec.name for state in self.parameters))
        check_unique("data set", (state.spec.name for state in self.datasets))
        for state in self.states:
            require(state.parameters in self.steps, "state of", state.parameters, "parameters of the snapshot")
        check_unique("state of a worker", (f"{state.rank} of {state.parameters}" for state in self.states))
        shards = (shard.file for state in self.parameters for shard in state.shards)
        check_unique("file", ("manifest.json", *shards, *(state.file for state in self.states)))

    @property
    def format(self) -> int:
        """Version of the format.

        5 with elements that skipped updates, 4 with float64 values or summed gradients, 3 with reference weights
        (``pull_compression``), 2 if an optimizer's state was reset, else 1.
        """
        if any(shard.lags for state in self.parameters for shard in state.shards):
            return 5
        if any(state.spec.dtype != "float32" or sums(state.spec.consistency) for state in self.parameters):
            return 4
        if any(state.spec.pull_compression for state in self.parameters):
            return 3
        return 2 if any(state.state_since or state.spec.reset_optimizer for state in self.parameters) else 1

    @property
    def steps(self) -> dict[str, int]:
        """``ParametersState.step`` by parameter set."""
        return {state.spec.name: state.step for state in self.parameters}

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """Length and digest of each file of the snapshot except the manifest, by name."""
        files: list[ShardFile | WorkerState] = [shard for state in self.parameters for shard in state.shards]
        return {file.file: (file.length, file.digest) for file in (*files, *self.states)}

    @property
    def bytes(self) -> int:
        """Size in bytes of all files of the snapshot except the manifest."""
        return sum(length for length, _ in self.files.values())

    def state(self, parameters: str) -> ParametersState | None:
        """Return the parameter set with this name, or None."""
        return next((state for state in self.parameters if state.spec.name == parameters), None)

    def worker_state(self, parameters: str, rank: int) -> WorkerState | None:
        """Return the state of the worker with this rank, or None."""
        return next((state for state in self.states if (state.parameters, state.rank) == (parameters, rank)), None)

    def to_bytes(self) -> _Bytes:
        """Return the manifest as canonical JSON."""
        values = {name: getattr(self, name) for name in (*_MANIFEST_PLAIN, "format")}
        values["parameters"] = [_parameters_to_json(state) for state in self.parameters]
        values["datasets"] = [
            {"spec": asdict(state.spec), "position": asdict(state.position)} for state in self.datasets
        ]
        values["states"] = [asdict(state) for state in self.states]
        return _canonical(values)

    @classmethod
    def from_bytes(cls, data: _Bytes, file: str) -> Manifest:
        """Parse the result of ``to_bytes``.

        Raises SnapshotCorruptError, which names ``file``, and StorageError if the format is newer.
        """
        values = _parse(data, file)
        _check_format(values, file, FORMAT)

        def make() -> Manifest:
            return cls(
                **{name: values[name] for name in _MANIFEST_PLAIN},
                parameters=tuple(_parameters_from_json(item) for item in values["parameters"]),
                datasets=tuple(_dataset_from_json(item) for item in values["datasets"]),
                states=tuple(WorkerState(**item) for item in values["states"]),
            )

        return _made(make, data, file, "a manifest")


@dataclass(frozen=True)
class CommitRecord:
    """Commit record: the snapshot in ``directory`` exists because of it.

    sequence: number of the record.
    manifest_length, manifest_digest: the manifest's size in bytes, and its xxh3_128.
    epoch: epoch of the committing scheduler's cluster map.
    time: time of the commit in seconds since 1970.
    seconds: duration of the attempt.
    steps, bytes: as in the manifest.
    """

    sequence: int
    run_id: str
    directory: str
    epoch: int
    time: float
    seconds: float
    reason: str
    manifest_length: int
    manifest_digest: str
    steps: Mapping[str, int]
    bytes: int

    def __post_init__(self) -> None:
        check_name(self.run_id, "run id")
        check_directory(self.directory)
        for name in ("sequence", "epoch", "manifest_length", "bytes"):
            check_number(name, getattr(self, name))
        require(self.sequence < 10**12, "sequence", self.sequence, "of 12 digits at most")
        require(self.manifest_length <= MANIFEST_BYTES_MAX, "manifest_length", self.manifest_length, "up to 1 GiB")
        check_digest("manifest_digest", self.manifest_digest)
        check_time("time", self.time)
        check_time("seconds", self.seconds)
        check_text("reason", self.reason)
        for name, step in self.steps.items():
            check_name(name, "parameters name")
            check_number("step", step)

    @cached_property
    def path(self) -> str:
        """Path in the storage."""
        return commit_path(self.sequence)

    def to_bytes(self) -> _Bytes:
        """Return the record as canonical JSON, with its own digest."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"format": COMMIT_FORMAT}
        return _canonical(values | {"digest": digest_of(_canonical(values))})

    @classmethod
    def from_bytes(cls, data: _Bytes, file: str) -> CommitRecord:
        """Parse the result of ``to_bytes``.

        Raises SnapshotCorruptError, which names ``file``, and StorageError if the format is newer.
        """
        values = _parse(data, file)
        digest = values.pop("digest", None)
        if digest != digest_of(_canonical(values)):
            raise corrupt(file, "its digest is not that of its content")
        _check_format(values, file, COMMIT_FORMAT)
        del values["format"]
        return _made(lambda: cls(**values), data, file, "a commit record")


_MANIFEST_PLAIN: Final = (*("run_id", "directory", "epoch", "time", "reason", "configuration", "psdist_version"),)


def corrupt(file: str, why: str) -> SnapshotCorruptError:
    """Return the error for a ``file`` that differs from what was written."""
    return SnapshotCorruptError(f"{file} is not what was written: {why}", file=file)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3_128 of ``data`` in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _text(error: Exception) -> str:
    return f"{error.args[0] if error.args else error}"[:200]


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=dict
    ).encode()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _parse(data: bytes, file: str) -> dict[str, Any]:
    try:
        values = json.loads(data.decode("ascii"), parse_constant=_no_constant)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise corrupt(file, _text(error)) from None
    return cast(dict[str, Any], values)


def _check_format(values: Mapping[str, Any], file: str, newest: int) -> None:
    found = values.get("format")
    if type(found) is not int or found < 1:
        raise corrupt(file, f"its format is {found!r:.40}")
    if found > newest:
        raise StorageError(
            f"{file} has format {found}, but this psdist reads up to {newest}: use the psdist that wrote it", file=file
        )


def _made(make: Callable[[], F], data: bytes, file: str, what: str) -> F:
    """Return ``make()``, provided that ``data`` is its only representation."""
    try:
        value = make()
    except (PsdistError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise corrupt(file, f"it is not {what}: {_text(error)}") from None
    if value.to_bytes() != data:
        raise corrupt(file, "it is not in canonical form")
    return value


def _layout_from_json(values: Sequence[Sequence[Any]], master: MasterDType) -> Layout:
    tensors = []
    for name, shape, dtype in values:
        require(dtype in ("float32", "float16", "bfloat16", "float64"), f"dtype of {name}", dtype, "a known one")
        require(len(shape) <= DIMENSIONS_MAX, f"dimensions of {name}", len(shape), f"at most {DIMENSIONS_MAX}")
        for size in shape:
            check_number(f"shape of {name}", size)
        tensors.append(TensorSpec(check_tensor_name(name), tuple(shape), dtype))
    layout = Layout(tuple(tensors), master)
    check_number("number of elements", layout.total)
    return layout


def _parameters_to_json(state: ParametersState) -> dict[str, Any]:
    return {
        "spec": spec_to_json(state.spec),
        "layout": [[tensor.name, list(tensor.shape), tensor.dtype] for tensor in state.layout.tensors],
        "reference_workers": state.reference_workers,
        "state_names": list(state.state_names),
        "step": state.step,
        "next": [list(item) for item in state.next],
        "shards": [_shard_to_json(shard) for shard in state.shards],
        **({"state_since": state.state_since} if state.state_since else {}),
    }


def _parameters_from_json(values: Mapping[str, Any]) -> ParametersState:
    spec = spec_from_json(values["spec"])
    return ParametersState(
        spec=spec,
        layout=_layout_from_json(values["layout"], spec.dtype),
        reference_workers=values["reference_workers"],
        state_names=tuple(values["state_names"]),
        step=values["step"],
        next=tuple((worker_id, incarnation, number) for worker_id, incarnation, number in values["next"]),
        shards=tuple(_shard_from_json(item) for item in values["shards"]),
        state_since=values.get("state_since", 0),
    )


def _shard_to_json(shard: ShardFile) -> dict[str, Any]:
    values = dict(vars(shard))
    lags = values.pop("lags")
    return values | ({"lags": [list(row) for row in lags]} if lags else {})


def _shard_from_json(values: Mapping[str, Any]) -> ShardFile:
    lags = tuple((index, start, stop, updates) for index, start, stop, updates in values.get("lags", ()))
    return ShardFile(
        **{**values, "versions": tuple(values["versions"]), "digests": tuple(values["digests"]), "lags": lags}
    )


def _dataset_from_json(values: Mapping[str, Any]) -> DatasetState:
    position = values["position"]
    done = tuple((first, count) for first, count in position["done"])
    return DatasetState(DatasetSpec(**values["spec"]), DataPosition(**(position | {"done": done})))
