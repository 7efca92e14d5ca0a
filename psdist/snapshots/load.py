"""``psdist.load_snapshot``: a snapshot's weights as named arrays, without a cluster; and the state of the optimizer.

Invariant: All values that a caller receives, or finds in its own arrays, were verified; nothing is filled partially.

``psdist.torch`` converts the optimizer's state to torch's format, for programs that continue without servers.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import (
    DTypeMismatchError,
    InvalidArgumentError,
    MissingTensorError,
    ShapeMismatchError,
    SnapshotCorruptError,
    UnknownParametersError,
    UnknownSnapshotError,
    UnknownTensorError,
)
from psdist.optim import Optimizer, group_of
from psdist.snapshots import reader
from psdist.snapshots.format import CommitRecord, ParametersState
from psdist.snapshots.model_tensors import DTYPES, Contents, contents, is_float
from psdist.snapshots.opening import open_storage
from psdist.snapshots.reader import CommittedSnapshot, SliceReader, Unreadable
from psdist.snapshots.storage import Storage

AnyArray = NDArray[Any]
T = TypeVar("T")
_SHOWN = 8


class Snapshot(Mapping[str, AnyArray]):
    """Weights by tensor name, in their declared shapes.

    step: in BSP the next step, else the highest version of any slice; the maximum over parameter sets.
    steps: the same by parameter set.
    run_id, directory: run and directory of the snapshot.
    missing, unexpected: names in ``into`` that the snapshot lacks, and names in the snapshot that ``into`` lacks.
    skipped: one sentence for each newer snapshot that could not be used.
    """

    def __init__(
        self, arrays: Mapping[str, AnyArray], found: CommittedSnapshot, states: tuple[ParametersState, ...]
    ) -> None:
        self._arrays = dict(arrays)
        self.run_id = found.manifest.run_id
        self.directory = found.manifest.directory
        self.steps = {state.spec.name: state.step for state in states}
        self.step = max(self.steps.values(), default=0)
        self.skipped = found.skipped
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> AnyArray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"Snapshot({self.directory!r} of run {self.run_id!r}, step={self.step}, {len(self)} tensors)"


def load_snapshot(
    url: str,
    *,
    step: int | None = None,
    parameters: str | None = None,
    dtype: str | None = None,
    into: Mapping[str, AnyArray] | None = None,
    strict: bool = True,
) -> Snapshot:
    """Return the weights in a committed snapshot of the storage at ``url``, a directory or a URL.

    For a model of psdist.torch, the result has the entries of the model's ``state_dict``, with the buffers of the
    lowest rank; a warning names omitted tensors.

    step: load the snapshot of this step. None loads the newest, or the one before if that is corrupt, with a warning.
    parameters: name of a parameter set. None loads all sets of the snapshot; their tensors must then have distinct
        names.
    dtype: dtype for all floating-point arrays: "float32", "float16", "bfloat16" or "float64". None keeps each tensor's
        own.
    into: numpy arrays by name, which are filled, each in its own dtype. The result then has these names only.
    strict: True raises MissingTensorError or UnknownTensorError if the names differ. False leaves arrays unfilled that
        the snapshot lacks; ``missing`` and ``unexpected`` of the result list the differences.

    Raises UnknownSnapshotError, SnapshotCorruptError, StorageError, UnknownParametersError, ShapeMismatchError (even
    if ``strict`` is False), DTypeMismatchError, InvalidArgumentError. If it raises, nothing was filled.
    """
    if dtype is not None and dtype not in NUMPY_DTYPES:
        raise DTypeMismatchError(f"dtype {dtype!r:.80} is not supported: use one of {', '.join(NUMPY_DTYPES)}")
    if dtype is not None and into is not None:
        raise InvalidArgumentError("dtype and into cannot be given together: each array of into has its own dtype")
    _check_targets(into or {})
    storage = open_storage(url)
    found, states, stored, arrays = run_coroutine(load_usable(storage, step, parameters, _read))
    for sentence in found.skipped:
        warnings.warn(f"an older snapshot is used: {sentence}", RuntimeWarning, stacklevel=2)
    for sentence in stored.left_out:
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
    if into is not None:
        return _fill(Snapshot(into, found, states), arrays, into, strict)
    with np.errstate(over="ignore"):
        typed = {
            tensor.name: arrays[tensor.name].astype(
                DTYPES[(dtype if tensor.is_float else None) or tensor.dtype], copy=False
            )
            for tensor in stored.tensors
        }
    return Snapshot(typed, found, states)


# --- reading ----------------------------------------------------------------------------------------------------------

#: Read the required parts of a snapshot with these contents.
Read = Callable[[Storage, CommittedSnapshot, Contents], Awaitable[T]]


def run_coroutine(load: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine, in a new thread if this thread already has a running loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(load)
    with ThreadPoolExecutor(1, "psdist-load-snapshot") as executor:
        return executor.submit(asyncio.run, load).result()


async def load_usable(
    storage: Storage, step: int | None, parameters: str | None, read: Read[T]
) -> tuple[CommittedSnapshot, tuple[ParametersState, ...], Contents, T]:
    """Return the newest snapshot that ``read`` finds intact, and the result of ``read``.

    step, parameters: as for ``load_snapshot``, which also lists the errors.
    """

    def wanted(commit: CommitRecord) -> bool:
        return step is None or step in [n for name, n in commit.steps.items() if parameters in (None, name)]

    corrupt: list[str] = []
    async for found in reader.usable(storage, where=wanted):
        states = _states(found, parameters)
        try:
            stored = await contents(storage, found.manifest, () if parameters is None else (parameters,))
            _check_owners(stored)
            what = await read(storage, found, stored)
        except SnapshotCorruptError as error:
            if await reader.is_committed(storage, found.commit):
                corrupt.append(error.message)
            continue
        return CommittedSnapshot(found.commit, found.manifest, (*found.skipped, *corrupt)), states, stored, what
    if corrupt:
        raise SnapshotCorruptError(f"no snapshot in {storage.url} can be used: {'; '.join(corrupt)[:2000]}")
    raise await _unknown(storage, step)


async def _unknown(storage: Storage, step: int | None) -> UnknownSnapshotError:
    records = [record for record in await reader.commits(storage) if not isinstance(record, Unreadable)]
    if step is None or not records:
        return UnknownSnapshotError(f"there is no committed snapshot in {storage.url}")
    steps = ", ".join(str(max(record.steps.values(), default=0)) for record in records[:_SHOWN])
    return UnknownSnapshotError(f"there is no snapshot of step {step} in {storage.url}; the newest are of {steps}")


def _states(found: CommittedSnapshot, parameters: str | None) -> tuple[ParametersState, ...]:
    states = found.manifest.parameters
    if parameters is not None:
        state = found.manifest.state(parameters)
        if state is None:
            names = ", ".join(state.spec.name for state in states)
            raise UnknownParametersError(
                f"snapshot {found.manifest.directory} has no {parameters!r:.80}; it has {names}"
            )
        return (state,)
    return states


def _check_owners(stored: Contents) -> None:
    owners: dict[str, str] = {}
    for tensor in stored.tensors:
        if (other := owners.setdefault(tensor.name, tensor.owner)) != tensor.owner:
            raise InvalidArgumentError(
                f"tensor {tensor.name!r} is in {other!r} and in {tensor.owner!r}: say which by parameters="
            )


async def _read(storage: Storage, found: CommittedSnapshot, stored: Contents) -> dict[str, AnyArray]:
    """Read all tensors.

    Those in a parameter set become views of its vector, in the dtype of its servers; those stored as bytes keep their
    own dtype.
    """
    slices, vectors = SliceReader(storage, found.manifest), dict[str, AnyArray]()
    arrays: dict[str, AnyArray] = {}
    for tensor in stored.tensors:
        elements = None
        if tensor.place is not None:
            state = tensor.place[0]
            if state.spec.name not in vectors:
                vectors[state.spec.name] = await _vector(slices, state)
            elements = vectors[state.spec.name][tensor.elements.start : tensor.elements.stop].view(state.spec.dtype)
        if elements is None or tensor.is_encoded:
            elements = tensor.decoded(elements)
        arrays[tensor.name] = elements.reshape(tensor.shape)
    return arrays


async def _vector(slices: SliceReader, state: ParametersState) -> AnyArray:
    flat = np.empty(state.layout.total, np.float32)
    for shard in range(len(state.shards)):
        async for index, (weights, *_) in slices.slices(state, shard):
            flat[slice(*state.slicing.bounds(index))] = weights
    return flat


# --- into arrays of the caller ----------------------------------------------------------------------------------------


def _check_targets(into: Mapping[str, AnyArray]) -> None:
    for name, array in into.items():
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise InvalidArgumentError(f"into[{name!r:.100}] must be a writable numpy array")
        if array.dtype not in DTYPES.values():
            raise DTypeMismatchError(f"into[{name!r:.100}] has dtype {array.dtype}: use one of {', '.join(DTYPES)}")


def _fill(snapshot: Snapshot, arrays: Mapping[str, AnyArray], into: Mapping[str, AnyArray], strict: bool) -> Snapshot:
    snapshot.missing = tuple(name for name in into if name not in arrays)
    snapshot.unexpected = tuple(name for name in arrays if name not in into)
    if strict and snapshot.missing:
        raise MissingTensorError(
            f"{_names(snapshot.missing)} of into are not in snapshot {snapshot.directory}: strict=False leaves them"
        )
    if strict and snapshot.unexpected:
        raise UnknownTensorError(
            f"{_names(snapshot.unexpected)} of snapshot {snapshot.directory} are not in into: strict=False ignores them"
        )
    both = [name for name in into if name in arrays]
    for name in both:
        if into[name].shape != arrays[name].shape:
            raise ShapeMismatchError(f"into[{name!r}] has shape {into[name].shape}, expected {arrays[name].shape}")
        if not _can_fill(arrays[name].dtype, into[name].dtype):
            raise DTypeMismatchError(
                f"into[{name!r}] has dtype {into[name].dtype}, but the tensor is {arrays[name].dtype}: give an array "
                "of that dtype"
            )
    with np.errstate(over="ignore"):
        for name in both:
            np.copyto(into[name], arrays[name], casting="unsafe")  # Checked above; numpy's rules lack bfloat16.
    return snapshot


def _can_fill(given: np.dtype[Any], into: np.dtype[Any]) -> bool:
    """True if values of one dtype may be rounded to the other: both have the same kind of number."""
    return (is_float(given.name) and is_float(into.name)) or np.can_cast(given, into, "same_kind")


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensors {', '.join(map(repr, names[:_SHOWN]))}{more}"


# --- optimizer state --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorState:
    """Optimizer state of one tensor.

    optimizer: the specification.
    group: the tensor's group in it.
    since: step at which the state began.
    updates: number of updates since the state began, without those that skipped the tensor because no worker had a
        gradient for it; in SSP and ASP the minimum over slices.
    arrays: arrays with the tensor's shape, in the dtype of the servers, by ``optimizer.group_state_names(group)``.
    """

    optimizer: Optimizer
    group: int
    since: int
    updates: int
    arrays: Mapping[str, NDArray[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Optimizer state of all trained tensors.

    step: the next step.
    directory: the snapshot's directory.
    tensors: state by tensor name.
    """

    step: int
    directory: str
    tensors: Mapping[str, TensorState]


def load_optimizer_state(url: str, step: int | None = None, parameters: str | None = None) -> OptimizerState:
    """Read the optimizer's state from a snapshot of the storage at ``url``.

    Arguments and errors are those of ``psdist.load_snapshot``.
    """
    storage = open_storage(url)
    found, states, _, tensors = run_coroutine(load_usable(storage, step, parameters, _read_state))
    return OptimizerState(max(state.step for state in states), found.manifest.directory, tensors)


async def _read_state(storage: Storage, found: CommittedSnapshot, stored: Contents) -> dict[str, TensorState]:
    slices, vectors = SliceReader(storage, found.manifest), dict[str, list[NDArray[np.float32]]]()
    tensors: dict[str, TensorState] = {}
    for tensor in stored.tensors:
        if tensor.place is None or tensor.is_encoded:
            continue
        state = tensor.place[0]
        if state.spec.name not in vectors:
            vectors[state.spec.name] = await _vectors(slices, state)
        part = slice(tensor.elements.start, tensor.elements.stop)
        spec = state.spec.optimizer
        group = group_of(state.layout.tensors[tensor.place[1]].name, spec.overrides)  # a tied weight has other names
        kept = spec.group_state_names(group)
        arrays: dict[str, Any] = {
            name: flat[part].view(state.spec.dtype).reshape(tensor.shape)
            for name, flat in zip(state.state_names, vectors[state.spec.name], strict=True)
            if name in kept
        }
        tensors[tensor.name] = TensorState(spec, group, state.state_since, _updates(state, tensor.elements), arrays)
    return tensors


async def _vectors(slices: SliceReader, state: ParametersState) -> list[NDArray[np.float32]]:
    """Return each of the optimizer's arrays as a flat vector."""
    flats = [np.empty(state.layout.total, np.float32) for _ in state.state_names]
    for shard in range(len(state.shards)):
        async for index, (_, *arrays) in slices.slices(state, shard):
            for flat, array in zip(flats, arrays, strict=True):
                flat[slice(*state.slicing.bounds(index))] = array
    return flats


def _updates(state: ParametersState, elements: range) -> int:
    size, count = state.slicing.slice_elements, len(state.shards)
    numbers = range(elements.start // size, -(-elements.stop // size)) if elements else range(0)
    updates = [
        state.shards[number % count].versions[number // count] - _lag(state, number, elements) for number in numbers
    ]
    return min(updates, default=state.step) - state.state_since


def _lag(state: ParametersState, number: int, elements: range) -> int:
    """Return the number of updates of slice ``number`` that skipped ``elements`` of the vector."""
    first = max(elements.start - state.slicing.bounds(number)[0], 0)
    lags = state.shards[number % len(state.shards)].lags_of(number)
    return next((lag for start, stop, lag in lags if start <= first < stop), 0)
