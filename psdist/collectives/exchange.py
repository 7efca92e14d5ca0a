"""Frames of one group: carries out the decisions of the group's machine, over the links of ``mesh``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from psdist.client.session.waits import WaitTracker
from psdist.collectives import messages
from psdist.collectives.call_waits import AwaitedCall, AwaitedMessage, CallCounts
from psdist.collectives.core.machine import (
    CallDone,
    CallLane,
    Effect,
    GroupMachine,
    MoveData,
    SendCall,
    SendFailure,
    SendPart,
)
from psdist.collectives.core.plan import Bytes, Plan
from psdist.collectives.data_route import DataRoute
from psdist.collectives.incoming import Sender
from psdist.collectives.mesh import Mesh
from psdist.collectives.silence_watch import SilenceWatch
from psdist.errors import (
    ClosedError,
    InternalError,
    InvalidArgumentError,
    PsdistError,
    WaitTimeoutError,
    copy_error,
)
from psdist.types import WorkerEntry
from psdist.v1 import scheduler_pb2
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits, status


class Exchange:
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
        self.route = DataRoute(self, self._machine)
        self._counts = CallCounts()
        #: Set after the next event. None if no call waits for a message of any rank.
        self._event: asyncio.Event | None = None
        self._silence = silence
        self.watch = SilenceWatch(mesh, self._machine, silence, self.end, lambda: self._counts.takes_any)

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
        loop = asyncio.get_running_loop()
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
            waiting = self._waits.group_calls.begin_wait(AwaitedCall(self, call_id))
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
        reason = f"for a message with tag {tag} from any rank"
        waiting = self._waits.group_calls.begin_wait(AwaitedMessage(self, tag))
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

    def need(self, call_id: int) -> scheduler_pb2.Activity.GroupCall | None:
        """Return the call that must be made before this one ends, and ranks that have not made it; None if all have."""
        return self._counts.need(self._machine, call_id, self.key, self.members)

    def need_message(self, tag: int) -> scheduler_pb2.Activity.GroupCall | None:
        """Return the message that any other rank has to send, and these ranks; None if one has, or is gone."""
        return self._counts.need_message(self._machine, tag, self.key, self.members)

    def lacks(self, check: scheduler_pb2.CheckCall) -> bool:
        """See ``GroupFrames``."""
        peer = self._by_worker.get((check.worker_id, check.incarnation))
        return peer is not None and not self.has_ended and self._counts.lacks(check, peer)

    def _expire(self, call_id: int, timeout: float) -> None:
        if not self.key:
            self.end(WaitTimeoutError(f"waited {timeout:g} s {self._reason(call_id)}"))
        else:
            self._carry_out(self._machine.expire(call_id, timeout))

    def abandon(self, error: PsdistError) -> None:
        """See ``GroupFrames``."""
        self._carry_out(self._machine.on_failure(error))

    def farewell(self, key: bytes) -> bytes:
        """See ``GroupFrames``."""
        return messages.encode(key, self._machine.farewell(self._machine.rank))

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
        header = messages.encode(self.key, effect)
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

    # --- the route of large data --------------------------------------------------------------------------------------

    def claim_memory(self) -> bool:
        """See ``RoutedGroup``."""
        return not self.has_ended and self._mesh.claim_memory(self)

    def return_memory(self) -> None:
        """See ``RoutedGroup``."""
        self._mesh.return_memory(self)

    def offer_memory(self, peer: int, offer: pb.GroupMemory) -> None:
        """See ``RoutedGroup``."""
        offer.group = self.key
        self._mesh.link(self.members[peer]).send(pb.PeerFrame(memory=offer).SerializeToString())

    def make_part(self, ranks: Sequence[int], name: str) -> Exchange:
        """See ``RoutedGroup``."""
        named = [self.ranks[rank] for rank in ranks]
        part = Exchange(self._mesh, self._waits, named, ranks.index(self._machine.rank), self._silence)
        self._mesh.enter(part, f"{name} of {self.key.hex()}", 1, [self.members[rank] for rank in ranks])
        return part

    # --- frames -------------------------------------------------------------------------------------------------------

    def open(self, key: bytes, members: list[WorkerEntry]) -> None:
        """See ``GroupFrames``."""
        self.key, self.members = key, members
        self.route.open(members)
        self._by_worker = {(worker.worker_id, worker.incarnation): rank for rank, worker in enumerate(members)}
        self.watch.open(members)
        unopened, self._unopened = self._unopened, deque()
        self._carry_out(unopened)

    def place(self, sender: Sender, part: pb.CollectivePart, size: int) -> Bytes | None:
        """See ``GroupFrames``."""
        peer = self._rank_of(sender)
        lane = messages.lane_of(part.lane, peer, self._machine.rank)
        return self._machine.place(peer, lane, part.lane.number, part.part, size)

    def on_frame(self, sender: Sender, frame: pb.PeerFrame, data: Bytes) -> None:
        """See ``GroupFrames``."""
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
                lane, number = messages.lane_of(call.lane, peer, rank), call.lane.number
                self._counts.heard(lane, peer)
                self._carry_out(self._machine.on_call(peer, lane, number, messages.header_of(call), data))
            case "part":
                part = frame.part
                lane = messages.lane_of(part.lane, peer, rank)
                self._carry_out(self._machine.on_part(peer, lane, part.lane.number, part.part))
            case "memory":
                self.route.on_offer(peer, frame.memory)
            case "failure":
                error = status.from_detail(frame.failure.error)
                self._carry_out(self._machine.on_peer_failure(peer, error, frame.failure.completed))

    def on_lost(self, worker: Sender, reason: str) -> None:
        """See ``GroupFrames``."""
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
