"""The board of squared norms: which slices are meant is said by who asks."""

from __future__ import annotations

import asyncio

import pytest

from psdist_server.norms import NormBoard, global_norm


async def test_who_asks_gets_the_squares_of_its_slices_when_all_are_there() -> None:
    board = NormBoard()
    board.record(3, 0, 1.0)
    board.record(3, 5, 4.0)  # a backup's slice
    waiting = asyncio.create_task(board.wait_complete(3, [0, 2]))
    await asyncio.wait({waiting}, timeout=0)
    assert not waiting.done() and board.is_complete(3, [0, 5]) and not board.is_complete(3, [0, 2])
    assert await board.wait_complete(3, (5,)) == {5: 4.0}
    board.record(3, 2, 9.0)
    assert await waiting == {0: 1.0, 2: 9.0}


async def test_one_that_gives_up_waiting_does_not_end_the_others() -> None:
    board = NormBoard()
    first, second = (asyncio.create_task(board.wait_complete(0, [1])) for _ in range(2))
    await asyncio.wait({first, second}, timeout=0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    board.record(0, 1, 2.0)
    assert await second == {1: 2.0}


def test_squares_are_kept_while_a_server_that_is_late_may_ask() -> None:
    board = NormBoard()
    for step in range(5):
        board.record(step, 0, float(step))
    assert [step for step in range(5) if board.is_complete(step, [0])] == [2, 3, 4]


def test_the_norm_does_not_depend_on_the_order_in_which_squares_came() -> None:
    squares = {index: 1.0 / 3**index for index in range(30)}
    assert global_norm(squares) == global_norm(dict(reversed(squares.items())))
