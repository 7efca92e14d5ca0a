"""Partition is a bijection between tensors and the flat vector, for any number, shapes and dtypes.

Routes cover every slice exactly once, for any placement.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from psdist.client.core import flat_vector, routing
from psdist.consistency import BSP
from psdist.optim import SGD
from psdist.types import ClusterMap, ParametersEntry, ParametersSpec, Replica, ServerEntry, Shard, Slicing
from psdist.v1.server_pb2 import SliceResult

DTYPES = [np.dtype("f4"), np.dtype("f8"), np.dtype("f2"), np.dtype(">f4"), np.dtype(ml_dtypes.bfloat16)]
names = st.text(alphabet="abcXYZ019._/-", min_size=1, max_size=12)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Return arrays by name whose values are exact in all four dtypes."""
    out = {}
    for name in draw(st.lists(names, min_size=1, max_size=8, unique=True)):
        array = draw(hnp.arrays(np.int8, draw(shapes)))
        out[name] = array.astype(draw(st.sampled_from(DTYPES)))
    return out


def _same(given: Mapping[str, np.ndarray], back: Mapping[str, np.ndarray]) -> None:
    assert list(given) == list(back)
    for name, array in given.items():
        assert back[name].shape == array.shape
        assert back[name].dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(back[name].astype(np.float64), array.astype(np.float64))


@given(tensors())
def test_there_and_back(values: dict[str, np.ndarray]) -> None:
    layout = flat_vector.layout_of(values)
    flat = flat_vector.flatten(layout, values)
    assert flat.dtype == np.float32 and flat.shape == (layout.total,)
    _same(values, flat_vector.unflatten(layout, flat))


@given(tensors())
def test_into_the_callers_arrays(values: dict[str, np.ndarray]) -> None:
    values = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in values.items()}
    layout = flat_vector.layout_of(values)
    out = {name: np.empty_like(array) for name, array in values.items()}
    shared = flat_vector.check_out(layout, out)
    flat = flat_vector.flatten(layout, values)
    if shared is None:
        flat_vector.copy_out(layout, flat, out)
    else:
        shared[...] = flat
    _same(values, out)


@given(st.lists(shapes, min_size=1, max_size=8), st.data())
def test_views_of_one_vector_are_not_copied(sides: list[tuple[int, ...]], data: st.DataObject) -> None:
    sizes = [int(np.prod(shape)) for shape in sides]
    lead = data.draw(st.integers(0, 3))
    vector = np.arange(lead + sum(sizes) + 1, dtype=np.float32)
    cuts = np.cumsum([lead, *sizes])
    views = {
        f"t{i}": vector[start : start + size].reshape(shape)
        for i, (start, size, shape) in enumerate(zip(cuts, sizes, sides, strict=False))
    }
    flat = flat_vector.flatten(flat_vector.layout_of(views), views)
    assert np.array_equal(flat, vector[lead:-1])
    assert not flat.size or np.shares_memory(flat, vector)


@given(st.integers(0, 500), st.integers(1, 64), st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), st.data())
def test_routes_cover_each_slice_once(total: int, elements: int, shards: list[str], data: st.DataObject) -> None:
    spec = ParametersSpec("p", SGD(), BSP(), slice_elements=elements)
    entry = ParametersEntry(spec, total, tuple(Shard(Replica(name, 1)) for name in shards), ready=True)
    live = data.draw(st.sets(st.sampled_from("abcde")))
    servers = tuple(ServerEntry(name, 1, f"{name}:1") for name in sorted(live & set(shards)))
    cluster = ClusterMap("run", 7, servers, parameters=(entry,))
    count = entry.slicing.count
    wanted = sorted(data.draw(st.sets(st.integers(0, count - 1)))) if count else []
    plan = routing.plan(cluster, "p", wanted)
    routes = plan.routes
    assert sorted([*plan.orphans, *(index for route in routes for index in route.slices)]) == wanted
    assert all(shards[index % len(shards)] not in live for index in plan.orphans)
    assert bool(plan.reason) == bool(plan.orphans)
    assert len({route.server_id for route in routes}) == len(routes)
    for route in routes:
        assert list(route.slices) == sorted(route.slices)
        assert set(route.slices) <= set(entry.slices_of(route.server_id))


@given(hnp.arrays(np.uint16, st.integers(1, 40)))
def test_bfloat16_is_widened_exactly(bits: np.ndarray) -> None:
    from psdist.client.transport.buffers import PullTarget

    target = np.empty(len(bits), np.float32)
    pulled = PullTarget(Slicing(len(bits), len(bits)), target, dtype="bfloat16")
    pulled.write(SliceResult(slice=0), bits.view(np.uint8).data, "server-0")
    expected = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(target, expected, equal_nan=True)


@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)), st.sampled_from(["float16", "bfloat16"])
)
def test_finite_means_finite_after_the_cast(values: np.ndarray, dtype: str) -> None:
    from psdist.compression.dtypes import NUMPY_DTYPES

    with np.errstate(over="ignore"):
        cast = values.astype(NUMPY_DTYPES[dtype]).astype(np.float32)
    assert flat_vector.is_finite(values, dtype) == bool(np.isfinite(cast).all())
    assert flat_vector.is_finite(values, "float32") == bool(np.isfinite(values).all())
