"""Snapshot format (docs/internals/snapshot-format.md): one representation per value; nothing else is accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from psdist import optim
from psdist.consistency import BSP
from psdist.errors import InvalidArgumentError, InvalidNameError, SnapshotCorruptError, StorageError
from psdist.snapshots import format as layouts
from psdist.snapshots.format import CommitRecord, Manifest, ShardFile, shard_header, slice_offset
from psdist.types import Layout, ParametersSpec, TensorSpec
from tests.support.dict_storage import DATASET, LAYOUT, SPEC, commit_of, state_of

OPTIMIZERS = [
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True, schedule=optim.Step(every=3, gamma=0.5)),
    optim.Adam(lr=1e-3, max_grad_norm=1.0, schedule=optim.Cosine(total_steps=10, warmup_steps=3)),
    optim.AdamW(overrides=(optim.override("*.bias", weight_decay=0.0), optim.override("w*", lr=0.25))),
    optim.Adagrad(schedule=optim.Linear(total_steps=7)),
    optim.RMSprop(schedule=optim.Polynomial(total_steps=9, power=2.0)),
    optim.Lion(),
    optim.FTRL(),
]


def manifest_of(*specs: ParametersSpec) -> Manifest:
    """Return a manifest of parameters without content."""
    states = []
    for number, spec in enumerate(specs or (SPEC,)):
        state = state_of(spec)
        states.append(replace(state, shards=(replace(state.shards[0], file=layouts.shard_file_name(number, 0, 1)),)))
    settings: dict[str, str | int] = {"ort": "Zürich", "seed": -3}
    return Manifest("run", "000000000007-1-1-abcdef", 3, 1.5, "on demand", settings, tuple(states), (DATASET,))


def commit() -> CommitRecord:
    """Return the record of ``manifest_of()``."""
    manifest = manifest_of()
    return commit_of(manifest, manifest.to_bytes(), 12)


def as_json(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


# --- there and back ---------------------------------------------------------------------------------------------------


def test_a_manifest_says_what_is_in_the_snapshot() -> None:
    manifest = manifest_of(SPEC, replace(SPEC, name="other"))
    states = tuple(
        replace(state, shards=(replace(state.shards[0], length=10 + number),), next=(("w0", 2, 9),))
        for number, state in enumerate(manifest.parameters)
    )
    manifest = Manifest.from_bytes(replace(manifest, parameters=states).to_bytes(), "m")
    assert manifest.steps == {"net": 7, "other": 7}
    assert manifest.bytes == 21
    assert list(manifest.files) == [layouts.shard_file_name(0, 0, 1), layouts.shard_file_name(1, 0, 1)]
    assert manifest.state("other") == states[1]
    assert manifest.state("none") is None


def test_a_commit_record_comes_back_as_it_was() -> None:
    record = commit()
    assert CommitRecord.from_bytes(record.to_bytes(), record.path) == record
    assert record.path == "commits/000000000012.json"


def test_the_bytes_are_canonical_json() -> None:
    for data in (manifest_of().to_bytes(), commit().to_bytes()):
        assert data == as_json(json.loads(data))
        assert data.isascii()


# --- versions ---------------------------------------------------------------------------------------------------------


def test_what_has_nothing_of_version_2_is_written_as_version_1() -> None:
    """An older program can then read it; and a manifest from such a program keeps its meaning."""
    values = json.loads(manifest_of().to_bytes())
    (state,) = values["parameters"]
    assert values["format"] == 1 and "state_since" not in state and "reset_optimizer" not in state["spec"]
    (read,) = Manifest.from_bytes(as_json(values), "m").parameters
    assert (read.state_since, read.spec.reset_optimizer, read.version_min) == (0, False, 7)


def test_the_bytes_of_version_1_are_those_of_the_release_that_began_it() -> None:
    specs = [replace(SPEC, name=f"p{number}", optimizer=optimizer) for number, optimizer in enumerate(OPTIMIZERS)]
    files = [manifest_of().to_bytes(), manifest_of(*specs).to_bytes(), commit().to_bytes()]
    assert [layouts.digest_of(data) for data in files] == [
        "df1c8f0719a1850e2f7128efafbf4c01",
        "de6adf1b50bafd0465891094f783352d",
        "e4e6622ed0f458f0f522f59de865ac04",
    ]


@pytest.mark.parametrize(
    ("version", "settings", "state"),
    [
        (2, {}, {"state_since": 7}),  # It would count the optimizer's updates from the start.
        (2, {"reset_optimizer": True}, {}),
        (2, {"reset_optimizer": True}, {"state_since": 3}),
        (3, {"pull_compression": "TopK(ratio=0.01)"}, {}),  # It would take reference weights for optimizer state.
        (4, {"dtype": "float64", "slice_elements": 10}, {}),  # It would read or apply other numbers.
        (4, {"consistency": BSP(reduction="sum")}, {}),
    ],
    ids=str,
)
def test_what_an_older_program_would_misread_has_a_newer_version(
    version: int, settings: dict[str, Any], state: dict[str, Any]
) -> None:
    manifest = manifest_of(replace(SPEC, **settings))
    layout = replace(LAYOUT, dtype=manifest.parameters[0].spec.dtype)
    manifest = replace(manifest, parameters=(replace(manifest.parameters[0], layout=layout, **state),))
    data = manifest.to_bytes()
    assert json.loads(data)["format"] == manifest.format == version
    assert Manifest.from_bytes(data, "m") == manifest
    with pytest.raises(SnapshotCorruptError):
        Manifest.from_bytes(data.replace(b'"format":%d' % version, b'"format":1'), "m")
    assert commit_of(manifest, data, 1).to_bytes().count(b'"format":1') == 1


def test_what_says_nothing_is_not_written() -> None:
    values = json.loads(manifest_of().to_bytes())
    for place, name, nothing in (
        (values["parameters"][0], "state_since", 0),
        (values["parameters"][0]["spec"], "reset_optimizer", False),
        (values["parameters"][0]["spec"], "pull_compression", ""),
    ):
        place[name] = nothing
        with pytest.raises(SnapshotCorruptError, match="canonical form"):
            Manifest.from_bytes(as_json(values), "m")
        del place[name]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_other_bytes_are_no_record_and_no_manifest() -> None:
    others = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"format":1',
        b"[" * 100_000,
        b'{"format":NaN}',
        b"1" * 5000,
        b"\0" * 64,
    ]
    for data in others:
        for kind in (CommitRecord, Manifest):
            with pytest.raises(SnapshotCorruptError, match=r"^some/file is not what was written") as caught:
                kind.from_bytes(data, "some/file")
            assert caught.value.details["file"] == "some/file"


def test_another_form_of_the_same_values_is_refused() -> None:
    data = manifest_of().to_bytes()
    forms = [
        b" " + data,
        data + b"\n",
        data.replace(b'"epoch":3', b'"epoch":3,"epoch":3'),
        data.replace(b'"time":1.5', b'"time":1.50'),
        data.replace(b'"format":1,', b'"format":1,"further":0,'),
        data.replace(b'"lr":0.5', b'"lr":5e-1'),
        data.replace(b'"step":7', b'"step":true'),
        data.replace(b'"reference_workers":1', b'"reference_workers":1.0'),
        data.replace(b'"run_id":"run"', b'"run_id":"\\u0072un"'),
    ]
    compressed = manifest_of(replace(SPEC, pull_compression="TopK(ratio=0.01)")).to_bytes()
    forms.append(compressed.replace(b"TopK(ratio", b"TopK(share"))
    for form in forms:
        assert form not in (data, compressed)
        with pytest.raises(SnapshotCorruptError):
            Manifest.from_bytes(form, "m")


def test_a_newer_format_names_the_remedy() -> None:
    values = json.loads(manifest_of().to_bytes()) | {"format": 6, "parameters": "as they are in format 6"}
    with pytest.raises(StorageError, match=r"m has format 6, .* up to 5: use the psdist that wrote it"):
        Manifest.from_bytes(as_json(values), "m")
    record = {"format": 2, "anything": "else"}
    with pytest.raises(StorageError, match="format 2"):
        CommitRecord.from_bytes(as_json(record | {"digest": layouts.digest_of(as_json(record))}), "c")
    with pytest.raises(SnapshotCorruptError, match="format is 0"):
        Manifest.from_bytes(as_json(values | {"format": 0}), "m")


def _leaves(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [path, *(leaf for key, value in items for leaf in _leaves(value, (*path, key)))]


def _with(values: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    values = dict(values) if isinstance(values, dict) else list(values)
    values[path[0]] = _with(values[path[0]], path[1:], new)
    return values


def test_each_value_of_another_kind_is_refused_or_comes_back() -> None:
    for new in [None, True, -1, 2**70, 1e300, "../x", "é", [], {}, [["a"]], {"a": 1}]:
        values = json.loads(manifest_of().to_bytes())
        for path in _leaves(values)[1:]:
            data = as_json(_with(values, path, new))
            try:
                assert Manifest.from_bytes(data, "m").to_bytes() == data, path
            except (SnapshotCorruptError, StorageError) as error:
                assert error.message.startswith("m "), path


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", ".hidden", "", "a\0b", "..", "é", "x" * 129, "a\n", "~"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    for make in (
        lambda: layouts.manifest_path(name),
        lambda: layouts.file_path("d", name),
        lambda: layouts.directory_name(1, 1, 1, f"x/{name}"),
        lambda: ShardFile(name, 0, "0" * 32, (), ()),
        lambda: replace(manifest_of(), directory=name),
        lambda: replace(commit(), directory=name),
        lambda: replace(state_of(), state_names=(name,)),
    ):
        with pytest.raises(InvalidNameError):
            make()


def test_a_record_that_nobody_can_use_cannot_be_made() -> None:
    for change in [
        {"directory": "../../outside"},
        {"manifest_length": (1 << 30) + 1},
        {"sequence": 10**12},
        {"manifest_digest": "0" * 31 + "G"},
        {"steps": {"net": -1}},
        {"time": float("inf")},
        {"seconds": -1.0},
        {"reason": "x" * 5000},
    ]:
        with pytest.raises(InvalidArgumentError):
            replace(commit(), **change)


def test_a_manifest_that_nobody_can_use_cannot_be_made() -> None:
    manifest = manifest_of()
    [state] = manifest.parameters
    twice = ParametersSpec("other", optim.SGD(), BSP(), slice_elements=2)
    bad: list[Any] = [
        lambda: replace(manifest, parameters=(state, state)),
        lambda: replace(manifest, parameters=(state, replace(state, spec=twice))),
        lambda: replace(manifest, datasets=(DATASET, DATASET)),
        lambda: replace(manifest, configuration={"a": 1.5}),
        lambda: replace(state, state_since=8),
        lambda: replace(state, state_since=-1),
        lambda: replace(state, shards=()),
        lambda: replace(state, shards=(replace(state.shards[0], versions=(), digests=()),)),
        lambda: replace(state, step=6),
        lambda: replace(state.shards[0], versions=()),
        lambda: replace(state, spec=replace(SPEC, slice_elements=0)),
        lambda: replace(state, state_names=("m", "m")),
        lambda: replace(state, state_names=("weights",)),
        lambda: replace(state, layout=Layout((TensorSpec("w", (2,)), TensorSpec("w", (3,))))),
        lambda: replace(state, next=(("w 0", 1, 1),)),
    ]
    for make in bad:
        with pytest.raises(InvalidArgumentError):
            make()


def test_a_shape_that_no_vector_has_is_refused_before_anything_is_allocated() -> None:
    for shape in [[2**62, 4], [2**63], [0] * 33, [-1], [1.0], "ab"]:
        values = _with(json.loads(manifest_of().to_bytes()), ("parameters", 0, "layout", 0, 1), shape)
        with pytest.raises(SnapshotCorruptError):
            Manifest.from_bytes(as_json(values), "m")


# --- a shard's file ---------------------------------------------------------------------------------------------------


def test_a_shards_file_is_a_safetensors_file(tmp_path: Path) -> None:
    header = shard_header([1, 3], [4, 3], ["m", "v"])
    values = np.arange(21, dtype=np.float32)
    tensors = load(header + values.tobytes())
    assert {name: array.tolist() for name, array in tensors.items()} == {
        "1/weights": [0, 1, 2, 3],
        "1/m": [4, 5, 6, 7],
        "1/v": [8, 9, 10, 11],
        "3/weights": [12, 13, 14],
        "3/m": [15, 16, 17],
        "3/v": [18, 19, 20],
    }
    assert len(header) % 8 == 0
    assert slice_offset(len(header), 1, 4, 2) == len(header) + 12 * 4


def test_a_shard_without_slices_is_a_safetensors_file() -> None:
    assert load(shard_header([], [], ["m"])) == {}


def test_slices_are_dealt_to_shards_in_turn() -> None:
    assert [list(layouts.shard_slices(shard, 3, 7)) for shard in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    state = state_of()
    assert state.slicing.count == 3
    assert load(state.header(0) + bytes(state.data_bytes(0)))["2/weights"].shape == (1,)


def test_names_of_files_and_records() -> None:
    assert layouts.directory_name(7, 2, 9, "abc123") == "000000000007-2-9-abc123"
    assert layouts.manifest_path("d") == "snapshots/d/manifest.json"
    assert layouts.shard_file_name(0, 2, 4) == "parameters-0000-00002-of-00004.safetensors"
    assert layouts.commit_sequence(layouts.commit_path(5)) == 5
    for other in ("commits/5.json", "commits/0000000000050.json", "snapshots/000000000005.json", "commits/a.json"):
        assert layouts.commit_sequence(other) is None
    assert LAYOUT.total == 5
