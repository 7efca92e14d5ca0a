"""What engines should do after each exit status of each role."""

from __future__ import annotations

from psdist.settings.exit_codes import REACTIONS, SIGNAL_BASE, TABLE, statuses


def test_every_status_of_a_role_has_a_reaction() -> None:
    for role, reactions in REACTIONS.items():
        ends = {row.status for row in TABLE if role in row.roles}
        assert ends | {SIGNAL_BASE} == reactions.keys(), role


def test_a_status_means_the_same_to_a_script_and_its_launcher() -> None:
    script, launcher = REACTIONS["script"], REACTIONS["launcher"]
    assert {status: launcher[status] for status in script} == script


def test_statuses_are_chosen_by_reaction() -> None:
    assert statuses("scheduler", "restart") == (69,)
    assert statuses("launcher", "restart", "requeue") == (1, 69, 70, 74)
