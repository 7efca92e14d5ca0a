"""Effects that cause effects: carried out in order, none inside another."""

from __future__ import annotations

import pytest

from psdist_server.store.parameter_store import Trampoline


def test_effects_that_an_effect_causes_come_after_those_in_the_queue() -> None:
    trampoline, seen, inside = Trampoline(), list[object](), 0

    def count(number: int) -> None:
        nonlocal inside
        assert not inside
        inside += 1
        seen.append(number)
        if number < 4:
            trampoline.run([2 * number, str(number)])
        inside -= 1

    trampoline.handlers = {int: count, str: seen.append}
    trampoline.run([1, 3])
    assert seen == [1, 3, 2, "1", 6, "3", 4, "2"]


def test_effects_after_one_that_failed_are_carried_out_with_the_next() -> None:
    trampoline, seen = Trampoline(), list[str]()

    def fail(_: int) -> None:
        raise ValueError

    trampoline.handlers = {int: fail, str: seen.append}
    with pytest.raises(ValueError):
        trampoline.run([0, "after"])
    assert not seen
    trampoline.run(["next"])
    assert seen == ["after", "next"]
