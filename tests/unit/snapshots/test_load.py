"""``psdist.load_snapshot``: named arrays, or arrays of the caller, from a storage."""

from __future__ import annotations

import secrets
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import psdist
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
from psdist.snapshots.opening import open_storage
from psdist.types import Layout, TensorSpec
from tests.support.dict_storage import SPEC, state_of, table_of, write_snapshot

NET = state_of()
OTHER = state_of(replace(SPEC, name="other"), Layout((TensorSpec("x", (3,), "float64"), TensorSpec("w2", ()))), ())


@pytest.fixture
async def url() -> str:
    """Return a storage with two snapshots of the parameters "net" and "other", at steps 7 and 8."""
    storage = open_storage(f"memory://{secrets.token_hex(8)}")
    for sequence, step in ((1, 7), (2, 8)):
        states = [state_of(step=step), state_of(OTHER.spec, OTHER.layout, (), step - 1)]
        tables = {"net": table_of(NET, step), "other": table_of(OTHER, step)}
        await write_snapshot(storage, states, tables, sequence=sequence)
    return storage.url


async def spoil(url: str, file: str) -> None:
    """Flip a bit in the last byte of the file with ``file`` in its name."""
    storage = open_storage(url)
    [path] = [stored.path for stored in await storage.list() if file in stored.path]
    data = bytearray(await storage.read(path))
    data[-1] ^= 1
    await storage.delete([path])
    await storage.create(path, bytes(data))


def weights(step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return table_of(NET, step)[0]


async def test_arrays_have_their_names_shapes_and_dtypes(url: str) -> None:
    snapshot = psdist.load_snapshot(url)
    assert {name: (array.dtype.name, array.shape) for name, array in snapshot.items()} == {
        "w": ("float32", (2, 2)),
        "b": ("bfloat16", (1,)),
        "x": ("float64", (3,)),
        "w2": ("float32", ()),
    }
    np.testing.assert_array_equal(snapshot["w"].ravel(), weights(8)[:4])
    assert snapshot["b"] == weights(8)[4:].astype(ml_dtypes.bfloat16)
    assert (snapshot.step, snapshot.steps, snapshot.run_id) == (8, {"net": 8, "other": 7}, "run")
    assert (snapshot.missing, snapshot.unexpected, snapshot.skipped) == ((), (), ())
    assert snapshot.directory.startswith("000000000008-") and "step=8" in repr(snapshot)
    assert len(snapshot) == 4 and list(snapshot) == ["w", "b", "x", "w2"]


def test_it_works_without_a_loop_too(tmp_path: Path) -> None:
    with pytest.raises(UnknownSnapshotError, match="there is no committed snapshot"):
        psdist.load_snapshot(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


async def test_a_step_and_parameters_are_chosen(url: str) -> None:
    snapshot = psdist.load_snapshot(url, step=7, parameters="net")
    assert set(snapshot) == {"w", "b"} and snapshot.step == 7
    np.testing.assert_array_equal(snapshot["w"].ravel(), weights(7)[:4])
    assert psdist.load_snapshot(url, step=6, parameters="other").steps == {"other": 6}
    with pytest.raises(UnknownSnapshotError, match=r"no snapshot of step 9 in .*; the newest are of 8, 7"):
        psdist.load_snapshot(url, step=9)
    with pytest.raises(UnknownSnapshotError, match="step 6"):
        psdist.load_snapshot(url, step=6, parameters="net")
    with pytest.raises(UnknownParametersError, match="has no 'no'; it has net, other"):
        psdist.load_snapshot(url, parameters="no")


async def test_a_dtype_is_given_to_all(url: str) -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert {array.dtype.name for array in psdist.load_snapshot(url, dtype=dtype).values()} == {dtype}
    with pytest.raises(DTypeMismatchError, match="'int8' is not supported: use one of float32"):
        psdist.load_snapshot(url, dtype="int8")
    with pytest.raises(InvalidArgumentError, match="dtype and into"):
        psdist.load_snapshot(url, dtype="float32", into={})


async def test_tensors_of_one_name_need_a_choice(tmp_path: Path) -> None:
    states = [NET, replace(state_of(replace(SPEC, name="twin")))]
    await write_snapshot(open_storage(str(tmp_path)), states, {"net": table_of(NET, 1), "twin": table_of(NET, 2)})
    with pytest.raises(InvalidArgumentError, match="tensor 'w' is in 'net' and in 'twin': say which by parameters="):
        psdist.load_snapshot(str(tmp_path))
    twin = psdist.load_snapshot(str(tmp_path), parameters="twin")
    np.testing.assert_array_equal(twin["w"].ravel(), weights(2)[:4])


# --- corrupt ones -----------------------------------------------------------------------------------------------------


async def test_a_corrupt_newest_falls_back_and_says_so(url: str) -> None:
    await spoil(url, "8-1-2-000002/parameters-0000-00000-")
    with pytest.warns(
        RuntimeWarning, match=r"an older snapshot is used: .*00000-of-00002.safetensors is not"
    ) as caught:
        snapshot = psdist.load_snapshot(url)
    assert snapshot.step == 7 and len(snapshot.skipped) == 1
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(snapshot["w"].ravel(), weights(7)[:4])


async def test_nothing_is_filled_from_corrupt_files(url: str) -> None:
    await spoil(url, "7-1-1-000001/parameters-0000-00000-")
    into = {"w": np.zeros((2, 2), np.float32)}
    with pytest.raises(SnapshotCorruptError, match=r"no snapshot in .* can be used"):
        psdist.load_snapshot(url, step=7, parameters="net", into=into, strict=False)
    assert not into["w"].any()


async def test_nothing_usable_is_corrupt_and_not_missing(url: str) -> None:
    for sequence in (1, 2):
        await spoil(url, f"commits/{sequence:012d}.json")
    with pytest.raises(SnapshotCorruptError, match="none of the 2 snapshots"):
        psdist.load_snapshot(url)


# --- into -------------------------------------------------------------------------------------------------------------


async def test_arrays_are_filled_in_their_own_dtype(url: str) -> None:
    into: dict[str, Any] = {"b": np.zeros(1, np.float16), "w": np.zeros((2, 4), np.float32)[:, ::2]}
    snapshot = psdist.load_snapshot(url, parameters="net", into=into)
    np.testing.assert_array_equal(into["w"].ravel(), weights(8)[:4])
    assert into["b"] == weights(8)[4:].astype(np.float16)
    assert snapshot["w"] is into["w"] and list(snapshot) == ["b", "w"]


async def test_what_differs_is_an_error_or_is_reported(url: str) -> None:
    def into() -> dict[str, Any]:
        return {"w": np.zeros((2, 2), np.float32), "new": np.ones(3)}

    with pytest.raises(MissingTensorError, match=r"'new' of into are not in snapshot"):
        psdist.load_snapshot(url, parameters="net", into=into())
    with pytest.raises(UnknownTensorError, match=r"'b' of snapshot .* are not in into"):
        psdist.load_snapshot(url, parameters="net", into={"w": np.zeros((2, 2))})
    mine = into()
    snapshot = psdist.load_snapshot(url, parameters="net", into=mine, strict=False)
    assert (snapshot.missing, snapshot.unexpected) == (("new",), ("b",))
    np.testing.assert_array_equal(mine["w"].ravel(), weights(8)[:4])
    assert mine["new"].all()


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.zeros((4,), np.float32), ShapeMismatchError),
        (np.zeros((2, 2), np.int32), DTypeMismatchError),
        ([[0.0, 0.0], [0.0, 0.0]], InvalidArgumentError),
        (np.broadcast_to(np.zeros(1, np.float32), (2, 2)), InvalidArgumentError),
    ],
    ids=["shape", "dtype", "list", "read-only"],
)
@pytest.mark.parametrize("strict", [True, False])
async def test_arrays_that_cannot_take_it_are_refused_before_any_is_filled(
    url: str, array: Any, error: type[Exception], strict: bool
) -> None:
    into = {"b": np.zeros(1, np.float32), "w": array}
    with pytest.raises(error, match="into"):
        psdist.load_snapshot(url, parameters="net", into=into, strict=strict)
    assert not into["b"].any()


async def test_values_too_large_for_a_dtype_become_infinite_without_a_word(tmp_path: Path) -> None:
    table = [np.full(5, 1e38, np.float32), np.zeros(5, np.float32)]
    await write_snapshot(open_storage(str(tmp_path)), [NET], {"net": table})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isinf(psdist.load_snapshot(str(tmp_path), dtype="float16")["w"]).all()
