"""Progress bars: shown on a terminal, silent elsewhere; and the progress of ``psdist drain``."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from psdist.cli import servers
from psdist.cli.terminal import bytes_bar, count_bar
from psdist.v1.scheduler_pb2 import DrainResponse


class Tty(io.StringIO):
    """A terminal that keeps its output."""

    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """Make output and errors a terminal until the end of the test."""
    shown = Tty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, shown)
    return shown


def test_a_bar_shows_bytes_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with bytes_bar("saving") as bar:
        bar(500, 1000)
    assert "saving" in terminal.getvalue() and "0.5/1.0 kB" in terminal.getvalue()


def test_a_bar_shows_counts_and_a_literal_note() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with count_bar("draining", "shards", console) as bar:
        bar(3, 8, "[red]waiting for server-2")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "3/8" in shown and "shards" in shown and "[red]waiting for server-2" in shown


def test_elsewhere_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with bytes_bar("saving") as bar, count_bar("draining", "shards") as count:
        bar(500, 1000)
        count(1, 2, "")
    assert capsys.readouterr() == ("", "")


ANSWERS = [
    DrainResponse(shards_left=2, shards_total=2, waiting_for="for copies"),
    DrainResponse(shards_left=1, shards_total=2),
    DrainResponse(shards_left=1, shards_total=2),
    DrainResponse(shards_total=2, drained=True),
]


def test_a_drain_prints_each_line_once_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with servers._drain_progress("server-1", "table") as report:
        for answer in ANSWERS:
            report(answer)
    assert capsys.readouterr().out == "0 of 2 shards moved; waiting for copies\n1 of 2 shards moved\n"
    with servers._drain_progress("server-1", "json") as report:
        report(ANSWERS[0])
    assert capsys.readouterr() == ("", "")


def test_a_drain_has_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with servers._drain_progress("server-1", "table") as report:
        for answer in ANSWERS[:2]:
            report(answer)
    assert "draining server-1" in terminal.getvalue() and "1/2" in terminal.getvalue()
