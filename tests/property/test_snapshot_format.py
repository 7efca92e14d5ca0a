"""Snapshot format: values survive a round trip, and any bytes are a value or a typed error."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from psdist import optim
from psdist.consistency import ASP, BSP, SSP
from psdist.errors import SnapshotCorruptError, StorageError
from psdist.snapshots import format as layouts
from psdist.snapshots.format import CommitRecord, DatasetState, Manifest, ParametersState, WorkerState
from psdist.snapshots.reader import SliceReader
from psdist.types import DataPosition, DatasetSpec, Layout, ParametersSpec, TensorSpec
from tests.support.dict_storage import DictStorage, commit_of, state_of, table_of, write_snapshot

NAMES = st.text("abcXYZ019._/-", min_size=1, max_size=12)
NUMBERS = st.integers(0, (1 << 63) - 1)
TEXTS = st.text(max_size=20)
DTYPES = st.sampled_from(["float32", "float16", "bfloat16", "float64"])
TENSORS = st.builds(TensorSpec, NAMES, st.lists(st.integers(0, 4), max_size=3).map(tuple), DTYPES)
LAYOUTS = st.lists(TENSORS, max_size=5, unique_by=lambda tensor: tensor.name).map(lambda t: Layout(tuple(t)))
RATES = st.floats(1e-30, 1e30)
SCHEDULES = st.one_of(
    st.builds(optim.Constant, warmup_steps=st.integers(0, 99)),
    st.builds(optim.Cosine, total_steps=st.integers(1, 1 << 40), end_factor=st.floats(0, 1)),
    st.builds(optim.Step, every=st.integers(1, 99), gamma=st.floats(0, 1)),
)
OVERRIDES = st.lists(st.builds(lambda pattern, lr: optim.override(pattern, lr=lr), NAMES, RATES), max_size=2).map(tuple)
OPTIMIZERS = st.one_of(
    *(
        st.builds(kind, lr=RATES, schedule=SCHEDULES, max_grad_norm=st.floats(0, 1e30), overrides=OVERRIDES)
        for kind in (optim.SGD, optim.Adam, optim.Lion)
    )
)
CONSISTENCIES = st.one_of(
    st.builds(BSP, st.integers(0, 9), st.sampled_from(["none", "linear", "sqrt"])),
    st.builds(SSP, st.integers(0, 9), st.sampled_from(["none", "inverse"])),
    st.builds(ASP, st.sampled_from(["none", "inverse"])),
)
SPECS = st.builds(
    ParametersSpec,
    NAMES,
    OPTIMIZERS,
    CONSISTENCIES,
    st.sampled_from(["reject", "skip"]),
    st.integers(1, 9),
    st.booleans(),
)
STATES = st.builds(
    lambda spec, layout, names, step, following, since: replace(
        state_of(spec, layout, names, step), next=following, state_since=min(since, step)
    ),
    SPECS,
    LAYOUTS,
    st.sampled_from([(), ("momentum",), ("m", "v")]),
    NUMBERS,
    st.lists(st.tuples(NAMES, NUMBERS, NUMBERS), max_size=3).map(tuple),
    st.one_of(st.just(0), NUMBERS),
)
POSITIONS = st.builds(DataPosition, st.integers(0, 99), st.just(((1, 2), (5, 1))), st.integers(0, 9))
DATASETS = st.builds(
    DatasetState, st.builds(DatasetSpec, NAMES, st.integers(1, 1 << 20), st.integers(1, 99)), POSITIONS
)
SETTINGS = st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers()), max_size=3)


def _numbered(states: list[ParametersState]) -> tuple[ParametersState, ...]:
    """Return the states with distinct file names."""
    return tuple(
        replace(state, shards=(replace(state.shards[0], file=layouts.shard_file_name(number, 0, 1)),))
        for number, state in enumerate(states)
    )


def _with_own(manifest: Manifest, ranks: set[int], next_push: int) -> Manifest:
    """Return the manifest with states of workers of these ranks for its first parameters."""
    own = tuple(
        WorkerState(manifest.parameters[0].spec.name, rank, next_push, layouts.state_file_name(0, rank), 1, "0" * 32)
        for rank in (sorted(ranks) if manifest.parameters else ())
    )
    return replace(manifest, states=own)


PLAIN_MANIFESTS = st.builds(
    Manifest,
    run_id=NAMES,
    directory=st.just("d"),
    epoch=NUMBERS,
    time=st.floats(0, 1e12),
    reason=TEXTS,
    configuration=SETTINGS,
    parameters=st.lists(STATES, max_size=2, unique_by=lambda state: state.spec.name).map(_numbered),
    datasets=st.lists(DATASETS, max_size=2, unique_by=lambda state: state.spec.name).map(tuple),
)
MANIFESTS = st.builds(_with_own, PLAIN_MANIFESTS, st.sets(st.integers(0, 9), max_size=2), NUMBERS)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)


@given(MANIFESTS, st.integers(0, 10**12 - 1))
@settings(max_examples=20)
def test_manifests_and_records_come_back(manifest: Manifest, sequence: int) -> None:
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data, "m") == manifest
    commit = commit_of(manifest, data, sequence)
    assert CommitRecord.from_bytes(commit.to_bytes(), "c") == commit


@given(st.one_of(st.binary(max_size=64), JSON.map(lambda values: json.dumps(values).encode())))
@settings(max_examples=80)
def test_any_bytes_are_a_value_or_a_typed_error(data: bytes) -> None:
    for kind in (Manifest, CommitRecord):
        with suppress(SnapshotCorruptError, StorageError):
            assert kind.from_bytes(data, "f").to_bytes() == data


@given(MANIFESTS, JSON, st.data())
@settings(max_examples=25)
def test_any_value_in_the_place_of_any_other_is_a_value_or_a_typed_error(
    manifest: Manifest, new: Any, data: st.DataObject
) -> None:
    values = json.loads(manifest.to_bytes())
    where = values
    while True:
        key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
        if not isinstance(where[key], dict | list) or not where[key] or data.draw(st.booleans()):
            where[key] = new
            break
        where = where[key]
    changed = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    with suppress(SnapshotCorruptError, StorageError):
        assert Manifest.from_bytes(changed, "f").to_bytes() == changed


@given(LAYOUTS, st.integers(1, 9), st.integers(1, 5), st.sampled_from([(), ("momentum",), ("m", "v")]))
@settings(max_examples=20)
async def test_what_is_written_in_any_shards_is_read_and_is_safetensors(
    layout: Layout, slice_elements: int, shards: int, names: tuple[str, ...]
) -> None:
    state = state_of(ParametersSpec("p", optim.SGD(), BSP(), slice_elements=slice_elements), layout, names)
    table, storage = table_of(state), DictStorage()
    _, manifest = await write_snapshot(storage, [state], {"p": table}, shards=shards)
    [state] = manifest.parameters
    slices = SliceReader(storage, manifest)
    for index in range(state.slicing.count):
        for array, whole in zip(await slices.slice(state, index), table, strict=True):
            np.testing.assert_array_equal(array, whole[slice(*state.slicing.bounds(index))])
    for shard, file in enumerate(state.shards):
        tensors = load(storage.files[layouts.file_path(manifest.directory, file.file)])
        assert len(tensors) == len(file.versions) * (1 + len(names))
        for index in layouts.shard_slices(shard, shards, state.slicing.count):
            part = table[0][slice(*state.slicing.bounds(index))]
            np.testing.assert_array_equal(tensors[f"{index}/weights"], part)
