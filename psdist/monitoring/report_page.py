"""HTML page of a run's summary: one file without external resources, with charts as inline SVG. Pure.

Texts from the run are escaped, wherever they are from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from psdist.monitoring.run_summary import Point, Summary, WorkerPart

#: Rows of the longest tables; the page says how many are left out.
ROWS_SHOWN: Final = 500
_WIDTH: Final = 640
_HEIGHT: Final = 180
_PHASES: Final = ("compute", "push", "wait", "pull")
#: Kinds of events that are faults, or reactions to them.
_FAULTS: Final = frozenset({"loss", "promotion", "rollback", "snapshot_failed"})

_STYLE: Final = """
:root{color-scheme:light dark;--line:#2563c9;--grid:#8884;--compute:#3a9a5b;--push:#c9762a;--wait:#999;--pull:#2563c9}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;display:block;overflow-x:auto}
th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--grid);vertical-align:top}
td.number{text-align:right;font-variant-numeric:tabular-nums}
figure{display:inline-block;margin:0 1.5rem 1rem 0;max-width:100%}
svg{max-width:100%;height:auto;font:11px system-ui,sans-serif;fill:currentColor}
.bar{display:flex;width:20rem;height:1rem}.warning{font-weight:600}
.compute{background:var(--compute)}.push{background:var(--push)}.wait{background:var(--wait)}.pull{background:var(--pull)}
.key span{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 1rem}
"""


def page(summary: Summary) -> str:
    """Return the page as one HTML document."""
    title = escape(f"Run {summary.run_id}")
    sections = (
        _overview(summary),
        _curves(summary),
        _phases(summary),
        _parameters(summary),
        _faults(summary),
        _snapshots(summary),
        _members(summary),
        _environment(summary),
        _events(summary),
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


# --- sections ---------------------------------------------------------------------------------------------------------


def _overview(summary: Summary) -> str:
    trained = sum(point.seconds for point in summary.curves.points)
    steps: dict[str, float] = {}
    for point in summary.curves.points:
        for name, count in point.steps.items():
            steps[name] = steps.get(name, 0.0) + count
    rows = [
        ("state", f"{summary.state}: {summary.reason}" if summary.reason else summary.state),
        ("first seen", _time(summary.started)),
        ("last seen", _time(summary.written)),
        ("time with training", _duration(trained)),
        *((f"updates of {name}", f"{count:,.0f}") for name, count in sorted(steps.items())),
        ("schedulers, one after another", str(summary.schedulers)),
        *((name.replace("_", " "), str(value)) for name, value in summary.configuration.items()),
    ]
    return _pairs(rows)


def _curves(summary: Summary) -> str:
    reported = list(dict.fromkeys(name for point in summary.curves.points for name in point.reported))
    # The loss is what people look for first.
    reported.sort(key=lambda name: "loss" not in name)
    names = list(dict.fromkeys(name for point in summary.curves.points for name in point.steps))
    charts = [
        _chart(name, summary.curves.points, [point.reported[name].value if name in point.reported else None
                                      for point in summary.curves.points])
        for name in reported
    ]  # fmt: skip
    charts += [
        _chart(f"updates of {name} per second", summary.curves.points, [_rate(point, point.steps.get(name))
                                                                 for point in summary.curves.points])
        for name in names
    ]  # fmt: skip
    if any(point.samples for point in summary.curves.points):
        values = [_rate(point, point.samples) for point in summary.curves.points]
        charts.append(_chart("samples per second, all workers", summary.curves.points, values))
    values = [_rate(point, point.bytes / 1e6) for point in summary.curves.points]
    charts.append(_chart("payload, MB per second, all workers", summary.curves.points, values))
    return _section("Curves", "".join(charts))


def _phases(summary: Summary) -> str:
    key = "".join(f'<span class="{phase}"></span>{phase}' for phase in _PHASES)
    rows = []
    workers = sorted(summary.workers.items(), key=lambda item: (len(item[0]), item[0]))
    for worker_id, worker in workers[:ROWS_SHOWN]:
        shares = _shares(worker)
        bars = "".join(
            f'<div class="{phase}" style="width:{100 * share:.1f}%" title="{phase} {share:.1%}"></div>'
            for phase, share in zip(_PHASES, shares, strict=True)
        )
        cells = [f"<td>{escape(worker_id)}</td>", f'<td><div class="bar">{bars}</div></td>']
        numbers = [f"{share:.0%}" for share in shares] + [f"{worker.pushes:,.0f}", f"{worker.dropped:,.0f}"]
        numbers += [_size(worker.push_bytes), _size(worker.pull_bytes)]
        rows.append("<tr>" + "".join(cells) + "".join(f'<td class="number">{each}</td>' for each in numbers) + "</tr>")
    heads = ("worker", "time by phase", *_PHASES, "pushes", "dropped", "sent", "received")
    return _section("Workers", f'<p class="key">{key}</p>' + _table(heads, rows, len(summary.workers)))


def _shares(worker: WorkerPart) -> list[float]:
    seconds = [max(0.0, getattr(worker.phases, phase)) for phase in _PHASES]
    return [one / total for one in seconds] if (total := sum(seconds)) else [0.0] * len(seconds)


def _parameters(summary: Summary) -> str:
    rows = [
        _row(one.name, one.state, one.consistency, one.optimizer, f"{one.elements:,}", f"{one.tensors:,}",
             f"{one.slices:,}", "" if one.version_max is None else f"{one.version_max:,}")
        for one in summary.parameters[:ROWS_SHOWN]
    ]  # fmt: skip
    heads = ("name", "state", "consistency", "optimizer", "elements", "tensors", "slices", "version")
    return _section("Parameter sets", _table(heads, rows, len(summary.parameters)))


def _faults(summary: Summary) -> str:
    found = [event for event in summary.history.events if event.kind in _FAULTS]
    if not found:
        return _section("Faults", "<p>None among the events that are kept.</p>")
    rows = [_row(_time(event.time), event.kind, event.text) for event in found[-ROWS_SHOWN:]]
    return _section("Faults", _table(("time", "kind", "event"), rows, len(found)))


def _snapshots(summary: Summary) -> str:
    if not summary.snapshots:
        return _section("Snapshots", "<p>None in the storage.</p>")
    rows = []
    for one in summary.snapshots[:ROWS_SHOWN]:
        steps = ", ".join(f"{name} {step:,}" for name, step in sorted(one.steps.items()))
        rows.append(_row(one.directory, _time(one.time), steps, _size(one.bytes), f"{one.seconds:.2f} s", one.reason))
    heads = ("directory", "time", "steps", "size", "duration", "reason")
    return _section("Snapshots", _table(heads, rows, len(summary.snapshots)))


def _members(summary: Summary) -> str:
    rows = []
    for one in summary.members[:ROWS_SHOWN]:
        state = f"{one.state}: {one.reason}" if one.reason else one.state
        threads = f"{one.kernel_threads} of {one.cores}" if one.cores else ""
        memory = _size(one.resident_bytes) if one.resident_bytes else ""
        rows.append(_row(one.id, one.role, one.host, state, str(one.incarnation), one.device or "", threads, memory))
    heads = ("member", "role", "host", "state", "incarnation", "device", "kernel threads, cores", "memory")
    return _section("Members", _table(heads, rows, len(summary.members)))


def _environment(summary: Summary) -> str:
    return _section("Environment of the scheduler", _pairs(summary.environment.items()))


def _events(summary: Summary) -> str:
    rows = [
        _row(str(event.number), _time(event.time), event.kind, event.text, mark=event.warning)
        for event in summary.history.events[-ROWS_SHOWN:]
    ]
    total = summary.history.omitted + len(summary.history.events)
    return _section("Events", _table(("number", "time", "kind", "event"), rows, total))


# --- charts -----------------------------------------------------------------------------------------------------------


def _rate(point: Point, count: float | None) -> float | None:
    return count / point.seconds if count is not None and point.seconds > 0 else None


def _chart(title: str, points: Sequence[Point], values: Sequence[float | None]) -> str:
    """Return a line chart over time. None interrupts the line."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(0.0, *known), max(known)
    span = (high - low) or 1.0
    start = points[0].time
    length = max(1e-9, points[-1].time - start)
    left, bottom = 60, _HEIGHT - 20

    def place(point: Point, value: float) -> tuple[float, float]:
        return left + (point.time - start) / length * (_WIDTH - left - 10), bottom - (value - low) / span * 150

    lines: list[list[tuple[float, float]]] = [[]]
    for point, value in zip(points, values, strict=True):
        if value is not None:
            lines[-1].append(place(point, value))
        elif lines[-1]:
            lines.append([])
    drawn = "".join(_line(line) for line in lines if line)
    grid = f'<path stroke="var(--grid)" d="M{left} {bottom}H{_WIDTH - 10}M{left} {bottom - 150}H{_WIDTH - 10}"/>'
    marks = (
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">{low:.4g}</text>'
        f'<text x="{left - 6}" y="{bottom - 146}" text-anchor="end">{high:.4g}</text>'
        f'<text x="{left}" y="{_HEIGHT - 4}">0</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 4}" text-anchor="end">{_duration(length)}</text>'
    )
    return (
        f"<figure><figcaption>{escape(title)}, last {known[-1]:.4g}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(title)}">'
        f"{grid}{drawn}{marks}</svg></figure>"
    )


def _line(places: Sequence[tuple[float, float]]) -> str:
    """Return a line through these places; a dot if there is only one."""
    if len(places) == 1:
        return f'<circle r="2" fill="var(--line)" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}"/>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline fill="none" stroke="var(--line)" stroke-width="1.5" points="{points}"/>'


# --- pieces -----------------------------------------------------------------------------------------------------------


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}"


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in rows) + "</table>"


def _table(heads: Sequence[str], rows: Sequence[str], total: int) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    more = f"<p>{total - len(rows):,} more are not shown.</p>" if total > len(rows) else ""
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{more}"


def _row(*cells: str, mark: bool = False) -> str:
    texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr class="warning">{texts}</tr>' if mark else f"<tr>{texts}</tr>"


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"
