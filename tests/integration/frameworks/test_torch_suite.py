"""PyTorch's own tests of a backend: what passes with gloo passes with psdist, and the page lists every test."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.tree import ROOT
from tests.torch_suite import files, suite
from tests.torch_suite.page import Files, page
from tests.torch_suite.suite import Outcome

RANKS = 4


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_what_passes_with_gloo_passes_with_psdist(tmp_path: Path) -> None:
    gloo, psdist = (suite.run(backend, suite.names(), RANKS, tmp_path / backend) for backend in ("gloo", "psdist"))
    assert sum(outcome.outcome == "passed" for outcome in gloo.values()) > 100
    assert {name: psdist[name] for name in suite.worse(gloo, psdist)} == {}


def test_the_page_lists_every_test() -> None:
    text = (ROOT / "docs/internals/torch-suite.md").read_text(encoding="utf-8")
    listed = sorted(f"test_{name}" for name in re.findall(r"`(\w+)`", text.partition("### ")[2]))
    assert listed == suite.names(), "run make torch-suite"
    assert re.findall(r"^- `(\S+\.py)`: ", text, re.MULTILINE) == list(files.FILES)
    assert set(re.findall(r"`(\w+\.test_\w+)`", text)) <= set(files.REASONS)


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
    text = page(gloo, merged, Files("2.6", {"one.py": gloo}, {"one.py": merged}), "2.13", "4")
    assert "| why | 1 | `a` |" in text
    counts = "1 passed with both, 2 passed with gloo only, 1 skipped"
    assert f"- `one.py`: {counts}\n- all: {counts}\n" in text and "| `a`, `b`, `d` | none |" in text


_FILE = """
import os
import unittest

import torch
import torch.distributed as c10d
from torch.testing._internal.common_distributed import MultiProcessTestCase


class Group(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_a(self):
        store = c10d.FileStore(self.file_name, 2)
        c10d.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        assert c10d.get_backend() == "gloo"
        group = c10d.ProcessGroupGloo(store, self.rank, 2)
        total = torch.ones(1)
        group.allreduce(total).wait()
        assert total.item() == 2
        assert type(group).__name__ == "LinkGroup"


class Alone(unittest.TestCase):
    def test_b(self):
        os._exit(3)

    def test_c(self):
        self.skipTest("why")

    def test_d(self):
        raise AssertionError("wrong")
"""


def test_a_file_is_run_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "test/distributed/test_one.py"
    path.parent.mkdir(parents=True)
    path.write_text(_FILE)
    found = files.run("psdist", path, tmp_path / "log")
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert found.pop("Group.test_a") == Outcome("passed"), log
    assert "AssertionError: wrong" in found.pop("Alone.test_d").reason
    assert found == {"Alone.test_b": Outcome("failed", "the process ended"), "Alone.test_c": Outcome("skipped", "why")}
    path.write_text("import nothing_of_this_name")
    assert files.run("gloo", path, tmp_path / "log")["test_one"].outcome == "failed"


def test_outcomes_are_kept_for_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = {"a": Outcome("failed", "why"), "b": Outcome("passed")}, {"a": Outcome("passed")}
    suite.KeptOutcomes(tmp_path, False).get("psdist", "folder/one.py", lambda: first)
    assert suite.KeptOutcomes(tmp_path, True).get("psdist", "folder/one.py", lambda: second) == first
    assert suite.KeptOutcomes(tmp_path, True).get("gloo", "folder/one.py", lambda: second) == second
    assert suite.KeptOutcomes(tmp_path, False).get("psdist", "folder/one.py", lambda: second) == second
    for place in ("psdist", "servers", "tests/torch_suite"):
        shutil.copytree(ROOT / place, tmp_path / place, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    assert suite.KeptOutcomes(tmp_path, True).get("psdist", "folder/one.py", lambda: first) == second
    (tmp_path / "psdist/errors.py").write_text("")
    assert suite.KeptOutcomes(tmp_path, True).get("gloo", "folder/one.py", lambda: first) == second
    assert suite.KeptOutcomes(tmp_path, True).get("psdist", "folder/one.py", lambda: first) == first


def test_without_the_source_the_suite_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DIRECTORY", tmp_path)
    monkeypatch.setattr(files, "_KEYRING", tmp_path / "keyring")
    with pytest.raises(files.SourceUnavailableError, match=r"this is no Debian: it lacks .*keyring"):
        files.source()
