"""PyTorch's own tests of a backend: what passes with gloo passes with psdist, and the page lists every test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.test_tidy import ROOT
from tests.torch_suite import suite
from tests.torch_suite.page import page
from tests.torch_suite.suite import Outcome

RANKS = 4


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_what_passes_with_gloo_passes_with_psdist(tmp_path: Path) -> None:
    gloo, psdist = (suite.run(backend, suite.names(), RANKS, tmp_path / backend) for backend in ("gloo", "psdist"))
    assert sum(outcome.outcome == "passed" for outcome in gloo.values()) > 100
    assert {name: psdist[name] for name in suite.worse(gloo, psdist)} == {}


def test_the_page_lists_every_test() -> None:
    text = (ROOT / "docs/torch-suite.md").read_text(encoding="utf-8")
    listed = sorted(f"test_{name}" for name in re.findall(r"`(\w+)`", text.partition("## ")[2]))
    assert listed == suite.names(), "run python -m tests.torch_suite"


def test_the_worst_rank_decides(tmp_path: Path) -> None:
    ranks = (
        [["a", "passed", ""], ["b", "skipped", "no"], ["c", "passed", ""], ["d", "started", ""]],
        [["a", "failed", "why"], ["b", "skipped", "no"], ["c", "passed", ""], ["d", "passed", ""]],
    )
    for number, outcomes in enumerate(ranks):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, outcomes)), encoding="utf-8")
    merged = suite.merge(tmp_path, 2)
    assert merged == {
        "a": Outcome("failed", "why"),
        "b": Outcome("skipped", "no"),
        "c": Outcome("passed"),
        "d": Outcome("failed", "the process ended"),
    }
    gloo = dict.fromkeys(merged, Outcome("passed"))
    assert suite.worse(gloo, merged) == ["a", "b", "d"]
    assert suite.worse(merged, gloo) == []
    assert "| why | 1 | `a` |" in page(gloo, merged, "2.13", "4")
