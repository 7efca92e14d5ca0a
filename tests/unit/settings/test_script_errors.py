"""The report about the error that ended a script before its first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.errors import SchedulerUnreachableError
from psdist.settings import script_errors
from psdist.settings.exit_codes import CERTAIN
from psdist.settings.script_errors import read_report, report, signature


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("error", [SyntaxError("x"), ImportError("x"), ModuleNotFoundError("x"), NameError("x")])
def test_errors_of_the_program_text_are_certain(error: Exception) -> None:
    assert signature(raised(error)) == CERTAIN


@pytest.mark.parametrize(
    "error", [ConnectionResetError(), TimeoutError(), SchedulerUnreachableError("x"), KeyboardInterrupt()]
)
def test_errors_that_may_pass_are_not_reported(error: BaseException) -> None:
    assert signature(raised(error)) == ""


def test_the_place_and_the_kind_of_an_error_decide_and_its_text_does_not() -> None:
    errors = [raised(FileNotFoundError(text)) for text in ("a", "b")]
    assert len({signature(error) for error in errors}) == 1
    assert signature(raised(ValueError("a"))) != signature(errors[0])


def test_only_a_launched_script_without_a_step_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_errors, "_has_trained", False)
    connected = tmp_path / "0.0"
    report(ImportError())
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(connected))
    assert read_report(connected) == ""
    report(ImportError())
    assert read_report(connected) == CERTAIN
    script_errors.note_step()
    other = tmp_path / "0.1"
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(other))
    report(ImportError())
    assert read_report(other) == ""
