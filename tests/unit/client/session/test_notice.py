"""Notices in a worker's log about a run that resumes with other settings, and requests of a reset."""

from __future__ import annotations

import asyncio
import logging

import pytest

import psdist
from psdist import errors
from tests.support.client_fakes import Setup, Start, flat, gradient

NOTICE = "'p' resumes from snapshot 000000000007-1-1-abcdef with other settings: lr 0.1 -> 0.5"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about settings."""
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in warnings if "resumes from" in record.getMessage()]


async def test_it_is_a_warning_and_comes_once(connected: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup = connected
    setup.scheduler.notice = NOTICE
    weights = await setup.create()
    assert told(caplog) == [NOTICE]
    assert await setup.create() is weights
    await setup.weights.push_pull(gradient())
    setup.expel(first_step=4)
    await setup.expelled()
    await setup.weights.pull()
    assert setup.client.incarnation == 2 and told(caplog) == [NOTICE]


async def test_it_comes_again_where_the_run_goes_back(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    await setup.weights.push_pull(gradient())
    assert told(caplog) == []
    setup.scheduler.notice = NOTICE
    setup.roll_back(0, until=1)
    async with asyncio.timeout(60):
        await setup.scheduler.hello.wait()
    assert len(flat(await setup.weights.pull())) == 22
    assert setup.weights.statistics().rolled_back == 1 and told(caplog)[-1:] == [NOTICE]
    assert told(caplog).count(NOTICE) == 1


async def test_the_wish_for_a_reset_is_one_of_the_settings(start: Start) -> None:
    setup = await start(reset_optimizer=True)
    created = setup.scheduler.created
    assert created is not None and created.reset_optimizer and setup.weights.spec.reset_optimizer
    with pytest.raises(errors.SettingsMismatchError, match="reset_optimizer is False, not True"):
        await setup.create()
    with pytest.raises(errors.InvalidArgumentError, match="'new': reset_optimizer=True without init"):
        await setup.client.parameters("new", reset_optimizer=True)
    with pytest.raises(errors.InvalidArgumentError, match="reset_optimizer=1 is neither True nor False"):
        await setup.client.parameters("new", gradient(), psdist.optim.SGD(), reset_optimizer=1)
