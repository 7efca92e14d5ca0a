"""Compressed pushes of a client whose servers break: the same bytes are sent again, and the residual is sent once."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import psdist
from psdist import errors, off_loop
from psdist.client import encoding
from psdist.client.core.push_sequence import ReadySlices
from psdist.client.encoding import EncodedPush, Encoding, _run_in_threads
from psdist.client.participation import Participation
from psdist.compression import Float16, Int8, PerTensor, RandomK, segments
from psdist.monitoring.metrics import Phase
from psdist.monitoring.phase_timer import PhaseTimer
from psdist.types import Layout, Slicing, TensorSpec
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from tests.support.client_fakes import Break, Setup, Start

INIT = {"v": np.zeros((10, 8), np.float32), "b": np.zeros(7, np.float32), "w": np.zeros((9, 9), np.float32)}
#: Coarse, so that much is left out.
CODEC = PerTensor({"*": Int8(block=16)}, min_elements=64)


def gradient(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(array.shape).astype(np.float32) for name, array in INIT.items()}


def joined(values: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(values[name]).reshape(-1) for name in INIT])


@pytest.fixture
def sent_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode slices one by one in threads while earlier ones are sent, as with large gradients."""
    monkeypatch.setattr(off_loop, "LARGE_ELEMENTS", 1)
    monkeypatch.setattr(encoding, "LARGE_ELEMENTS", 1)
    monkeypatch.setattr(encoding, "_TOGETHER_ELEMENTS", 1)


@pytest.fixture(params=["sent then", "sent meanwhile"])
def start(request: pytest.FixtureRequest, start: Start) -> Start:
    """Start clients that compress."""
    if request.param == "sent meanwhile":
        request.getfixturevalue("sent_meanwhile")

    async def compressing(**settings: Any) -> Setup:
        return await start(INIT, **{"compression": CODEC} | settings)

    return compressing


def residual(setup: Setup) -> np.ndarray:
    return setup.weights._order.encoding._encoder.residual


def same_bytes(setup: Setup) -> bool:
    """True if each slice of each push was the same whenever it was sent."""
    sent = defaultdict[tuple[int, int], set[bytes]](set)
    for server in setup.servers:
        for step, index, payload in server.payloads:
            sent[step, index].add(payload)
    return all(len(payloads) == 1 for payloads in sent.values())


async def is_all_there(setup: Setup, *seeds: int) -> None:
    """True if the servers' sums and the residual together are all gradients of these seeds, once."""
    given = sum(joined(gradient(seed)).astype(np.float64) for seed in seeds)
    weights = joined(await setup.weights.pull())
    np.testing.assert_allclose(weights + residual(setup), given, atol=1e-5)


async def test_what_is_left_out_is_added_to_the_next_push(start: Start) -> None:
    setup = await start()
    for seed in range(5):
        await setup.weights.push_pull(gradient(seed))
    await is_all_there(setup, *range(5))
    headers = [header for server in setup.servers for header in server.headers]
    assert {(header.codec, header.dtype) for header in headers} == {
        (common_pb2.CODEC_SEGMENTS, common_pb2.DTYPE_FLOAT32)
    }
    statistics = setup.weights.statistics()
    assert residual(setup).any()
    assert statistics.compression.residual_norm == pytest.approx(np.linalg.norm(residual(setup)), rel=1e-6)
    sent = sum(len(payload) for server in setup.servers for _, _, payload in server.payloads)
    assert statistics.push_bytes == sent and statistics.compression.ratio == pytest.approx(5 * 4 * 168 / sent)


@pytest.mark.parametrize("lose_answer", [False, True])
@pytest.mark.parametrize("bucketed", [False, True])
async def test_what_is_sent_again_is_the_same_bytes(start: Start, bucketed: bool, lose_answer: bool) -> None:
    setup = await start()
    await setup.weights.push_pull(gradient(0))
    for server in setup.servers:
        server.breaks = [Break(2, lose_answer=lose_answer), Break(1, lose_answer=lose_answer)]
    if bucketed:
        for name, values in gradient(1).items():
            bucket = await setup.weights.push_pull_async({name: values})
        await bucket
    else:
        await setup.weights.push_pull(gradient(1))
    assert setup.weights.statistics().resent and same_bytes(setup)
    await is_all_there(setup, 0, 1)


@pytest.mark.parametrize("bucketed", [False, True])
async def test_a_push_that_failed_is_made_again_with_the_same_bytes(start: Start, bucketed: bool) -> None:
    setup = await start()
    await setup.weights.push_pull(gradient(0))

    async def push(values: dict[str, np.ndarray]) -> None:
        await (await setup.weights.push_pull_async(values) if bucketed else setup.weights.push(values))

    setup.servers[0].breaks = [Break(2, errors.InternalError("broken on purpose"))]
    with pytest.raises(errors.InternalError, match="on purpose"):
        await push(gradient(1))
    # Also if other gradients are given, which count for nothing.
    await push(gradient(8))
    assert setup.weights.step == 2 and same_bytes(setup)
    await is_all_there(setup, 0, 1)


class Gate:
    """Gate before the second group of slices that a client's encoder gets; it opens when ``go`` is set."""

    def __init__(self, setup: Setup, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.go, self._error, self._groups = threading.Event(), error, 0
        self._encoder = setup.weights._order.encoding._encoder
        self._encode = self._encoder.encode
        monkeypatch.setattr(self._encoder, "_encode_slice", self._encoder._encode_slice)
        monkeypatch.setattr(self._encoder, "encode", self._wait_and_encode)

    def _wait_and_encode(self, *arguments: Any) -> bool:
        self._groups += 1
        if self._groups == 2:
            assert self.go.wait(60), "the first group is not sent before the second is encoded"
            if self._error is not None:
                self._encoder._encode_slice = self._fail
        return self._encode(*arguments)

    def _fail(self, *arguments: Any) -> bytes:
        assert self._error is not None
        raise self._error


@pytest.fixture
def first_sent(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Event that is set when the first slice of a push is sent."""
    sent, payload = threading.Event(), EncodedPush.payload

    def noted(push: EncodedPush, index: int) -> memoryview:
        sent.set()
        return payload(push, index)

    monkeypatch.setattr(EncodedPush, "payload", noted)
    return sent


@pytest.mark.parametrize("start", ["sent meanwhile"], indirect=True)
class TestSentMeanwhile:
    """A push whose first slices are sent while later ones are encoded."""

    async def test_the_first_slice_does_not_wait_for_the_last(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, first_sent: threading.Event
    ) -> None:
        setup = await start()
        await setup.weights.push_pull(gradient(0))
        first_sent.clear()
        Gate(setup, monkeypatch).go = first_sent
        await setup.weights.push_pull(gradient(1))
        await is_all_there(setup, 0, 1)

    async def test_nothing_reads_a_gradient_after_its_push_however_often_that_is_cancelled(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, first_sent: threading.Event
    ) -> None:
        setup = await start()
        await setup.weights.push_pull(gradient(0))
        first_sent.clear()
        setup.servers[0].breaks = [Break(0, errors.InternalError("broken on purpose"))]
        gate, given = Gate(setup, monkeypatch), gradient(1)
        call = asyncio.create_task(setup.weights.push_pull(given))
        assert await asyncio.to_thread(first_sent.wait, 60)
        for _ in range(3):
            call.cancel()
            await asyncio.wait({call}, timeout=0.01)
            assert not call.done()
        gate.go.set()
        await asyncio.wait({call})
        for values in given.values():
            values[...] = 7e3
        setup.servers[0].breaks = []
        await setup.weights.push(gradient(8))
        assert setup.weights.step == 2 and same_bytes(setup)
        await is_all_there(setup, 0, 1)

    @pytest.mark.parametrize("how", ["weight", "nan"])
    async def test_what_was_encoded_counts_although_the_rest_abstains(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, first_sent: threading.Event, how: str
    ) -> None:
        setup = await start(non_finite="skip")
        await setup.weights.push_pull(gradient(0))
        await fail_to_encode(setup, monkeypatch, first_sent, gradient(1))
        again = gradient(1)
        if how == "nan":
            again["w"][0, 0] = np.nan
        await setup.weights.push(again, weight=float(how != "weight"))
        assert setup.weights.step == 2 and same_bytes(setup) and setup.weights.statistics().abstained == 1
        weights, slicing = joined(await setup.weights.pull()), setup.weights.participation.slicing
        given = joined(gradient(0)).astype(np.float64)
        part = slice(*slicing.bounds(0))
        given[part] += joined(gradient(1))[part]
        np.testing.assert_allclose(weights + residual(setup), given, atol=1e-5)

    async def test_what_is_sent_as_it_is_is_read_out_of_the_gradient_that_is_given_again(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, first_sent: threading.Event
    ) -> None:
        setup = await start(compression=PerTensor({"w": Int8(block=16)}, min_elements=64))
        await setup.weights.push_pull(gradient(0))
        vector = joined(gradient(1))  # Such a gradient is read in place.
        v, b, w = np.split(vector, (80, 87))
        await fail_to_encode(setup, monkeypatch, first_sent, {"v": v.reshape(10, 8), "b": b, "w": w.reshape(9, 9)})
        vector.fill(np.nan)
        await setup.weights.push(gradient(1))
        assert setup.weights.step == 2 and same_bytes(setup)
        await is_all_there(setup, 0, 1)

    async def test_the_time_of_encoding_is_no_wait(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, first_sent: threading.Event
    ) -> None:
        setup = await start()
        await setup.weights.push_pull(gradient(0))
        first_sent.clear()
        gate = Gate(setup, monkeypatch)
        call = asyncio.create_task(setup.weights.push_pull(gradient(1)))
        assert await asyncio.to_thread(first_sent.wait, 60)
        assert setup.weights.participation.phases.phase is Phase.PUSH
        gate.go.set()
        await call


async def fail_to_encode(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, first_sent: threading.Event, given: dict[str, np.ndarray]
) -> None:
    """Make a push fail after its first slice was sent, since no other slice can be encoded."""
    first_sent.clear()
    with monkeypatch.context() as patched:
        Gate(setup, patched, MemoryError("on purpose")).go = first_sent
        with pytest.raises(MemoryError, match="on purpose"):
            await setup.weights.push_pull(given)


async def test_nothing_is_encoded_of_a_gradient_that_is_refused_or_skipped(start: Start) -> None:
    setup = await start(non_finite="skip")
    await setup.weights.push_pull(gradient(0))
    before = residual(setup).tobytes()
    broken = gradient(1)
    broken["v"][3, 3] = np.nan
    await setup.weights.push_pull(broken)
    assert setup.weights.statistics().abstained == 1 and residual(setup).tobytes() == before
    # In buckets only the slices that the tensor touches abstain.
    for name in INIT:
        bucket = await setup.weights.push_pull_async({name: broken[name]})
    await bucket
    assert residual(setup)[:80].tobytes() == before[: 4 * 80] and residual(setup)[90:].tobytes() != before[4 * 90 :]
    setup = await start()
    with pytest.raises(errors.NonFiniteGradientError, match="gradient 'v' holds 1 NaN"):
        await setup.weights.push(broken)
    await setup.weights.push(gradient(0))
    await is_all_there(setup, 0)


@pytest.mark.parametrize("bucketed", [False, True])
async def test_a_push_goes_on_in_the_next_incarnation(start: Start, bucketed: bool) -> None:
    setup = await start()
    await setup.weights.push_pull(gradient(0))
    setup.servers[1].breaks = [Break(1, hang=asyncio.Event())]

    async def push() -> None:
        if bucketed:
            await (await setup.weights.push_pull_async(gradient(1)))
        else:
            await setup.weights.push(gradient(1))

    call = asyncio.create_task(push())
    await setup.servers[1].hanging.wait()
    setup.scheduler.resumes = True
    setup.scheduler.expel()
    await call
    assert setup.weights.statistics().resumed == 1 and setup.client.incarnation == 2 and same_bytes(setup)
    await setup.weights.push(gradient(2))
    await is_all_there(setup, 0, 1, 2)


@pytest.mark.parametrize("bucketed", [False, True])
async def test_what_a_dropped_push_carried_is_lost_with_it_and_said(
    start: Start, bucketed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    setup = await start()
    await setup.weights.push_pull(gradient(0))
    setup.servers[1].breaks = [Break(0, hang=asyncio.Event())]
    encoder = setup.weights._order.encoding._encoder
    if bucketed:
        bucket = await setup.weights.push_pull_async(gradient(1))
        call = asyncio.create_task(bucket.wait())
    else:
        call = asyncio.create_task(setup.weights.push(gradient(1)))
    await setup.servers[1].hanging.wait()
    setup.expel(first_step=5)
    if bucketed:
        with pytest.raises(errors.FencedError, match="dropped"):
            await call
    else:
        await call
    await setup.weights.pull()
    [told] = [record.getMessage() for record in caplog.records if "was dropped" in record.getMessage()]
    assert "what compression had left out of earlier gradients was in it, and is lost, too" in told
    # As if it had arrived: its residual belongs to the next push.
    assert encoder is setup.weights._order.encoding._encoder and encoder.state()["ordinal"].tolist() == [2]
    kept = residual(setup).astype(np.float64)
    before = joined(await setup.weights.pull())
    await setup.weights.push(gradient(2))
    after = joined(await setup.weights.pull())
    np.testing.assert_allclose(after - before + residual(setup), kept + joined(gradient(2)), atol=1e-5)


async def test_a_push_of_which_nothing_was_sent_takes_nothing_with_it(start: Start) -> None:
    codec = PerTensor({"v": Int8(block=16), "w": Float16()}, min_elements=64, min_vector=64)
    setup = await start(compression=codec)
    await setup.weights.push_pull(gradient(0))
    before = residual(setup).tobytes()
    too_large = gradient(1)
    too_large["w"][:] = 1e6
    with pytest.raises(errors.NonFiniteGradientError):
        await setup.weights.push(too_large)
    setup.expel(first_step=5)
    await setup.expelled()
    await setup.weights.pull()
    assert residual(setup).tobytes() == before and any(residual(setup))
    assert setup.weights._order.encoding._encoder.state()["ordinal"].tolist() == [1]


@pytest.mark.parametrize("non_finite", ["skip", "reject"])
async def test_a_bucket_that_a_codec_cannot_hold_abstains_or_is_given_again(start: Start, non_finite: str) -> None:
    """Check a bucket whose tensors share slices with others of the bucket, which had been encoded before."""
    codec = PerTensor({"v": Int8(block=16), "w": Float16()}, min_elements=64, min_vector=64)
    setup = await start(compression=codec, non_finite=non_finite)
    await setup.weights.push_pull(gradient(0))
    too_large = gradient(1)
    too_large["w"][:] = 1e6
    bucket = await setup.weights.push_pull_async(too_large)
    given = joined(gradient(0))
    if non_finite == "reject":
        with pytest.raises(errors.NonFiniteGradientError):
            await bucket.wait()
        bucket = await setup.weights.push_pull_async(gradient(2))
        given += joined(gradient(2))
    await bucket.wait()
    assert setup.weights.statistics().abstained == (non_finite == "skip")
    weights = joined(await setup.weights.pull())
    np.testing.assert_allclose(weights + residual(setup), given, atol=5e-3)


async def test_chance_is_that_of_the_rank_that_a_worker_has_now() -> None:
    """Check a worker that gets another rank when it registers again."""
    layout = Layout((TensorSpec("a", (64, 64)),))
    flat, slicing = np.ones(4096, np.float32), Slicing(4096, 4096)

    def encoding_of(rank: int) -> tuple[Encoding, SimpleNamespace]:
        current = SimpleNamespace(origin=SimpleNamespace(rank=rank), sequence=SimpleNamespace(step=0, unfinished=False))
        phases = PhaseTimer(lambda: 0.0)
        part = SimpleNamespace(current=current, layout=layout, slicing=slicing, name="model", phases=phases)
        return Encoding(RandomK(0.1), cast(Participation, part)), part

    async def payload(encoding: Encoding) -> bytes:
        push = await encoding.begin(flat)
        await push.encode(push.decide(ReadySlices((0,), ())).valued)
        encoded = bytes(push.payload(0))
        encoding.end_push()
        return encoded

    (mine, part), (other, _) = encoding_of(1), encoding_of(2)
    assert await payload(mine) != await payload(other)
    part.current.origin = SimpleNamespace(rank=2)
    mine.restore({})
    other.restore({})
    assert await payload(mine) == await payload(other)


async def test_what_a_failed_push_carried_is_told_where_another_call_drops_it(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    setup = await start()
    await setup.weights.push_pull(gradient(0))
    setup.servers[0].breaks = [Break(2, errors.InternalError("broken on purpose"))]
    with pytest.raises(errors.InternalError, match="on purpose"):
        await setup.weights.push(gradient(1))
    setup.expel(first_step=5)
    await setup.expelled()
    await setup.weights.pull()
    [told] = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert told.startswith("a push of 'p' that had failed is dropped: what compression had left out")
    await setup.weights.push(gradient(2))
    assert not setup.weights._order.encoding.take_lost()


async def test_no_thread_works_on_after_another_has_failed() -> None:
    failing, done = threading.Event(), list[int]()

    def work(number: int) -> None:
        if number == 0:
            failing.set()
            raise ValueError("on purpose")
        failing.wait()
        done.extend(range(100_000))

    with pytest.raises(ValueError, match="on purpose"):
        _run_in_threads(work, range(2))
    assert len(done) == 100_000


def roll_back(setup: Setup, step: int) -> None:
    """Roll the run back to its snapshot before ``step``."""
    setup.scheduler.restored, setup.scheduler.generation = "000000000002-1-1-abcdef", setup.scheduler.generation + 1
    for server in setup.servers:
        server.taken = {(number, index) for number, index in server.taken if number < step}
    setup.scheduler.ready = False
    setup.expel(first_step=step)


async def test_the_residual_goes_back_with_the_run(start: Start) -> None:
    setup = await start()
    given = list[dict[str, np.ndarray]]()
    await setup.weights.keep_state(lambda: {"mine": np.ones(2)}, given.append)
    await setup.weights.push_pull(gradient(0))
    setup.scheduler.command(7, mark=pb.SnapshotCommand.Mark(steps={"p": 1}))
    _, setup.scheduler.state = await setup.scheduler.states.get()
    before = residual(setup).tobytes()
    await setup.weights.push_pull(gradient(1))
    roll_back(setup, 1)
    await setup.expelled()
    await setup.weights.pull()
    assert residual(setup).tobytes() == before and setup.weights.step == 1
    assert [list(state) for state in given] == [["mine"]]
    await setup.weights.push(gradient(1))
    assert same_bytes(setup), "the step that is made again is another one"
    setup.scheduler.state = b""
    roll_back(setup, 0)
    await setup.expelled()
    await setup.weights.pull()
    assert not residual(setup).any() and given[-1] == {}


async def test_the_norm_for_clipping_is_that_of_what_is_sent(start: Start) -> None:
    setup = await start(consistency=psdist.ASP())
    steps = setup.weights._order
    steps._needs_norm = True  # The fake servers do not clip.
    await setup.weights.push(gradient(0))
    norms = {header.grad_norm for server in setup.servers for header in server.headers}
    assert sorted(norms) == [pytest.approx(np.linalg.norm(joined(await setup.weights.pull())), rel=1e-6)]


class LoadingCompiler:
    """Compiler that is loading kernels until ``go`` is set."""

    def __init__(self) -> None:
        self.go, self.is_awaited = asyncio.Event(), asyncio.Event()

    async def loaded(self) -> None:
        """See ``BackgroundCompiler``."""
        self.is_awaited.set()
        await self.go.wait()


async def test_a_push_waits_for_kernels_that_are_being_loaded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, elements = LoadingCompiler(), []
    monkeypatch.setattr(segments, "prepare_kernels", lambda size: elements.append(size) or compiler)
    setup = await start()
    for given_up in True, False:
        call = asyncio.create_task(setup.weights.push(gradient(0)))
        await asyncio.wait_for(compiler.is_awaited.wait(), 60)
        compiler.is_awaited.clear()
        assert not call.done() and setup.weights.statistics().compression.residual_norm == 0.0
        if given_up:
            call.cancel()
            await asyncio.wait({call})
    compiler.go.set()
    await call
    await is_all_there(setup, 0)
    assert elements == [168]


async def test_a_pattern_that_matches_no_tensor_is_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    await start(compression=PerTensor({"embedding*": Int8(), "[vw]": Int8()}))
    [told] = [record.getMessage() for record in caplog.records if "matches" in record.getMessage()]
    assert told == "compression of 'p': no tensor's name matches 'embedding*'"


async def test_what_no_snapshot_can_have_is_told(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "STATE_BYTES_MAX", 100)
    await start(compression=Int8())
    assert any("more than the 100 that a snapshot takes" in record.getMessage() for record in caplog.records)


async def test_differences_and_what_is_left_out_do_not_go_together() -> None:
    setup = Setup()
    with pytest.raises(errors.InvalidArgumentError, match='have "ef21", for which servers keep estimates'):
        await setup.start(INIT, compression=PerTensor({"v": Int8(error_feedback="ef21"), "*": Int8()}))
    await setup.stop()
