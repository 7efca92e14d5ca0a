"""``deploy/monitoring``: rules, dashboard and page name metrics that exist, and promtool accepts the rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from psdist.monitoring.catalog import BY_NAME

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "monitoring"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "psdist.json"


@pytest.mark.parametrize("path", [FOLDER / "alerts.yml", FOLDER / "alerts_test.yml", DASHBOARD], ids=lambda p: p.name)
def test_only_metrics_of_the_catalog_are_used(path: Path) -> None:
    names = set(re.findall(r"\bpsdist_[a-z_]+", path.read_text()))
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in BY_NAME else name for name in names}
    assert plain <= BY_NAME.keys() and len(plain) > 10


def test_the_dashboard_has_its_panels_side_by_side() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(target["expr"] for panel in panels for target in panel.get("targets", []))


def test_each_alert_is_described_and_tested() -> None:
    alerts = re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yml").read_text())
    page, tested = (ROOT / "docs" / "monitoring.md").read_text(), (FOLDER / "alerts_test.yml").read_text()
    assert alerts and set(re.findall(r"`(Psdist\w+)`", page)) == set(alerts)
    assert set(re.findall(r'alertname="(\w+)"', tested)) == set(alerts)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt install prometheus)")
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_prometheus_accepts_the_rules(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
