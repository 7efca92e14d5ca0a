"""All-reduces of encoded arrays, over a simulated network and in any order of events."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from psdist.collectives import compression as compressed_plan
from psdist.collectives import compression as compressions
from psdist.collectives.compression import AllReduceCompression, CompressedPlan
from psdist.collectives.core.plans import Header
from psdist.compression import Codec, Int4, Int8, OneBit, PerTensor, RandomK, TopK, segments
from psdist.errors import CollectiveMismatchError
from tests.support.collective_network import CollectiveNetwork

Floats = NDArray[np.float32]
CODECS = (Int8(), Int8(block=32, stochastic=True), Int4(block=16), OneBit(block=16), TopK(0.1), RandomK(0.25))
SHAPES = ((20, 30), (7,), (90, 11))
TOTAL = 20 * 30 + 7 + 90 * 11


@pytest.fixture(autouse=True, scope="module")
def small_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (compressed_plan, compressions):
            patch.setattr(module, "SLICE_ELEMENTS", 200)
        yield


def compression_of(codec: Codec) -> AllReduceCompression:
    return AllReduceCompression(PerTensor({"*": codec}, min_elements=64, min_vector=64), SHAPES)


class Ranks:
    """Ranks that reduce one array after another."""

    def __init__(self, codec: Codec, size: int) -> None:
        self.compressions = [compression_of(codec) for _ in range(size)]
        self.size = size

    def all_reduce(self, arrays: list[Floats], op: str, seed: int) -> tuple[list[Floats], list[list[bytes]]]:
        """Return the result and the payloads of each rank."""
        network = CollectiveNetwork(self.size, random.Random(seed))
        outs, sent = [np.empty(TOTAL, np.float32) for _ in arrays], []
        for rank, (one, array, out) in enumerate(zip(self.compressions, arrays, outs, strict=True)):
            one.check(array, array.shape, op)
            payloads = one.encode(array, rank, self.size)
            sent.append([payload.tobytes() for payload in payloads])
            plan = CompressedPlan(
                Header("all_reduce", op, "float32", (TOTAL,)), rank, network.machines[rank].peers, payloads, out,
                divisor=self.size if op == "avg" else 1, encode_result=one.result_encoder(out),
            )  # fmt: skip
            network.start(rank, plan)
        network.run()
        for one in self.compressions:
            one.end()
        return outs, sent


def decoded(sent: list[list[bytes]], divisor: int) -> Floats:
    """Return the sum of payloads in rank order as a server computes it, divided."""
    total = np.zeros(TOTAL, np.float32)
    for payloads in sent:
        for index, payload in enumerate(payloads):
            segments.accumulate(payload, total[200 * index : 200 * (index + 1)])
    return total if divisor == 1 else total / np.float32(divisor)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(CODECS), st.integers(1, 4), st.sampled_from(["sum", "avg"]), st.integers(0, 1 << 16))
def test_all_ranks_get_the_same_bytes_and_residuals_lose_nothing(codec: Any, size: int, op: str, seed: int) -> None:
    rng, ranks = np.random.default_rng(seed), Ranks(codec, size)
    given, returned = np.zeros(TOTAL), np.zeros(TOTAL)
    for number in range(3):
        arrays = [rng.standard_normal(TOTAL).astype(np.float32) for _ in range(size)]
        outs, sent = ranks.all_reduce(arrays, op, seed + number)
        assert all(out.tobytes() == outs[0].tobytes() for out in outs)
        divisor = size if op == "avg" else 1
        if ranks.compressions[0].result_encoder(outs[0]) is None:
            assert outs[0].tobytes() == decoded(sent, divisor).tobytes()
        given += np.sum(arrays, axis=0, dtype=np.float64) / divisor
        returned += outs[0]
    if codec.feedback is True:
        held = sum(one._encoder.residual for one in ranks.compressions if one._encoder is not None) / divisor
        for one in ranks.compressions:
            held = held + (0.0 if one._results is None else one._results.residual)
        np.testing.assert_allclose(returned + held, given, atol=1e-3)


def test_codecs_that_differ_are_named() -> None:
    network, arrays = CollectiveNetwork(2, random.Random(0)), np.ones(TOTAL, np.float32)
    calls = []
    for rank, codec in enumerate((Int8(), TopK(0.1))):
        one = compression_of(codec)
        one.check(arrays, arrays.shape, "sum")
        header = Header("all_reduce", f"sum, compression={one.label}", "float32", (TOTAL,))
        plan = CompressedPlan(header, rank, [1 - rank], one.encode(arrays, rank, 2), arrays.copy())
        calls.append(network.start(rank, plan))
    network.run()
    for call in calls:
        assert isinstance(call.error, CollectiveMismatchError) and "Int8" in str(call.error)
        assert "TopK" in str(call.error)
