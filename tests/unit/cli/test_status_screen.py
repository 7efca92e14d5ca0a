"""The screen of ``psdist status --watch``, as a terminal shows it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
import threading
from argparse import Namespace
from typing import Any

import pyte
import pytest
from rich.console import Console

from psdist.cli import status
from psdist.cli.status import Screen, screen_lines
from psdist.cli.target import SchedulerChoice
from psdist.errors import SchedulerUnreachableError
from psdist.monitoring.run_json import status_json
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2 as pb

WIDTH, HEIGHT = 80, 24
LONG = "the path to its arena cannot be mapped here because processes of another user own it"


def answer(servers: int = 4, workers: int = 8) -> pb.GetStatusResponse:
    """Status of a run: its members are in no order, and one is restarting."""
    report = pb.GetStatusResponse(
        run_id="digits", phase="training 'model' at version 1234", psdist_version="0.1.0", epoch=9, replicas=2
    )
    for number in reversed(range(servers)):
        report.members.add(
            member_id=f"server-{number}", role=pb.ROLE_SERVER, state="live", address=f"10.0.0.{number}:29601"
        )
    for rank in reversed(range(workers)):
        member = report.members.add(member_id=f"worker-{rank}", role=pb.ROLE_WORKER, rank=rank)
        member.state, member.host = "live", "box"
        member.rates.CopyFrom(pb.WorkerRates(seconds=10, waiting_seconds=rank, pushes={"model": 50}))
        for server in range(servers):
            way, why = ("shm", "") if rank % 2 else ("tcp", LONG)
            member.connections.add(parameters="model", server_id=f"server-{server}", transport=way, reason=why)
    report.members[-1].state, report.members[-1].reason = "lost", "its process ended,\nand is started again"
    parameters = report.parameters.add(state="ready")
    parameters.entry.spec.name, parameters.entry.spec.consistency.kind = "model", "bsp"
    report.waiting_for.append("for worker-0 to register again")
    for number in range(40):
        report.events.add(time=1.7e9 + number, text=f"event {number} " + "x" * 100)
    return report


class Terminal:
    """Terminal emulator that shows the output of a ``Screen``."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self._screen = pyte.HistoryScreen(WIDTH, HEIGHT)
        self._stream = pyte.Stream(self._screen)
        self.console = Console(file=self._file, force_terminal=True, width=WIDTH, height=HEIGHT, highlight=False)

    def read(self) -> tuple[str, list[str]]:
        """Return the output since the previous call, and the contents of the terminal."""
        written = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        self._stream.feed(written.replace("\n", "\r\n"))  # As a terminal driver does.
        return written, [line.rstrip() for line in self._screen.display]

    @property
    def scrolled(self) -> int:
        """Return how many lines have left the screen at its top."""
        return len(self._screen.history.top)


def test_a_run_of_four_servers_and_eight_workers_fits() -> None:
    terminal = Terminal()
    with Screen(terminal.console) as screen:
        screen.show(status_json(answer()))
        written, shown = terminal.read()
        assert "\x1b[?1049h" in written, "not on the alternate screen"
        assert shown[0] == "digits: training 'model' at version 1234"
        assert [line.split()[0] for line in shown[2:15]] == [
            "member", *(f"server-{number}" for number in range(4)), *(f"worker-{rank}" for rank in range(8))
        ]  # fmt: skip
        assert "worker-0  lost   5.0      0%       its process ended, and is started again" in shown
        assert any(line.startswith("model (") and line.endswith("steps/s, 0 elements") for line in shown), shown
        assert "shm: 16 connections" in shown
        assert any(line.startswith("tcp: 16 connections, the path to") for line in shown)
        assert "waiting: for worker-0 to register again" in shown
        assert shown[-1][10:].startswith("event 39 ") and shown[-1].endswith("…")
        for _ in range(3):
            screen.show(status_json(answer()))
        written, again = terminal.read()
        assert again == shown and "\x1b[2J" not in written, "the screen is cleared, and flickers"
        assert terminal.scrolled == 0


def test_a_scheduler_that_does_not_answer_leaves_the_last_status() -> None:
    terminal = Terminal()
    with Screen(terminal.console) as screen:
        screen.show(status_json(answer()))
        _, before = terminal.read()
        screen.show_trouble("no answer for 3 s: no scheduler answers at 10.0.0.1:29600")
        _, shown = terminal.read()
        assert shown[0].startswith("no answer for 3 s") and shown[1:15] == before[0:14]
        screen.show(status_json(answer()))
        assert terminal.read()[1] == before


def test_nothing_is_larger_than_the_terminal() -> None:
    for height in [4, 6, 10, 24]:
        for width in [20, 80]:
            shown = screen_lines(status_json(answer(12, 40)), width, height)
            assert len(shown) <= height and all(line.cell_len <= width for line in shown)
            assert shown[0].plain.startswith("digits: ")
            if height >= 10 and width >= 80:
                texts = [line.plain for line in shown]
                assert any("worker-0" in text and "lost" in text for text in texts), "who is not live is shown"
                assert any(text.startswith("and ") and text.endswith(" more members") for text in texts)


def test_members_are_in_the_order_of_their_numbers() -> None:
    report: dict[str, Any] = status_json(answer(12, 0))
    names = [line.plain.split()[0] for line in screen_lines(report, WIDTH, 40)[3:15]]
    assert names == [f"server-{number}" for number in range(12)]


def test_the_command_on_a_terminal_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check on a real pseudo terminal, whose other end is read until the command has ended."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    answers: list[pb.GetStatusResponse | None] = [answer(), None, answer()]
    written = bytearray()

    def read() -> None:
        while True:
            try:
                written.extend(os.read(outer, 1 << 16))
            except OSError:  # the other end is closed
                return

    def fetch(target: SchedulerChoice, timeout: float) -> pb.GetStatusResponse:
        if not answers:
            raise KeyboardInterrupt
        if (found := answers.pop(0)) is None:
            raise SchedulerUnreachableError("no scheduler answers at 10.0.0.1:29600")
        return found

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(inner, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(
            status, "find_target", lambda given, environ: SchedulerChoice("10.0.0.1:29600", Credentials(), "test")
        )
        patch.setattr(status, "fetch", fetch)
        patch.setattr(status.time, "sleep", lambda seconds: None)
        patch.setattr(status.signal, "signal", lambda number, handler: None)
        patch.setattr("sys.stdout", stdout)
        for name in ("COLUMNS", "LINES", "NO_COLOR", "TERM"):
            patch.delenv(name, raising=False)
        assert status.run(Namespace(watch=True, timeout=1.0, format="table"), {}) == 0
    reader.join(60)
    os.close(outer)
    text = written.decode()
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1 and "\x1b[2J" not in text
    assert text.rindex("\x1b[?1049l") > text.rindex("digits: training")
    assert "no answer for" in text and text.count("digits: training") == 3
