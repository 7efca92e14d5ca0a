"""``--log-format`` of ``psdist run`` reaches scheduler and servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.launcher.plan import SchedulerAddress, ServicesPlan, ServicesSettings


@pytest.mark.parametrize(("settings", "form"), [({}, "console"), ({"log_format": "json"}, "json")])
def test_services_get_the_log_format(settings: dict[str, str], form: str, tmp_path: Path) -> None:
    link = SchedulerAddress(file=tmp_path / "address", run_id="r")
    plan = ServicesPlan(ServicesSettings(servers=1, **settings), tmp_path, link, 3, 1)
    for spec in (plan.scheduler({}), plan.server(0, {})):
        assert spec.argv[spec.argv.index("--log-format") + 1] == form
