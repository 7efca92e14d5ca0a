"""When a worker's pushes may begin: reports of a held worker on its iterations, and its coordinated shutdown.

Of the shutdown: its reports, the pushes that it finishes, and how long it waits for an answer. First ``WorkerShutdown``
alone, then a client and a fake scheduler.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import psdist
from psdist.client.core.push_sequence import PushSequence, SnapshotMarks
from psdist.client.session import worker_alignment
from psdist.client.session.worker_alignment import WorkerAlignment, WorkerShutdown
from psdist.v1 import scheduler_pb2 as pb
from tests.support.client_fakes import Break, Setup, flat, gradient


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable time limits: no wait ends only because a test takes long, and no test passes only because it does."""
    monkeypatch.setattr(worker_alignment, "ALONE_SECONDS", 600.0)
    monkeypatch.setattr(worker_alignment, "FINISH_SECONDS", 600.0)


class Worker:
    """Worker with two parameter sets and no pushes, and a scheduler that answers."""

    def __init__(self) -> None:
        self.sessions = {"a": PushSequence(1, psdist.BSP()), "b": PushSequence(1, psdist.ASP())}
        self.told: list[pb.StopReport] = []
        self.heard = True
        #: Number of checks that the scheduler answers.
        self.asked = 0
        self.enough = asyncio.Event()
        self.marks = SnapshotMarks()
        for name, session in self.sessions.items():
            self.marks.enter(name, session)
        self.shutdown = WorkerShutdown(
            lambda: self.marks,
            lambda request: self.told.append(request.stop),
            self._is_heard,
            WorkerAlignment(lambda report: None, self._is_heard),
        )

    def _is_heard(self) -> bool:
        self.asked += 1
        if self.asked >= 50:
            self.enough.set()
        return self.heard

    def begin(self, name: str) -> None:
        """Start a push."""
        self.sessions[name].send(0)

    def end(self, name: str) -> None:
        """Answer a push."""
        session = self.sessions[name]
        request = session.begin_push()
        request.answer(0, session.step + 1)
        session.end_push(request, seen=True)
        self.shutdown.push_ended()

    def leave(self, **ends: int) -> None:
        """Let the scheduler release it after these pushes."""
        self.shutdown.on_command(pb.StopCommand(number=9, leave=pb.StopCommand.Leave(next=ends)))


async def is_over(task: asyncio.Task[None]) -> bool:
    """True if the task ends without another event from outside."""
    for _ in range(20):
        await asyncio.sleep(0)
    return task.done()


async def test_a_restarted_scheduler_hears_that_no_push_begins() -> None:
    worker = Worker()
    worker.shutdown.request()
    worker.shutdown.on_command(pb.StopCommand(number=3, hold=True))
    held = worker.told[-1]
    worker.shutdown.session_began()
    assert worker.told[-1] == pb.StopReport(stopping=True, holding=True, next=held.next) and held.next


async def test_asked_it_looks_before_it_answers() -> None:
    worker = Worker()
    worker.shutdown.on_command(pb.StopCommand(number=3, ask=True))
    worker.shutdown.is_asked = lambda: True
    worker.shutdown.on_command(pb.StopCommand(number=4, ask=True))
    assert worker.told == [
        pb.StopReport(number=3, stopping=False),
        pb.StopReport(stopping=True),
        pb.StopReport(number=4, stopping=True),
    ]
    assert not worker.shutdown.holding and not worker.shutdown.together


async def test_held_it_says_where_it_stands_and_begins_no_push() -> None:
    worker = Worker()
    await worker.shutdown.until_allowed()
    worker.end("a")
    worker.begin("a")
    worker.begin("b")
    worker.sessions["b"].partial = True  # More calls of the script are needed, which makes them before it leaves.
    worker.shutdown.on_command(pb.StopCommand(number=5, hold=True))
    assert worker.told == [pb.StopReport(number=5, stopping=True, holding=True, next={"a": 2, "b": 1})]
    assert worker.shutdown.together
    waits = asyncio.create_task(worker.shutdown.until_allowed())
    assert not await is_over(waits)
    waits.cancel()


async def test_a_push_below_the_end_is_finished() -> None:
    for ends, awaited in [
        ({}, True),
        ({"a": 1}, True),
        ({"b": 1}, True),  # "a" is not mentioned: all of it is finished.
        ({"a": 0}, False),
    ]:
        worker = Worker()
        worker.begin("a")
        leaves = asyncio.create_task(worker.shutdown.until_leaving())
        assert not await is_over(leaves)
        worker.leave(**ends)
        assert await is_over(leaves) is not awaited
        assert worker.shutdown.holding  # Calls that the script starts from now on do not delay it.
        worker.end("a")
        await leaves


async def test_each_of_several_pushes_is_finished_or_dropped() -> None:
    worker = Worker()
    worker.begin("a")
    worker.begin("b")
    worker.leave(a=1, b=1)
    leaves = asyncio.create_task(worker.shutdown.until_leaving())
    assert not await is_over(leaves)
    worker.end("b")
    assert not await is_over(leaves)
    worker.marks = SnapshotMarks()  # This worker was expelled, and the push dropped.
    worker.shutdown.push_ended()
    await leaves


@pytest.mark.parametrize("end", [0, 1])
async def test_a_push_in_pieces_is_finished_if_all_have_begun_it(end: int) -> None:
    worker = Worker()
    worker.begin("a")
    worker.sessions["a"].partial = True
    worker.leave(a=end)
    leaves = asyncio.create_task(worker.shutdown.until_leaving())
    assert await is_over(leaves) is (end == 0)
    worker.end("a")
    await leaves


async def test_a_push_that_others_keep_from_ending_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_alignment, "FINISH_SECONDS", 0.05)
    worker = Worker()
    worker.begin("a")
    worker.leave()
    await worker.shutdown.until_leaving()
    assert worker.sessions["a"].unfinished


async def test_a_scheduler_that_is_heard_is_waited_for_and_one_that_is_not_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_alignment, "ALONE_SECONDS", 0.02)
    worker = Worker()
    leaves = asyncio.create_task(worker.shutdown.until_leaving())
    await worker.enough.wait()  # Five times as long as it waits for a server that does not answer.
    assert not leaves.done() and not worker.shutdown.holding
    worker.heard = False
    await leaves
    assert worker.shutdown.holding and not worker.shutdown.together


# --- with a scheduler -------------------------------------------------------------------------------------------------


def command(setup: Setup, number: int, **kind: Any) -> None:
    """Send this command of the scheduler down the session."""
    setup.scheduler.news.put_nowait(pb.SessionResponse(stop=pb.StopCommand(number=number, **kind)))


async def test_an_end_is_agreed_and_no_push_begins_after_it(setup: Setup) -> None:
    said = setup.scheduler.stops
    await setup.weights.push(gradient())
    setup.servers[1].breaks = [Break(0, hang=asyncio.Event())]
    under_way = asyncio.create_task(setup.weights.push_pull(gradient()))
    await setup.servers[1].hanging.wait()
    leaves = asyncio.create_task(setup.client.request_stop())
    assert await said.get() == pb.StopReport(stopping=True)
    command(setup, 1, hold=True)
    assert await said.get() == pb.StopReport(number=1, stopping=True, holding=True, next={"p": 2})
    command(setup, 2, leave=pb.StopCommand.Leave(next={"p": 2}))
    command(setup, 3, ask=True)
    assert (await said.get()).number == 3  # It has received permission to leave.
    assert not leaves.done()
    setup.servers[1].breaks = []
    setup.scheduler.lose(setup.servers[1])  # Its push takes another path, and is answered.
    setup.scheduler.promote(setup.servers[1], setup.servers[0])
    assert flat(await under_way) == [2.0] * 22
    await leaves
    begun = asyncio.create_task(setup.weights.push(gradient()))
    for number in range(4, 24):  # More than enough time for the answer.
        command(setup, number, ask=True)
        assert (await said.get()).number == number
    assert not begun.done() and [header.step for header in setup.servers[0].headers][-1] == 1
    begun.cancel()


async def test_a_new_session_is_told_of_the_end(setup: Setup) -> None:
    leaves = asyncio.create_task(setup.client.request_stop())
    assert (await setup.scheduler.stops.get()).stopping
    port = int(setup.scheduler.address.rpartition(":")[2])
    await setup.scheduler.stop()
    await setup.scheduler.start(port)
    assert await setup.scheduler.stops.get() == pb.StopReport(stopping=True)
    command(setup, 7, leave=pb.StopCommand.Leave())
    await leaves


async def test_a_client_that_is_not_connected_has_nothing_to_agree_on(setup: Setup) -> None:
    await psdist.AsyncClient("127.0.0.1:1").request_stop()
    await setup.client.close()
    await setup.client.request_stop()
    assert setup.scheduler.stops.empty()


# --- alignment -------------------------------------------------------------------------------------------------------


async def test_a_declared_end_is_reported_though_its_position_was_reported_before() -> None:
    reports: list[pb.AlignReport] = []
    alignment = WorkerAlignment(lambda request: reports.append(request.align), lambda: True)
    sequences = {name: PushSequence(1, psdist.BSP()) for name in "DG"}
    for name, sequence in sequences.items():
        alignment.enter(name, sequence)
    alignment.mark_boundary()
    for name in "DG":
        sequences[name].send(0)
        alignment.push_began(name)
    alignment.on_command(pb.AlignCommand(number=1, hold=True))
    assert (reports[-1].position, reports[-1].start) == (2, 0), "the iteration's last push is under way"
    alignment.mark_boundary()
    assert (reports[-1].position, reports[-1].start) == (2, 2)
