"""Runs that cannot continue end everywhere, within seconds and with one exit status; those that can continue do.

``FAULT_ROUNDS`` in the environment is the number of repetitions of each case. ``lost_runs`` runs them without pytest.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from psdist.settings.exit_codes import INFRASTRUCTURE
from tests.chaos.lost_runs import CASES

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "1"))
#: Nothing is lost in these: a scheduler with its store knows its commits without their records.
CONTINUES = ("store kept", "store lost, snapshots", "snapshots records")
#: The simulation of lost runs covers all of them; with real processes ``make test`` runs one.
SHORT = ("store lost",)


@pytest.mark.timeout(120 + 240 * ROUNDS)
@pytest.mark.parametrize("case", [c if c in SHORT else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_a_run_continues_or_ends_everywhere(case: str, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        (path := tmp_path / str(number)).mkdir()
        outcome = CASES[case](path)
        print(f"{case}: {outcome}")
        expected = set() if case in CONTINUES else {INFRASTRUCTURE}
        assert set(outcome.statuses.values()) == expected, f"{outcome}\n{outcome.text}"
        if expected and case.startswith("snapshots"):
            directories = [file.name for file in path.glob("*/snapshots/*")] or ["snapshot"]
            assert "held shard" in outcome.text and any(name in outcome.text for name in directories), outcome.text
        elif case == "nothing saved":
            assert "server-0 held shard" in outcome.text and "restart the run" in outcome.text, outcome.text
        elif expected:
            assert "the scheduler's record of this run is gone" in outcome.text, outcome.text
