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
    "flags",
    [
        ["--keep-last", "5"],  # psdist run has a storage by default.
        ["--storage-path", "none", "--keep-last", "3"],  # The default changes nothing.
        ["--standalone", "--master-port", "3"],
    ],
)
def test_flags_with_an_effect_are_taken(flags: list[str]) -> None:
    line = worker.command_line() if "--standalone" in flags else run.command_line()
    line.parse([*flags, "x.py"], {})


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
