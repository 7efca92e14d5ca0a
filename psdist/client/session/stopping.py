"""The end of a worker that was asked to end, agreed with the others.

The last snapshot is then of a step that all workers have made. A worker that is asked to end reports it and trains on.
If all workers were asked, the scheduler has them begin no more pushes (``hold``), has the last snapshot cut, and lets
them leave. Pushes before the cut are then finished, and later ones are given up. If only some workers were asked, each
of them leaves when its push is done. Everything here runs on the loop.

Not here: the signal (``sigterm``), leaving itself (``scheduler_session``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from psdist.client.core.push_sequence import PushSequence
from psdist.client.core.snapshot_marks import SnapshotMarks
from psdist.client.session.iterations import Iterations
from psdist.v1 import scheduler_pb2 as pb

#: A scheduler that is not heard for so long is not waited for: this worker leaves without it.
ALONE_SECONDS: Final = 5.0
#: A push that is not done by then, because others do not push, is given up.
FINISH_SECONDS: Final = 10.0


class Stopping:
    """The agreed end of one client.

    send: puts a report on the session. is_heard: whether the scheduler answers.
    """

    def __init__(
        self,
        pushes: SnapshotMarks,
        send: Callable[[pb.StopReport], None],
        is_heard: Callable[[], bool],
        iterations: Iterations,
    ) -> None:
        #: The order of the script's pushes. A script with several parameter sets leaves between two iterations.
        self.iterations = iterations
        self._pushes = pushes
        self._send = send
        self._is_heard = is_heard
        #: This worker was asked to end.
        self.requested = False
        #: No push is begun any more.
        self.holding = False
        #: All workers of the run end, and the last snapshot is taken for them.
        self.together = False
        #: Whether this worker was asked to end, also where nobody has said so yet.
        self.is_asked: Callable[[], bool] = lambda: False
        self._told = asyncio.Event()
        self._ends: dict[str, int] = {}
        self._changed = asyncio.Event()

    # --- the scheduler's side -----------------------------------------------------------------------------------------

    def session_began(self) -> None:
        """Reports the wish to end again: the session before may have lost it."""
        if self.requested:
            self._send(pb.StopReport(stopping=True))

    def on_command(self, command: pb.StopCommand) -> None:
        """Carries out a command of the scheduler."""
        if self.is_asked():
            self.request()
        match command.WhichOneof("kind"):
            case "ask":
                self._send(pb.StopReport(number=command.number, stopping=self.requested))
            case "hold":
                self.holding = self.together = True
                self._send(pb.StopReport(number=command.number, stopping=True, holding=True, next=self._pushes.next()))
            case "leave":
                self._ends = dict(command.leave.next)
                self._told.set()

    # --- this worker's side -------------------------------------------------------------------------------------------

    def request(self) -> None:
        """Asks this worker to end."""
        if not self.requested:
            self.requested = True
            self._send(pb.StopReport(stopping=True))

    def push_ended(self) -> None:
        """A push was answered or dropped."""
        self._changed.set()

    async def until_allowed(self) -> None:
        """Returns when a push may be begun: at once, or never after ``hold``, because this worker leaves."""
        while self.holding:
            await asyncio.get_running_loop().create_future()

    async def until_leaving(self) -> None:
        """Returns when this worker may leave, or when the scheduler does not answer."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while not self._told.is_set() and loop.time() - heard < ALONE_SECONDS:
            try:
                async with asyncio.timeout(ALONE_SECONDS / 10):
                    await self._told.wait()
            except TimeoutError:
                heard = loop.time() if self._is_heard() else heard
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                if not self._ends:
                    await self.iterations.until_start()
                self.holding = True
                while any(self._is_awaited(name, session) for name, session in self._pushes.sessions.items()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.holding = True

    def _is_awaited(self, name: str, session: PushSequence) -> bool:
        """Whether a push is under way that is to be finished, and that was given as a whole."""
        return session.unfinished and session.step < self._ends.get(name, session.step + 1)
