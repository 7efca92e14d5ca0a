"""Two workers whose layers lack gradients in some steps: the weights are those of torch, also after a loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import Run

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests/support/torch_skipped.py"


def ended(run: Run) -> dict[str, str]:
    """Wait for the end, check the differences from torch, and return the digest of each case's weights."""
    try:
        status, output = run.end()
    finally:
        run.stop()
    assert status == 0, output
    found = re.findall(r"(\w+ \w+) difference (\S+) digest (\w+)", "".join(run.seen) + output)
    assert len(found) == 4
    assert all(float(difference) < 1e-6 for _, difference, _ in found), found
    return {case: digest for case, _, digest in found}


@pytest.mark.long
def test_a_lost_server_changes_no_byte(tmp_path: Path) -> None:
    digests = []
    for number, kills in enumerate((True, False)):
        path = tmp_path / str(number)
        path.mkdir()
        run = Run(path, SCRIPT.read_text(), str(ROOT), "50", "adam", flags=("--nservers", "3", "--replicas", "2"))
        if kills:
            run.until("freeze is under way")
            run.child("psdist_server").kill()
            run.until("ranks is under way")
            run.child("psdist_server").kill()
        digests.append(ended(run))
    assert digests[0] == digests[1]


@pytest.mark.long
def test_an_interrupted_run_continues_with_the_same_lags(tmp_path: Path) -> None:
    """The first run ends after 25 steps, in the middle of each case's schedule."""
    flags = ("--nservers", "2", "--run-id", "skipped", "--storage-path", str(tmp_path / "saved"))
    first = Run(tmp_path, SCRIPT.read_text(), str(ROOT), "25", "adam", flags=flags)
    ended(first)
    second = Run(tmp_path, SCRIPT.read_text(), str(ROOT), "50", "adam", flags=flags)
    digests = ended(second)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert digests == ended(Run(whole, SCRIPT.read_text(), str(ROOT), "50", "adam", flags=("--nservers", "1")))
