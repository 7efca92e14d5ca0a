"""``GroupRunner``: carries out the decisions of a group's machine, over the links of ``mesh``.

It ends the group when a rank that a call needs gives no sign of life, and reports the calls that wait for other ranks
to the scheduler. A rank that lacks a call may have made it, and its announcement is on the way. So the scheduler asks
that rank before it believes in a deadlock. Collectives are compared by their numbers. Of messages, a rank counts those
with each other rank that it has made, and those that the other rank has announced to it: if both are equal, none is on
the way.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from psdist.client.session.waits import AwaitedCall, WaitTracker
from psdist.collectives import frames
from psdist.collectives.core.machine import (
    COLLECTIVES,
    CallDone,
    CallLane,
    Effect,
    GroupMachine,
    MoveData,
    SendCall,
    SendFailure,
    SendPart,
    missing_ranks,
    needed_ranks,
)
from psdist.collectives.core.plans import Bytes, Plan
from psdist.collectives.data_route import DataRoute
from psdist.collectives.frames import Sender, epoch_of
from psdist.collectives.mesh import LOOKS, Mesh
from psdist.errors import (
    ClosedError,
    InternalError,
    InvalidArgumentError,
    PsdistError,
    WaitTimeoutError,
    WorkerLostError,
    copy_error,
)
from psdist.settings.debugging import time_limit
from psdist.types import WorkerEntry
from psdist.v1 import common_pb2, scheduler_pb2
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits, status
from psdist.wire.limits import AWAITED_REPORTED_MAX

_RANKS_NAMED: Final = 8


class CallCounts:
    """Calls that this rank has made, and messages that it knows of. machine: of the group at this rank."""

    def __init__(self, machine: GroupMachine) -> None:
        self._machine = machine
        #: Key and members of the group, by rank; empty until it is open.
        self._key = b""
        self._members: Sequence[WorkerEntry] = ()
        self._collectives = 0
        #: Messages made with each rank, and announced by it, in both directions.
        self._made: Counter[int] = Counter()
        self._heard: Counter[int] = Counter()
        #: Waits for messages of any rank.
        self._takers = 0

    def open(self, key: bytes, members: Sequence[WorkerEntry]) -> None:
        """Set the key and the members of the group, by rank."""
        self._key, self._members = key, members

    def made(self, lane: CallLane, plan: Plan) -> None:
        """Count a call of this rank."""
        if lane == COLLECTIVES:
            self._collectives += 1
        else:
            self._made.update(plan.peers)

    def heard(self, lane: CallLane, peer: int) -> None:
        """Count a call that another rank has announced."""
        if lane != COLLECTIVES:
            self._heard[peer] += 1

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Count a wait for a message of any rank, in a ``with`` block."""
        self._takers += 1
        try:
            yield
        finally:
            self._takers -= 1

    @property
    def takes_any(self) -> bool:
        """True if this rank waits for a message of any rank."""
        return self._takers > 0

    def lacks(self, check: scheduler_pb2.CheckCall, peer: int) -> bool:
        """Return True if this rank has not made the call that ``peer`` waits for, and does not make it by itself.

        A wait for a message of any rank takes those of ``peer`` that are on the way.
        """
        if check.message and self.takes_any and not 0 < check.next <= self._heard[peer] + 1:
            return False
        return (self._made[peer] if check.message else self._collectives) <= check.number

    def need(self, call_id: int) -> scheduler_pb2.Activity.GroupCall | None:
        """Return the call that must be made before this one ends, and ranks that have not; None if all have."""
        lane, number, call, absent = missing_ranks(self._machine, call_id)
        if not absent or not self._members:
            return None
        return scheduler_pb2.Activity.GroupCall(
            group=self._key,
            message=lane != COLLECTIVES,
            number=number if lane == COLLECTIVES else self._heard[absent[0]],
            next=0 if lane == COLLECTIVES else self._made[absent[0]] + 1,
            awaited=[_identity(self._members[rank]) for rank in absent[:AWAITED_REPORTED_MAX]],
            text=f"in {call} {self._group_text()}",
        )

    def need_message(self, tag: int) -> scheduler_pb2.Activity.GroupCall | None:
        """Return the message that any other rank has to send, and these ranks; None if one has, or is gone.

        All of them are reported or none: the wait lasts only while each of them is held up.
        """
        machine, members = self._machine, self._members
        if machine.error is not None or machine.lost or not members or len(machine.peers) > AWAITED_REPORTED_MAX:
            return None
        if machine.announced(tag) is not None:
            return None
        sources = [
            scheduler_pb2.Activity.GroupCall.Source(
                worker=_identity(members[rank]), number=self._heard[rank], next=self._made[rank] + 1
            )
            for rank in machine.peers
        ]
        text = f"in recv_any(tag={tag}) {self._group_text()}"
        return scheduler_pb2.Activity.GroupCall(group=self._key, message=True, sources=sources, text=text)

    def _group_text(self) -> str:
        ranks = [member.rank for member in self._members]
        named = ", ".join(map(str, ranks[:_RANKS_NAMED])) + (", ..." if len(ranks) > _RANKS_NAMED else "")
        return f"of group {epoch_of(self._key)} of ranks {named}"


def _identity(member: WorkerEntry) -> common_pb2.WorkerIncarnation:
    return common_pb2.WorkerIncarnation(worker_id=member.worker_id, incarnation=member.incarnation)


class SilenceWatch:
    """Watch of one group at one rank.

    limit: seconds without a sign of life after which a rank is lost; None leaves that to its lease.
    lose: ends the group with an error at all ranks. A silent rank learns of it when it wakes.
    counts: the calls of this rank.
    """

    def __init__(
        self,
        mesh: Mesh,
        machine: GroupMachine,
        limit: float | None,
        lose: Callable[[PsdistError], None],
        counts: CallCounts,
    ) -> None:
        self._mesh = mesh
        self._machine = machine
        self._limit = math.inf if limit is None else limit
        self._lose = lose
        self._counts = counts
        self._members: Sequence[WorkerEntry] = ()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, members: Sequence[WorkerEntry]) -> None:
        """Set the members, by rank."""
        self._members = members
        self.start()

    def start(self) -> None:
        """Watch until no call needs another rank, and none waits for a message of any rank."""
        if self._members and self._timer is None and math.isfinite(self._limit):
            self._timer = asyncio.get_running_loop().call_later(self._limit / LOOKS, self._look)

    def stop(self) -> None:
        """Stop to watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        # A message of any rank might have been that of a rank which is lost.
        needed = self._machine.peers if self._counts.takes_any else needed_ranks(self._machine)
        for rank in needed:
            if reason := self._reason(rank):
                self._lose(WorkerLostError(f"rank {rank} is gone: {reason}", rank=rank))
                return
        if needed:
            self.start()

    def _reason(self, rank: int) -> str:
        member = self._members[rank]
        identity = member.worker_id, member.incarnation
        return self._mesh.liveness.check(identity, self._mesh.link(member), self._limit)

    def unreachable(self) -> list[int]:
        """Look at the other ranks that are in the run. Returns those that are gone, or silent."""
        return [rank for rank in self._machine.peers if self._mesh.knows(self._members[rank]) and self._reason(rank)]

    @property
    def closed(self) -> list[int]:
        """Ranks that have closed the group, or given up a call of it. Ranks that pass this on are not among them."""
        ended = {rank: error for rank, error in self._machine.lost.items() if isinstance(error, ClosedError)}
        return [rank for rank, error in ended.items() if error.details.get("rank") == str(rank)]


class GroupRunner:
    """Frames of one group: carries out the decisions of its machine.

    ranks: the workers of the group by their ranks in the run.
    rank: this worker's number in the group.
    silence: seconds without a sign of life after which a rank that a call needs is lost; None leaves that to its lease.
    """

    def __init__(
        self, mesh: Mesh, waits: WaitTracker, ranks: Sequence[int], rank: int, silence: float | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        self._mesh = mesh
        self._waits = waits
        self._machine = GroupMachine(rank, len(ranks))
        #: Key and members, by rank; empty until the group is open.
        self.key = b""
        self.members: list[WorkerEntry] = []
        self._by_worker: dict[Sender, int] = {}
        self._results: dict[int, asyncio.Future[None]] = {}
        #: Effects to carry out, in order, and those that need a link while the group is not open.
        self._todo: deque[Effect] = deque()
        self._unopened: deque[Effect] = deque()
        self._is_busy = False
        self.route = DataRoute(mesh, self._machine, self._make_part, self.end)
        self._counts = CallCounts(self._machine)
        #: Set after the next event. None if no call waits for a message of any rank.
        self._event: asyncio.Event | None = None
        self._silence = silence
        self.watch = SilenceWatch(mesh, self._machine, silence, self.end, self._counts)

    @property
    def has_ended(self) -> bool:
        """True if the group can make no more calls."""
        return self._machine.broken is not None

    @property
    def error(self) -> PsdistError | None:
        """The error that ended the group, or None."""
        return None if self._machine.error is None else copy_error(self._machine.error)

    # --- calls --------------------------------------------------------------------------------------------------------

    def start(self, lane: CallLane, plan: Plan) -> int:
        """Make a call. Returns its id. Raises the error that ended the group."""
        try:
            self.route.prepare(lane, plan)
            call_id, effects = self._machine.start(lane, plan)
            self._results[call_id] = asyncio.get_running_loop().create_future()
            self._counts.made(lane, plan)
            self._carry_out(effects)
        except PsdistError as error:
            raise copy_error(error) from None
        except Exception as error:
            self._end_by(error)
            raise
        self.watch.start()
        return call_id

    def _end_by(self, error: Exception) -> None:
        """End the group by an error that is none of psdist's: this rank has taken the number of a call."""
        self.end(InternalError(f"rank {self._machine.rank} could not carry out its call: {error!r:.500}"))

    async def result(self, call_id: int, call: str, timeout: float | None) -> None:
        """Wait for a call. Raises the error that ended it; WaitTimeoutError after ``timeout`` seconds."""
        loop, timeout = asyncio.get_running_loop(), time_limit(timeout)
        future, until = self._results[call_id], None if timeout is None else loop.time() + timeout
        with self._waits.open(f"for the other ranks in {call}") as wait:
            timer: asyncio.TimerHandle

            def check() -> None:
                nonlocal timer
                if until is not None and timeout is not None and loop.time() >= until:
                    self._expire(call_id, timeout)
                else:
                    wait.update_reason(self._reason(call_id))
                    timer = loop.call_later(_pause(until), check)

            timer = loop.call_later(_pause(until), check)
            waiting = self._waits.group_calls.begin_wait(AwaitedCall(partial(self._counts.need, call_id), self.end))
            try:
                if future.done():  # In a group of one. The worker's heartbeats need a turn of the event loop, too.
                    await asyncio.sleep(0)
                await future
            except asyncio.CancelledError:
                rank = self._machine.rank
                self.end(ClosedError(f"rank {rank} gave up {call}, so that the group has ended", rank=rank))
                raise
            finally:
                self._waits.group_calls.end_wait(waiting)
                timer.cancel()
                del self._results[call_id]

    async def any_source(self, tag: int, timeout: float | None) -> int:
        """Wait for a message with this tag, and return its source. The caller receives it before it waits again.

        Raises the error that ends the group; WaitTimeoutError after ``timeout`` seconds.
        """
        reason, timeout = f"for a message with tag {tag} from any rank", time_limit(timeout)
        waiting = self._waits.group_calls.begin_wait(AwaitedCall(partial(self._counts.need_message, tag), self.end))
        try:
            with self._waits.open(reason), self._counts.taking():
                self.watch.start()
                async with asyncio.timeout(timeout):
                    while (source := self._announced(tag)) is None:
                        self._event = self._event or asyncio.Event()
                        await self._event.wait()
        except TimeoutError as error:
            if not isinstance(error, PsdistError):
                rank = self._machine.rank
                self.end(WaitTimeoutError(f"rank {rank} reached the timeout of {timeout:g} s, waiting {reason}"))
                self._announced(tag)
            raise
        finally:
            self._waits.group_calls.end_wait(waiting)
        return source

    def _announced(self, tag: int) -> int | None:
        try:
            return self._machine.announced(tag)
        except PsdistError as error:
            self.end(error)
            raise copy_error(error) from None

    def _reason(self, call_id: int) -> str:
        if not self.key and (absent := self._mesh.absent(self)):
            return f"for rank {', '.join(map(str, absent[:8]))} to join the run"
        return self._machine.waiting_for(call_id)

    def lacks(self, check: scheduler_pb2.CheckCall) -> bool:
        peer = self._by_worker.get((check.worker_id, check.incarnation))
        return peer is not None and not self.has_ended and self._counts.lacks(check, peer)

    def _expire(self, call_id: int, timeout: float) -> None:
        if not self.key:
            self.end(WaitTimeoutError(f"waited {timeout:g} s {self._reason(call_id)}"))
        else:
            self._carry_out(self._machine.expire(call_id, timeout))

    def abandon(self, error: PsdistError) -> None:
        self._carry_out(self._machine.on_failure(error))

    def farewell(self, key: bytes) -> bytes:
        return frames.encode(key, self._machine.farewell(self._machine.rank))

    def end(self, error: PsdistError) -> None:
        """End the group at all ranks, and all of its calls with ``error``."""
        self._carry_out(self._machine.close(error))

    # --- effects ------------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Carry out effects in order, after those of a call of this method that is under way."""
        self._todo.extend(effects)
        if self._event is not None:
            self._event.set()
            self._event = None
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._todo:
                effect = self._todo.popleft()
                if isinstance(effect, CallDone):
                    self._finish(effect)
                elif isinstance(effect, MoveData):
                    self.route.move(effect, lambda call_id: self._carry_out(self._machine.on_moved(call_id)))
                elif self.key:
                    self._send(effect)
                else:
                    self._unopened.append(effect)
        finally:
            self._is_busy = False
        if self.has_ended:
            self.route.stop()
        elif self._machine.lost:
            self.route.on_lost()

    def _release_memory(self) -> None:
        """Stop to use the arrays of calls, which have failed."""
        self.route.stop()
        self.watch.stop()
        for queue in (self._todo, self._unopened):
            failures = [effect for effect in queue if isinstance(effect, CallDone | SendFailure)]
            queue.clear()
            queue.extend(failures)
        self._mesh.drop(self)

    def _finish(self, done: CallDone) -> None:
        if done.error is not None:
            self._release_memory()
        future = self._results.get(done.call_id)
        if future is None or future.done():
            return
        if done.error is None:
            future.set_result(None)
        else:
            future.set_exception(copy_error(done.error))
            future.exception()  # Marks it as retrieved: the call may have been cancelled.

    def _send(self, effect: SendCall | SendPart | SendFailure) -> None:
        header = frames.encode(self.key, effect)
        match effect:
            case SendCall(call_id, peer, lane, _, _, data):
                sent = partial(self._sent, peer, lane, call_id)
                self._mesh.link(self.members[peer]).send(header, data.data, sent, self)
            case SendPart(call_id, lane, _, outgoing):
                sent = partial(self._sent, outgoing.peer, lane, call_id)
                self._mesh.link(self.members[outgoing.peer]).send(header, outgoing.data.data, sent, self)
            case SendFailure(peer):
                self._mesh.link(self.members[peer]).send(header)

    def _sent(self, peer: int, lane: CallLane, call_id: int) -> None:
        self._carry_out(self._machine.on_sent(peer, lane, call_id))

    def _make_part(self, ranks: Sequence[int], name: str) -> GroupRunner:
        """Make a group of some of the ranks. Raises LimitExceededError."""
        named = [self.ranks[rank] for rank in ranks]
        part = GroupRunner(self._mesh, self._waits, named, ranks.index(self._machine.rank), self._silence)
        self._mesh.enter(part, f"{name} of {self.key.hex()}", 1, [self.members[rank] for rank in ranks])
        return part

    # --- frames -------------------------------------------------------------------------------------------------------

    def open(self, key: bytes, members: list[WorkerEntry]) -> None:
        self.key, self.members = key, members
        self.route.open(key, members)
        self._counts.open(key, members)
        self._by_worker = {(worker.worker_id, worker.incarnation): rank for rank, worker in enumerate(members)}
        self.watch.open(members)
        unopened, self._unopened = self._unopened, deque()
        self._carry_out(unopened)

    def place(self, sender: Sender, part: pb.CollectivePart, size: int) -> Bytes | None:
        peer = self._rank_of(sender)
        lane = frames.lane_of(part.lane, peer, self._machine.rank)
        return self._machine.place(peer, lane, part.lane.number, part.part, size)

    def on_frame(self, sender: Sender, frame: pb.PeerFrame, data: Bytes) -> None:
        peer = self._rank_of(sender)
        try:
            self._process(peer, frame, data)
        except PsdistError as error:  # The call has taken a part of it, and cannot end any more.
            self.end(copy_error(error))
            raise
        except Exception as error:
            self._end_by(error)

    def _process(self, peer: int, frame: pb.PeerFrame, data: Bytes) -> None:
        rank = self._machine.rank
        match frame.WhichOneof("kind"):
            case "call":
                call = frame.call
                lane, number = frames.lane_of(call.lane, peer, rank), call.lane.number
                self._counts.heard(lane, peer)
                self._carry_out(self._machine.on_call(peer, lane, number, frames.header_of(call), data))
            case "part":
                part = frame.part
                lane = frames.lane_of(part.lane, peer, rank)
                self._carry_out(self._machine.on_part(peer, lane, part.lane.number, part.part))
            case "memory":
                self.route.on_offer(peer, frame.memory)
            case "failure":
                error = status.from_detail(frame.failure.error)
                self._carry_out(self._machine.on_peer_failure(peer, error, frame.failure.completed))

    def on_lost(self, worker: Sender, reason: str) -> None:
        if (rank := self._by_worker.get(worker)) is not None:
            self._carry_out(self._machine.on_lost(rank, reason))

    def _rank_of(self, sender: Sender) -> int:
        if sender not in self._by_worker:
            raise InvalidArgumentError(f"{sender[0]!r:.80} is not in a group that it sends frames of")
        return self._by_worker[sender]


def _pause(until: float | None) -> float:
    """Return the time in seconds until a wait is looked at again."""
    if until is None:
        return limits.WAIT_REASON_SECONDS
    return max(0.0, min(limits.WAIT_REASON_SECONDS, until - asyncio.get_running_loop().time()))
