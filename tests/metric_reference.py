"""The list of the metrics for Prometheus in ``docs/prometheus.md``, from their declarations.

    python -m tests.metric_reference

``tests/unit/monitoring/test_metric_reference.py`` compares the page with this list.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from psdist.monitoring.exporter import METRICS, Metric

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "prometheus.md"
START: Final = "<!-- metrics: python -m tests.metric_reference -->\n"
END: Final = "<!-- end of metrics -->\n"


def page() -> str:
    """The text of the page, with the list as the catalog has it."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{head}{START}\n{chr(10).join(map(_row, METRICS))}\n\n{END}{rest.partition(END)[2]}"


def _row(metric: Metric) -> str:
    roles = "all" if len(metric.roles) == 3 else ", ".join(metric.roles)
    labels = f": {', '.join(f'`{label}`' for label in metric.labels)}" if metric.labels else ""
    kind = "" if metric.kind != "histogram" else " A histogram."
    return f"- `{metric.name}` ({roles}{labels}). {metric.help}{kind}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
