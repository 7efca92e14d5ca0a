"""The launcher knows from a directory of snapshots whether a run can resume from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psdist import BSP, optim
from psdist.launcher.run_storage import has_commits, holds_weights, how_to_resume
from psdist.optim import Optimizer
from psdist.snapshots.records import spec_to_json
from psdist.types import ParametersSpec


def save(storage: Path, sequence: int, *optimizers: Optimizer) -> None:
    """Write the parts of a snapshot that the launcher reads."""
    specs = [ParametersSpec(f"set-{number}", optimizer, BSP()) for number, optimizer in enumerate(optimizers)]
    directory = storage / "snapshots" / f"snapshot-{sequence}"
    directory.mkdir(parents=True)
    manifest = {"parameters": [{"spec": spec_to_json(spec)} for spec in specs]}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (storage / "commits").mkdir(exist_ok=True)
    (storage / "commits" / f"{sequence:012}.json").write_text(json.dumps({"directory": directory.name}))


SHARED = optim.SGD(lr=0.0)


@pytest.mark.parametrize(
    ("optimizers", "holds"),
    [
        ((optim.Adam(),), True),
        ((optim.Mean(), SHARED, optim.SGD(lr=0.1)), True),
        ((optim.SGD(lr=0.0, overrides=(optim.override("*.bias", lr=0.1),)),), True),
        ((optim.SGD(lr=0.0, overrides=(optim.override("*.bias", weight_decay=0.1),)),), False),
        ((optim.Mean(), optim.Mean(), SHARED), False),
        ((), False),
    ],
)
def test_only_trained_sets_are_weights(tmp_path: Path, optimizers: tuple[Optimizer, ...], holds: bool) -> None:
    save(tmp_path, 1, optim.Mean() if holds else optim.Adam())
    save(tmp_path, 2, *optimizers)
    assert has_commits(str(tmp_path)) and holds_weights(str(tmp_path)) == holds
    said = how_to_resume(str(tmp_path), "digits")
    assert ("to resume: psdist run --run-id digits, with the same arguments" in said) == holds
    assert ("start it again from its own checkpoint" in said) != holds


def test_directories_that_cannot_be_read_are_left_to_the_scheduler(tmp_path: Path) -> None:
    assert not has_commits(str(tmp_path)) and not has_commits("") and not has_commits("s3://bucket/run")
    assert holds_weights(str(tmp_path))
    save(tmp_path, 1, optim.Mean())
    manifest = tmp_path / "snapshots" / "snapshot-1" / "manifest.json"
    for damaged in ("{", "[]", '{"parameters": [{"spec": {}}]}', '{"parameters": 3}'):
        manifest.write_text(damaged)
        assert holds_weights(str(tmp_path)), damaged
    manifest.unlink()
    assert holds_weights(str(tmp_path))
