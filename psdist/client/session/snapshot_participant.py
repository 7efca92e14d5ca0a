"""This worker's part in snapshots: it answers the scheduler's commands immediately, whatever the script is doing.

It joins three parts: the numbers of the next pushes (``SnapshotMarks``), the worker-local states (``WorkerStates``),
and their uploads to the scheduler (``StateUploads``).

Not here: asking for a snapshot (``snapshots``), the servers' part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from psdist.client.core.snapshot_marks import MarkAnswer, SnapshotMarks
from psdist.client.session.membership import WorkerMembership
from psdist.client.session.scheduler_calls import SchedulerCalls
from psdist.client.session.worker_state import StateUploads, WorkerStates
from psdist.errors import PsdistError
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import status


class SnapshotParticipant:
    """Snapshots of one client. send: puts a report on the session."""

    def __init__(
        self, calls: SchedulerCalls, membership: WorkerMembership, send: Callable[[pb.SessionRequest], None]
    ) -> None:
        #: Next pushes of all parameter sets of this incarnation.
        self.marks = SnapshotMarks()
        self._uploads = StateUploads(calls, membership, self._report_failed)
        self.states = WorkerStates(self._uploads.put, self._report_failed)
        self._send = send

    def start_incarnation(self) -> None:
        """Replace the marks: the snapshot attempts of the previous incarnation were abandoned."""
        self.marks = SnapshotMarks(self.marks.dropped)

    def session_began(self) -> None:
        """Report again, because the previous session may have lost it."""
        self.report_kept()
        if (pending_answer := self.marks.pending_answer) is not None:
            self._report_marked(*pending_answer)

    def on_command(self, command: pb.SnapshotCommand) -> None:
        """Carry out a command of the scheduler."""
        match command.WhichOneof("kind"):
            case "mark":
                lowest = partial(self.states.mark, command.attempt, self.marks.sequences, command.mark.steps)
                if (answer := self.marks.answer(command.attempt, lowest)) is not None:
                    self._report_marked(command.attempt, answer)
            case "end":
                self.marks.end(command.attempt)
                self.states.end(command.attempt)
                self._uploads.end(command.attempt)

    def report_kept(self) -> None:
        """Report the parameter sets for which this worker keeps a state."""
        if self.states.names:
            self._report(pb.SnapshotReport(keeps=pb.SnapshotReport.Keeps(parameters=self.states.names)))

    async def close(self) -> None:
        """Cancel the uploads under way."""
        await self._uploads.close()

    def _report_marked(self, attempt: int, answer: MarkAnswer) -> None:
        marked = pb.SnapshotReport.Marked(next=answer.next, keeps=answer.keeps)
        self._report(pb.SnapshotReport(attempt=attempt, marked=marked))

    def _report_failed(self, attempt: int, error: PsdistError) -> None:
        failed = pb.SnapshotReport.Failed(error=status.to_detail(error))
        self._report(pb.SnapshotReport(attempt=attempt, failed=failed))

    def _report(self, report: pb.SnapshotReport) -> None:
        self._send(pb.SessionRequest(snapshot=report))
