"""The page of ``growth``: docs/internals/growth.md with its tables and a picture per curve. Values in, files out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.contenders import ROOT
from benchmarks.report import notes_of, section, table

PAGE = ROOT / "docs/internals/growth.md"
_SESSIONS = "sessions"
_HEADINGS: Mapping[str, str] = {
    "workers": "Workers",
    "servers": "Servers",
    "params": "Parameters",
    "tensors": "Tensors",
    "replicas": "Copies of each shard",
}


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write the page and its pictures, and keeps the page's notes."""
    notes = notes_of(path.read_text(encoding="utf-8")) if path.exists() else ""
    path.write_text(page(results, path.stem, notes), encoding="utf-8")
    for name, text in pictures(results).items():
        path.with_name(picture(path.stem, name)).write_text(text, encoding="utf-8")


def picture(stem: str, name: str) -> str:
    """Return the name of a curve's file."""
    return f"{stem}-{name}.svg"


def pictures(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the SVG of each curve that was measured."""
    found = {}
    for name, heading in _HEADINGS.items():
        if name in results:
            curve = results[name]
            lines = {
                transport: [(float(value), one["ms"]) for value, one in points.items()]
                for transport, points in curve["points"].items()
            }
            found[name] = plot.svg(heading, curve["label"], "ms a step", lines)
    if _SESSIONS in results:
        keys = {"joined": "joined_seconds", "told": "told_seconds", "left": "left_seconds"}
        lines = {what: [(float(one["sessions"]), one[key]) for one in results[_SESSIONS]] for what, key in keys.items()}
        found[_SESSIONS] = plot.svg("Sessions of a scheduler", "sessions", "seconds", lines)
    return found


def page(results: Mapping[str, Any], stem: str, notes: str) -> str:
    """Return the whole text; curves without a result are left out."""
    facts = results["machine"]
    introduction = f"""
        `python -m benchmarks.growth --page docs/internals/growth.md` measures all curves again, or the named ones, and
        writes this page and its pictures. Two workers, two servers, 25,000,000 float32 parameters, Adam and BSP, unless
        it is what grows. Both axes of the pictures are logarithmic. Medians; in brackets the 10th and the 90th
        percentile. Measured on one machine, whose cores all processes share: {facts["processor"]}, {facts["cores"]}
        cores, {facts["memory_gigabytes"]} GB. [Performance](../performance.md) has psdist beside its peers."""
    parts = [section("# Growth", introduction)]
    parts += [_curve(results[name], stem, name) for name in _HEADINGS if name in results]
    if _SESSIONS in results:
        parts.append(_sessions(results[_SESSIONS], stem))
    return "\n\n".join([*parts, *filter(None, [notes.strip()])]) + "\n"


def _curve(curve: Mapping[str, Any], stem: str, name: str) -> str:
    points = curve["points"]
    values = sorted({int(value) for of in points.values() for value in of})
    rows = [(f"{value:,}", *(_cell(of.get(str(value))) for of in points.values())) for value in values]
    shown = table((curve["label"], *(f"{transport}, ms" for transport in points)), rows)
    return f"## {_HEADINGS[name]}\n\n{shown}\n\n![ms a step by {curve['label']}]({picture(stem, name)})"


def _cell(one: Mapping[str, float] | None) -> str:
    if one is None:
        return ""
    digits = 2 if one["ms"] < 10 else 0
    return f"{one['ms']:.{digits}f} ({one['low']:.{digits}f} to {one['high']:.{digits}f})"


def _sessions(points: list[Mapping[str, Any]], stem: str) -> str:
    text = """
        Sessions of real clients with one scheduler, all joining concurrently. *Told* is from the moment at which
        one more worker begins to register until all have the new cluster map; CPU at rest is of one core, with
        heartbeats."""
    titles = (
        "sessions", "joined, s", "epochs", "told, s", "worst", "CPU to join, s", "at rest", "MB", "status, ms",
        "left, s",
    )  # fmt: skip
    rows = [
        (
            f"{one['sessions']:,}", f"{one['joined_seconds']:.2f}", str(one["epochs"]), f"{one['told_seconds']:.3f}",
            f"{one['told_worst_seconds']:.3f}", f"{one['joining_cpu_seconds']:.2f}", f"{one['rest_cpu']:.1%}",
            f"{one['resident_bytes'] / 1e6:.0f}", f"{one['status_seconds'] * 1e3:.0f}", f"{one['left_seconds']:.2f}",
        )
        for one in points
    ]  # fmt: skip
    shown = table(titles, rows)
    return section("## Sessions", text, shown, f"![seconds by sessions]({picture(stem, _SESSIONS)})")
