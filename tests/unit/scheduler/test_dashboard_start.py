"""Start of the dashboard: off by default, and refused with the remedy where its libraries are missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from psdist.errors import ConfigurationError
from psdist.monitoring import dashboard
from psdist.security.tls import Credentials
from psdist.settings.programs import scheduler_settings


def test_a_scheduler_without_a_dashboard_imports_none_of_it() -> None:
    code = "import sys, psdist_scheduler.app; print({'starlette', 'uvicorn', 'anyio'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    present: dict[str, ModuleSpec | None] = {"starlette": ModuleSpec("starlette", None), "uvicorn": None}
    monkeypatch.setattr(dashboard, "find_spec", present.get)
    with pytest.raises(ConfigurationError, match=r"needs uvicorn: pip install uvicorn, or"):
        dashboard.require_dashboard()


def test_the_flags_of_the_scheduler() -> None:
    assert scheduler_settings([], {}).dashboard is None
    endpoint = scheduler_settings(["--dashboard-port", "0"], {"PSDIST_TOKEN": "secret"}).dashboard
    assert endpoint is not None and (endpoint.port, endpoint.credentials.token) == (0, "secret")
    assert scheduler_settings([], {"PSDIST_DASHBOARD_PORT": "9500", "PSDIST_DASHBOARD_HOST": "::1"}).dashboard == (
        type(endpoint)("::1", 9500, Credentials())
    )
    inherited = scheduler_settings(["--dashboard-fd", "7", "--dashboard-host", "::1"], {}).dashboard
    assert inherited == type(endpoint)("::1", 0, Credentials(), 7)


def test_flags_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, refusal in [
        (["--dashboard-host", "::1"], "--dashboard-host ::1 has no effect without --dashboard-port or --dashboard-fd"),
        (["--metrics-host", "::1"], "--metrics-host ::1 has no effect without --metrics-port: add --metrics-port"),
        (["--storage-optional"], "--storage-optional has no effect without --storage-path"),
        (["--storage-path", "none", "--storage-optional"], "--storage-optional has no effect without --storage-path"),
        (["--keep-last", "5"], "--keep-last 5 has no effect without --storage-path: add --storage-path, or leave it"),
        (["--keep-every", "100"], "--keep-every 100 has no effect without --storage-path"),
        (["--no-save-at-end"], "--no-save-at-end has no effect without --storage-path"),
        (["--fresh"], "--require-empty-storage has no effect without --storage-path"),
    ]:
        with pytest.raises(SystemExit) as ended:
            scheduler_settings(argv, {})
        assert ended.value.code == 2 and refusal in capsys.readouterr().err


def test_a_variable_may_be_meant_for_another_program() -> None:
    settings = scheduler_settings([], {"PSDIST_DASHBOARD_HOST": "::1", "PSDIST_METRICS_HOST": "::1"})
    assert settings.dashboard is settings.metrics is None
