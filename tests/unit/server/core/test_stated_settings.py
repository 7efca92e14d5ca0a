"""Settings of an update: which contribution decides, and which contributions differ from it."""

from __future__ import annotations

import pytest

from psdist import optim
from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import Setting, Settings
from psdist_server.core.contributions import Decision, SettingsCheck, Stated

SPEC = optim.SGD(lr=0.1, momentum=0.9, overrides=(optim.override("b", weight_decay=0.5),))
LOW = (Setting(0, "momentum", 0.8),)


def stated(
    number: int, first_step: int = 0, lr_factor: float | None = None, settings: Settings | None = None
) -> Stated:
    return Stated(f"worker-{number}", first_step, lr_factor, settings)


def test_nothing_stated_is_the_specification() -> None:
    for given in ([], [stated(0), stated(1)]):
        decision = Decision(SPEC, given)
        assert (decision.lr_factor, decision.settings) == (1.0, ())
        assert decision.difference(stated(0)) == ("", "", "")


def test_the_longest_standing_worker_decides_each_part() -> None:
    """Of equal ones the first does, which has the lowest rank."""
    given = [stated(0, 7, 0.5, ()), stated(1, 3, None, LOW), stated(2, 3, 2.0, ())]
    decision = Decision(SPEC, given)
    assert (decision.lr_factor, decision.settings) == (2.0, LOW)
    assert decision.difference(given[0]) == ("lr_factor=0.5", "lr_factor=2.0", "worker-2")
    assert decision.difference(given[1]) == ("", "", "")
    assert decision.difference(given[2]) == ("momentum=0.9 of group 0", "momentum=0.8", "worker-1")


def test_a_difference_in_the_last_digits_is_ignored() -> None:
    """A number that is left out is the specification's."""
    for settings, differs in [
        ((Setting(0, "momentum", 0.8 * (1 + 1e-9)),), False),
        ((Setting(0, "momentum", 0.8 * (1 + 1e-5)),), True),
        ((*LOW, Setting(1, "weight_decay", 0.5 * (1 - 1e-9))), False),
        ((*LOW, Setting(1, "weight_decay", 0.0)), True),
        ((*LOW, Setting(0, "weight_decay", 1e-12)), True),
        ((), True),
        (None, False),
    ]:
        decision = Decision(SPEC, [stated(0, 0, None, LOW), stated(1, 0, None, settings)])
        assert decision.settings == LOW
        assert bool(decision.difference(stated(1, 0, None, settings))[0]) == differs


def test_equal_settings_are_stored_once() -> None:
    check = SettingsCheck(SPEC)
    first = check.check((Setting(1, "lr", 0.5), *LOW))
    assert first == (*LOW, Setting(1, "lr", 0.5))
    assert check.check((Setting(1, "lr", 0.5), *LOW)) is first
    assert check.check(()) == ()
    with pytest.raises(InvalidArgumentError, match="is given twice"):
        check.check((*LOW, *LOW))
    with pytest.raises(InvalidArgumentError, match="settings of group 2"):
        check.check((Setting(2, "lr", 0.5),))
    assert check.check(LOW) == LOW
