"""The reference of flags, each program's help and the defaults that the code uses come from one declaration."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.settings.flags import CommandLine
from psdist.settings.programs import scheduler_settings, server_settings
from tests.flag_reference import command_lines, page

LINES = {line.program: line for line in command_lines()}


def test_the_page_has_what_the_code_declares() -> None:
    path = Path(__file__).parents[3] / "docs" / "flags.md"
    assert path.read_text(encoding="utf-8") == page(), "run: python -m tests.flag_reference > docs/flags.md"


def test_the_help_has_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for program in LINES:
        line: CommandLine = LINES[program]
        with pytest.raises(SystemExit) as ended:
            line.parse(["--help", *["STORAGE"][: len(line.words)]], {})
        words = " ".join(capsys.readouterr().out.split())
        assert ended.value.code == 0
        for flag in line.flags:
            assert flag.name in words
            # argparse may break a line within a word with a hyphen.
            told = f"{flag.help} (default {flag.default_text})" if flag.default_text else flag.help
            assert _squeezed(told) in _squeezed(words), flag.name


def _squeezed(text: str) -> str:
    return "".join(text.split())


def test_without_flags_programs_have_the_declared_defaults() -> None:
    scheduler, server = scheduler_settings([], {}), server_settings(["--scheduler", "127.0.0.1:1"], {})
    by_name = {flag.name: flag.default for line in ("psdist-scheduler", "psdist-server") for flag in LINES[line].flags}
    assert scheduler.failure_timeout_seconds == by_name["--failure-timeout"]
    assert scheduler.worker_timeout_seconds == by_name["--worker-timeout"]
    assert scheduler.idle_timeout_seconds == by_name["--idle-timeout"]
    assert (scheduler.workers_min, scheduler.servers_min) == (by_name["--min-workers"], by_name["--min-servers"])
    assert scheduler.policy.keep_last == by_name["--keep-last"]
    assert server.start_timeout_seconds == by_name["--start-timeout"]
    assert server.drain_timeout_seconds == by_name["--drain-timeout"]
    assert (server.transport, server.device) == (by_name["--transport"], by_name["--device"])
