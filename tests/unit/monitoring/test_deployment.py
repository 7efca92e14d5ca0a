"""``deploy/monitoring``: rules, dashboard and page name metrics that exist, and promtool accepts the rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from psdist.monitoring.exporter import BY_NAME

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "monitoring"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "psdist.json"


@pytest.mark.parametrize("path", [FOLDER / "alerts.yml", FOLDER / "alerts_test.yml", DASHBOARD], ids=lambda p: p.name)
def test_only_metrics_of_the_catalog_are_used(path: Path) -> None:
    names = set(re.findall(r"\bpsdist_[a-z_]+", path.read_text()))
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in BY_NAME else name for name in names}
    assert plain <= BY_NAME.keys() and len(plain) > 10


#: Labels that Prometheus and the scheduler's list of targets add to every series.
_ADDED = {"run", "member", "member_role", "job", "instance", "le"}
#: Series that are not in the catalog, with their labels.
_OTHERS = {"ALERTS": {"alertname", "alertstate", "severity"}, "process": set(), "psdist:": set(), "up": set()}


def labels_of(series: str) -> set[str]:
    """Return the labels that a series may have."""
    name = series if series in BY_NAME else re.sub(r"_(bucket|sum|count)$", "", series)
    if name in BY_NAME:
        return {*BY_NAME[name].labels, *_ADDED}
    return next(found for start, found in _OTHERS.items() if series.startswith(start)) | _ADDED


def unknown_labels(expression: str, legend: str = "") -> set[str]:
    """Return the labels in a query, and in the names of its results, that no series in it has."""
    series = set(re.findall(r"\b(?:psdist[_:]|process_)[a-z0-9_:]+|\b(?:ALERTS|up)\b", expression))
    assert series, expression
    wrong = set()
    for name, selector in re.findall(r"\b(\w[\w:]*)\{([^}]*)\}", expression):
        wrong |= {label for label in re.findall(r"(\w+)\s*(?:=|!=|=~|!~)", selector) if label not in labels_of(name)}
    grouped = re.findall(r"\b(?:by|on|group_left|without)\s*\(([^)]*)\)", expression)
    named = {label.strip() for group in grouped for label in group.split(",") if label.strip()}
    named |= set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    return wrong | (named - set().union(*map(labels_of, series)))


def test_labels_that_do_not_exist_are_seen() -> None:
    assert unknown_labels('sum by (phase) (rate(psdist_step_seconds_sum{run="r"}[1m]))', "{{phase}}") == set()
    assert unknown_labels('sum by (rank) (rate(psdist_step_seconds_sum{step="1"}[1m]))', "{{id}}") == {
        *("rank", "step", "id")
    }


def test_queries_of_the_dashboard_use_labels_that_exist() -> None:
    """A query with a wrong label is valid and shows nothing."""
    targets = [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])]
    wrong = {one["expr"]: found for one in targets if (found := unknown_labels(one["expr"], one["legendFormat"]))}
    assert len(targets) > 20 and wrong == {}


def test_alerts_use_labels_that_exist() -> None:
    rules = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*)\n)", (FOLDER / "alerts.yml").read_text())
    wrong = {text: found for text in map("".join, rules) if (found := unknown_labels(text))}
    assert len(rules) >= 15 and wrong == {}


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_compose_accepts_the_overlay() -> None:
    files = ("-f", "docker-compose.yml", "-f", str((FOLDER / "docker-compose.yml").relative_to(ROOT)))
    command = ["docker-compose", *files, "config"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for service in ("prometheus:", "grafana:", "scheduler:"):
        assert f"\n  {service}" in done.stdout


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
    page, tested = (ROOT / "docs" / "metrics.md").read_text(), (FOLDER / "alerts_test.yml").read_text()
    assert alerts and set(re.findall(r"`(Psdist\w+)`", page)) == set(alerts)
    assert set(re.findall(r'alertname="(\w+)"', tested)) == set(alerts)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt install prometheus)")
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_prometheus_accepts_the_rules(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
