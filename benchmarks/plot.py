"""Curves as SVG, with the standard library alone. Values in, text out.

Both axes are logarithmic, so that proportional growth is a straight line of slope 1; values must be positive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

#: Points of a line: x and y.
Line = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 34, 46
_COLORS = (
    "#2a6f97", "#bc4749", "#6a994e", "#7b2cbf", "#f3722c", "#495057", "#0a9396", "#d00070", "#b08900", "#1d3557",
    "#9c6644", "#5fa8d3",
)  # fmt: skip
_FACTORS = (1, 2, 5)


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two positive values, thinned out if there are many.

    At least one is at each end, so the first may be below ``low`` and the last above ``high``.
    """
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    factors = _FACTORS if len(powers) <= 4 else (1,)
    every = [factor * 10.0**power for power in powers for factor in factors]
    first = max((tick for tick in every if tick <= low * 1.0001), default=every[0])
    last = min((tick for tick in every if tick >= high * 0.9999), default=every[-1])
    return [tick for tick in every if first <= tick <= last]


class _Axis:
    """Positions of values along one side of the picture."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        self.ticks = ticks(min(values), max(values))
        self._low, high = math.log10(self.ticks[0]), math.log10(self.ticks[-1])
        self._reach = (high - self._low) or 1.0
        self._start, self._stop = start, stop

    def __call__(self, value: float) -> float:
        return self._start + (math.log10(value) - self._low) / self._reach * (self._stop - self._start)


def short(value: float) -> str:
    """Format a number in few characters: 200M, 20k, 0.5."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def svg(title: str, x_label: str, y_label: str, lines: Mapping[str, Line]) -> str:
    """Return a picture of lines by name. Raises ValueError for no point, or one that is not positive."""
    points = [point for line in lines.values() for point in line]
    if not points or min(min(point) for point in points) <= 0:
        raise ValueError("a plot needs points, and they must be positive")
    x = _Axis([point[0] for point in points], _LEFT, WIDTH - _RIGHT)
    y = _Axis([point[1] for point in points], HEIGHT - _BOTTOM, _TOP)
    parts = [_text(_LEFT, 20, title, "font-weight='bold'")]
    for tick in x.ticks:
        parts.append(_stroke(x(tick), _TOP, x(tick), HEIGHT - _BOTTOM))
        parts.append(_text(x(tick), HEIGHT - _BOTTOM + 16, short(tick), "text-anchor='middle'"))
    for tick in y.ticks:
        parts.append(_stroke(_LEFT, y(tick), WIDTH - _RIGHT, y(tick)))
        parts.append(_text(_LEFT - 6, y(tick) + 4, short(tick), "text-anchor='end'"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10, x_label, "text-anchor='middle'"))
    parts.append(_text(16, HEIGHT / 2, y_label, f"text-anchor='middle' transform='rotate(-90 16 {HEIGHT / 2})'"))
    for number, (name, line) in enumerate(lines.items()):
        parts += _curve(name, [(x(one), y(other)) for one, other in line], _COLORS[number % len(_COLORS)], number)
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-family='sans-serif' "
        f"font-size='12'>\n<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>\n{body}\n</svg>\n"
    )


def _curve(name: str, places: Sequence[tuple[float, float]], color: str, number: int) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{color}'/>" for x, y in places]
    label = _text(WIDTH - _RIGHT + 12, _TOP + 14 + 18 * number, name, f"fill='{color}'")
    return [f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2'/>", *dots, label]


def _stroke(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='#dee2e6'/>"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {attributes}>{escape(text)}</text>"
