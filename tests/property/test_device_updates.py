"""A device gives the bytes of the CPU, for every optimizer over 100 steps.

Contributions have all types, with NaN and Inf; written means, copies and digests are compared, too.

The device is emulated: the CPU runs the device's sources.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psdist import optim
from psdist.compression import Int8
from psdist.compression.specifications import pull_codec_to_text
from psdist_server.kernels.arrays import Update
from psdist_server.kernels.interpreted import DTYPES
from tests.support.dense_updates import REDUCTIONS
from tests.support.device_updates import Both, entry_of, every_optimizer, gradients
from tests.support.example_counts import examples
from tests.support.host_device import HostDevice, needs_compiler
from tests.support.segments import integers

pytestmark = needs_compiler

reductions = st.sampled_from(REDUCTIONS)


@every_optimizer
def test_a_hundred_steps_give_the_same_bytes(spec: optim.Optimizer) -> None:
    both = Both(entry_of(spec))
    rng = np.random.default_rng(7)
    for step in range(100):
        dtypes = [["float32"], ["float32", "bfloat16"], ["float16", "float32", "float32"]][step % 3]
        updates = [Update(i, step, gradients(rng, both.host.slicing.size(i), dtypes)) for i in both.host.indices]
        assert both.update(updates) == [()] * len(updates)
    both.check()
    both.close()


@every_optimizer
@examples(2)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_what_is_not_finite_is_left_out_of_the_same_blocks(
    spec: optim.Optimizer, seed: int, data: st.DataObject
) -> None:
    both = Both(entry_of(spec, reduction=data.draw(reductions)), HostDevice(descending=data.draw(st.booleans())))
    rng = np.random.default_rng(seed)
    for step, index in enumerate(data.draw(st.permutations(both.host.indices))):
        size = both.host.slicing.size(index)
        dtypes = data.draw(st.lists(st.sampled_from(list(DTYPES)), min_size=1, max_size=5))
        parts = gradients(rng, size, dtypes)
        for part in data.draw(st.sets(st.integers(0, len(parts) - 1))):
            parts[part][data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        if data.draw(st.booleans()):
            # Denormals, and sums that overflow in one element.
            parts[0][: size // 2] *= np.asarray(1e-7 if dtypes[0] == "float16" else 1e-38, parts[0].dtype)
            for part in parts:
                if part.dtype == np.float32:
                    part[0] = 3e38
        mean = np.full(size, -1.0, np.float32) if data.draw(st.booleans()) else None
        factor = data.draw(st.sampled_from([None, 0.25, 1 / 3, float("nan")])) if len(parts) == 1 else None
        both.update([Update(index, step, parts, data.draw(st.sampled_from([1.0, 1 / 3])), factor, mean)])
    both.check()
    both.close()


def test_large_slices_go_in_pieces() -> None:
    both = Both(entry_of(optim.Adam(lr=0.1), slice_elements=1 << 20, total=(1 << 20) + 4097))
    rng = np.random.default_rng(3)
    for step in range(2):
        sizes = [both.host.slicing.size(index) for index in both.host.indices]
        parts = [gradients(rng, size, ["float32", "bfloat16", "float32"]) for size in sizes]
        parts[0][1][-1] = np.inf
        means = [np.zeros(size, np.float32) for size in sizes]
        updates = [Update(index, step, parts[index], mean=means[index]) for index in both.host.indices]
        assert both.update(updates) == [(1,), ()]
    both.check()
    both.close()


def test_very_many_contributions_have_room() -> None:
    both = Both(entry_of(optim.SGD(lr=0.1), slice_elements=4096, total=4096))
    rng = np.random.default_rng(5)
    assert both.update([Update(0, 0, gradients(rng, 4096, ["float32"] * 600))]) == [()]
    both.check()
    both.close()


@examples(6)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_means_and_their_squares_are_the_same(seed: int, data: st.DataObject) -> None:
    both = Both(entry_of(optim.SGD(lr=0.1, max_grad_norm=1.0), reduction=data.draw(reductions)))
    rng = np.random.default_rng(seed)
    index = data.draw(st.sampled_from(both.host.indices))
    dtypes = data.draw(st.lists(st.sampled_from(list(DTYPES)), min_size=1, max_size=4))
    parts = gradients(rng, both.host.slicing.size(index), dtypes)
    for part in data.draw(st.sets(st.integers(0, len(parts) - 1))):
        parts[part][data.draw(st.integers(0, parts[part].size - 1))] = np.nan
    weights = data.draw(st.sampled_from([(), tuple(1.0 + place for place in range(len(parts)))]))
    ours, theirs = (dense.combine(index, parts, weights=weights) for dense in both.each)
    assert ours[1:] == theirs[1:]
    assert (ours[0] is None) == (theirs[0] is None)
    if ours[0] is not None and theirs[0] is not None:
        assert ours[0].tobytes() == theirs[0].tobytes()
    both.close()


def test_the_squares_of_a_large_slice_are_added_in_one_order() -> None:
    device = HostDevice()
    both = Both(entry_of(optim.SGD(lr=0.1), slice_elements=1 << 20, total=(1 << 20) - 77), device)
    parts = gradients(np.random.default_rng(1), (1 << 20) - 77, ["float32"] * 3)
    launches = device.launches
    ours, theirs = (dense.combine(0, parts) for dense in both.each)
    assert ours[0] is not None and theirs[0] is not None
    assert ours[0].tobytes() == theirs[0].tobytes() and ours[1] == theirs[1]
    assert device.launches == launches + 4, "two pieces, a mean and squares of each"
    both.close()


@examples(4)
@given(seed=st.integers(0, 2**32 - 1), weighted=st.booleans())
def test_sums_that_the_processor_makes_are_the_same(seed: int, weighted: bool) -> None:
    both = Both(entry_of(optim.Adam(lr=0.1)))
    rng = np.random.default_rng(seed)
    for index in both.host.indices:
        size = both.host.slicing.size(index)
        parts = gradients(rng, size, ["float32", "bfloat16"])
        codes = rng.integers(-128, 128, size)
        encoded = np.frombuffer(integers(codes, rng.random(-(-size // 100)).astype(np.float32), 8, 100), np.uint8)
        weights = (1.0, 2.5, 0.5) if weighted else ()
        both.update([Update(index, 0, [*parts, encoded], is_encoded=True, weights=weights)])
    both.check()
    both.close()


def test_differences_of_published_weights_are_the_same() -> None:
    both = Both(entry_of(optim.Adam(lr=0.1), pull_compression=pull_codec_to_text(Int8())))
    rng = np.random.default_rng(2)
    for step in range(3):
        for index in both.host.indices:
            both.update([Update(index, step, gradients(rng, both.host.slicing.size(index), ["float32"]))])
    both.check()
    published = [dense.published for dense in both.each]
    assert published[0] is not None and published[1] is not None
    differences = published[0].differences(0, 2, 3)
    assert differences and published[1].differences(0, 2, 3) == differences
    both.close()
