"""The Python of psdist's programs, in programs that are not Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from psdist.errors import ConfigurationError
from psdist.interpreter import VARIABLE, python


def test_this_python_is_used() -> None:
    assert python() == sys.executable


@pytest.mark.parametrize(
    ("executable", "frozen", "reason"),
    [
        (None, False, "sys.executable is not set"),
        ("", False, "sys.executable is not set"),
        ("/opt/app/app", True, r"frozen application, and sys.executable is the application itself \(/opt/app/app\)"),
        ("/opt/python/app", False, "embeds Python, and sys.executable is the program itself"),
    ],
)
def test_other_programs_name_the_reason_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, executable: str | None, frozen: bool, reason: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    with pytest.raises(ConfigurationError, match=f"{reason}.*set {VARIABLE} to a Python"):
        python()


def test_a_chosen_python_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert python() == sys.executable
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"{VARIABLE}=.* is no program"):
        python()
