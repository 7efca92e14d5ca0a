"""Updates that wait for copies of a snapshot."""

from __future__ import annotations

from typing import cast

import pytest

from psdist_server.core.cut_state import CopyBudget, CutState
from psdist_server.core.shard import SliceRecord
from psdist_server.store.snapshot_cut import SliceCopies, UpdateGate

SLICES = 4


class Copies:
    """A cut that every slice has reached, and its copies as far as the gate needs them."""

    def __init__(self) -> None:
        self.state = CutState(1, dict.fromkeys(range(SLICES), 4), CopyBudget(1))
        for index in range(SLICES):
            assert self.state.check(index, SliceRecord(1))


@pytest.fixture
def copies() -> Copies:
    return Copies()


def gate_of(copies: Copies) -> tuple[UpdateGate[str], list[str]]:
    delivered: list[str] = []
    gate = UpdateGate[str](delivered.append)
    gate.arm(cast(SliceCopies, copies))
    return gate, delivered


def test_updates_wait_while_their_slices_are_being_copied(copies: Copies) -> None:
    gate, delivered = gate_of(copies)
    copies.state.copy_for_writer(2)
    assert gate.blocks(2) and not gate.blocks(1)
    gate.defer(2, "two")
    gate.resume(2)
    assert not delivered and list(gate.deferred) == [2]
    copies.state.copy_finished(2)
    gate.resume(2)
    assert delivered == ["two"] and not gate.deferred


def test_updates_that_exceed_the_budget_go_on_from_the_lowest_slice(copies: Copies) -> None:
    gate, delivered = gate_of(copies)
    copies.state.copy_for_update(0)
    for index in (3, 1, 2):
        assert gate.blocks(index)
        gate.defer(index, str(index))
    gate.discard(2)
    copies.state.copy_finished(0)
    copies.state.written(0)
    gate.resume()
    assert delivered == ["1", "3"]


def test_without_a_snapshot_nothing_waits(copies: Copies) -> None:
    gate, delivered = gate_of(copies)
    copies.state.copy_for_writer(1)
    gate.defer(1, "one")
    gate.disarm()
    gate.resume()
    assert delivered == ["one"] and not gate.blocks(1)
