"""Refusals of pushes that slices had counted: repeated for the same push only."""

from __future__ import annotations

import pytest

from psdist.errors import InvalidArgumentError
from psdist.wire.limits import MEMBERS_MAX
from psdist_server.core.contributions import LateRefusals, Stated

WORKER = ("worker-0", 1)
STATED = Stated("worker-0", 0, 0.5, None)
OTHER = Stated("worker-0", 0, 0.25, None)
ERROR = InvalidArgumentError("lr_factor=0.5 in step 3", step=3)


@pytest.fixture
def refusals() -> LateRefusals:
    refusals = LateRefusals()
    refusals.add_settings(WORKER, 3, 7, STATED, ERROR)
    refusals.add_not_finite(WORKER, 3, 7)
    return refusals


def test_the_same_push_has_its_error_again(refusals: LateRefusals) -> None:
    for _ in range(2):
        error = refusals.settings_error(WORKER, 3, 7, STATED)
        assert error is not None and error is not ERROR and (str(error), error.details) == (str(ERROR), ERROR.details)
    assert refusals.was_not_finite(WORKER, 3, 7)


@pytest.mark.parametrize(
    ("producer", "step", "index", "stated"),
    [
        (("worker-0", 2), 3, 7, STATED),
        (("worker-1", 1), 3, 7, STATED),
        (WORKER, 4, 7, STATED),
        (WORKER, 3, 8, STATED),
        (WORKER, 3, 7, OTHER),
    ],
)
def test_no_other_push_has_it(
    refusals: LateRefusals, producer: tuple[str, int], step: int, index: int, stated: Stated
) -> None:
    assert refusals.settings_error(producer, step, index, stated) is None
    assert stated != STATED or not refusals.was_not_finite(producer, step, index)


def test_a_later_refusal_replaces_it(refusals: LateRefusals) -> None:
    refusals.add_not_finite(WORKER, 4, 1)
    assert refusals.settings_error(WORKER, 3, 7, STATED) is None
    assert not refusals.was_not_finite(WORKER, 3, 7) and refusals.was_not_finite(WORKER, 4, 1)


def test_memory_is_bounded(refusals: LateRefusals) -> None:
    for number in range(MEMBERS_MAX):
        refusals.add_not_finite((f"worker-{number}", 2), 0, 0)
    assert refusals.settings_error(WORKER, 3, 7, STATED) is None
    assert refusals.was_not_finite((f"worker-{MEMBERS_MAX - 1}", 2), 0, 0)
