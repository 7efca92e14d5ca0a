"""When this worker's pushes may begin: alignment at the start of an iteration, and coordinated shutdown.

*Alignment.* While the scheduler lets workers join, saves or ends the run, it asks all workers to stop at the start of
an iteration (``AlignCommand``). Each immediately reports its progress and finishes its current iteration. The scheduler
then chooses one position of the common program order, and workers before it run up to it. There all wait until they
are released. A worker that loses the scheduler continues alone after ``ALONE_SECONDS``. That is safe: in BSP nothing of
the next iteration is applied without the other workers, and servers check each join and cut themselves.

*Coordinated shutdown.* A worker that is asked to end reports it and continues to train. Once all workers were asked,
the scheduler stops them from starting pushes (``hold``), cuts the last snapshot at a step that all of them have made,
and lets them leave. Pushes before the cut are then finished, and later ones are abandoned. If only some workers were
asked, each of them leaves after its current push.

Everything here runs on the loop. Not here: the starts of iterations (``core.program_order``), the signal (``script``),
leaving itself (``worker_session``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from psdist.client.core.program_order import ProgramOrder
from psdist.client.core.push_sequence import PushSequence, SnapshotMarks
from psdist.v1 import scheduler_pb2 as pb

#: Silence of the scheduler after which this worker continues, or leaves, without it.
ALONE_SECONDS: Final = 5.0
#: Time limit of the last push. It is abandoned if other workers do not push by then.
FINISH_SECONDS: Final = 10.0


class WorkerAlignment:
    """The program order of one client, and the pushes that are held back.

    send: puts a report on the session.
    is_heard: returns True if the scheduler answers.
    """

    def __init__(self, send: Callable[[pb.SessionRequest], None], is_heard: Callable[[], bool]) -> None:
        self.order = ProgramOrder()
        self._send = send
        self._is_heard = is_heard
        #: Number of the command that holds pushes back; 0 for none.
        self._held = 0
        #: Position up to which pushes may begin; None while it is not chosen.
        self._until: int | None = None
        #: Position and start of an iteration that were reported last. A declared iteration may start at a position that
        #: was reported before, when its last push began.
        self._reported: tuple[int, int | None] = -1, None
        #: This worker leaves alone, between two iterations.
        self._is_leaving = False
        self._changed = asyncio.Event()

    def session_began(self) -> None:
        """Report again: a restarted scheduler does not know that it holds this worker."""
        self._report()

    def on_command(self, command: pb.AlignCommand) -> None:
        """Hold pushes back, or release them."""
        if command.WhichOneof("kind") == "release":
            self._release()
            return
        self._held = command.number
        self._until = command.until if command.HasField("until") else None
        self._report()
        self._wake()

    async def until_allowed(self, name: str) -> None:
        """Return when a push of ``name`` may begin."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while name in self.order.sequences and not self._allows():
            self._report_progress()
            changed = self._changed
            try:
                async with asyncio.timeout(ALONE_SECONDS / 10):
                    await changed.wait()
            except TimeoutError:
                heard = loop.time() if self._is_heard() else heard
            if loop.time() - heard >= ALONE_SECONDS:
                self._release()

    async def until_start(self) -> None:
        """Hold this worker alone, and return when its script is between two iterations. Return immediately if their
        boundaries are unknown."""
        self._is_leaving = True
        while self.order.is_shared and self.order.is_inside:
            await self._changed.wait()

    def push_began(self, name: str) -> None:
        """Record a push of ``name`` that has begun. Report it if it led to the position where this worker is held."""
        if self.order.is_shared:
            self.order.begin_push(name)
        if not self._allows():
            self._report_progress()
            self._wake()

    def enter(self, name: str, sequence: PushSequence) -> None:
        """Add a parameter set, or its sequence in a new incarnation."""
        self.order.enter(name, sequence)
        self._report()

    def start_incarnation(self) -> None:
        """Forget the commands of the previous incarnation."""
        self.order.start_incarnation()
        self._release()

    def mark_boundary(self) -> None:
        """Record that the script declares the start or end of an iteration."""
        self.order.mark_boundary()
        if self._held:
            self._report_progress()

    def _allows(self) -> bool:
        if not self._held:
            return not self._is_leaving or self.order.is_inside or not self.order.is_shared
        return self.order.is_inside if self._until is None else self.order.position < self._until

    def _release(self) -> None:
        self._held, self._until = 0, None
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _report_progress(self) -> None:
        standing = self.order.standing
        if (standing.position, standing.start) != self._reported:
            self._report()

    def _report(self) -> None:
        if not self._held:
            return
        standing = self.order.standing
        self._reported = standing.position, standing.start
        report = pb.AlignReport(
            number=self._held,
            position=standing.position,
            period=standing.period,
            declared=standing.is_declared,
            next=standing.next,
        )
        if standing.start is not None:
            report.start = standing.start
        self._send(pb.SessionRequest(align=report))


class WorkerShutdown:
    """Coordinated shutdown of one client.

    marks: returns the push sequences of this incarnation.
    send: puts a report on the session.
    is_heard: returns True if the scheduler answers.
    """

    def __init__(
        self,
        marks: Callable[[], SnapshotMarks],
        send: Callable[[pb.SessionRequest], None],
        is_heard: Callable[[], bool],
        alignment: WorkerAlignment,
    ) -> None:
        #: The order of the script's pushes. A script with several parameter sets leaves between two iterations.
        self._alignment = alignment
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
            self._report(stopping=True, holding=True, next=self._marks().next())
        elif self.requested:
            self._report(stopping=True)

    def on_command(self, command: pb.StopCommand) -> None:
        """Carry out a command of the scheduler."""
        if self.is_asked():
            self.request()
        match command.WhichOneof("kind"):
            case "ask":
                self._report(number=command.number, stopping=self.requested)
            case "hold":
                self.holding = self.together = True
                self._report(number=command.number, stopping=True, holding=True, next=self._marks().next())
            case "leave":
                self._ends = dict(command.leave.next)
                self._told.set()

    # --- this worker's side -------------------------------------------------------------------------------------------

    def request(self) -> None:
        """Ask this worker to end."""
        if not self.requested:
            self.requested = True
            self._report(stopping=True)

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
                    await self._alignment.until_start()
                self.holding = True
                while any(self._is_awaited(name, session) for name, session in self._marks().sequences.items()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.holding = True

    def _is_awaited(self, name: str, session: PushSequence) -> bool:
        """Return True if a whole push is under way that must be finished."""
        return session.unfinished and session.step < self._ends.get(name, session.step + 1)

    def _report(self, **state: Any) -> None:
        self._send(pb.SessionRequest(stop=pb.StopReport(**state)))
