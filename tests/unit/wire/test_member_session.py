"""Session of a member: its requests, the maps of one stream, and the streams that follow one that broke."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from psdist.errors import FencedError, PsdistError, SchedulerUnreachableError, StaleEpochError, UnauthenticatedError
from psdist.map_difference import difference
from psdist.types import ClusterMap, WorkerEntry
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert
from psdist.wire.scheduler_connection import FollowedMap, MemberSession, SessionRequests

MAPS = [ClusterMap("run", epoch, workers=tuple(WorkerEntry(f"w{n}", 1, n) for n in range(epoch))) for epoch in range(4)]


def whole(epoch: int) -> pb.SessionResponse:
    return pb.SessionResponse(map=convert.map_to_proto(MAPS[epoch]))


def change(before: int, after: int) -> pb.SessionResponse:
    return pb.SessionResponse(map_difference=convert.difference_to_proto(difference(MAPS[before], MAPS[after])))


def test_maps_and_differences_in_any_order() -> None:
    followed = FollowedMap()
    assert [followed.apply(one) for one in (whole(0), change(0, 2), whole(1), change(1, 3))] == [
        MAPS[epoch] for epoch in (0, 2, 1, 3)
    ]


def test_a_difference_to_a_map_that_did_not_come_changes_nothing() -> None:
    followed = FollowedMap()
    followed.apply(whole(1))
    with pytest.raises(StaleEpochError, match="map 2 to 3 does not apply to map 1"):
        followed.apply(change(2, 3))
    assert followed.apply(change(1, 3)) == MAPS[3]


async def test_a_slow_write_of_a_report_is_not_cut_off_by_the_next_heartbeat() -> None:
    """Check a slow write. If it were cut off, the stream would end without an error, and with it this member's
    heartbeats."""
    session = SessionRequests()
    requests = session.stream(
        pb.SessionRequest.Hello(member_id="server-0"), lambda: pb.SessionRequest.Heartbeat(epoch=3), 0.02
    )
    assert (await anext(requests)).hello.member_id == "server-0"
    assert (await anext(requests)).heartbeat.epoch == 3
    session.send(pb.SessionRequest(join_answer=pb.SessionRequest.JoinAnswer(proposal_id=7)))
    assert (await anext(requests)).join_answer.proposal_id == 7
    with pytest.raises(TimeoutError):  # And no CancelledError.
        async with asyncio.timeout(0.1):
            await asyncio.Event().wait()
    assert (await anext(requests)).HasField("heartbeat")
    await requests.aclose()


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_stream_that_gRPC_stops_reading_ends_without_an_error_once_it_is_closed(is_closed: bool) -> None:
    """Check that the stream raises nothing: gRPC logs any exception, with a traceback."""
    session, read = SessionRequests(), []

    async def consume() -> None:
        async for request in session.stream(pb.SessionRequest.Hello(), pb.SessionRequest.Heartbeat, 60.0):
            read.append(request)
            waits.set()

    waits = asyncio.Event()
    consuming = asyncio.create_task(consume())
    async with asyncio.timeout(60):
        while len(read) < 2:  # The hello and a heartbeat: then it waits for a report.
            waits.clear()
            await waits.wait()
        consuming.cancel()  # As the session does: the call is cancelled first.
        if is_closed:
            session.close()
        await asyncio.wait({consuming})
    assert consuming.cancelled() is not is_closed and len(read) == 2


class Streams:
    """Connection to a scheduler that answers each stream of a session with one of these lists, and then ends it."""

    rng, has_standby, peer, metadata = Random(0), False, "the scheduler", ()

    def __init__(self, *answers: Sequence[pb.SessionResponse]) -> None:
        self.answers = list(answers)
        self.hellos: list[pb.SessionRequest.Hello] = []
        self.stub = SimpleNamespace(Session=lambda sent, metadata: Stream(self, sent))


class Stream:
    def __init__(self, streams: Streams, sent: AsyncIterator[pb.SessionRequest]) -> None:
        self._streams, self._sent = streams, sent

    async def __aiter__(self) -> AsyncIterator[pb.SessionResponse]:
        self._streams.hellos.append((await anext(self._sent)).hello)
        for one in self._streams.answers.pop(0):
            yield one

    def cancel(self) -> None: ...


class Session(MemberSession):
    """Member that is fenced by a notice."""

    def __init__(self, streams: Any) -> None:
        super().__init__(streams)
        self.maps = [MAPS[0]]
        self.ended = 0

    def begin_stream(self) -> ClusterMap:
        return self.maps[-1]

    def heartbeat(self) -> pb.SessionRequest.Heartbeat:
        return pb.SessionRequest.Heartbeat()

    async def adopt_map(self, cluster: ClusterMap) -> None:
        self.maps.append(cluster)

    async def on_command(self, response: pb.SessionResponse) -> PsdistError | None:
        self.is_leaving = response.HasField("run_ended")
        return FencedError("expelled") if response.HasField("notice") else None

    def end_stream(self) -> None:
        self.ended += 1


async def test_a_scheduler_that_is_back_with_another_token_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The member waits for one that accepts its token, and its operator must see the reason, once."""
    gone, refused = SchedulerUnreachableError("refused the connection"), UnauthenticatedError("the token is wrong")
    errors = [gone, gone, refused, refused, gone, FencedError("expelled")]

    class Failing(Session):
        async def _follow_stream(self, *_args: Any) -> PsdistError:
            return errors.pop(0)

    assert isinstance(await Failing(Streams()).hold_session("server-0", 7, 0.01), FencedError)
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [gone, refused]


async def test_a_stream_that_ends_or_cannot_be_followed_is_opened_again_with_the_newest_map() -> None:
    fence = pb.SessionResponse(notice=pb.SessionResponse.Notice())
    streams = Streams([whole(1), change(1, 2)], [whole(2), change(0, 3)], [fence])
    session = Session(streams)
    assert isinstance(await session.hold_session("server-0", 7, 0.01), FencedError)
    assert [(hello.member_id, hello.incarnation, hello.epoch) for hello in streams.hellos] == [
        ("server-0", 7, epoch) for epoch in (0, 2, 2)
    ]
    assert session.maps == [MAPS[epoch] for epoch in (0, 1, 2, 2)] and session.ended == 3


async def test_a_member_that_leaves_opens_no_other_stream() -> None:
    session = Session(Streams([whole(0), pb.SessionResponse(run_ended=pb.SessionResponse.RunEnded())]))
    assert await session.hold_session("server-0", 1, 1.0) is None
