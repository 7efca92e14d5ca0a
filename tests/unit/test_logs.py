"""Log messages of the server programs, and the messages that they suppress."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import secrets
from typing import Any

import pytest
import structlog

from psdist import logs


@pytest.fixture(autouse=True)
def restored() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_tracebacks_are_text_without_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """They may hold the token."""

    def call(token: str) -> None:
        raise ValueError("no such call")

    logs.configure("server", log_format="json")
    secret = secrets.token_hex(8)
    try:
        call(secret)
    except ValueError as error:
        structlog.get_logger("psdist.server").error("failed", exc_info=error)
        logging.getLogger("psdist.server").error("failed", exc_info=error)
    output = capsys.readouterr().err
    assert secret not in output
    for line in output.splitlines():
        lines = json.loads(line)["exception"].splitlines()
        assert lines[0].startswith("Traceback") and lines[-1] == "ValueError: no such call"


def test_a_call_that_was_cancelled_before_its_handler_began_is_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("server", log_format="json")
    try:
        raise asyncio.CancelledError
    except asyncio.CancelledError:
        logging.getLogger("grpc._cython.cygrpc").exception("Exception not handled by %s", "_handle_exceptions")
        logging.getLogger("psdist.server").exception("a task was cancelled")
    shown = capsys.readouterr().err
    assert "not handled" not in shown and "a task was cancelled" in shown


def test_a_peer_that_died_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("server", log_format="json")
    grpc_logger = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise ValueError("a write failed")
    except ValueError:
        grpc_logger.exception(
            "ExecuteBatchError raised in core by servicer method [%s]", "/psdist.v1.ServerService/Pull"
        )
        grpc_logger.exception("Unexpected error in %s", "Pull")
    shown = capsys.readouterr().err
    assert "ExecuteBatchError" not in shown
    assert "Unexpected error in Pull" in shown and "a write failed" in shown


def test_lines_are_json_unless_they_are_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("server", run_id="r")
    logs.identify(id="server-1", incarnation=3)
    logging.getLogger("psdist.server").warning("a %s", "message")
    found = json.loads(capsys.readouterr().err)
    assert {name: found[name] for name in ("event", "level", "role", "run", "id", "incarnation")} == {
        "event": "a message", "level": "warning", "role": "server", "run": "r", "id": "server-1", "incarnation": 3,
    }  # fmt: skip
    logs.configure("server", run_id="r", log_format="console")
    logging.getLogger("psdist.server").warning("a %s", "message")
    assert "a message" in (shown := capsys.readouterr().err) and "{" not in shown


@pytest.mark.parametrize("logger", [logging.getLogger("psdist.scheduler"), structlog.get_logger("psdist.server")])
def test_members_cannot_write_control_characters(logger: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """They choose some texts. A terminal would obey escape sequences, and a new line could be forged."""
    logs.configure("scheduler", log_format="console")
    logger.warning("%s gave up: %s", "host-ä", "\x1b[31m\n12:00:00 [error] forged\0")
    shown = capsys.readouterr().err
    assert r"host-ä gave up: \x1b[31m\n12:00:00 [error] forged\x00" in shown and len(shown.splitlines()) == 1


def test_a_line_about_one_peer_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("server", log_format="json", run_id="r")
    logging.getLogger("psdist.scheduler").info("worker-3 left", extra={"peer": "worker-3"})
    logging.getLogger("psdist.scheduler").info("two members left", extra={"peer": ""})
    structlog.get_logger("psdist.server").warning("session broken", peer="10.0.0.1:29600")
    lines = list(map(json.loads, capsys.readouterr().err.splitlines()))
    assert [line.get("peer") for line in lines] == ["worker-3", None, "10.0.0.1:29600"]
    logs.configure("server", log_format="console", run_id="r")
    logging.getLogger("psdist.scheduler").info("worker-3 left", extra={"peer": "worker-3"})
    assert "peer" not in capsys.readouterr().err


def test_console_lines_have_the_form_of_workers_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("server", log_format="console", run_id="r", level="warning")
    logs.identify(id="server-0", incarnation=1)
    structlog.get_logger("psdist.server").info("not shown")
    structlog.get_logger("psdist.server").warning("TCP disabled", reason="port in use", host="::1", count=2)
    logging.getLogger("psdist.scheduler").error("ends", exc_info=ValueError("why"))
    first, second, *below = capsys.readouterr().err.splitlines()
    assert first[8:] == " WARNING psdist.server: TCP disabled count=2 host=::1 reason='port in use'"
    assert second[8:] == " ERROR psdist.scheduler: ends" and below[-1] == "ValueError: why"


@pytest.mark.parametrize(("plain", "level", "colour"), [("", "error", "31"), ("", "warning", "33"), ("1", "error", "")])
def test_errors_are_red_on_a_terminal(plain: str, level: str, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("NO_COLOR", plain)
    logs.configure("server")
    getattr(structlog.get_logger("psdist.server"), level)("text")
    assert screen.getvalue().startswith(f"\x1b[{colour}m") == bool(colour) and "text" in screen.getvalue()
