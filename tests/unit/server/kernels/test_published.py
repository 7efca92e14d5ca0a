"""Published weights: what workers that add the differences have, which versions they can come from, and what happens to
weights that diverge."""

from __future__ import annotations

import numpy as np

from psdist.compression import Codec, Int2, Int8, OneBit, RandomK, TopK, segments
from psdist.types import Slicing
from psdist.wire.limits import DIFFERENCES_MAX
from psdist_server.kernels.memory import WeightsMemory
from psdist_server.kernels.published import PublishedWeights

SLICING = Slicing(2080, 1000)


def published_of(codec: Codec) -> PublishedWeights:
    memory = WeightsMemory(SLICING)
    memory.hold(range(SLICING.count))
    published = PublishedWeights(codec, SLICING, memory)
    for index in range(SLICING.count):
        published.begin(index, np.zeros(SLICING.size(index), np.float32))
    return published


def walk(index: int, versions: int) -> list[np.ndarray]:
    """Weights that change at random."""
    random = np.random.default_rng(index)
    steps = random.standard_normal((versions, SLICING.size(index))).astype(np.float32)
    return list(np.cumsum(0.01 * steps, axis=0, dtype=np.float32))


def test_a_worker_that_adds_the_differences_has_the_published_weights() -> None:
    for codec in [Int8(), Int2(), Int2(stochastic=True), TopK(0.01), OneBit(), RandomK(0.1)]:
        published = published_of(codec)
        for index in range(SLICING.count):
            mine, held = published.part(index).copy(), 0
            for version, weights in enumerate(walk(index, 12), 1):
                published.publish(index, version, weights)
                if version % 3:
                    continue
                found = published.differences(index, held, version)
                if found is None:  # More than the weights.
                    mine[...] = published.part(index)
                for payload in found or ():
                    segments.check(payload, mine.size)
                    segments.accumulate(payload, mine)
                held = version
                assert mine.tobytes() == published.part(index).tobytes()


def test_what_is_left_out_comes_later() -> None:
    """Published weights reach weights that no longer change."""
    for codec in [Int8(), Int2(), TopK(0.2), OneBit()]:
        published, weights = published_of(codec), walk(0, 5)[-1]
        for version in range(1, 200):
            published.publish(0, version, weights)
        left = np.abs(published.part(0) - weights).max()
        assert left < (0.1 if isinstance(codec, OneBit) else 0.02) * np.abs(weights).max()


def test_differences_are_known_up_to_half_of_the_weights() -> None:
    published = published_of(TopK(0.1))
    for version, weights in enumerate(walk(0, 10), 1):
        published.publish(0, version, weights)
    size = len((published.differences(0, 9, 10) or [b""])[0])
    known = [held for held in range(11) if published.differences(0, held, 10) is not None]
    assert 500 <= size <= 700 and known == list(range(10 - 2000 // size, 11))
    assert published.differences(0, 10, 10) == []
    assert published.differences(0, 11, 10) is None and published.differences(1, 0, 1) is None
    published.forget([0])
    assert published.differences(0, 10, 10) == [] and published.differences(0, 9, 10) is None


def test_a_difference_longer_than_the_weights_is_not_sent() -> None:
    published = published_of(RandomK(1.0))
    published.publish(0, 1, walk(0, 1)[0])
    assert published.differences(0, 0, 1) is None


def test_versions_without_an_update_cost_nothing() -> None:
    published = published_of(Int8())
    published.publish(0, 1, walk(0, 1)[0])
    for _ in range(DIFFERENCES_MAX - 1):
        published.unchanged(0)
    found = published.differences(0, 0, DIFFERENCES_MAX)
    assert found is not None and len(found) == 1
    published.unchanged(0)
    assert published.differences(0, 0, DIFFERENCES_MAX + 1) is None
    assert published.differences(0, 1, DIFFERENCES_MAX + 1) == []


def test_weights_that_diverge_are_sent_as_they_are() -> None:
    published, (weights, later) = published_of(Int8()), walk(0, 2)
    weights[7] = np.inf
    published.publish(0, 1, weights)
    assert published.part(0).tobytes() == weights.tobytes() and published.differences(0, 0, 1) is None
    published.publish(0, 2, later)
    assert published.part(0).tobytes() == later.tobytes() and published.differences(0, 1, 2) is None


def test_slices_too_small_to_compress_are_sent_exactly() -> None:
    published, small = published_of(OneBit()), Slicing(40, 40)
    assert small.count == 1
    memory = WeightsMemory(small)
    memory.hold([0])
    published = PublishedWeights(OneBit(), small, memory)
    published.begin(0, np.zeros(40, np.float32))
    weights = np.arange(40, dtype=np.float32)
    published.publish(0, 1, weights)
    assert published.part(0).tobytes() == weights.tobytes()
