"""The launcher's view of its workers' metrics, and the progress line on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from psdist.errors import ConfigurationError
from psdist.launcher.events import ProcessKey
from psdist.launcher.output import STDERR, STDOUT, Output, Routing
from psdist.launcher.run_metrics import MetricsOptions, RunMetrics
from psdist.monitoring.metrics import PhaseTimes, WeightedSum, WorkerInterval, to_line
from psdist.wire.limits import METRIC_LINE_BYTES_MAX

WORKER = ProcessKey("worker", 0)


class FakeConsole:
    """Console that keeps its text; each message sets ``changed``."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.is_terminal = is_terminal
        self.said: list[str] = []
        self.progress: list[str] = []
        self.changed = asyncio.Event()

    def say(self, message: str) -> None:
        self.said.append(message)
        self.changed.set()

    def show_progress(self, message: str) -> None:
        self.progress.append(message)
        self.changed.set()


def interval(rank: int, step: int, samples: float = 10, loss: float = 1.0) -> WorkerInterval:
    return WorkerInterval(
        rank, step, 1, samples, {"loss": WeightedSum(loss * samples, samples)}, PhaseTimes(1, 0, 1, 0), 100, 200
    )


def started(console: FakeConsole, directory: Path | None, workers: int = 1, **options: Any) -> RunMetrics:
    metrics = RunMetrics(MetricsOptions(**options), "run", directory, range(workers))
    metrics.start(cast(Output, console))
    return metrics


def report(metrics: RunMetrics, *intervals: WorkerInterval) -> None:
    for one in intervals:
        os.write(metrics.descriptor, to_line(one))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


async def test_workers_are_combined_as_soon_as_all_have_reported(tmp_path: Path) -> None:
    console = FakeConsole(True)
    metrics = started(console, tmp_path, 2, metrics_interval_seconds=600)
    report(metrics, interval(1, 3, 30), interval(1, 4, 30), interval(0, 4, 20, 5.0))
    await asyncio.wait_for(console.changed.wait(), 60)
    (line,) = lines_of(tmp_path)
    assert line["step"] == 4 and line["loss"] == 2.0 and line["samples"] == 80 and line["workers"] == 2
    assert line["reports"] == 3 and line["samples_per_second"] == 60 / 4 + 20 / 2 and line["push_bytes"] == 300
    assert console.progress[0].startswith("step 4  loss 2  25 samples/s  2,000 ms (compute 1,000, ")
    report(metrics, interval(1, 5))
    metrics.close()
    metrics.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [4, 5]
    assert console.progress[-1] == "" and console.said[-1].startswith("step 5  ")


async def test_a_worker_that_is_late_is_not_waited_for_for_long(tmp_path: Path) -> None:
    """Check that a worker is no longer expected the second time."""
    console = FakeConsole(True)
    metrics = started(console, tmp_path, 2, metrics_interval_seconds=0)
    report(metrics, interval(0, 1))
    await asyncio.wait_for(console.changed.wait(), 60)
    assert [line["workers"] for line in lines_of(tmp_path)] == [1]
    metrics._options = MetricsOptions(metrics_interval_seconds=600)
    report(metrics, interval(0, 2), interval(0, 3))
    metrics._receiver._read()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    metrics.close()


async def test_what_is_no_line_is_left_out_and_said_once(tmp_path: Path) -> None:
    console = FakeConsole()
    metrics = started(console, tmp_path)
    for data in (b"hello\n{}\n", b"x" * (METRIC_LINE_BYTES_MAX + 1), b"\n", to_line(interval(0, 1))):
        os.write(metrics.descriptor, data)
        metrics._receiver._read()
    metrics.close()
    assert len(console.said) == 2
    assert "a line of metrics cannot be read" in console.said[0] and console.said[1].startswith("step 1  ")
    assert [line["step"] for line in lines_of(tmp_path)] == [1]


async def test_progress_can_be_off_and_plain_and_scripts_may_report_nothing() -> None:
    for progress, steps, said in (("off", 2, 0), ("plain", 2, 1), ("auto", 0, 0)):
        console = FakeConsole(True)
        metrics = started(console, None, progress=progress)
        report(metrics, *(interval(0, step) for step in range(steps)))
        metrics.close()
        assert len(console.said) == said and not console.progress


async def test_a_file_that_fails_is_reported_and_the_run_goes_on() -> None:
    metrics, console = RunMetrics(MetricsOptions(), "run", None, [0]), FakeConsole()

    class Full:
        def start(self, run_id: str) -> None: ...

        def log(self, values: object, step: int) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    metrics._add(Full())
    metrics.start(console)
    os.write(metrics.descriptor, to_line(interval(0, 1)))
    metrics.close()
    assert console.said[0] == "Full no longer receives metrics: No space left on device"
    assert console.said[1].startswith("step 1  ")


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="TensorBoard files cannot be written"):
        RunMetrics(MetricsOptions(tensorboard=tmp_path / "file"), "run", None, [0])


def test_nodes_have_files_of_their_own(tmp_path: Path) -> None:
    RunMetrics(MetricsOptions(tensorboard=tmp_path / "tb"), "run", tmp_path / "logs", [4], "node-2").close()
    assert (tmp_path / "logs" / "metrics-node-2.jsonl").exists() and (tmp_path / "tb" / "run" / "node-2").is_dir()


# --- the line on a terminal -------------------------------------------------------------------------------------------


class Terminal:
    """Terminal of 40 columns. stream: its input, which ``shown`` reads."""

    def __init__(self) -> None:
        self._reader, descriptor = pty.openpty()
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        self.stream = os.fdopen(descriptor, "w")

    def shown(self) -> str:
        self.stream.write("\0")  # The system delivered the output piece by piece: this is the last of it.
        self.stream.flush()
        data = b""
        while not data.endswith(b"\0"):
            data += os.read(self._reader, 4096)
        return data[:-1].decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.stream.close()
        os.close(self._reader)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    opened = Terminal()
    yield opened
    opened.close()


def test_lines_stand_above_the_progress_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr("psdist.launcher.output.stamped", lambda message: f"12:00 {message}")
    output = Output(Routing(), lambda rank: rank)
    assert output.is_terminal
    output.clear_lines(WORKER)
    output.show_progress("step 1  " + "x" * 80)
    output.show_lines(WORKER, STDOUT, ["hello"])
    output.show_progress("step 2")
    output.show_progress("")
    output.say("the end")
    erase, cut = "\r\x1b[K", "12:00 step 1  " + "x" * 25
    assert len(cut) == 39
    assert terminal.shown() == (f"{erase}{cut}{erase}[worker 0] hello\n{cut}{erase}12:00 step 2{erase}12:00 the end\n")


def test_a_bar_of_the_first_worker_stands_above_the_progress_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr("psdist.launcher.output.stamped", lambda message: message)
    output = Output(Routing(), lambda rank: rank)
    output.clear_lines(WORKER)
    output.show_bar(ProcessKey("worker", 1), "50%")
    output.show_bar(WORKER, "\x1b[32m10%\x1b[0m")
    output.show_progress("step 1")
    output.show_lines(WORKER, STDERR, ["hello"])
    output.show_bar(WORKER, "20%")
    output.show_bar(WORKER, "20%")
    output.show_bar(WORKER, "")
    output.show_progress("")
    erase, both, up = "\r\x1b[K", "[worker 0] 10%\nstep 1", "\x1b[A\x1b[K"
    first = f"{erase}[worker 0] 10%{erase}{both}{erase}{up}[worker 0] hello\n{both}"
    assert terminal.shown() == f"{first}{erase}{up}[worker 0] 20%\nstep 1{erase}{up}step 1{erase}"
    output.is_plain = True
    output.show_bar(WORKER, "30%")
    assert terminal.shown() == "" and not output.is_terminal


def test_another_stream_is_not_disturbed(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    output = Output(Routing(), lambda rank: rank)
    output.clear_lines(WORKER)
    output.show_progress("step 1")
    assert "step 1" in terminal.shown()
    output.show_lines(WORKER, STDOUT, ["hello"])
    assert capsys.readouterr().out == "[worker 0] hello\n"


def test_a_dumb_terminal_and_a_file_get_no_line_in_place(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(Routing(), lambda rank: rank)
    assert not output.is_terminal, "it is pytest's file"
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    assert output.is_terminal
    monkeypatch.setenv("TERM", "dumb")
    assert not output.is_terminal
