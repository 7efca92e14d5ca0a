"""What an agent decides before it starts workers, and what it tells the scheduler at its end."""

from __future__ import annotations

import signal

import pytest

from psdist.addresses import is_wildcard, parse_address
from psdist.launch import agent
from psdist.launch.agent import why_given_up
from psdist.launch.events import Finish, ProcessKey
from psdist.launch.rendezvous import Place
from psdist.settings import exit_codes

SCHEDULER = "scheduler:29600"
W1 = ProcessKey("worker", 1)


@pytest.mark.parametrize(
    ("place", "environ", "master"),
    [
        (Place(1, 2, 1, 2, "box:7000", "run"), {"MASTER_ADDR": "other", "MASTER_PORT": "1"}, "box:7000"),
        (Place(1, 2, 1, 2), {"MASTER_ADDR": "2001:db8::7", "MASTER_PORT": "29500"}, "[2001:db8::7]:29500"),
        (Place(1, 2, 1, 2), {"MASTER_ADDR": "box"}, SCHEDULER),
        (Place(1, 2, 1, 2), {}, SCHEDULER),
    ],
)
def test_scripts_meet_where_the_rendezvous_says_and_else_where_the_user_says(
    place: Place, environ: dict[str, str], master: str
) -> None:
    assert agent._master(place, SCHEDULER, environ) == master


def test_the_scripts_of_a_single_node_meet_at_a_free_port_of_it() -> None:
    host, port = parse_address(agent._master(Place(0, 1, 0, 2), SCHEDULER, {}))
    assert not is_wildcard(host) and host != "scheduler" and port != 29600


@pytest.mark.parametrize("status", [exit_codes.FAILURE, exit_codes.CONFIGURATION, exit_codes.NEVER_CONNECTED, 42])
def test_a_script_that_fails_is_given_up(status: int) -> None:
    assert why_given_up(Finish(status, "worker 1 failed", W1), has_connected=True) == "worker 1 failed"


def test_so_is_one_that_never_connected() -> None:
    assert "psdist.init()" in why_given_up(Finish(exit_codes.OK), has_connected=False)
    assert not why_given_up(Finish(exit_codes.OK), has_connected=True)


@pytest.mark.parametrize("status", [exit_codes.INFRASTRUCTURE, exit_codes.UNAVAILABLE, exit_codes.LATE])
def test_what_the_scheduler_said_itself_is_not_told_to_it(status: int) -> None:
    assert not why_given_up(Finish(status, "worker 1 failed", W1), has_connected=True)


def test_an_agent_that_is_stopped_may_be_started_again() -> None:
    assert not why_given_up(Finish(exit_codes.SIGNAL_BASE + signal.SIGTERM), has_connected=False)
