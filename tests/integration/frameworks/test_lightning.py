"""``PsdistStrategy`` beside Lightning in a single process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import ConfigurationError, InvalidArgumentError
from tests.support.framework_runs import Runs, difference, programs_of
from tests.support.nursery import Nursery

# Imported by the nursery alone: every process of the tests would take seconds for it.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery("tests.support.lightning_work")
    yield made
    made.close()


@pytest.fixture
def runs(nursery: Nursery, tmp_path: Path) -> Runs:
    return Runs(nursery, tmp_path)


def check_equal(expected: dict[str, Any], found: dict[str, Any], *, with_losses: bool = True) -> None:
    assert difference(expected["weights"], found["weights"]) < 1e-5
    assert found["step"] == expected["step"]
    if with_losses:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("is_manual", [False, pytest.param(True, marks=pytest.mark.long)])
def test_training_equals_a_single_process(runs: Runs, tmp_path: Path, is_manual: bool) -> None:
    """Check shuffling, accumulation, clipping, the scheduler, validations, and the loss of a server."""
    settings: dict[str, Any] = {"is_manual": is_manual}
    expected = runs.alone("fit", directory=str(tmp_path / "alone"), batch=8, uses=False, **settings)
    for one in runs.together("fit", 1, directory=str(tmp_path / "one"), batch=8, **settings):
        check_equal(expected, one)
    found = runs.together(
        "fit", 2, directory=str(tmp_path / "two"), batch=4, servers=2, replicas=2, kills_server_at=5, **settings
    )
    for one in found:
        check_equal(expected, one)
    assert [one["main"] for one in found] == [True, False]


@pytest.mark.parametrize("is_manual", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_interrupted_training_resumes(runs: Runs, tmp_path: Path, is_manual: bool) -> None:
    """Kill all workers after a checkpoint, which Lightning resumes from at the start of a data epoch."""
    settings: dict[str, Any] = {"is_manual": is_manual, "shuffle": False}
    expected = runs.alone("fit", directory=str(tmp_path / "alone"), batch=8, uses=False, **settings)
    parts: dict[str, Any] = {"directory": str(tmp_path / "parts"), "batch": 4, "storage": True, **settings}
    runs.together("fit", 2, kill=[6, [0]], codes=(-9, -9), **parts)
    for one in runs.together("fit", 2, resume=True, **parts):
        check_equal(expected, one, with_losses=False)


def test_the_example_runs(runs: Runs, tmp_path: Path) -> None:
    trained = runs.together("program", 2, path="examples/lightning_fit.py", directory=str(tmp_path))
    assert float(re.findall(r"accuracy ([\d.]+)% after 160 steps\n", trained[0])[0]) > 80, trained
    assert trained[1] == ""


@pytest.mark.long  # A shorter form of the example.
def test_the_program_of_the_page_runs(runs: Runs, tmp_path: Path) -> None:
    (path,) = programs_of("frameworks.md", "psdist.lightning", tmp_path)
    runs.together("program", 2, path=path, directory=str(tmp_path))


def test_ranks_of_other_launchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from psdist.lightning import PsdistStrategy

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE is 2.*'psdist run'"):
        PsdistStrategy().setup_environment()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("psdist.lightning.strategy.torch_group_size", lambda: 2)
    with pytest.raises(InvalidArgumentError, match=r"torch\.distributed has several ranks"):
        PsdistStrategy().setup_environment()
