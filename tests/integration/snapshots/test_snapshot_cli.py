"""``psdist run`` with real processes and a storage: it saves at its end, resumes there, and refuses impossible
requests.

Each run is a process tree of its own. Scripts communicate by lines, and tests wait for lines.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounted import Mount
from tests.support.programs import Programs, until

_SCRIPT = """
import os, sys
import numpy as np, psdist
gradient = {"w": np.ones((300, 200), np.float32)}
with psdist.init() as context:
    model = context.client.parameters(
        "renamed" if "rename" in sys.argv else "model",
        init={"w": np.zeros((300, 200), np.float32)},
        optimizer=psdist.optim.SGD(lr=1.0),
        consistency=psdist.BSP(),
    )
    print("begins at step", model.step)
    for _ in range(3):
        values = model.push_pull(gradient)
    print("is at step", model.step, "with", values["w"][0, 0])
    if "break" in sys.argv:
        os.rename("broken", "renamed")
        open("broken", "x").close()
    while "hold" in sys.argv:
        model.push_pull(gradient)
"""


class Stage(Programs):
    """A directory with the script, and the ``psdist`` commands started in it, as by a user who knows no flags."""

    def __init__(self, path: Path, script: str) -> None:
        super().__init__(path, script)
        del self.environ["PSDIST_STORAGE_PATH"]

    def train(self, *arguments: str) -> tuple[int, str]:
        """Start ``psdist run`` of run ``digits``, with one server."""
        return self.run("psdist", "run", "--run-id", "digits", "--nservers", "1", *arguments)

    def snapshots(self, storage: str = "psdist-runs/digits") -> list[dict[str, Any]]:
        """Return the rows of ``psdist snapshot list``, newest first."""
        status, text = self.run("psdist", "snapshot", "list", storage, "--format", "json")
        assert status == 0, text
        found: list[dict[str, Any]] = json.loads(text)
        return found


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with closing(Stage(tmp_path, _SCRIPT)) as made:
        yield made


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mounted = Mount(tmp_path / "disk", "size=1m")
    yield mounted
    mounted.close()


def test_a_run_saves_on_demand_and_at_its_end_and_the_same_command_goes_on(stage: Stage) -> None:
    run = stage.start("psdist", "run", "--run-id", "digits", "--nproc-per-node", "2", "train.py", "hold")
    until(run, "is at step")
    status, text = stage.run("psdist", "snapshot", "save", "--format", "json")
    saved = json.loads(text)
    assert status == 0 and not saved["unchanged"] and saved["steps"]["model"] >= 3 and saved["reason"] == "on demand"

    told = json.loads(stage.run("psdist", "status", "--format", "json")[1])["snapshots"]
    assert told["storage"] == str(stage.path / "psdist-runs" / "digits")
    assert told["policy"] == "every 10 min and at the end, the last 3 kept"
    assert [one["directory"] for one in told["committed"]] == [saved["directory"]]
    assert told["failed"] == 0 and told["restored"] is None
    status, text = stage.run("psdist", "status")
    assert status == 0 and saved["directory"] in text and "snapshots: every 10 min and at the end" in text, text

    # `timeout` sends it twice.
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGTERM)
    text, _ = run.communicate()
    assert run.returncode == 143 and re.search(r"\[snapshot\] \d\d:\d\d:\d\d step", text), text
    where = stage.path / "psdist-runs" / "digits"
    assert f"snapshots are in {where}; to resume: psdist run --run-id digits," in text, text
    last, first = stage.snapshots()
    step = last["steps"]["model"]
    assert (
        last["reason"] == "at the end" and step > saved["steps"]["model"] and first["directory"] == saved["directory"]
    )

    status, text = stage.train("train.py")
    assert status == 0 and f"begins at step {step}\n" in text and f"is at step {step + 3} with -{step + 3}.0" in text, (
        text
    )
    assert [one["steps"]["model"] for one in stage.snapshots()][:2] == [step + 3, step]
    assert stage.run("psdist", "snapshot", "verify", "psdist-runs/digits")[0] == 0

    # The location of snapshots is printed once: at the start if some existed, else at the end.
    place = f"in {stage.path / 'psdist-runs' / 'digits'}"
    assert text.count(place) == 1, text

    status, text = stage.train("--fresh", "train.py")
    assert status == 2 and "has 3 snapshots" in text and "--require-empty-storage" in text, text
    assert "the run continues" not in text and "begins at" not in text


def test_another_script_under_a_run_id_with_snapshots_is_refused_at_its_start(stage: Stage) -> None:
    status, text = stage.train("train.py")
    assert status == 0 and text.splitlines()[-1].endswith(f"snapshots are in {stage.path / 'psdist-runs' / 'digits'}")
    status, text = stage.train("train.py", "rename")
    assert status == 78 and "which has 'model' and not 'renamed'" in text and "another --run-id" in text, text


@pytest.mark.long
def test_a_storage_that_breaks_costs_the_snapshot_and_nothing_else(stage: Stage) -> None:
    run = stage.start("psdist", "run", "--run-id", "digits", "--storage-path", "broken", "train.py", "hold")
    until(run, "is at step")
    (stage.path / "broken").rename(stage.path / "aside")
    (stage.path / "broken").touch()
    status, text = stage.run("psdist", "snapshot", "save")
    assert status == 1 and "broken" in text and "training continues" in text, text
    told = json.loads(stage.run("psdist", "status", "--format", "json")[1])["snapshots"]
    assert told["failed"] >= 1 and "broken" in told["last_failure"] and told["committed"] == []
    run.send_signal(signal.SIGTERM)
    text, _ = run.communicate()
    assert run.returncode == 143 and "not saved" in text and "broken" in text, text
    # Scripts that ended well do not hide it.
    (stage.path / "broken").unlink()
    status, text = stage.train("--storage-path", "broken", "train.py", "break")
    assert status == 74 and "is at step 3" in text and "not saved" in text, text


@pytest.mark.long
def test_a_storage_that_is_not_for_the_run_or_cannot_be_read_ends_it_at_once(stage: Stage) -> None:
    assert stage.train("--storage-path", "mine", "train.py")[0] == 0
    status, text = stage.run("psdist", "run", "--run-id", "other", "--storage-path", "mine", "train.py")
    assert status == 2 and "--run-id digits" in text, text
    (stage.path / "file").touch()
    status, text = stage.train("--storage-path", "file/below", "train.py")
    assert status == 69 and "file/below" in text and len(text.splitlines()) == 1, text


@pytest.mark.parametrize(("how", "reason"), [("full", "No space left"), ("read-only", "Read-only file system")])
def test_a_storage_that_cannot_be_written_ends_a_run_before_it_trains(
    stage: Stage, mount: Mount, how: str, reason: str
) -> None:
    if how == "full":
        mount.fill()
    else:
        assert mount.remount("size=1m", readonly=True)
    before = sorted(path.name for path in mount.path.iterdir())
    status, text = stage.train("--storage-path", str(mount.path / "runs"), "train.py")
    assert status == 69 and "begins at" not in text, text
    told = f"the storage {mount.path / 'runs'} cannot be written: {reason}"
    assert told in text and "--storage-path" in text and len(text.splitlines()) == 1, text
    assert sorted(path.name for path in mount.path.iterdir()) == before


@pytest.mark.long  # What a run does without a storage is seen in most other tests.
def test_who_did_not_ask_for_snapshots_trains_without_where_they_cannot_be_written(stage: Stage, mount: Mount) -> None:
    command = ("run", "--run-id", "digits", "--nservers", "1", str(stage.path / "train.py"))
    assert mount.remount("size=1m", readonly=True)
    status, text = stage.run("psdist", *command, cwd=mount.path)
    assert status == 0 and "is at step 3 with -3.0" in text, text
    storage = mount.path / "psdist-runs" / "digits"
    assert text.count(f"training continues without: the storage {storage} cannot be written: Read-only") == 1, text
    assert "[snapshot]" not in text and "not saved" not in text, text
    # Existing snapshots still count.
    assert mount.remount("size=1m")
    assert stage.run("psdist", *command, cwd=mount.path)[0] == 0
    assert mount.remount("size=1m", readonly=True)
    status, text = stage.run("psdist", *command, cwd=mount.path)
    assert status == 0 and "begins at step 3\n" in text and text.count("training continues without") == 1, text
    assert "[snapshot]" not in text and "not saved" not in text, text
