"""Progress line for people: the newest metrics, the most important first, so that it can be truncated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from psdist.metrics.report import MEASURED

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def progress_line(values: Mapping[str, float], step: int) -> str:
    """Format the metrics of ``summarize``.

    ``step 1200  loss 0.01441  accuracy 0.9917  28,721 samples/s  step 4.46 ms (compute 3.1, push 0.2, wait 0.9, pull
    0.26)  communication 30%  2 workers``; staleness is shown if it is not 0.
    """
    parts = [f"step {step}"]
    parts += [f"{name} {_short(value)}" for name, value in values.items() if name not in MEASURED]
    if "samples_per_second" in values:
        parts.append(f"{_rate(values['samples_per_second'])} samples/s")
    if values.get("step_ms"):
        phases = ", ".join(f"{name} {_short(values[f'{name}_ms'], 3)}" for name in ("compute", "push", "wait", "pull"))
        parts.append(f"{_short(values['step_ms'], 3)} ms ({phases})")
        parts.append(f"communication {values['communication_share']:.0%}")
    if values.get("staleness_max"):
        parts.append(f"staleness {values['staleness_mean']:.1f}, at most {values['staleness_max']:.0f}")
    if sent := values.get("push_bytes", 0) + values.get("pull_bytes", 0):
        parts.append(f"{_bytes(sent / max(1, values['reports']))} a step")
    workers = values.get("workers", 1)
    parts.append(f"{workers:.0f} worker{'s' * (workers != 1)}")
    return "  ".join(parts)


def _short(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.{digits}g}"
    return f"{value:.{digits}g}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"
