"""Segments: rejected inputs of encoders and decoders, unusual tensors, and arguments of codecs."""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist.compression import (
    BFloat16,
    Cast,
    Chain,
    ChunkedTopK,
    Codec,
    Compressor,
    Float32,
    Int2,
    Int4,
    Int8,
    OneBit,
    PerTensor,
    PowerSGD,
    RandomK,
    TopK,
    resolve,
)
from psdist.compression.segments import (
    KERNELS,
    PushNumber,
    Region,
    accumulate,
    add_decayed,
    check,
    encode,
    payload_limit,
    prepare,
    regions,
)
from psdist.compression.segments.format import Kind
from psdist.errors import (
    InvalidArgumentError,
    MalformedPayloadError,
    NonFiniteGradientError,
    ShapeMismatchError,
    UnknownCodecError,
)
from psdist.types import TensorSpec
from tests.fuzz.segments import CODECS as FUZZED
from tests.fuzz.segments import OUTCOMES, fuzz

ALL: tuple[Codec, ...] = (
    *(Float32(), Int8(16), Int4(16), Int2(16), OneBit(16), TopK(0.1), ChunkedTopK(3, 16), ChunkedTopK(3, 16, bits=2)),
    *(Chain(TopK(0.1), Int8()), RandomK(0.1), Chain(RandomK(0.1), BFloat16()), PowerSGD(2)),
)
LARGEST = np.finfo(np.float32).max


@pytest.fixture(params=["compiled", "interpreted"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_current", kernel.interpreted if request.param == "interpreted" else None)
    yield request.param


def encoded(values: NDArray[np.float32], codec: Codec) -> bytes:
    """Return the payload of a square matrix. It is compressed if it has 64 elements."""
    policy = PerTensor({"*": codec}, min_elements=64, min_vector=64)
    side = int(values.size**0.5)
    prepared = [
        prepare(r, values[r.start : r.stop], PushNumber(1, 2)) for r in regions([TensorSpec("w", (side, side))], policy)
    ]
    out = np.empty(payload_limit(values.size), np.uint8)
    return out[: encode(prepared, 0, values.size, out)].tobytes()


def decoded(payload: bytes, elements: int) -> NDArray[np.float32]:
    out = np.zeros(elements, np.float32)
    check(payload, elements)
    accumulate(payload, out)
    return out


@pytest.mark.usefixtures("implementation")
def test_what_is_not_finite_is_not_encoded() -> None:
    for codec in ALL:
        for bad in [np.nan, np.inf, -np.inf]:
            values = np.ones(400, np.float32)
            values[123] = bad
            with pytest.raises(NonFiniteGradientError, match="have NaN or Inf"):
                encoded(values, codec)


@pytest.mark.usefixtures("implementation")
def test_unusual_values_are_encoded() -> None:
    """Constants, denormals, and one huge value: the decoded value is no worse than zero."""
    for codec in ALL:
        for values in (
            np.full(400, -3.5),
            np.full(400, 1e-42),
            np.r_[np.full(399, 1e-3), LARGEST],
            np.full(400, LARGEST),
        ):
            gradient = values.astype(np.float32)
            error = (gradient - decoded(encoded(gradient, codec), 400)).astype(np.float64)
            assert np.linalg.norm(error) <= np.linalg.norm(gradient.astype(np.float64)) * 1.0001


def test_sizes_0_and_1() -> None:
    for codec in ALL:
        assert encoded(np.empty(0, np.float32), codec) == b""
        assert decoded(encoded(np.array([2.5], np.float32), codec), 1).tolist() == [2.5]


def test_arrays_that_do_not_fit_are_refused() -> None:
    region, number = Region(0, 100, Int8(), (100,)), PushNumber(0, 0)
    with pytest.raises(ShapeMismatchError):
        prepare(region, np.ones(200, np.float32)[::2], number)
    with pytest.raises(InvalidArgumentError):
        prepare(region, np.ones(100), number)
    prepared = [prepare(region, np.ones(100, np.float32), number)]
    with pytest.raises(InvalidArgumentError, match="628 may be needed"):
        encode(prepared, 0, 100, np.empty(627, np.uint8))
    tiny = [prepare(Region(i, i + 1, RandomK(1.0), (1,)), np.ones(1, np.float32), number) for i in range(100)]
    with pytest.raises(InvalidArgumentError, match="fewer than 64 elements cannot be compressed"):
        encode(tiny, 0, 100, np.empty(628, np.uint8))
    with pytest.raises(InvalidArgumentError, match="element 100 of the flat vector is in no prepared region"):
        encode(prepared, 50, 150, np.empty(4096, np.uint8))
    with pytest.raises(ShapeMismatchError):
        accumulate(encoded(np.ones(100, np.float32), Int8()), np.ones(200, np.float32)[::2])
    with pytest.raises(UnknownCodecError):
        prepare(Region(0, 100, PerTensor({}), (100,)), np.ones(100, np.float32), number)


def segment(kind: int, bits: int, phase: int, elements: int, parameter: int, body: bytes) -> bytes:
    header = struct.pack("<BBHIII", kind, bits, phase, elements, len(body), parameter)
    return header + body + bytes(-len(body) % 4)


def sparse(count: int, gaps: bytes, values: int | None = None) -> bytes:
    """Return a SPARSE segment of 300 elements with 32-bit values."""
    written = struct.pack("<I", count) + bytes(4 * (count if values is None else values)) + gaps
    return segment(Kind.SPARSE, 32, 0, 300, 0, written)


RAW = segment(Kind.RAW32, 32, 0, 300, 0, bytes(1200))
SCALES = np.ones(19, np.float32).tobytes()
MALFORMED = {
    "nothing": b"",
    "a cut header": RAW[:10],
    "a cut body": RAW[:-4],
    "trailing zeros": RAW + bytes(4),
    "a second segment": RAW + RAW,
    "no elements": segment(Kind.RAW32, 32, 0, 0, 0, b"") + RAW,
    "too few elements": segment(Kind.RAW32, 32, 0, 299, 0, bytes(1196)),
    "a body beyond the end": RAW[:8] + b"\xff\xff\xff\xff" + RAW[12:],
    "an unknown kind": segment(99, 32, 0, 300, 0, bytes(1200)),
    "another width": segment(Kind.RAW32, 16, 0, 300, 0, bytes(600)),
    "a phase of nothing": segment(Kind.RAW32, 32, 1, 300, 0, bytes(1200)),
    "a block of 0": segment(Kind.INTEGER, 8, 0, 300, 0, bytes(300)),
    "a small block": segment(Kind.INTEGER, 8, 0, 300, 15, bytes(380)),
    "a phase beyond the block": segment(Kind.INTEGER, 8, 16, 300, 16, SCALES + bytes(304)),
    "a missing scale": segment(Kind.INTEGER, 8, 0, 300, 16, SCALES[4:] + bytes(300)),
    "a negative scale": segment(Kind.INTEGER, 8, 0, 300, 16, struct.pack("<f", -1.0) + SCALES[4:] + bytes(300)),
    "unused bits": segment(Kind.ONE_BIT, 1, 0, 300, 16, SCALES + bytes(37) + b"\x80"),
    "padding": segment(Kind.INTEGER, 2, 0, 300, 300, bytes(79))[:-1] + b"\1",
    "more places than values": sparse(1, b"\0\0"),
    "more values than places": sparse(2, b"\0"),
    "missing values": sparse(2, b"\0\0", 1),
    "a count beyond everything": sparse(2**32 - 1, b"\0", 1),
    "a place beyond the end": sparse(1, b"\xff\x2d"),
    "an open end": sparse(1, b"\0\xff"),
    "gaps far beyond the end": sparse(1, b"\xff" * 200 + b"\0"),
    "a period of 0": segment(Kind.RANDOM, 32, 0, 300, 0, bytes(16)),
    "a place above 2 ** 62": segment(Kind.RANDOM, 32, 0, 300, 300, bytes(15) + b"\x80" + bytes(4)),
    "too many random values": segment(Kind.RANDOM, 32, 0, 300, 300, bytes(16) + bytes(8)),
    "rank 0": segment(Kind.LOW_RANK, 0, 0, 300, 20, bytes(4)),
    "columns of nothing": segment(Kind.LOW_RANK, 1, 0, 300, 2**32 - 1, bytes(4)),
    "a column beyond the row": segment(Kind.LOW_RANK, 1, 0, 300, 20, struct.pack("<I", 20) + bytes(4 * 36)),
}


@pytest.mark.usefixtures("implementation")
def test_what_is_malformed_is_refused() -> None:
    for name in MALFORMED:
        with pytest.raises(MalformedPayloadError):
            check(MALFORMED[name], 300)
        out = np.zeros(300, np.float32)
        try:
            accumulate(MALFORMED[name], out)
        except MalformedPayloadError:
            pass
        else:
            assert name in ("a negative scale", "unused bits", "padding", "an open end")


@pytest.mark.usefixtures("implementation")
def test_long_payloads_are_refused() -> None:
    with pytest.raises(MalformedPayloadError, match="at most 1628 are allowed"):
        check(bytes(1629), 300)


@pytest.mark.usefixtures("implementation")
def test_what_is_not_finite_is_told_apart() -> None:
    body: Any
    for kind, bits, parameter, body in [
        (Kind.RAW32, 32, 0, np.full(4, np.nan, np.float32)),
        (Kind.RAW16, 16, 0, np.full(4, np.inf, np.float16)),
        (Kind.BRAIN16, 16, 0, np.full(4, 0xFF80, np.uint16)),
        (Kind.INTEGER, 8, 16, np.array([LARGEST / 127, 0], np.float32)),
        (Kind.ONE_BIT, 1, 16, [*np.array([np.inf], np.float32).view(np.uint8).tolist(), 0]),
        (Kind.LOW_RANK, 1, 4, np.array([0, 1e20, 1e20, 0, 0, 0], np.float32)),
    ]:
        data = bytes(body) if isinstance(body, list) else body.tobytes()
        payload = segment(kind, bits, 0, 4, parameter, data)
        with pytest.raises(NonFiniteGradientError, match="from byte 0 on"):
            check(payload, 4)
        with pytest.raises(MalformedPayloadError):  # Malformed takes precedence.
            check(payload + b"\0", 4)


@pytest.mark.usefixtures("implementation")
def test_what_is_not_finite_and_badly_padded_is_malformed() -> None:
    body = np.full(3, np.inf, np.float16).tobytes()
    with pytest.raises(MalformedPayloadError, match="bits that must be zero are not"):
        check(segment(Kind.RAW16, 16, 0, 3, 0, body)[:-1] + b"\1", 3)


def test_wrong_arguments_are_refused() -> None:
    for wrong in [
        lambda: Int8(block=15),
        lambda: Int8(block=65537),
        lambda: Int8(stochastic=1),
        lambda: Int4(seed=-1),
        lambda: Int2(error_feedback="always"),
        lambda: Int2(error_feedback=1),
        lambda: Int8(stochastic=True, residual_decay=0.5),
        lambda: OneBit(residual_decay=0.0),
        lambda: OneBit(residual_decay=float("nan")),
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: TopK(warm_up=-1),
        lambda: TopK(momentum=-0.5),
        lambda: TopK(momentum=1.0),
        lambda: TopK(momentum=0.5, error_feedback=False),
        lambda: ChunkedTopK(k=0),
        lambda: ChunkedTopK(k=65, chunk=64),
        lambda: ChunkedTopK(bits=4),
        lambda: RandomK(1e-6),
        lambda: RandomK(1e-310),
        lambda: PowerSGD(0),
        lambda: PowerSGD(256),
        lambda: Chain(Int8(), Int8()),
        lambda: Chain(TopK(), Int4()),
        lambda: Chain(TopK(), Int8(stochastic=True)),
        lambda: Chain(RandomK(), Int8()),
        lambda: Chain(TopK(), Int8(block=64)),
        lambda: Chain(TopK(error_feedback=False), Int8()),
        lambda: Chain(TopK(residual_decay=0.5), Int8()),
        lambda: Chain(TopK(momentum=0.5), Int8(), error_feedback=False),
        lambda: Chain(ChunkedTopK(bits=8), Int2()),
        lambda: PerTensor({"*": "int8"}),  # type: ignore[dict-item]  # what is refused
        lambda: PerTensor({"*": Int8()}, min_elements=63),
        lambda: PerTensor({"*": PerTensor({})}),
    ]:
        with pytest.raises(InvalidArgumentError):
            wrong()


def test_biased_codecs_have_an_error_feedback() -> None:
    assert Int8().feedback is True and TopK(error_feedback="ef21").feedback == "ef21"
    assert Int8(stochastic=True).feedback is False and Int8(error_feedback=False).feedback is False


def test_codecs_can_be_copied_and_sent_to_processes() -> None:
    policy = PerTensor({"w*": TopK(0.5), "*": Chain(TopK(), Int8())}, min_elements=70)
    function, arguments = policy.__reduce__()  # Used by pickle.
    assert function(*arguments) == policy == copy.deepcopy(policy)


def test_names() -> None:
    for kind in (Codec, Cast, Compressor):
        with pytest.raises(UnknownCodecError):
            resolve(kind())
    assert PerTensor({"a": Int8(), "*": TopK()}) != PerTensor({"*": TopK(), "a": Int8()})
    assert resolve("int8") == Int8() and resolve("topk") == TopK(0.01) and resolve(PowerSGD(2)) == PowerSGD(2)


def test_tensors_get_their_codecs() -> None:
    tensors = [
        *(TensorSpec("embedding", (100, 50)), TensorSpec("layer/bias", (5000,)), TensorSpec("norm", (50,))),
        *(TensorSpec("tiny", (10, 10)), TensorSpec("layer/weight", (50, 60)), TensorSpec("flat", (100000,))),
    ]
    codec = PerTensor({"embedding": TopK(), "layer/*": Int8(), "f*": OneBit()})
    found = [(r.start, r.stop, r.codec, r.shape) for r in regions(tensors, codec)]
    assert found == [
        (0, 5000, TopK(), (100, 50)),
        (5000, 10150, Float32(), (5150,)),
        (10150, 13150, Int8(), (50, 60)),
        (13150, 113150, OneBit(), (100000,)),
    ]


def test_the_ratio_falls_from_a_quarter() -> None:
    ratios = [TopK(0.01, warm_up=4).ratio_at(ordinal) for ordinal in range(6)]
    assert ratios[0] == 0.25 and ratios[4:] == [0.01, 0.01] and ratios == sorted(ratios, reverse=True)


def test_chance_is_right_in_the_mean_and_differs_from_push_to_push() -> None:
    region = Region(0, 6400, Int4(stochastic=True), (80, 80))
    values = np.linspace(-1, 1, 6400, dtype=np.float32)
    total, payloads, out = np.zeros(6400, np.float32), set(), np.empty(payload_limit(6400), np.uint8)
    for ordinal in range(200):
        size = encode([prepare(region, values, PushNumber(0, ordinal))], 0, 6400, out)
        accumulate(out[:size], total)
        payloads.add(out[:size].tobytes())
    assert len(payloads) == 200
    assert abs((total / 200 - values).mean()) < 1e-4 and np.abs(total / 200 - values).max() < 0.03


def test_low_rank_comes_nearer_with_each_push() -> None:
    rng = np.random.default_rng(0)
    matrix = (rng.standard_normal((60, 3)) @ rng.standard_normal((3, 50))).astype(np.float32).reshape(-1)
    region, state, errors = Region(0, 3000, PowerSGD(2), (60, 50)), None, []
    for ordinal in range(4):
        prepared = prepare(region, matrix, PushNumber(0, ordinal), state)
        state, out, residual = prepared.next_state, np.empty(payload_limit(3000), np.uint8), np.empty(3000, np.float32)
        encode([prepared], 0, 3000, out, residual)
        errors.append(float(np.linalg.norm(residual)))
    singular = np.linalg.svd(matrix.reshape(60, 50), compute_uv=False)
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1.05 * singular[2]


@pytest.mark.usefixtures("implementation")
def test_residuals_decay() -> None:
    gradient, residual, out = np.ones(9, np.float32), np.full(9, 2, np.float32), np.empty(9, np.float32)
    assert add_decayed(gradient, residual, 0.25, out) and out.tolist() == [1.5] * 9
    assert add_decayed(out, residual, 0.25, out) and out.tolist() == [2.0] * 9
    residual[4] = np.inf
    assert not add_decayed(gradient, residual, 0.25, out)


def test_decoders_are_safe() -> None:
    """Short run of ``python -m tests.fuzz``."""
    for name in FUZZED:
        outcomes = fuzz(FUZZED[name], 8_000, seed=7)
        assert outcomes[OUTCOMES[0]] > 400 and outcomes[OUTCOMES[1]] > 400 and not outcomes["WRONG"]
