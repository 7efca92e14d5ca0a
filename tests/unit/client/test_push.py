"""Buckets through broken streams and refusals: each slice exactly once, and no failure goes unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import errors
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.transport.buffers import Results
from tests.support.client_fakes import Break, Setup, Start, gradient

#: Slices of four elements, alternating between the two servers: 0, 1 and half of 2 belong to "a", the rest to "b".
INIT = {"a": np.zeros(10, np.float32), "b": np.zeros(14, np.float32)}
ONES = {name: np.ones_like(value) for name, value in INIT.items()}


class Buckets(Setup):
    """A client that pushes in buckets, and how often its memory was withdrawn from the servers."""

    def __init__(self) -> None:
        super().__init__()
        self.withdrawals = 0
        self.given: list[psdist.AsyncBucket] = []

    async def create(self, init: dict[str, np.ndarray] | None = None, **settings: Any) -> psdist.AsyncParameters:
        weights = await super().create(INIT, **settings)
        weights.participation.shared_memory.withdraw = self._withdraw
        return weights

    async def _withdraw(self) -> None:
        self.withdrawals += 1

    async def give(self, name: str) -> psdist.AsyncBucket:
        self.given.append(await self.weights.push_pull_async({name: ONES[name]}))
        return self.given[-1]

    async def settle(self) -> None:
        """Wait until no bucket is on its way."""
        if tasks := self.given[-1].push.tasks:
            await asyncio.wait(tasks)


@pytest.fixture
async def setup() -> AsyncIterator[Buckets]:
    setup = Buckets()
    await setup.start()
    yield setup
    await setup.stop()


REFUSAL = errors.InvalidArgumentError("refused on purpose")


async def test_a_failed_bucket_is_given_again_and_only_the_rest_is_sent(setup: Buckets) -> None:
    setup.servers[1].breaks = [Break(1, REFUSAL)]
    failed = await setup.give("b")
    await setup.settle()
    with pytest.raises(errors.InvalidArgumentError, match="on purpose"):
        await failed
    assert failed.done() and setup.withdrawals == 1
    with pytest.raises(errors.InvalidArgumentError, match="on purpose"):
        await failed
    assert setup.withdrawals == 1
    with pytest.raises(errors.InvalidArgumentError, match="misses a, b"):
        await setup.weights.pull()
    first = await setup.give("a")
    with pytest.raises(errors.InvalidArgumentError, match="b must be given first"):
        await first
    second = await setup.give("b")
    values = await first | await second
    assert {name: set(value) for name, value in values.items()} == {"a": {1.0}, "b": {1.0}}
    assert setup.weights.step == 1 and setup.weights.statistics().pushes == 1
    # The refusal may overtake the other server's answer, which is then requested again.
    assert set(setup.servers[0].requests) == {(0, 0), (0, 2), (0, 4)} and setup.servers[0].requests.count((0, 0)) == 1
    assert setup.servers[1].requests.count((0, 3)) == 1 and setup.servers[1].requests.count((0, 1)) == 1
    assert (await setup.weights.push_pull(ONES))["b"].tolist() == [2.0] * 14


@pytest.mark.parametrize("call", ["bucket", "pull"])
async def test_a_failure_that_nobody_saw_is_told_by_the_next_call(setup: Buckets, call: str) -> None:
    setup.servers[1].breaks = [Break(0, REFUSAL)]
    failed = await setup.give("b")
    await setup.settle()
    assert failed.done() and setup.withdrawals == 0  # the user may be writing the next bucket
    with pytest.raises(errors.InvalidArgumentError, match="on purpose"):
        await (setup.give("a") if call == "bucket" else setup.weights.pull())
    assert setup.withdrawals == 1
    await setup.give("b")
    await setup.give("a")
    assert set((await setup.weights.pull())["a"]) == {1.0} and setup.weights.step == 1


async def test_who_waits_for_a_slice_of_a_failed_bucket_is_told(setup: Buckets) -> None:
    first = await setup.give("a")
    await setup.settle()
    proceed = asyncio.Event()
    setup.servers[0].breaks = [Break(0, REFUSAL, hang=proceed)]
    failed = await setup.give("b")
    waiting = asyncio.create_task(first.wait())
    await setup.servers[0].hanging.wait()
    assert not waiting.done()
    proceed.set()
    with pytest.raises(errors.InvalidArgumentError, match="b must be given first"):
        await waiting
    with pytest.raises(errors.InvalidArgumentError, match="on purpose"):
        await failed
    await setup.give("b")
    assert (await first)["a"].tolist() == [1.0] * 10


@pytest.mark.parametrize("answers", [0, 1])
@pytest.mark.parametrize("lose_answer", [False, True])
async def test_broken_streams_apply_each_slice_once(setup: Buckets, answers: int, lose_answer: bool) -> None:
    for step in range(3):
        for server in setup.servers:
            server.breaks = [Break(answers, lose_answer=lose_answer), Break(0, lose_answer=lose_answer)]
        buckets = [await setup.give("b"), await setup.give("a")]
        for bucket in buckets:
            for value in (await bucket).values():
                assert set(value) == {step + 1.0}
    assert setup.withdrawals == 0


async def test_two_buckets_break_at_once(setup: Buckets) -> None:
    setup.servers[0].breaks = [Break(0, REFUSAL), Break(0, REFUSAL)]
    buckets = [await setup.give("b"), await setup.give("a")]
    await setup.settle()
    for bucket in buckets:
        with pytest.raises(errors.InvalidArgumentError, match="on purpose"):
            await bucket
    again = [await setup.give("a"), await setup.give("b")]
    assert [set(value) for bucket in again for value in (await bucket).values()] == [{1.0}, {1.0}]
    assert setup.weights.step == 1


async def test_a_failure_ends_the_buckets_under_way_before_their_memory_may_be_written(setup: Buckets) -> None:
    never = asyncio.Event()
    setup.servers[0].breaks = [Break(0, hang=never), Break(0, REFUSAL)]
    under_way = await setup.give("b")
    await setup.servers[0].hanging.wait()
    failed = await setup.give("a")
    with pytest.raises(errors.InvalidArgumentError, match="on purpose"):
        await failed
    assert under_way.done() and not under_way.push.tasks and setup.withdrawals == 1
    with pytest.raises(errors.InvalidArgumentError, match="on purpose"):
        await under_way
    again = [await setup.give("b"), await setup.give("a")]
    assert [set(value) for bucket in again for value in (await bucket).values()] == [{1.0}, {1.0}]
    assert setup.weights.step == 1 and setup.withdrawals == 1
    never.set()


class Miscounted(PendingRequest):
    """A push whose answers cannot be added up."""

    def absorb(self, part: PendingRequest) -> None:
        raise RuntimeError("miscounted on purpose")


async def test_a_failure_of_the_accounting_is_raised_where_the_bucket_is_waited_for(setup: Buckets) -> None:
    bucket = await setup.give("a")
    push = bucket.push
    push.request = Miscounted(push.number, set(push.request.pending))
    await setup.give("b")
    with pytest.raises(errors.InternalError, match="miscounted on purpose"):
        await asyncio.wait_for(bucket.wait(), 20)


async def test_weights_that_cannot_be_returned_end_the_wait_for_their_bucket_alone(
    setup: Buckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr(Results, "bucket_arrays", fail)
    buckets = [await setup.give("a"), await setup.give("b")]
    for bucket in buckets:
        with pytest.raises(errors.InternalError, match=r"the new weights of .* cannot be returned: MemoryError"):
            await asyncio.wait_for(bucket.wait(), 20)
    assert setup.weights.step == 1


async def test_a_bucket_takes_no_longer_than_a_request_may(start: Start) -> None:
    setup = await start(client={"request_timeout": 0.3})
    setup.servers[0].breaks = [Break(0, hang=asyncio.Event())]
    bucket = await setup.weights.push_pull_async(gradient())
    with pytest.raises(errors.WaitTimeoutError, match=r"did not come within 0\.01 s"):
        await bucket.wait(0.01)
    assert not bucket.done()
    with pytest.raises(errors.WaitTimeoutError, match=r"request_timeout=0\.3"):
        await bucket.wait(120)


async def test_a_push_that_fails_gives_its_memory_back(setup: Buckets) -> None:
    setup.servers[0].breaks = [Break(0, REFUSAL), Break(0, hang=asyncio.Event())]
    with pytest.raises(errors.InvalidArgumentError):
        await setup.weights.push_pull(ONES)
    assert setup.withdrawals == 1
    call = asyncio.create_task(setup.weights.push(ONES))
    await setup.servers[0].hanging.wait()
    call.cancel()
    await asyncio.wait({call})
    assert setup.withdrawals == 2
