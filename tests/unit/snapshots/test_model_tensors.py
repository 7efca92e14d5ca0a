"""Tensors of a model that a snapshot stores as bytes: their description, rejections and omissions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from psdist.errors import SnapshotCorruptError, StorageError
from psdist.snapshots import reader
from psdist.snapshots.model_tensors import BUFFERS, DESCRIPTION, Contents, ModelDescription, contents
from psdist.snapshots.opening import open_storage
from tests.support.snapshot_files import write

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
NARROW = np.array([1.5, -2.0], np.float16)
COUNT = np.array([7], np.int64)


def raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(array.tobytes(), np.uint8)


def described(**changes: Any) -> dict[str, Any]:
    description = ModelDescription(
        trained=("model",),
        fixed="model/fixed",
        plain=("frozen",),
        encoded={"count": ("int64", ()), "narrow": ("float16", (2,)), "empty": ("bool", (0, 3))},
        aliases={"tied": "w", "count2": "count"},
    )
    values: dict[str, Any] = json.loads(description.to_bytes())
    return values | changes


def state(description: object, count: NDArray[Any] = COUNT) -> bytes:
    """Return the file of a worker's state, with a residual before and after."""
    text = description if isinstance(description, bytes) else json.dumps(description).encode()
    tensors = {
        "psdist.residual": np.ones(1000, np.float32),
        BUFFERS + "count": raw(count),
        BUFFERS + DESCRIPTION: np.frombuffer(text, np.uint8),
        "users": np.ones(3),
    }
    return safetensors.numpy.save(tensors)


def read(path: Path, **options: Any) -> Contents:
    """Return the tensors of the newest snapshot."""

    async def work() -> Contents:
        storage = open_storage(str(path))
        newest = await reader.newest(storage)
        return await contents(storage, newest.manifest, **options)

    return asyncio.run(work())


def found(path: Path, *states: bytes, **options: Any) -> Contents:
    """Return the tensors of a snapshot, with states of rank 3 and above."""
    write(
        str(path),
        1,
        10,
        {
            "model": {"w": ("float32", WEIGHT)},
            "model/fixed": {
                "frozen": ("float32", np.array([2.0, 3.0], np.float32)),
                "narrow": ("float32", raw(NARROW).astype(np.float32)),
                "count": ("float32", np.zeros(8, np.float32)),
                "scratch": ("float32", np.full(4, 255, np.float32)),
            },
        },
        kept={("model", 3 + number): data for number, data in enumerate(states)},
    )
    return read(path, **options)


def test_the_lowest_rank_says_what_bytes_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_BYTES", 100)  # Small parts: the header and each tensor span several.
    stored = found(tmp_path, state(described()), state(described(), np.array([8], np.int64)))
    assert stored.left_out == ()
    places = {tensor.name: (tensor.owner, tensor.dtype, tensor.shape) for tensor in stored.tensors}
    assert places == {
        "w": ("model", "float32", (2, 3)),
        "tied": ("model", "float32", (2, 3)),
        "frozen": ("model/fixed", "float32", (2,)),
        "narrow": ("model/fixed", "float16", (2,)),
        "count": ("model", "int64", ()),
        "count2": ("model", "int64", ()),
        "empty": ("model", "bool", (0, 3)),
    }
    by_name = {tensor.name: tensor for tensor in stored.tensors}
    assert by_name["count"].decoded(None).tolist() == [7]
    assert np.array_equal(by_name["narrow"].decoded(raw(NARROW).astype(np.float32)), NARROW)


def test_parameter_sets_that_are_not_wanted_give_nothing(tmp_path: Path) -> None:
    stored = found(tmp_path, state(described()), parameters=["model/fixed"])
    assert {tensor.name for tensor in stored.tensors} == {"frozen", "narrow"}


@pytest.mark.parametrize(
    "encoded",
    [
        pytest.param({"count": ["int64", [2]]}, id="of another size"),
        pytest.param({"count": ["quint8", [8]]}, id="of an unknown dtype"),
    ],
)
def test_bytes_that_cannot_be_understood_are_left_out(tmp_path: Path, encoded: dict[str, Any]) -> None:
    stored = found(tmp_path, state(described(encoded=encoded)))
    assert [tensor.name for tensor in stored.tensors] == ["w", "frozen", "tied"]
    (sentence,) = stored.left_out
    assert sentence.startswith(f"count ({encoded['count'][0]}) left out") and "Take another snapshot" in sentence


@pytest.mark.parametrize(
    "description",
    [
        *(b"no JSON", b"[]", b"{}", b"[" * 100_000, b"\xff"),
        *(
            {"encoded": {"count": "int64"}},
            {"encoded": {"count": ["int64", [-1]]}},
            {"encoded": {"count": ["int64", 1]}},
            {"encoded": {"count": ["int64", [1] * 33]}},
        ),
        *({"encoded": {"../count": ["int64", [1]]}}, {"aliases": {"a\n": "w"}}, {"aliases": {"": "w"}}),
        *({"format": "1"}, {"fixed": 3}, {"plain": [3]}, {"trained": "model"}, {"aliases": []}),
    ],
)
def test_a_description_that_is_none_is_corrupt(tmp_path: Path, description: Any) -> None:
    whole = description if isinstance(description, bytes) else described(**description)
    with pytest.raises(SnapshotCorruptError, match="its model description is malformed"):
        found(tmp_path, state(whole))


def test_second_names_have_any_characters_and_take_no_others_place(tmp_path: Path) -> None:
    stored = found(tmp_path, state(described(aliases={"heads.en:de é": "w", "frozen": "w", "count": "w"})))
    shapes = {tensor.name: tensor.shape for tensor in stored.tensors}
    assert shapes == {
        "w": (2, 3),
        "heads.en:de é": (2, 3),
        "frozen": (2,),
        "narrow": (2,),
        "count": (),
        "empty": (0, 3),
    }
    assert len(shapes) == len(stored.tensors)


def test_what_is_not_trained_comes_with_its_model(tmp_path: Path) -> None:
    stored = found(tmp_path, state(described()), parameters=["model"])
    assert {tensor.name for tensor in stored.tensors} == {
        "w", "tied", "frozen", "narrow", "count", "count2", "empty",
    }  # fmt: skip


def test_weights_need_no_state_that_has_no_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its header is read, so the rest may be damaged."""
    monkeypatch.setattr(reader, "BATCH_BYTES", 100)
    data = safetensors.numpy.save({"psdist.residual": np.ones(1000, np.float32)})
    assert next(one.name for one in found(tmp_path, data).tensors) == "w"
    (file,) = tmp_path.glob("snapshots/*/*worker*")
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert next(one.name for one in read(tmp_path).tensors) == "w"


def test_a_newer_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"has format 2, but this psdist reads 1: use the psdist that wrote it"):
        found(tmp_path, state(described(format=2)))


ENDLESS = b'{"%s": {"data_offsets": [0, 1e999]}}' % (BUFFERS + "a").encode()
OVERLAPS = json.dumps({BUFFERS + name: {"data_offsets": [0, 80]} for name in "abc"}).encode()


@pytest.mark.parametrize(
    "data",
    [
        len(OVERLAPS).to_bytes(8, "little") + OVERLAPS,
        len(ENDLESS).to_bytes(8, "little") + ENDLESS,
        b"",
        b"short",
        b"\xff" * 8 + b"{}",
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x04" + b"\0" * 7 + b'{"":',
    ],
)
def test_a_state_that_is_no_safetensors_file_is_corrupt(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SnapshotCorruptError, match="header"):
        found(tmp_path, data)


def test_a_state_that_was_changed_is_corrupt(tmp_path: Path) -> None:
    data = state(described())
    found(tmp_path, data)
    (file,) = tmp_path.glob("snapshots/*/*worker*")
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(SnapshotCorruptError, match=f"{file.name} is not what was written: its digest"):
        read(tmp_path)
