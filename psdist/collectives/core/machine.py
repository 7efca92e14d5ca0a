"""The calls of one group of workers at one rank.

Calls of a lane are carried out one after another. A lane is either that of the collectives, in which all ranks take
part, or one direction of messages between two ranks under a tag. A rank announces each call to its peers, which compare
it with their own. Data that does not travel with the announcement is sent once the peer has made the call, so that it
is received in its place.

A lane of messages exists while it has calls. When a call of it ends, all frames of the call have arrived, so that the
next announcement is that of the next call: its number is not compared. A rank announces a limited number of messages
that the peer has not announced. Further ones wait until the peer answers, or announces them first.

Invariants: A peer is at most one call of a lane ahead, because no call ends before all of its ranks have announced it.
Every call ends: with its result, or with an error that all ranks of the call learn. A rank whose group ends tells all
others, whoever failed first, and again each rank that announces a call later. A call that needs nothing more from
a lost rank ends with its result. A collective that has its result at a rank which fails later gets it at the others,
too, unless another rank is lost or gives it up. After a failure the group makes no more calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

from psdist.collectives.core.plans import NOWHERE, Bytes, Header, Outgoing, Plan, mismatch
from psdist.errors import (
    ClosedError,
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    WaitTimeoutError,
    WorkerLostError,
)
from psdist.wire.limits import EARLY_MESSAGES_MAX, EARLY_MESSAGES_MIN


class Moves(Protocol):
    """Movement of one call's data."""

    def needs(self, peer: int) -> bool:
        """True if the call cannot end without more from a rank."""

    def slowest(self) -> list[int]:
        """Return the ranks that the movement waits for."""


class GroupRoute(Protocol):
    """A way that this rank can go."""

    def fits(self, plan: Plan) -> bool:
        """True if the data of a call may go this way."""

    def moves(self, plan: Plan) -> Moves:
        """Return the movement of the next call, which all ranks make."""


class CallLane(NamedTuple):
    """Name of a lane: source and target rank and tag of messages, or ``COLLECTIVES``."""

    source: int
    target: int
    tag: int = 0


COLLECTIVES: Final = CallLane(-1, -1)


@dataclass(frozen=True, slots=True)
class SendCall:
    """Announce a call to a peer. data: travels with it. ``on_sent`` follows with the call's id."""

    call_id: int
    peer: int
    lane: CallLane
    number: int
    header: Header
    data: Bytes


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send a part. ``on_sent`` follows with the call's id."""

    call_id: int
    lane: CallLane
    number: int
    outgoing: Outgoing


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Tell a peer that the group has failed here. completed: number of collectives that have their results here."""

    peer: int
    error: PsdistError
    completed: int = 0


@dataclass(frozen=True, slots=True)
class MoveData:
    """Move the data of a call. ``on_moved`` follows with the call's id, unless the call ends before."""

    call_id: int
    moves: Moves


@dataclass(frozen=True, slots=True)
class CallDone:
    """End a call. error: None if it has its result."""

    call_id: int
    error: PsdistError | None = None


Effect: TypeAlias = SendCall | SendPart | SendFailure | MoveData | CallDone


@dataclass(slots=True)
class GroupCall:
    """Call of a lane, under way or waiting for its turn."""

    call_id: int
    plan: Plan
    #: Peers that have made the call too.
    called: set[int] = field(default_factory=set)
    #: True until a rank has announced that it cannot go the group's route.
    shares: bool = False
    #: Movement of the data by that route, and whether it is under way here.
    moves: Moves | None = None
    is_moving: bool = False
    #: True while the peer of a message has not announced it, and this rank has.
    is_unanswered: bool = False
    #: Announcements and parts that are being sent, by peer.
    unsent: dict[int, int] = field(default_factory=dict)

    def needs(self, peer: int) -> bool:
        if peer not in self.plan.peers:
            return False
        if self.moves is not None:
            return bool(self.unsent.get(peer)) or self.moves.needs(peer)
        return peer not in self.called or bool(self.plan.missing[peer]) or bool(self.unsent.get(peer))

    @property
    def has_begun(self) -> bool:
        """True if the call was announced."""
        return bool(self.unsent)

    @property
    def is_complete(self) -> bool:
        """True if this rank has nothing more to do and to wait for."""
        if self.moves is not None:
            return not self.is_moving and not any(self.unsent.values())
        return not any(map(self.needs, self.plan.peers))


@dataclass(slots=True)
class _Calls:
    """Calls of one lane. number: that of the first call in ``queue``, which is under way."""

    number: int = 0
    queue: deque[GroupCall] = field(default_factory=deque)
    #: Announcements of the next call here, by peer.
    early: dict[int, tuple[Header, Bytes]] = field(default_factory=dict)


class GroupMachine:
    """Calls of one rank in its group. size: number of ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        #: The other ranks.
        self.peers = [peer for peer in range(size) if peer != rank]
        #: Error that ended the group.
        self.broken: PsdistError | None = None
        #: Error of a failed peer, which ends the group once the collective under way has its result.
        self._failing: PsdistError | None = None
        #: Way for large data besides parts, once this rank can go it.
        self.route: GroupRoute | None = None
        self._lanes: dict[CallLane, _Calls] = {COLLECTIVES: _Calls()}
        #: By peer, the messages that it has not answered, those that it has announced early, and lanes of messages that
        #: wait to be announced.
        self._unanswered = dict.fromkeys(self.peers, 0)
        self._early = dict.fromkeys(self.peers, 0)
        self._held: dict[int, dict[CallLane, None]] = {peer: {} for peer in self.peers}
        #: Limit on unanswered messages to one peer, and on those whose data travels with the announcement.
        share = EARLY_MESSAGES_MAX // max(1, len(self.peers))
        self._unanswered_max, self._eager_max = max(share, EARLY_MESSAGES_MIN), max(share, 1)
        #: Lanes of all calls that have not ended, by their ids.
        self._unended: dict[int, _Calls] = {}
        #: Ranks that are gone or have closed the group, and why.
        self.lost: dict[int, PsdistError] = {}
        self._ids = 0
        self._effects: list[Effect] = []

    @property
    def error(self) -> PsdistError | None:
        """Error of further calls, or None. A call under way may still get its result."""
        return self.broken or self._failing

    def validate(self) -> None:
        """Check the invariants."""
        queued = [call.call_id for calls in self._lanes.values() for call in calls.queue]
        assert sorted(queued) == sorted(self._unended), "a call has ended, or its lane is not known"
        for calls in self._lanes.values():
            assert len(calls.early) < self.size, "a peer announced two calls ahead"
            assert not self.broken or not calls.queue, "a failed group has calls"
            assert all(not call.called for call in list(calls.queue)[1:]), "a call began before its turn"
            assert calls.queue or calls.early or calls is self._lanes[COLLECTIVES] or self.broken, "an idle lane"
            assert all(call.called <= call.unsent.keys() for call in calls.queue), "a call was not announced"
        for peer in self.peers if self.error is None else ():
            lanes = [calls for lane, calls in self._lanes.items() if lane != COLLECTIVES]
            heads = [calls.queue[0] for calls in lanes if calls.queue and peer in calls.queue[0].plan.peers]
            assert self._unanswered[peer] == sum(head.is_unanswered for head in heads), "answers are counted wrongly"
            assert self._early[peer] == sum(peer in calls.early for calls in lanes), "early messages are miscounted"
            assert len(self._held[peer]) == sum(not head.has_begun for head in heads), "a message is not announced"
            assert not self._held[peer] or self._unanswered[peer] >= self._unanswered_max, "a message is held back"

    # --- calls --------------------------------------------------------------------------------------------------------

    def start(self, lane: CallLane, plan: Plan) -> tuple[int, list[Effect]]:
        """Make a call. Returns its id, and the effects.

        Raises the error that ended the group. A call that needs a lost rank ends the group.
        """
        if self.error is not None:
            raise self.error
        calls = self._calls_of(lane)
        self._ids += 1
        call_id = self._ids
        plan.shares = self.route is not None and lane == COLLECTIVES and self.route.fits(plan)
        calls.queue.append(GroupCall(call_id, plan, shares=plan.shares))
        self._unended[call_id] = calls
        if len(calls.queue) == 1:
            self._begin(lane, calls)
        return call_id, self._taken()

    def _calls_of(self, lane: CallLane) -> _Calls:
        return self._lanes.setdefault(lane, _Calls())

    def _begin(self, lane: CallLane, calls: _Calls) -> None:
        """Announce the first call of the queue, and process what peers have announced before."""
        call = calls.queue[0]
        for peer in call.plan.peers:
            if peer in self.lost:
                self._fail(self.lost[peer])
                return
        if lane != COLLECTIVES and not self._may_announce(lane, calls):
            return
        call.plan.start()
        for peer in call.plan.peers:
            call.unsent[peer] = 1
            header, data = call.plan.header(peer), call.plan.eager(peer)
            self._effects.append(SendCall(call.call_id, peer, lane, calls.number, header, data))
        early, calls.early = calls.early, {}
        for peer, (header, data) in early.items():
            if lane != COLLECTIVES:
                self._early[peer] -= 1
            if not self._match(lane, calls, peer, header, data):
                return
        self._end_if_complete(lane, calls)

    def _may_announce(self, lane: CallLane, calls: _Calls) -> bool:
        """Count a message that is about to be announced, or hold it back if the peer has too many to answer."""
        call, (peer,) = calls.queue[0], calls.queue[0].plan.peers
        if peer not in calls.early:
            if self._unanswered[peer] >= self._unanswered_max:
                self._held[peer][lane] = None
                return False
            call.plan.is_bare = self._unanswered[peer] >= self._eager_max
            call.is_unanswered = True
            self._unanswered[peer] += 1
        self._held[peer].pop(lane, None)
        return True

    def _answered(self, call: GroupCall, peer: int) -> None:
        """Record that a peer has announced a message that it had not, and announce another one."""
        call.is_unanswered = False
        self._unanswered[peer] -= 1
        if self._held[peer]:
            lane = next(iter(self._held[peer]))
            self._begin(lane, self._lanes[lane])

    def _match(self, lane: CallLane, calls: _Calls, peer: int, header: Header, data: Bytes) -> bool:
        """Compare a peer's call with this one, and begin to exchange data. Returns False if they differ."""
        call = calls.queue[0]
        if peer not in call.plan.peers or peer in call.called:
            raise InvalidArgumentError(f"rank {peer} announces call {calls.number} of {lane} in vain")
        error = mismatch(call.plan.header(peer), header, self.rank, peer)
        if error is not None:
            self._fail(error)
            return False
        call.called.add(peer)
        if header.position != call.plan.position:
            call.plan.position = NOWHERE
        if data.nbytes:
            call.plan.check(peer, 0, data.nbytes)
            call.plan.place(peer, 0)[:] = data
            self._send(lane, calls, call.plan.received(peer, 0))
        self._exchange_data(lane, calls, peer, header)
        if call.is_unanswered:
            self._answered(call, peer)
        return self.broken is None

    def _exchange_data(self, lane: CallLane, calls: _Calls, peer: int, header: Header) -> None:
        """Start to exchange data with a peer that has made the call, or with all of them by another route."""
        call = calls.queue[0]
        if not call.shares:
            self._send(lane, calls, call.plan.initial(peer))
        elif not header.shares:
            call.shares = False
            for other in sorted(call.called):
                self._send(lane, calls, call.plan.initial(other))
        elif len(call.called) == len(call.plan.peers):
            assert self.route is not None
            call.moves, call.is_moving = self.route.moves(call.plan), True
            self._effects.append(MoveData(call.call_id, call.moves))

    def _send(self, lane: CallLane, calls: _Calls, parts: Iterable[Outgoing]) -> None:
        call = calls.queue[0]
        for outgoing in parts:
            call.unsent[outgoing.peer] = call.unsent.get(outgoing.peer, 0) + 1
            self._effects.append(SendPart(call.call_id, lane, calls.number, outgoing))

    def _end_if_complete(self, lane: CallLane, calls: _Calls) -> None:
        call = calls.queue[0]
        if not call.is_complete:
            return
        del self._unended[calls.queue.popleft().call_id]
        calls.number += 1
        self._effects.append(CallDone(call.call_id))
        if self._failing is not None and lane == COLLECTIVES:
            self._fail(self._failing)
        elif self._failing is None and calls.queue:
            self._begin(lane, calls)
        else:
            self._drop_if_idle(lane, calls)

    def _drop_if_idle(self, lane: CallLane, calls: _Calls) -> None:
        if lane != COLLECTIVES and not calls.queue and not calls.early:
            del self._lanes[lane]

    # --- peers --------------------------------------------------------------------------------------------------------

    def on_call(self, peer: int, lane: CallLane, number: int, header: Header, data: Bytes) -> list[Effect]:
        """Process a peer's announcement. Raises InvalidArgumentError if it makes no sense."""
        if self.broken is not None:
            return [self.farewell(peer)]  # The peer may have missed the first one.
        if self._failing is not None and lane != COLLECTIVES:
            return []  # Calls of other lanes that have not begun fail with the group.
        calls = self._calls_of(lane)
        if lane == COLLECTIVES:
            is_next, is_current = number == calls.number + bool(calls.queue), number == calls.number
        else:
            is_next = True
            is_current = bool(calls.queue) and calls.queue[0].has_begun and peer not in calls.queue[0].called
        if calls.queue and is_current:
            if self._match(lane, calls, peer, header, data):
                self._end_if_complete(lane, calls)
        elif is_next and peer not in calls.early:
            self._keep_early(peer, lane, calls, header, data)
        else:
            raise InvalidArgumentError(f"rank {peer} announces call {number} of {lane}, and {calls.number} is next")
        return self._taken()

    def _keep_early(self, peer: int, lane: CallLane, calls: _Calls, header: Header, data: Bytes) -> None:
        """Keep an announcement until this rank makes the call, or announces it."""
        if lane != COLLECTIVES:
            if self._early[peer] >= self._unanswered_max:
                self._drop_if_idle(lane, calls)
                raise LimitExceededError(
                    f"rank {peer} announces more than {self._unanswered_max} messages that rank {self.rank} has not "
                    "announced, which is the limit"
                )
            self._early[peer] += 1
        calls.early[peer] = header, data
        if calls.queue and not calls.queue[0].has_begun:
            self._begin(lane, calls)

    def place(self, peer: int, lane: CallLane, number: int, part: int, size: int) -> Bytes | None:
        """Return the memory for a part, or None if the call is over here. Raises InvalidArgumentError."""
        calls = self._lanes.get(lane)
        if self.broken is not None or calls is None or not self._is_under_way(lane, calls, number):
            return None
        plan = calls.queue[0].plan
        if peer not in plan.peers:
            raise InvalidArgumentError(f"rank {peer} sends data of {lane}, in which it has no part")
        plan.check(peer, part, size)
        return plan.place(peer, part)

    def on_part(self, peer: int, lane: CallLane, number: int, part: int) -> list[Effect]:
        """Process a part, which is in its place."""
        calls = self._lanes.get(lane)
        if self.broken is None and calls is not None and self._is_under_way(lane, calls, number):
            self._send(lane, calls, calls.queue[0].plan.received(peer, part))
            self._end_if_complete(lane, calls)
        return self._taken()

    @staticmethod
    def _is_under_way(lane: CallLane, calls: _Calls, number: int) -> bool:
        """True if data of a call has its place. That of a message comes after both announcements of its own call."""
        return bool(calls.queue) and (lane != COLLECTIVES or calls.number == number)

    def on_sent(self, peer: int, lane: CallLane, call_id: int) -> list[Effect]:
        """Record that an announcement or a part was sent, and its memory is free."""
        calls = self._lanes.get(lane)
        if calls is not None and calls.queue and calls.queue[0].call_id == call_id:
            calls.queue[0].unsent[peer] -= 1
            self._end_if_complete(lane, calls)
        return self._taken()

    def on_moved(self, call_id: int) -> list[Effect]:
        """Record that the data of a call has moved by another route."""
        calls = self._calls_of(COLLECTIVES)
        if calls.queue and calls.queue[0].call_id == call_id:
            calls.queue[0].is_moving = False
            self._end_if_complete(COLLECTIVES, calls)
        return self._taken()

    # --- failures -----------------------------------------------------------------------------------------------------

    def on_lost(self, peer: int, reason: str) -> list[Effect]:
        """Process the loss of a rank. Calls that need nothing more from it continue."""
        return self._lose(peer, WorkerLostError(f"rank {peer} is gone: {reason}", rank=peer))

    def _lose(self, peer: int, error: PsdistError) -> list[Effect]:
        is_new = peer not in self.lost
        self.lost.setdefault(peer, error)
        if self.broken is not None or not (is_new or self._failing):
            return []
        calls = self._lanes[COLLECTIVES]
        if not is_new and peer in calls.queue[0].unsent:
            # A peer that failed after the collective has received all of it, and acknowledges nothing any more.
            calls.queue[0].unsent[peer] = 0
            self._end_if_complete(COLLECTIVES, calls)
        # Calls that wait for their turn fail when it comes.
        if self.broken is None and peer in needed_ranks(self):
            self._fail(error)
        return self._taken()

    def on_peer_failure(self, peer: int, error: PsdistError, completed: int) -> list[Effect]:
        """Process the end of the group at a peer. The others learn of it here, too: the peer may have died meanwhile.

        If the peer has closed the group, calls that need nothing more from it continue. Otherwise the group ends.

        completed: number of collectives that had their results there. One of them that is under way gets its result
            first: all ranks have made it, and the peer has sent all that they need.
        """
        if isinstance(error, ClosedError):
            return self._lose(peer, error)
        self.lost.setdefault(peer, error)
        calls = self._lanes[COLLECTIVES]
        if self.broken is None and calls.queue and calls.number < completed:
            self._failing = self._failing or error
            return []
        return self.close(error)

    def on_failure(self, error: PsdistError) -> list[Effect]:
        """End the group here alone. Peers learn of it by the end of their links, or by a group of all of them."""
        if self.broken is None:
            self._end(error)
        return self._taken()

    def expire(self, call_id: int, seconds: float) -> list[Effect]:
        """End a call after its time limit, and with it the group."""
        if call_id in self._unended:
            first = self._unended[call_id].queue[0]
            absent = ", ".join(str(peer) for peer in first.plan.peers if peer not in first.called)
            reason = f"rank {self.rank} reached the timeout of {seconds:g} s, waiting {self.waiting_for(call_id)}"
            self._fail(WaitTimeoutError(reason, absent=absent))
        return self._taken()

    def announced(self, tag: int) -> int | None:
        """Return a rank that has announced a message with this tag, for which no call waits here, or None.

        Raises the error that ended the group, or that of a lost rank if no other has announced one: the message might
        have been its own.
        """
        if self.error is not None:
            raise self.error
        for lane, calls in self._lanes.items():
            if lane.target == self.rank and lane.tag == tag and lane.source in calls.early and not calls.queue:
                return lane.source
        if self.lost:
            raise next(iter(self.lost.values()))
        return None

    def waiting_for(self, call_id: int) -> str:
        """Return for whom a call waits: "for rank 2 to call all_reduce(...)".

        Calls of a lane that wait for their turn have the reason of the first one, which is logged once for all of them.
        """
        return _reason(self._unended[call_id].queue[0]) if call_id in self._unended else "for nothing"

    def close(self, error: PsdistError) -> list[Effect]:
        """End the group, and all of its calls with ``error``."""
        if self.broken is None:
            self._fail(error)
        return self._taken()

    def _fail(self, error: PsdistError) -> None:
        self._end(error)
        self._effects += [self.farewell(peer) for peer in self.peers if peer not in self.lost]

    def farewell(self, peer: int) -> SendFailure:
        """Return the effect that tells a peer of the end of this group."""
        assert self.broken is not None
        return SendFailure(peer, self.broken, self._lanes[COLLECTIVES].number)

    def _end(self, error: PsdistError) -> None:
        error = self._failing or error
        self.broken = error
        for calls in self._lanes.values():
            self._effects += [CallDone(call.call_id, error) for call in calls.queue]
            calls.queue.clear()
            calls.early.clear()
        self._unended.clear()

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


def needed_ranks(machine: GroupMachine) -> list[int]:
    """Return the ranks that the calls under way need something from."""
    under_way = [calls.queue[0] for calls in machine._lanes.values() if calls.queue]
    return [peer for peer in machine.peers if any(call.needs(peer) for call in under_way)]


def missing_ranks(machine: GroupMachine, call_id: int) -> tuple[CallLane, int, Header, list[int]]:
    """Return the lane of a call, the number of the lane's call under way, that call, and the ranks that have not made
    it. The lane has no other order: all of its calls wait for these ranks."""
    lane, calls = next((one for one in machine._lanes.items() if one[1] is machine._unended.get(call_id)), (None, None))
    if lane is None or calls is None:
        return COLLECTIVES, 0, Header(""), []
    first = calls.queue[0]
    return lane, calls.number, first.plan.call, [peer for peer in first.plan.peers if peer not in first.called]


def _reason(call: GroupCall) -> str:
    absent = [peer for peer in call.plan.peers if peer not in call.called]
    if absent:
        return f"for {_ranks(absent)} to call {call.plan.call}"
    late = call.moves.slowest() if call.moves else [peer for peer in call.plan.peers if call.needs(peer)]
    return f"for {_ranks(late) if late else 'this rank'} to exchange the data of {call.plan.call}"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
