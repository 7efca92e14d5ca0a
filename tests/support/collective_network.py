"""Simulated network between the machines of one group: links in order, with any delays between them, and deaths.

The data of a frame is read when it leaves, at any time after the machine gave it: a machine that lets go of its memory
too early sends other bytes here than a real link would.

Ranks in ``sharing`` have mapped the memory of all. A step of their movement is an event like others.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psdist.collectives.core.host_memory import HostMemory, HostMoves, RegisteredBuffers, memory_bytes
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
)
from psdist.collectives.core.plans import Bytes, Plan
from psdist.errors import PsdistError


def mapped_by(rank: int, memories: list[Bytes]) -> list[Bytes]:
    """Return the memories of all ranks as one rank maps them: those of the others read-only."""
    mapped = [memory[:] for memory in memories]
    for other, memory in enumerate(mapped):
        memory.flags.writeable = other == rank
    return mapped


@dataclass
class Call:
    """A call of one rank. error: None if it has its result."""

    call_id: int
    has_ended: bool = False
    error: PsdistError | None = None


@dataclass
class _Moving:
    """Movement of a rank's call through memory. step: the next one."""

    call_id: int
    moves: HostMoves
    step: int


@dataclass
class _Link:
    #: Frames that have not left their sender, and frames on the way.
    leaving: deque[Effect] = field(default_factory=deque)
    moving: deque[tuple[Effect, bytes]] = field(default_factory=deque)
    has_ended: bool = False


class CollectiveNetwork:
    """Machines of ``size`` ranks. rng: decides what happens next. sharing: ranks that have mapped all memory."""

    def __init__(self, size: int, rng: random.Random, sharing: Collection[int] = ()) -> None:
        self.machines = [GroupMachine(rank, size) for rank in range(size)]
        self._memories = [np.zeros(memory_bytes(size), np.uint8) for _ in range(size)]
        self._buffers = [RegisteredBuffers(rank) for rank in range(size)]
        self._allocated = 0
        for rank in sharing:
            self.machines[rank].route = HostMemory(rank, mapped_by(rank, self._memories), self._buffers[rank])
        self._moving: dict[int, _Moving] = {}
        #: Calls that moved through memory, and those whose contributions were read in place.
        self.moved = self.moved_in_place = 0
        self._rng = rng
        self._links = {(a, b): _Link() for a in range(size) for b in range(size) if a != b}
        self._calls: list[dict[int, Call]] = [{} for _ in range(size)]
        self.dead: set[int] = set()

    def allocate(self, nbytes: int) -> list[Bytes]:
        """Return a registered buffer of each rank."""
        memories = [np.zeros(nbytes, np.uint8) for _ in self.machines]
        self._allocated += 1
        for rank, buffers in enumerate(self._buffers):
            buffers.register(self._allocated, mapped_by(rank, memories))
        return memories

    def start(self, rank: int, plan: Plan, lane: CallLane = COLLECTIVES) -> Call:
        """Make a call. Returns it; with an error if it is refused."""
        if plan.whole is not None:
            plan.position = self._buffers[rank].position_of(plan.whole[0])
        try:
            call_id, effects = self.machines[rank].start(lane, plan)
        except PsdistError as error:
            return Call(0, True, error)
        call = self._calls[rank][call_id] = Call(call_id)
        self._carry_out(rank, effects)
        return call

    def expire(self, rank: int, call: Call) -> None:
        """End a call by its time limit."""
        self._carry_out(rank, self.machines[rank].expire(call.call_id, 1.0))

    def close(self, rank: int, error: PsdistError) -> None:
        """Close the group at a rank."""
        self._carry_out(rank, self.machines[rank].close(error))

    def kill(self, rank: int) -> None:
        """End a rank. What has left it still arrives."""
        self.dead.add(rank)
        self._moving.pop(rank, None)
        for (source, target), link in self._links.items():
            if rank in (source, target):
                link.leaving.clear()
            link.has_ended |= source == rank

    def run(self, happened: Callable[[], None] = lambda: None) -> None:
        """Let everything happen that can, in any order. happened: called after each event."""
        while events := list(self._events()):
            self._rng.choice(events)()
            happened()
            for machine in self.machines:
                machine.validate()

    def _events(self) -> Any:
        for (source, target), link in self._links.items():
            if link.leaving:
                yield lambda link=link, source=source: self._leave(source, link)
            if target in self.dead:
                link.moving.clear()
            elif link.moving:
                yield lambda link=link, source=source, target=target: self._arrive(source, target, link)
            elif link.has_ended:
                yield lambda link=link, source=source, target=target: self._end(source, target, link)

        for rank, moving in self._moving.items():
            completed = [int(memory[:8].view("<u8")[0]) for memory in self._memories]
            if all(completed[peer] >= moving.step for peer in self.machines[rank].peers):
                yield lambda rank=rank, moving=moving: self._advance(rank, moving)

    def _advance(self, rank: int, moving: _Moving) -> None:
        moving.moves.advance(moving.step)
        moving.step += 1
        if moving.step == moving.moves.last:
            del self._moving[rank]
            self.moved += 1
            self.moved_in_place += moving.moves.is_in_place
            self._carry_out(rank, self.machines[rank].on_moved(moving.call_id))

    def _leave(self, source: int, link: _Link) -> None:
        effect = link.leaving.popleft()
        match effect:
            case SendCall(call_id, peer, lane, _, _, data):
                link.moving.append((effect, data.tobytes()))
                self._carry_out(source, self.machines[source].on_sent(peer, lane, call_id))
            case SendPart(call_id, lane, _, outgoing):
                link.moving.append((effect, outgoing.data.tobytes()))
                self._carry_out(source, self.machines[source].on_sent(outgoing.peer, lane, call_id))
            case _:
                link.moving.append((effect, b""))

    def _arrive(self, source: int, target: int, link: _Link) -> None:
        effect, data = link.moving.popleft()
        machine, received = self.machines[target], np.frombuffer(data, np.uint8)
        match effect:
            case SendCall(_, _, lane, number, header):
                self._carry_out(target, machine.on_call(source, lane, number, header, received))
            case SendPart(_, lane, number, outgoing):
                place = machine.place(source, lane, number, outgoing.part, len(data))
                if place is not None:
                    place[:] = received
                self._carry_out(target, machine.on_part(source, lane, number, outgoing.part))
            case SendFailure(_, error, completed):
                self._carry_out(target, machine.on_peer_failure(source, error, completed))

    def _end(self, source: int, target: int, link: _Link) -> None:
        link.has_ended = False
        self._carry_out(target, self.machines[target].on_lost(source, "killed"))

    def _carry_out(self, rank: int, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case CallDone(call_id, error):
                    call = self._calls[rank][call_id]
                    assert not call.has_ended, "a call ended twice"
                    call.has_ended, call.error = True, error
                    if error is not None:  # The memory of failed calls is the caller's again.
                        self._drop(rank)
                case SendCall(peer=peer) | SendFailure(peer=peer):
                    self._put(rank, peer, effect)
                case SendPart(outgoing=outgoing):
                    self._put(rank, outgoing.peer, effect)
                case MoveData(call_id, moves):
                    assert isinstance(moves, HostMoves)
                    self._moving[rank] = _Moving(call_id, moves, moves.first)

    def _put(self, rank: int, peer: int, effect: Effect) -> None:
        if rank not in self.dead and peer not in self.dead:
            self._links[rank, peer].leaving.append(effect)

    def _drop(self, rank: int) -> None:
        self._moving.pop(rank, None)
        for (source, _), link in self._links.items():
            if source == rank:
                link.leaving = deque(effect for effect in link.leaving if isinstance(effect, SendFailure))
