"""What an agent decides before it starts workers."""

from __future__ import annotations

import pytest

from psdist.addresses import is_wildcard, parse_address
from psdist.launch import agent
from psdist.launch.rendezvous import Place

SCHEDULER = "scheduler:29600"


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
