"""Simulated network between the machines of one group: links in order, with any delays between them, and deaths.

The data of a frame is read when it leaves, at any time after the machine gave it: a machine that lets go of its memory
too early sends other bytes here than a real link would.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psdist.collectives.core.machine import (
    COLLECTIVES,
    CallDone,
    CallLane,
    Effect,
    GroupMachine,
    SendCall,
    SendFailure,
    SendPart,
)
from psdist.collectives.core.plan import Plan
from psdist.errors import ClosedError, PsdistError


@dataclass
class Call:
    """A call of one rank. error: None if it has its result."""

    call_id: int
    has_ended: bool = False
    error: PsdistError | None = None


@dataclass
class _Link:
    #: Frames that have not left their sender, and frames on the way.
    leaving: deque[Effect] = field(default_factory=deque)
    moving: deque[tuple[Effect, bytes]] = field(default_factory=deque)
    has_ended: bool = False


class CollectiveNetwork:
    """Machines of ``size`` ranks. rng: decides what happens next."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.machines = [GroupMachine(rank, size) for rank in range(size)]
        self._rng = rng
        self._links = {(a, b): _Link() for a in range(size) for b in range(size) if a != b}
        self._calls: list[dict[int, Call]] = [{} for _ in range(size)]
        self.dead: set[int] = set()

    def start(self, rank: int, plan: Plan, lane: CallLane = COLLECTIVES) -> Call:
        """Make a call. Returns it; with an error if it is refused."""
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
            case SendFailure(_, error):
                is_closed = isinstance(error, ClosedError)
                self._carry_out(target, machine.on_closed(source, error) if is_closed else machine.on_failure(error))

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

    def _put(self, rank: int, peer: int, effect: Effect) -> None:
        if rank not in self.dead and peer not in self.dead:
            self._links[rank, peer].leaving.append(effect)

    def _drop(self, rank: int) -> None:
        for (source, _), link in self._links.items():
            if source == rank:
                link.leaving = deque(effect for effect in link.leaving if isinstance(effect, SendFailure))
