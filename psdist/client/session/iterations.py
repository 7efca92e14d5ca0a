"""Holds this worker's pushes at the start of an iteration while the scheduler lets workers join, saves or ends the run.

The scheduler asks all workers to stop at the start of an iteration (``AlignCommand``). Each immediately reports its
progress and finishes its current iteration. The scheduler then chooses one position of the common program order, and
workers before it run up to it. There all wait until they are released.

A worker that loses the scheduler continues alone after ``ALONE_SECONDS``. That is safe: in BSP nothing of the next
iteration is applied without the other workers, and servers check each join and cut themselves.

Not here: the starts of iterations (``core.program_order``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from psdist.client.core.program_order import ProgramOrder
from psdist.client.core.push_sequence import PushSequence
from psdist.v1 import scheduler_pb2 as pb

#: Longest time for which a worker waits for a scheduler that does not answer.
ALONE_SECONDS: Final = 5.0


class Iterations:
    """The program order of one client, and the pushes that are held back.

    send: puts a report on the session.
    is_heard: returns True if the scheduler answers.
    """

    def __init__(self, send: Callable[[pb.AlignReport], None], is_heard: Callable[[], bool]) -> None:
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
        self._send(report)
