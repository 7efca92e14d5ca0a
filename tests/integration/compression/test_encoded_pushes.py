"""Encoded gradients over real gRPC and TCP connections, sent by hand: results, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from psdist import optim
from psdist.compression.segments import payload_limit
from psdist.consistency import ASP, BSP
from psdist.errors import (
    FutureStepError,
    InvalidArgumentError,
    MalformedPayloadError,
    NonFiniteGradientError,
    PsdistError,
    StaleEstimateError,
)
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as spb
from psdist_server.kernels import means
from tests.support.segments import integers, raw, sparse
from tests.support.server_bench import (
    COUNT,
    GRADIENT,
    INITIAL,
    STEPPED,
    TOTAL,
    ServerBench,
    cut,
    opened_bench,
    payloads,
)
from tests.support.worker_channels import TcpWorker

SEGMENTS: dict[str, Any] = {"codec": cpb.CODEC_SEGMENTS}

#: The gradient 0, 1, ... 24, a slice of 10 or 5 elements at a time, by several kinds of segments.
ENCODED = [
    raw(GRADIENT[:10]),
    integers(range(-4, 4), [0.3]) + raw(GRADIENT[18:20]),
    sparse(2, [1], [2.5]) + raw(GRADIENT[22:].astype(np.float16)),
]


def decoded(parts: Sequence[bytes] = ENCODED) -> np.ndarray:
    sizes = [part.size for part in cut(GRADIENT)]
    return np.concatenate([means.decoded([as_bytes(part)], size)[0] for part, size in zip(parts, sizes, strict=True)])


def as_bytes(part: bytes) -> np.ndarray:
    return np.frombuffer(part, np.uint8)


def after(gradient: np.ndarray) -> np.ndarray:
    """Return the weights after a step of SGD with the learning rate 0.5."""
    stepped: np.ndarray = INITIAL - np.float32(0.5) * gradient
    return stepped


async def push(
    bench: ServerBench, transport: str, step: int, parts: Sequence[bytes], worker: int = 0, **header: Any
) -> Any:
    """Push all slices. Returns the weights after it. Raises the error that the call ends with."""
    if transport == "grpc":
        return await bench.push_pull(bench.header(step, worker, **(SEGMENTS | header)), parts)
    peer = await TcpWorker.opened(bench, worker)
    await peer.begin(request := peer.push(step, **(SEGMENTS | header)))
    for index, part in enumerate(parts):
        await peer.send_slice(request, index, part)
    return np.concatenate([answer.weights for answer in await peer.answers(request)])


@pytest.fixture
async def bench() -> AsyncIterator[ServerBench]:
    """A server that is reached by gRPC and by TCP."""
    async with opened_bench() as bench:
        yield bench


@pytest.fixture(params=["grpc", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


# --- behaviour --------------------------------------------------------------------------------------------------------


async def test_a_step(bench: ServerBench, transport: str) -> None:
    await bench.create()
    weights = await push(bench, transport, 0, ENCODED)
    assert weights.tobytes() == after(decoded()).tobytes()
    statistics = bench.host.statistics().parameters[0]
    (counted,) = statistics.workers
    sent = sum(map(len, ENCODED))
    assert (counted.pushes, counted.push_bytes, counted.saved_bytes) == (COUNT, sent, 4 * TOTAL - sent)
    assert statistics.bytes_held == 0


async def test_contributions_with_different_codecs_in_one_step(bench: ServerBench) -> None:
    await bench.create(workers=3)
    peers = [await TcpWorker.opened(bench, rank) for rank in range(3)]
    requests = [peers[0].push(0), peers[1].push(0, **SEGMENTS), peers[2].push(0, dtype=cpb.DTYPE_FLOAT16)]
    halves = GRADIENT.astype(np.float16)
    for index in range(COUNT):
        bodies = [cut(GRADIENT)[index].tobytes(), ENCODED[index], cut(halves)[index].tobytes()]
        for peer, request, body in zip(peers, requests, bodies, strict=True):
            if index == 0:
                await peer.begin(request)
            await peer.send_slice(request, index, body)
        for peer, request in zip(peers, requests, strict=True):
            assert [answer.slice for answer in await peer.next_answers(request)] == [index]
    mean = ((GRADIENT + decoded()) + halves.astype(np.float32)) / np.float32(3)
    assert await bench.pull(bench.identity()) == after(mean).tobytes()


@pytest.mark.parametrize(("transport", "consistency"), [("tcp", BSP()), ("tcp", ASP()), ("grpc", ASP())], ids=str)
async def test_clipping(bench: ServerBench, transport: str, consistency: Any) -> None:
    await bench.create(consistency=consistency, optimizer=optim.SGD(lr=0.5, max_grad_norm=1.0))
    norm = float(np.sqrt(np.sum(decoded().astype(np.float64) ** 2)))
    weights = await push(bench, transport, 0, ENCODED, grad_norm=norm)
    np.testing.assert_allclose(weights, after(decoded() / np.float32(norm)), rtol=1e-6)


async def test_decoders_are_prepared_by_the_first_encoded_push(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(bench.host, "_compiler", Compiler(prepared))
    await bench.create()
    await bench.push_pull(bench.header(0), payloads(GRADIENT))
    assert prepared == ["sgd"]
    for step in (1, 2):
        await push(bench, "grpc", step, ENCODED)
    assert prepared == ["sgd", "compressed or weighted gradients"]


class Compiler:
    """Stand-in for the compiler that works in the background."""

    def __init__(self, prepared: list[str]) -> None:
        self._prepared = prepared

    def add(self, _: Any, purpose: str) -> None:
        self._prepared.append(purpose)


async def test_differences_are_added_to_the_gradient_before(bench: ServerBench, transport: str) -> None:
    await bench.create()
    weights, gradient = INITIAL, np.zeros(TOTAL, np.float32)
    for step in range(3):
        header = spb.GradientDifference(number=7 + step, from_zeros=step == 0)
        found = await push(bench, transport, step, ENCODED, difference=header)
        gradient = gradient + decoded()
        weights = weights - np.float32(0.5) * gradient
        assert found.tobytes() == weights.tobytes(), f"step {step}"
    assert bench.host.statistics().parameters[0].bytes_held == 0


async def test_a_difference_to_what_is_not_kept_is_refused_and_changes_nothing(
    bench: ServerBench, transport: str
) -> None:
    await bench.create()
    for number in (0, 1):
        with pytest.raises(StaleEstimateError, match=r"push \d of slice 0 .* send the whole gradient"):
            await push(bench, transport, 0, ENCODED, difference=spb.GradientDifference(number=number))
    assert await bench.pull(bench.identity()) == INITIAL.tobytes()
    whole = spb.GradientDifference(number=1, from_zeros=True)
    stepped = await push(bench, transport, 0, ENCODED, difference=whole)
    assert stepped.tobytes() == after(decoded()).tobytes()
    # It arrived before, so it is ignored like any other.
    again = await push(bench, transport, 0, ENCODED, difference=spb.GradientDifference(number=1))
    assert again.tobytes() == stepped.tobytes()
    with pytest.raises(StaleEstimateError, match="difference to the gradient of push 2"):
        await push(bench, transport, 1, ENCODED, difference=spb.GradientDifference(number=3))


@pytest.mark.parametrize("policy", ["reject", "skip"])
async def test_differences_whose_sum_is_not_finite(bench: ServerBench, transport: str, policy: str) -> None:
    await bench.create(non_finite=policy)
    huge = [raw(np.full(part.size, 3e38, np.float32)) for part in cut(GRADIENT)]
    await push(bench, transport, 0, huge, difference=spb.GradientDifference(number=0, from_zeros=True))
    before = await bench.pull(bench.identity())
    refused = push(bench, transport, 1, huge, difference=spb.GradientDifference(number=1))
    if policy == "reject":
        with pytest.raises(NonFiniteGradientError, match="elements 0 to 9"):
            await refused
    else:
        assert (await refused).tobytes() == before
    assert await bench.pull(bench.identity()) == before
    # The earlier gradient stays.
    step = 1 if policy == "reject" else 2
    less = [raw(np.full(part.size, -3e38, np.float32)) for part in cut(GRADIENT)]
    weights = await push(bench, transport, step, less, difference=spb.GradientDifference(number=1))
    assert weights.tobytes() == before


async def test_nothing_is_a_difference_to_a_push_that_was_refused(bench: ServerBench, transport: str) -> None:
    await bench.create()
    with pytest.raises(FutureStepError):
        await push(bench, transport, 5, ENCODED, difference=spb.GradientDifference(number=1, from_zeros=True))
    assert bench.host.admission.store("p").gradients.estimates.bytes < 4 * TOTAL
    with pytest.raises(StaleEstimateError, match="of slice 0"):
        await push(bench, transport, 0, ENCODED, difference=spb.GradientDifference(number=1))


async def test_a_worker_that_is_gone_leaves_no_estimate(bench: ServerBench) -> None:
    await bench.create()
    await push(bench, "grpc", 0, ENCODED, difference=spb.GradientDifference(number=0, from_zeros=True))
    estimates = bench.host.admission.store("p").gradients.estimates
    assert estimates.bytes == bench.host.statistics().parameters[0].estimate_bytes == 4 * TOTAL
    bench.host.admission.store("p").fence({"worker-0": 2})
    assert estimates.bytes == 0


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [bytes(4), raw(GRADIENT[:10]) + bytes(payload_limit(10))], ids=["none", "too long"])
async def test_a_malformed_payload_changes_nothing(bench: ServerBench, transport: str, payload: bytes) -> None:
    await bench.create()
    with pytest.raises(MalformedPayloadError, match="slice 0"):
        await push(bench, transport, 0, [payload, *ENCODED[1:]])
    assert await bench.pull(bench.identity(), cpb.DTYPE_FLOAT32) == INITIAL.tobytes()
    assert bench.host.statistics().parameters[0].bytes_held == 0
    assert (await push(bench, transport, 0, ENCODED)).tobytes() == after(decoded()).tobytes()


async def test_a_connection_goes_on_after_a_malformed_payload(bench: ServerBench) -> None:
    await bench.create()
    peer = await TcpWorker.opened(bench)
    await peer.begin(refused := peer.push(0, **SEGMENTS))
    await peer.send_slice(refused, 0, b"\0\0\0\0")
    with pytest.raises(MalformedPayloadError):
        await peer.answers(refused)
    assert np.array_equal(await peer.say(peer.push(0)), STEPPED)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("policy", ["reject", "skip"])
async def test_values_that_are_not_finite(bench: ServerBench, transport: str, policy: str, value: float) -> None:
    await bench.create(non_finite=policy)
    bad = GRADIENT[:10].copy()
    bad[7] = value
    parts = [raw(bad), *ENCODED[1:]]
    if policy == "reject":
        with pytest.raises(NonFiniteGradientError, match="elements 0 to 9"):
            await push(bench, transport, 0, parts)
        assert await bench.pull(bench.identity()) == INITIAL.tobytes()
        weights = await push(bench, transport, 0, ENCODED)
        assert weights.tobytes() == after(decoded()).tobytes()
    else:
        weights = await push(bench, transport, 0, parts)
        assert weights[:10].tobytes() == INITIAL[:10].tobytes()
        assert weights[10:].tobytes() == after(decoded())[10:].tobytes()
    (counted,) = bench.host.statistics().parameters[0].workers
    assert counted.non_finite == 1


@pytest.mark.parametrize("dtype", [cpb.DTYPE_FLOAT16, cpb.DTYPE_BFLOAT16, cpb.DTYPE_FLOAT64, cpb.DTYPE_UNSPECIFIED])
async def test_segments_are_of_float32(bench: ServerBench, transport: str, dtype: int) -> None:
    await bench.create()
    with pytest.raises((InvalidArgumentError, PsdistError), match=r"DTYPE_FLOAT32|float64|DType"):
        await push(bench, transport, 0, ENCODED, dtype=dtype)
    assert await bench.pull(bench.identity()) == INITIAL.tobytes()


async def test_a_difference_is_encoded(bench: ServerBench, transport: str) -> None:
    await bench.create()
    with pytest.raises(InvalidArgumentError, match="in segments: send CODEC_SEGMENTS"):
        await push(
            bench, transport, 0, payloads(GRADIENT), codec=cpb.CODEC_RAW, difference=spb.GradientDifference(number=0)
        )
    assert await bench.pull(bench.identity()) == INITIAL.tobytes()
