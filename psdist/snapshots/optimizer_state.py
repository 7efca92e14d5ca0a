"""Optimizer state in a snapshot, by tensor, for programs that continue without servers.

``psdist.torch`` converts it to torch's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psdist.optim import Optimizer, group_of
from psdist.snapshots.format import ParametersState
from psdist.snapshots.load import load_usable, run_coroutine
from psdist.snapshots.model_tensors import Contents
from psdist.snapshots.opening import open_storage
from psdist.snapshots.reader import CommittedSnapshot, SliceReader
from psdist.snapshots.storage import Storage


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
    found, states, _, tensors = run_coroutine(load_usable(storage, step, parameters, _read))
    return OptimizerState(max(state.step for state in states), found.manifest.directory, tensors)


async def _read(storage: Storage, found: CommittedSnapshot, stored: Contents) -> dict[str, TensorState]:
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
