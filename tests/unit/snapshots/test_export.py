"""Weights of a snapshot as files of other programs: as their readers see them, in several files, and rejections."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from psdist.errors import (
    ConfigurationError,
    SnapshotCorruptError,
    StorageError,
    UnknownParametersError,
)
from psdist.snapshots import reader
from psdist.snapshots.export import Exported, ExportOptions, export
from psdist.snapshots.opening import open_storage
from psdist.types import DType
from tests.support.snapshot_files import write

rng = np.random.default_rng(7)
BROAD = ml_dtypes.bfloat16


def floats(*shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


TENSORS: dict[str, tuple[DType, NDArray[np.float32]]] = {
    "narrow": ("bfloat16", floats(3, 3).astype(BROAD).astype(np.float32)),
    "weight": ("float32", floats(4, 6)),
    "empty": ("float32", floats(0, 2)),
    "scalar": ("float64", floats()),
    "half": ("float16", floats(7).astype(np.float16).astype(np.float32)),
}
MODEL = {"model": TENSORS}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "storage")


def run(url: str, out: Path, seen: list[tuple[int, int]] | None = None, **options: Any) -> Exported:
    async def work() -> Exported:
        storage = open_storage(url)
        found = await reader.newest(storage)
        heard = seen if seen is not None else []
        return await export(
            storage, found.manifest, out, ExportOptions(**options), lambda *progress: heard.append(progress)
        )

    return asyncio.run(work())


def same(read: dict[str, Any], dtype: str = "") -> None:
    assert read.keys() == TENSORS.keys()
    for name, (declared, values) in TENSORS.items():
        wanted = values.astype(np.dtype(BROAD) if (dtype or declared) == "bfloat16" else np.dtype(dtype or declared))
        assert read[name].dtype == wanted.dtype and read[name].shape == values.shape
        assert read[name].tobytes() == wanted.tobytes()


def test_safetensors_in_each_tensors_own_dtype(url: str, tmp_path: Path) -> None:
    write(url, 1, 10, MODEL)
    seen: list[tuple[int, int]] = []
    written = run(url, tmp_path / "model.safetensors", seen)
    assert written.files == (tmp_path / "model.safetensors",) and written.overflowed == 0
    assert seen[-1] == (written.bytes, written.bytes)
    same(safetensors.numpy.load_file(tmp_path / "model.safetensors"))
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    widths = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    assert length % 8 == 0 and all(
        header[name]["data_offsets"][0] % widths[header[name]["dtype"]] == 0 for name in TENSORS
    )
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_safetensors_in_one_dtype(url: str, tmp_path: Path, dtype: str) -> None:
    write(url, 1, 10, MODEL, shards=3, size=4)
    run(url, tmp_path / "m", dtype=dtype)
    same(safetensors.numpy.load_file(tmp_path / "m"), dtype)


def test_npz_has_bfloat16_as_float32(url: str, tmp_path: Path) -> None:
    write(url, 1, 10, MODEL)
    run(url, tmp_path / "model.npz", format="npz")
    with np.load(tmp_path / "model.npz") as read:
        assert sorted(read) == sorted(TENSORS)
        for name, (declared, values) in TENSORS.items():
            wanted = values.astype("float32" if declared == "bfloat16" else declared)
            assert read[name].dtype == wanted.dtype and np.array_equal(read[name], wanted)
            assert read[name].shape == values.shape
    with pytest.raises(ConfigurationError, match="npz has no bfloat16"):
        ExportOptions(format="npz", dtype="bfloat16")


def test_torch(url: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    write(url, 1, 10, MODEL)
    run(url, tmp_path / "model.pt", format="torch")
    read = torch.load(tmp_path / "model.pt", weights_only=True)
    assert read["narrow"].dtype == torch.bfloat16
    same(
        {
            name: value.view(torch.int16).numpy().view(BROAD) if name == "narrow" else value.numpy()
            for name, value in read.items()
        }
    )


def test_past_a_size_there_are_several_files_and_an_index(url: str, tmp_path: Path) -> None:
    write(url, 1, 10, MODEL)
    written = run(url, tmp_path / "model.safetensors", file_bytes_max=100)
    *files, index = [path.name for path in written.files]
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert index == "model.safetensors.index.json" and len(files) == 3
    values = json.loads((tmp_path / index).read_text())
    assert values["metadata"]["total_size"] == written.bytes
    read: dict[str, Any] = {}
    for file in files:
        part = safetensors.numpy.load_file(tmp_path / file)
        assert all(values["weight_map"][name] == file for name in part)
        read |= part
    same(read)


def test_parameters_are_chosen_by_name(url: str, tmp_path: Path) -> None:
    write(
        url,
        1,
        10,
        {"a": {"w": ("float32", floats(3))}, "b": {"v": ("float32", floats(4)), "u": ("float32", floats(9))}},
    )
    run(url, tmp_path / "all")
    assert set(safetensors.numpy.load_file(tmp_path / "all")) == {"w", "u", "v"}
    run(url, tmp_path / "a", parameters=("a",))
    assert set(safetensors.numpy.load_file(tmp_path / "a")) == {"w"}
    with pytest.raises(UnknownParametersError, match=r"no parameters 'c': it has a, b"):
        run(url, tmp_path / "c", parameters=("c",))


def test_tensors_of_the_same_name_are_not_mixed(url: str, tmp_path: Path) -> None:
    write(url, 1, 10, {"a": {"w": ("float32", floats(3))}, "b": {"w": ("float32", floats(3))}})
    with pytest.raises(ConfigurationError, match=r"a and b both have a tensor w.*--parameters a"):
        run(url, tmp_path / "all")


def test_elements_that_a_dtype_cannot_hold_are_counted(url: str, tmp_path: Path) -> None:
    values = np.array([1e6, 1.0, np.inf, -7e4], np.float32)
    write(url, 1, 10, {"a": {"w": ("float32", values)}})
    assert run(url, tmp_path / "m", dtype="float16").overflowed == 2
    assert np.isinf(safetensors.numpy.load_file(tmp_path / "m")["w"]).sum() == 3


def test_a_file_that_is_there_stays(url: str, tmp_path: Path) -> None:
    write(url, 1, 10, MODEL)
    (tmp_path / "m").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"exists already.*--overwrite"):
        run(url, tmp_path / "m")
    assert (tmp_path / "m").read_text() == "mine"
    (tmp_path / "m").chmod(0o640)
    run(url, tmp_path / "m", overwrite=True)
    same(safetensors.numpy.load_file(tmp_path / "m"))
    run(url, tmp_path / "new")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("m", "new")] == [0o640, 0o600]


@pytest.mark.parametrize("name", ["../../x", "/x", "a/../x", "..", "a\\b"])
def test_no_member_of_an_npz_file_leads_out_of_a_directory(url: str, tmp_path: Path, name: str) -> None:
    write(url, 1, 10, {"a": {name: ("float32", floats(3))}})
    with pytest.raises(ConfigurationError, match=r"cannot be in an npz file.*--format safetensors"):
        run(url, tmp_path / "m.npz", format="npz")
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]
    assert run(url, tmp_path / "m").tensors == 1


@pytest.mark.parametrize("parts", [1, 3])
def test_nothing_stays_of_an_export_of_a_corrupt_snapshot(url: str, tmp_path: Path, parts: int) -> None:
    commit = write(url, 1, 10, MODEL)
    file = next((Path(url) / "snapshots" / commit.directory).glob("*00001-of*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(SnapshotCorruptError, match=file.name):
        run(url, tmp_path / "m", file_bytes_max=100 if parts > 1 else 10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]


def test_where_nothing_can_be_written(url: str, tmp_path: Path) -> None:
    write(url, 1, 10, MODEL)
    with pytest.raises(StorageError, match=r"m cannot be written: No such file"):
        run(url, tmp_path / "no" / "m")
    with pytest.raises(ConfigurationError, match="use one of"):
        ExportOptions(format="onnx")
    with pytest.raises(ConfigurationError, match="use one of"):
        ExportOptions(dtype="int8")
