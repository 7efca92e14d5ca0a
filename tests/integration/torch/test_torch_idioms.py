"""Idioms of torch scripts: each equals torch, or is refused with the remedy, as ``docs/torch-features.md`` says.

One worker runs in this process, two under ``psdist run``. A parameter set costs the more the more a run has, so each
section has a run of its own. ``make test`` runs every twentieth idiom.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from psdist.client.context import Context
from tests.idioms.script import DDP, OPTIMIZER
from tests.idioms.table import PAGE, SECTIONS, Idiom, Result, compare, load, page
from tests.support.launched import Run
from tests.support.tree import ROOT

SCRIPT = ROOT / "tests/support/torch_idioms.py"
IDIOMS = load()
#: A sample over all sections.
SAMPLE = list(IDIOMS)[::20]

# Some idioms are deprecated by torch, and some make it warn.
pytestmark = pytest.mark.filterwarnings("ignore")


def complaints(one: Idiom, face: str, workers: int, results: list[Result]) -> list[str]:
    """Return the differences between an idiom's results and its declared outcome."""
    outcome = (one.optimizer if face == OPTIMIZER else one.ddp)[workers - 1]
    found = [outcome.complaint(result) for result in results]
    return [f"{one.name} with {face} on {workers}: {text}" for text in found if text]


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.idioms"


def test_a_result_that_differs_is_seen() -> None:
    one = IDIOMS["plain_loop"]
    assert complaints(one, DDP, 1, [Result(1e-7)]) == []
    assert len(complaints(one, DDP, 2, [Result(1e-5), Result(float("inf")), Result(error="refused")])) == 3


@pytest.mark.parametrize("section", [pytest.param(section, marks=pytest.mark.long) for section in SECTIONS])
def test_one_worker_trains_as_torch_does(alone: Context, section: str) -> None:
    chosen = [one for one in IDIOMS.values() if one.section == section]
    found = [
        text
        for one in chosen
        for face in (OPTIMIZER, DDP)
        for text in complaints(one, face, 1, [compare(one, face, alone)])
    ]
    assert not found, "\n".join(found)


def on_two_workers(path: Path, names: list[str]) -> list[str]:
    """Run idioms under ``psdist run`` and return the differences from their declared outcomes."""
    flags = ("--nservers", "1", "--max-restarts", "0")
    status, output = Run.ended(path, SCRIPT.read_text(), str(ROOT), *names, flags=flags, timeout=360)
    assert status == 0, output
    results: dict[tuple[str, str], list[Result]] = {}
    for line in re.findall(r"^\[worker \d\] (\{.*\})$", output, re.M):
        row = json.loads(line)
        key = row["idiom"], row["face"]
        results.setdefault(key, []).append(Result(row["difference"], row["error"]))
    assert [len(results.get((name, face), [])) for name in names for face in (OPTIMIZER, DDP)] == [2] * 2 * len(names)
    return [text for (name, face), some in results.items() for text in complaints(IDIOMS[name], face, 2, some)]


def test_two_workers_train_as_torch_does(tmp_path: Path) -> None:
    found = on_two_workers(tmp_path, SAMPLE)
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("section", SECTIONS)
def test_two_workers_train_as_torch_does_in_all_idioms(tmp_path: Path, section: str) -> None:
    found = on_two_workers(tmp_path, [name for name, one in IDIOMS.items() if one.section == section])
    assert not found, "\n".join(found)
