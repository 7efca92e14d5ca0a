"""The board of squared norms."""

from __future__ import annotations

import asyncio

from psdist_server.store.gradients import NormBoard, global_norm


def test_squares_of_a_step_come_one_by_one_and_together() -> None:
    board = NormBoard()
    board.record(3, 0, 1.0)
    board.merge(3, {5: 4.0, 2: 9.0})
    assert board.known(3) == {0: 1.0, 5: 4.0, 2: 9.0} and board.known(2) == {}


def test_squares_are_kept_while_a_server_that_is_late_may_ask() -> None:
    board = NormBoard()
    for step in range(5):
        board.record(step, 0, float(step))
    assert [step for step in range(5) if board.known(step)] == [2, 3, 4]


async def test_who_waits_looks_again_at_each_waking() -> None:
    board = NormBoard()
    for _ in range(2):
        waiting = [asyncio.create_task(board.wait()) for _ in range(2)]
        await asyncio.wait(waiting, timeout=0)
        assert not any(task.done() for task in waiting)
        board.wake()
        await asyncio.gather(*waiting)


async def test_a_waking_between_the_question_and_the_waiting_is_not_missed() -> None:
    board = NormBoard()
    waiting = asyncio.ensure_future(board.wait())
    board.wake()
    await asyncio.wait_for(waiting, 60)


def test_the_norm_does_not_depend_on_the_order_in_which_squares_came() -> None:
    squares = {index: 1.0 / 3**index for index in range(30)}
    assert global_norm(squares) == global_norm(dict(reversed(squares.items())))
