"""Decisions and output of an agent before it starts workers, and its report to the scheduler at its end."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from psdist.addresses import is_wildcard, parse_address
from psdist.launcher import agent
from psdist.launcher.agent import AgentSettings, WaitReport, why_given_up
from psdist.launcher.events import Finish, Place, ProcessKey
from psdist.settings import exit_codes

SCHEDULER = "scheduler:29600"
W1 = ProcessKey("worker", 1)


def test_scripts_meet_where_the_rendezvous_says_and_else_where_the_user_says() -> None:
    for place, environ, master in [
        (Place(1, 2, 1, 2, "box:7000", "run"), {"MASTER_ADDR": "other", "MASTER_PORT": "1"}, "box:7000"),
        (Place(1, 2, 1, 2), {"MASTER_ADDR": "2001:db8::7", "MASTER_PORT": "29500"}, "[2001:db8::7]:29500"),
        (Place(1, 2, 1, 2), {"MASTER_ADDR": "box"}, SCHEDULER),
        (Place(1, 2, 1, 2), {}, SCHEDULER),
    ]:
        assert agent._master(place, SCHEDULER, environ) == master


def test_the_scripts_of_a_single_node_meet_at_a_free_port_of_it() -> None:
    host, port = parse_address(agent._master(Place(0, 1, 0, 2), SCHEDULER, {}))
    assert not is_wildcard(host) and host != "scheduler" and port != 29600


def test_a_script_that_fails_or_never_connects_is_given_up() -> None:
    for status in [exit_codes.FAILURE, exit_codes.CONFIGURATION, exit_codes.NEVER_CONNECTED, 42]:
        assert why_given_up(Finish(status, "worker 1 failed", W1), has_connected=True) == "worker 1 failed"
    assert "psdist.init()" in why_given_up(Finish(exit_codes.OK), has_connected=False)


def test_what_the_scheduler_knows_or_nobody_waits_for_is_not_told_to_it() -> None:
    for status in [exit_codes.INFRASTRUCTURE, exit_codes.UNAVAILABLE, exit_codes.LATE]:
        assert not why_given_up(Finish(status, "worker 1 failed", W1), has_connected=True)
    assert not why_given_up(Finish(exit_codes.OK), has_connected=True)
    # A stopped agent may be started again.
    assert not why_given_up(Finish(exit_codes.SIGNAL_BASE + signal.SIGTERM), has_connected=False)


@pytest.mark.parametrize(
    ("given", "told", "name"),
    [("mine", "mine", "mine"), ("", "theirs", "theirs"), ("", "", r"run-\d{8}-\d{6}-[0-9a-f]{6}")],
)
def test_files_of_a_run_lie_below_its_id(
    given: str, told: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that files of two runs are never mixed, even if the run was given no name."""
    started: list[tuple[str, str]] = []

    async def run_workers(*arguments: Any) -> tuple[Finish, bool]:
        workers = arguments[2]
        environ = workers.spec(0, 0, {}).environment
        assert environ.get("PSDIST_RUN_ID", "") == environ["TORCHELASTIC_RUN_ID"]
        started.append((arguments[-1], environ["TORCHELASTIC_RUN_ID"]))
        return Finish(exit_codes.OK), True

    monkeypatch.setattr(agent, "_place", lambda *_: Place(0, 1, 0, 1, "127.0.0.1:7000", told))
    monkeypatch.setattr(agent, "_run_workers", run_workers)
    monkeypatch.setattr(agent.own_process, "exit_on", lambda signals: None)
    script = tmp_path / "train.py"
    script.touch()
    options = AgentSettings(command=(str(script),), scheduler=SCHEDULER, run_id=given)
    assert agent.run_agent(options, {}) == 0
    ((directory, run_id),) = started
    assert re.fullmatch(name, directory) and run_id == told


def test_a_wait_that_lasts_is_printed_once_a_minute() -> None:
    """Check a wait for which the scheduler repeats its reason every two seconds."""
    report, text = WaitReport(), "for 1 of 2 nodes to join the rendezvous"
    printed = [second for second in range(0, 130, 2) if report.is_due(text, float(second))]
    assert printed == [0, 60, 120]
    assert report.is_due("for more nodes", 131.0) and report.is_due(text, 132.0), "a new reason is news"
