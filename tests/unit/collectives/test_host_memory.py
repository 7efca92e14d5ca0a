"""Calls through memory of the host: steps of two ranks, and what happens to them if one is lost."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from psdist.collectives.core import plans
from psdist.collectives.core.host_memory import HostMemory, HostMoves, RegisteredBuffers, fits, memory_bytes
from psdist.collectives.core.machine import COLLECTIVES, CallDone, Effect, GroupMachine, MoveData, SendPart
from psdist.collectives.core.plans import Header, flat_bytes
from psdist.errors import WorkerLostError
from tests.support.collective_network import mapped_by

NOTHING = np.empty(0, np.uint8)
MIB = 1 << 20


class SharingPair:
    """Two ranks that share memory and make one all-reduce of ``size`` bytes.

    registered: ranks whose array is in a registered buffer, in which both ranks have memory.
    """

    def __init__(self, size: int = 3 * MIB, *, registered: Collection[int] = ()) -> None:
        memories = [np.zeros(memory_bytes(2), np.uint8) for _ in range(2)]
        self.machines = [GroupMachine(rank, 2) for rank in range(2)]
        self.arrays = [np.full(size // 4, rank + 1, np.float32) for rank in range(2)]
        buffers = [RegisteredBuffers(rank) for rank in range(2)]
        memories_of_buffer = [
            flat_bytes(array if rank in registered else array * 0) for rank, array in enumerate(self.arrays)
        ]
        for rank, one in enumerate(buffers):
            one.register(1, mapped_by(rank, memories_of_buffer))
        self.plans = [plans.all_reduce(rank, 2, array, array, "sum") for rank, array in enumerate(self.arrays)]
        self.effects: list[list[Effect]] = []
        for rank, machine in enumerate(self.machines):
            machine.route = HostMemory(rank, mapped_by(rank, memories), buffers[rank])
            self.plans[rank].position = buffers[rank].position_of(self.arrays[rank])
            call_id, effects = machine.start(COLLECTIVES, self.plans[rank])
            self.effects.append(effects + machine.on_sent(1 - rank, COLLECTIVES, call_id))
        for rank in range(2):
            self.called(rank, self.plans[1 - rank].header(rank))
        self.ids, self.moves = zip(*(self.moves_of(rank) for rank in range(2)), strict=True)

    def called(self, rank: int, header: Header) -> None:
        self.effects[rank] += self.machines[rank].on_call(1 - rank, COLLECTIVES, 0, header, NOTHING)

    def moves_of(self, rank: int) -> tuple[int, HostMoves]:
        [effect] = [effect for effect in self.effects[rank] if isinstance(effect, MoveData)]
        assert isinstance(effect.moves, HostMoves)
        return effect.call_id, effect.moves


def test_data_moves_in_steps_without_parts() -> None:
    pair = SharingPair()
    assert not any(isinstance(effect, SendPart) for effects in pair.effects for effect in effects)
    for step in range(pair.moves[0].first, pair.moves[0].last):
        for move in pair.moves:
            move.advance(step)
    for rank, machine in enumerate(pair.machines):
        assert machine.on_moved(pair.ids[rank]) == [CallDone(pair.ids[rank])]
        assert (pair.arrays[rank] == 3).all()


def test_rank_that_is_lost_before_its_last_step_ends_the_call() -> None:
    pair = SharingPair()
    for move in pair.moves:
        move.advance(0)
    assert "rank 1" in pair.machines[0].waiting_for(pair.ids[0])
    [done] = pair.machines[0].on_lost(1, "killed")
    assert isinstance(done, CallDone) and isinstance(done.error, WorkerLostError)
    assert pair.machines[0].on_moved(pair.ids[0]) == []


def test_rank_that_is_lost_after_its_last_step_is_not_missed() -> None:
    pair = SharingPair()
    behind, ahead = pair.moves
    for step in range(behind.first, behind.last - 1):
        ahead.advance(step)
        behind.advance(step)
    ahead.advance(ahead.last - 1)
    assert pair.machines[0].on_lost(1, "has left") == []
    behind.advance(behind.last - 1)
    assert pair.machines[0].on_moved(pair.ids[0]) == [CallDone(pair.ids[0])]
    assert (pair.arrays[0] == 3).all()


def test_arrays_of_a_registered_buffer_are_read_in_place_and_free_once_the_call_has_ended() -> None:
    pair = SharingPair(registered=(0, 1))
    ahead, behind = pair.moves
    assert ahead.is_in_place and ahead.last < SharingPair().moves[0].last
    for step in range(ahead.first, ahead.last - 1):
        ahead.advance(step)
        behind.advance(step)
    ahead.advance(ahead.last - 1)
    assert (pair.arrays[0] == 3).all()
    pair.arrays[0][:] = 9  # The script computes its next gradients while the other rank is late.
    behind.advance(behind.last - 1)
    assert (pair.arrays[1] == 3).all()


@pytest.mark.parametrize("registered", [(0,), (1,)])
def test_arrays_are_not_read_in_place_if_that_of_one_rank_is_elsewhere(registered: tuple[int, ...]) -> None:
    pair = SharingPair(registered=registered)
    for step in range(pair.moves[0].first, pair.moves[0].last):
        for move in pair.moves:
            move.advance(step)
    assert all((array == 3).all() for array in pair.arrays)


def test_large_calls_of_equal_sizes_fit() -> None:
    for plan, wanted in [
        (plans.all_reduce(0, 2, np.zeros(MIB, np.int8), np.zeros(MIB, np.int8), "sum"), True),
        (plans.all_reduce(0, 2, np.zeros(64, np.int8), np.zeros(64, np.int8), "sum"), False),
        (plans.broadcast(0, 2, np.zeros(MIB, np.int8), 0), True),
        (plans.barrier(0, 2), False),
        (plans.send(np.zeros(MIB, np.int8), 1), False),
        (plans.all_to_all(0, [np.zeros(MIB), np.zeros(MIB)], [np.zeros(MIB), np.zeros(MIB)]), True),
        (plans.all_to_all(0, [np.zeros(1), np.zeros(MIB)], [np.zeros(1), np.zeros(7)]), False),
    ]:
        assert fits(plan) is wanted
