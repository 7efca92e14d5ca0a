"""The report about the error that ended a script before its first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import NonFiniteGradientError, SchedulerUnreachableError
from psdist.settings import launcher_reports
from psdist.settings.exit_codes import CERTAIN
from psdist.settings.launcher_reports import error_signature, read_error, report_error


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_errors_of_the_program_text_are_certain() -> None:
    for error in [SyntaxError("x"), ImportError("x"), ModuleNotFoundError("x"), NameError("x")]:
        assert error_signature(raised(error)) == CERTAIN


def error_of(call: Callable[[], object]) -> Exception:
    with pytest.raises((AttributeError, TypeError)) as caught:
        call()
    return caught.value


def test_wrong_names_and_arguments_are_certain() -> None:
    function: Any = error_of
    for typo in (
        lambda: getattr(launcher_reports, "gone"),  # noqa: B009
        lambda: getattr(dict, "gone"),  # noqa: B009
        lambda: function(),
        lambda: function(1, 2),
        lambda: function(print, colour=1),
    ):
        assert error_signature(error_of(typo)) == CERTAIN
    # A value may be another one next time.
    for error in (error_of(lambda: getattr(None, "gone")), raised(NonFiniteGradientError("x"))):  # noqa: B009
        assert error_signature(error) not in ("", CERTAIN)


def test_errors_that_may_pass_are_not_reported() -> None:
    for error in [ConnectionResetError(), TimeoutError(), SchedulerUnreachableError("x"), KeyboardInterrupt()]:
        assert error_signature(raised(error)) == ""


def test_the_place_and_the_kind_of_an_error_decide_and_its_text_does_not() -> None:
    errors = [raised(FileNotFoundError(text)) for text in ("a", "b")]
    assert len({error_signature(error) for error in errors}) == 1
    assert error_signature(raised(ValueError("a"))) != error_signature(errors[0])


def test_steps_are_reported_unless_a_group_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(tmp_path / "0.0"))
    monkeypatch.setattr(launcher_reports, "_steps", {})
    monkeypatch.setattr(launcher_reports, "_has_trained", False)
    monkeypatch.setattr(launcher_reports, "_has_group", False)
    monkeypatch.setattr(launcher_reports, "_has_pushed", False)
    assert launcher_reports.read_steps(tmp_path / "0.0") is None
    launcher_reports.report_steps()
    assert launcher_reports.read_steps(tmp_path / "0.0") == {}
    launcher_reports.note_step("w", 1, abstained=True)
    launcher_reports.report_steps()
    assert launcher_reports.read_steps(tmp_path / "0.0") == {}
    for name, step in (("w", 1), ("w", 2), ("asynchronous", None)):
        launcher_reports.note_step(name, step)
    launcher_reports.report_steps()
    assert launcher_reports.read_steps(tmp_path / "0.0") == {"w": 2}
    for text in ("[]", '{"w": "2"}', "{"):
        (tmp_path / "0.0.steps").write_text(text)
        assert launcher_reports.read_steps(tmp_path / "0.0") is None
    (tmp_path / "0.0.steps").unlink()
    launcher_reports.note_group()
    monkeypatch.setattr(launcher_reports, "_steps", {})
    launcher_reports.report_steps()
    assert launcher_reports.read_steps(tmp_path / "0.0") is None


def test_only_a_launched_script_without_a_step_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_reports, "_has_trained", False)
    connected = tmp_path / "0.0"
    report_error(ImportError())
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(connected))
    assert read_error(connected) == ""
    report_error(ImportError())
    assert read_error(connected) == CERTAIN
    launcher_reports.note_step("w", 1)
    other = tmp_path / "0.1"
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(other))
    report_error(ImportError())
    assert read_error(other) == ""
