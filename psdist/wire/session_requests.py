"""What a member sends on one Session stream: a hello, heartbeats, and reports between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from psdist.v1 import scheduler_pb2 as pb


class SessionRequests:
    """The requests of one stream. Reports are sent in order, and at once. Those of a stream that broke are lost."""

    def __init__(self) -> None:
        self._reports: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()

    def send(self, report: pb.SessionRequest) -> None:
        """Sends a report as soon as the stream is open."""
        self._reports.put_nowait(report)

    async def stream(
        self,
        member_id: str,
        incarnation: int,
        heartbeat: Callable[[], pb.SessionRequest.Heartbeat],
        heartbeat_seconds: float,
    ) -> AsyncIterator[pb.SessionRequest]:
        """The requests, for ever. heartbeat: makes the next one, every ``heartbeat_seconds``."""
        yield pb.SessionRequest(hello=pb.SessionRequest.Hello(member_id=member_id, incarnation=incarnation))
        clock = asyncio.get_running_loop().time
        next_beat = clock()
        while True:
            if clock() >= next_beat:
                next_beat = clock() + heartbeat_seconds
                yield pb.SessionRequest(heartbeat=heartbeat())
            try:
                async with asyncio.timeout_at(next_beat):
                    report = await self._reports.get()
            except TimeoutError:
                continue
            yield report  # Not inside the timeout, which would cancel whoever writes it to the stream.
