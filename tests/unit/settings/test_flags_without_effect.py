"""Flags that would be ignored are refused; variables, which may be meant for another program, are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.cli import run, worker
from psdist.errors import ConfigurationError
from psdist.launcher.local import LocalSettings
from psdist.launcher.plan import SchedulerAddress, ServicesPlan
from psdist.settings.flags import read
from psdist.settings.programs import scheduler_settings
from psdist.snapshots.policy import SavePolicy


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        (["--keep-last", "5"], False),  # psdist run has a storage by default.
        (["--storage-path", "none", "--keep-last", "5"], True),
        (["--storage-path", "none", "--keep-last", "3"], False),  # The default changes nothing.
        (["--storage-path", "none", "--keep-every", "9"], True),
        (["--storage-path", "none", "--no-save-at-end"], True),
        (["--storage-path", "none", "--fresh"], True),
    ],
)
def test_a_run_refuses_flags_of_snapshots_that_it_does_not_take(
    flags: list[str], is_refused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if not is_refused:
        run.command_line().parse([*flags, "x.py"], {})
        return
    with pytest.raises(SystemExit):
        run.command_line().parse([*flags, "x.py"], {})
    assert "has no effect without --storage-path" in capsys.readouterr().err


def test_variables_for_another_run_leave_the_scheduler_of_a_run_without_storage_its_defaults(tmp_path: Path) -> None:
    given = run.command_line().parse(["--storage-path", "none", "x.py"], {"PSDIST_KEEP_LAST": "5", "PSDIST_FRESH": "1"})
    settings = read(LocalSettings, given, command=("x.py",)).resolved("a-run")
    link = SchedulerAddress(file=tmp_path / "scheduler", run_id="a-run")
    plan = ServicesPlan(settings, tmp_path, link, lifeline=3, workers=1)
    argv = plan.scheduler({}).argv
    assert scheduler_settings(argv[argv.index("psdist_scheduler") + 1 :], {"PSDIST_TOKEN": "t"}).policy == SavePolicy()


def test_standalone_refuses_flags_for_a_run_elsewhere() -> None:
    for flags in [
        ("--scheduler", "h:1"),
        ("--token-file", "t"),
        ("--tls-ca", "ca.pem"),
        ("--nnodes", "2"),
        ("--nnodes", "2:3"),
    ]:
        given = worker.command_line().parse(["--standalone", *flags, "x.py"], {})
        with pytest.raises(ConfigurationError, match=f"{flags[0]} has no effect with --standalone"):
            worker.run(given, {})


def test_a_port_of_nobody_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        worker.command_line().parse(["--scheduler", "h:1", "--master-port", "3", "x.py"], {})
    assert "--master-port 3 has no effect without --master-addr or --standalone" in capsys.readouterr().err
    worker.command_line().parse(["--standalone", "--master-port", "3", "x.py"], {})
