"""Coordinated shutdown of workers, as one worker takes part in it.

A worker that is asked to end reports it and continues to train. Once all workers were asked, the scheduler stops them
from starting pushes (``hold``), cuts the last snapshot at a step that all of them have made, and lets them leave.
Pushes before the cut are then finished, and later ones are abandoned. If only some workers were asked, each of them
leaves after its current push. Everything here runs on the loop.

Not here: the signal (``sigterm``), leaving itself (``worker_session``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from psdist.client.core.push_sequence import PushSequence
from psdist.client.core.snapshot_marks import SnapshotMarks
from psdist.client.session.iterations import Iterations
from psdist.v1 import scheduler_pb2 as pb

#: Silence of the scheduler after which this worker leaves without it.
ALONE_SECONDS: Final = 5.0
#: Time limit of the last push. It is abandoned if other workers do not push by then.
FINISH_SECONDS: Final = 10.0


class Stopping:
    """Coordinated shutdown of one client.

    marks: returns the push sequences of this incarnation.
    send: puts a report on the session.
    is_heard: returns True if the scheduler answers.
    """

    def __init__(
        self,
        marks: Callable[[], SnapshotMarks],
        send: Callable[[pb.StopReport], None],
        is_heard: Callable[[], bool],
        iterations: Iterations,
    ) -> None:
        #: The order of the script's pushes. A script with several parameter sets leaves between two iterations.
        self.iterations = iterations
        self._marks = marks
        self._send = send
        self._is_heard = is_heard
        #: True if this worker was asked to end.
        self.requested = False
        #: True if no push may begin.
        self.holding = False
        #: True if all workers of the run end, with a last snapshot.
        self.together = False
        #: Returns True if this worker was asked to end, even before ``request``.
        self.is_asked: Callable[[], bool] = lambda: False
        self._told = asyncio.Event()
        self._ends: dict[str, int] = {}
        self._changed = asyncio.Event()

    # --- the scheduler's side -----------------------------------------------------------------------------------------

    def session_began(self) -> None:
        """Report the request to end again, because the previous session may have lost it; and that no push may begin,
        which a restarted scheduler does not know."""
        if self.together:
            self._send(pb.StopReport(stopping=True, holding=True, next=self._marks().next()))
        elif self.requested:
            self._send(pb.StopReport(stopping=True))

    def on_command(self, command: pb.StopCommand) -> None:
        """Carry out a command of the scheduler."""
        if self.is_asked():
            self.request()
        match command.WhichOneof("kind"):
            case "ask":
                self._send(pb.StopReport(number=command.number, stopping=self.requested))
            case "hold":
                self.holding = self.together = True
                self._send(pb.StopReport(number=command.number, stopping=True, holding=True, next=self._marks().next()))
            case "leave":
                self._ends = dict(command.leave.next)
                self._told.set()

    # --- this worker's side -------------------------------------------------------------------------------------------

    def request(self) -> None:
        """Ask this worker to end."""
        if not self.requested:
            self.requested = True
            self._send(pb.StopReport(stopping=True))

    def push_ended(self) -> None:
        """Record that a push was answered or dropped."""
        self._changed.set()

    async def until_allowed(self) -> None:
        """Return when a push may begin. Never returns after ``hold``, because this worker leaves."""
        while self.holding:
            await asyncio.get_running_loop().create_future()

    async def until_leaving(self) -> None:
        """Return when this worker may leave, or when the scheduler does not answer."""
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
                while any(self._is_awaited(name, session) for name, session in self._marks().sequences.items()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.holding = True

    def _is_awaited(self, name: str, session: PushSequence) -> bool:
        """Return True if a whole push is under way that must be finished."""
        return session.unfinished and session.step < self._ends.get(name, session.step + 1)
