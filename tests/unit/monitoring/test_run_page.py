"""The page with a saved run inside, and the file that ``psdist report`` finds and writes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import io
import json
import os
import re
import sys
from argparse import Namespace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from psdist.cli import report
from psdist.cli.terminal import UnwritableError
from psdist.errors import ConfigurationError, SchedulerUnreachableError, SnapshotCorruptError, StorageError
from psdist.monitoring import run_summary as form
from psdist.monitoring.dashboard import content, saved_page
from psdist.monitoring.run_state import EVENTS_SAVED, saved_run
from psdist.snapshots.storage import LocalStorage

SCRIPTS = ("uplot.js", "dashboard.js")
EVIL = '<script>alert("1")</script>'


def summary(run_id: str = "digits", points: int = 20, text: str = "worker-1 was lost") -> form.Summary:
    return form.Summary(
        run_id=run_id,
        state="ended",
        started=1e9,
        written=1e9 + points,
        curves=form.RunCurves(
            1.0,
            [
                form.Point(
                    time=1e9 + n,
                    seconds=1.0,
                    steps={text: 3.0},
                    samples=64.0,
                    bytes=5e6,
                    reported={}
                    if n == 5
                    else {"accuracy": form.MeanValue(0.1 * n, 1.0), "loss": form.MeanValue(-1.0 / (n + 1), 1.0)},
                )
                for n in range(points)
            ],
        ),
        workers={text: form.WorkerPart(form.Phases(3.0, 1.0), 60.0, 1.0, 5e6, 5e6), "idle": form.WorkerPart()},
        members=[form.MemberPart(id=text, role="worker", state="lost", host=text, reason=text)],
        parameters=[form.ParametersPart(text, "ready", 2, 100, 1, "bsp", text, 60)],
        snapshots=[form.SnapshotPart(text, {text: 5}, 1000, 1e9, 0.1, text)],
        history=form.HistoryPart(0, [form.EventPart(1, 1e9, "loss", True, text)]),
        environment={"processor": text},
    )


class Checker(HTMLParser):
    """Collects tags, attributes that could load something, and the contents of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "srcset", "onload", "onclick")
        self.loads += [value or "" for name, value in attrs if name in names]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and data.strip():
            self.scripts.append(data)


def page_of(found: form.Summary) -> str:
    return saved_page(saved_run(found))


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    return checker


def test_the_page_is_the_dashboards_and_loads_nothing() -> None:
    found = checked(page_of(summary()))
    assert set(found.loads) == {"#main", "data:,"} and found.tags.count("link") == 1  # Its empty icon.
    data, *scripts = found.scripts
    assert [one.encode() for one in scripts] == [content(name) for name in SCRIPTS]
    run = json.loads(data)
    assert run["state"]["workers"]["worker-1 was lost"]["phases"] == [75, 25, 0, 0]
    assert run["state"]["facts"]["last seen"] == "2001-09-09 01:47:00 UTC"
    assert run["state"]["problems"][0]["text"] == "2001-09-09 01:46:40 UTC: worker-1 was lost"
    assert len(run["whole"]) == 20 and run["whole"][6]["reported"]["loss"]["value"] == -1 / 7


def test_its_policy_allows_its_own_scripts_alone() -> None:
    page = page_of(summary())
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    digests = [base64.b64encode(hashlib.sha256(content(name)).digest()).decode() for name in SCRIPTS]
    assert policy.endswith("script-src " + " ".join(f"'sha256-{one}'" for one in digests))
    assert "default-src 'none'" in policy


def test_texts_from_the_run_are_data() -> None:
    page = page_of(summary(run_id="digits", text=EVIL))
    assert EVIL not in page and page.count("\\u003cscript>") >= 10
    found = checked(page)
    assert found.tags.count("script") == 3 and EVIL in json.loads(found.scripts[0])["state"]["workers"]


@pytest.mark.parametrize("points", [0, 1])
def test_a_run_that_has_hardly_trained_has_a_page(points: int) -> None:
    assert "</html>" in page_of(summary(points=points))


def test_the_largest_page_is_below_a_megabyte() -> None:
    big = summary(points=form.POINTS_KEPT)
    for point in big.curves.points:
        point.reported = {f"name-{n}": form.MeanValue(n * point.time, 1.0) for n in range(form.NAMES_KEPT)}
        point.steps = {f"set-{n}": 3.0 for n in range(form.NAMES_KEPT)}
    big.workers = {f"worker-{n}": form.WorkerPart(form.Phases(1.0, 1.0, 1.0, 1.0)) for n in range(form.MEMBERS_KEPT)}
    big.history.events = [form.EventPart(n, 1e9, "loss", True, "x" * 100) for n in range(form.EVENTS_KEPT)]
    assert len(page_of(big)) < 1_000_000
    assert saved_run(big)["state"]["events_omitted"] == form.EVENTS_KEPT - EVENTS_SAVED


def given(**changes: Any) -> Namespace:
    values = {"scheduler": "", "run_id": "", "token_file": "", "format": "table", "timeout": 1.0, "storage_path": ""}
    return Namespace(**values | {"out": "-"} | changes)


def stored(path: Path, *ids: str) -> str:
    storage = LocalStorage(str(path))
    for run_id in ids:
        data = form.to_bytes(summary(run_id))
        asyncio.run(storage.create(form.path_of(run_id, 7, data), data))
    return str(path)


def test_a_finished_run_is_found_in_its_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, out = stored(tmp_path / "storage", "digits"), tmp_path / "run.html"
    assert report.run(given(storage_path=place, out=str(out)), {}) == 0
    assert '"id":"digits"' in out.read_text() and "run digits (ended)" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["run.html"]
    assert report.run(given(storage_path=place, format="json", out=str(out)), {}) == 0
    assert json.loads(out.read_text())["curves"]["points"][0]["steps"] == {"worker-1 was lost": 3.0}
    with pytest.raises(ConfigurationError, match="cannot be written: No such file"):
        report.run(given(storage_path=place, out=str(tmp_path / "missing" / "run.html")), {})


def test_a_run_without_a_summary_is_named(tmp_path: Path) -> None:
    place = stored(tmp_path / "storage", "digits", "faces")
    with pytest.raises(ConfigurationError, match="choose one of digits, faces by --run-id"):
        report.run(given(storage_path=place), {})
    with pytest.raises(StorageError, match="no summary of run 'other': it has digits, faces"):
        report.run(given(storage_path=place, run_id="other"), {})
    with pytest.raises(StorageError, match="no summary of a run"):
        report.run(given(storage_path=str(tmp_path / "empty")), {})


def test_the_default_storage_of_a_finished_run_is_found_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    stored(tmp_path / "psdist-runs" / "digits-1", "digits-1")
    assert report.run(given(run_id="digits-1", out="out.html"), environ) == 0
    with pytest.raises(SchedulerUnreachableError, match="For a finished run pass --storage-path"):
        report.run(given(run_id="digits-2", out="out.html"), environ)


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    place = stored(tmp_path, "digits")
    (path,) = (tmp_path / "summaries" / "digits").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(SnapshotCorruptError, match=r"digits/000000000007-.* is not what was written"):
        report.run(given(storage_path=place), {})


def test_a_device_or_directory_is_not_replaced_by_the_report(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    place = stored(tmp_path / "folder", "digits")
    for name in ("pipe", "folder"):
        with pytest.raises(ConfigurationError, match="is no file: give the name of a file, or - for standard output"):
            report.run(given(storage_path=place, out=str(tmp_path / name)), {})
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 2


def test_lost_output_is_the_same_error_as_of_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str, /) -> int:
            raise UnwritableError(28, "No space left on device", f"stdout, {len(text)} characters")

    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.raises(UnwritableError):
        report.run(given(storage_path=stored(tmp_path, "digits")), {})
