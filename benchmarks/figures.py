"""Figures from times: medians, ratios of rounds, percentiles. Values in, values out.

A round holds the seconds of all steps that one contender made in one turn, those of all its workers together. Ratios
compare rounds of the same number, which ran one after the other, so that a slow minute of the machine cancels out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

#: Seconds by round.
Rounds = Sequence[Sequence[float]]

#: Percent that a spread omits at each end.
TAIL_PERCENT = 10


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which ``percent`` of the values lie, interpolated."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> list[float]:
    """Return the 10th and the 90th percentile."""
    return [percentile(values, TAIL_PERCENT), percentile(values, 100 - TAIL_PERCENT)]


def milliseconds(rounds: Rounds) -> float:
    """Median of all steps."""
    return 1e3 * statistics.median(second for one in rounds for second in one)


def ratios(peer: Rounds, own: Rounds) -> list[float]:
    """Return the ratios of the peer's step time to psdist's, round by round."""
    return [statistics.median(one) / statistics.median(mine) for one, mine in zip(peer, own, strict=True)]


def summary(rounds: Rounds) -> dict[str, Any]:
    """Median and spread of one contender."""
    return {
        "ms": milliseconds(rounds),
        "ms_spread": spread([1e3 * statistics.median(one) for one in rounds]),
        "steps": sum(len(one) for one in rounds),
    }


def comparison(peer: Rounds, own: Rounds) -> dict[str, Any]:
    """Return a peer's figures beside psdist's.

    ``ratio``: peer / psdist, above 1 if psdist is faster; median of rounds.
    """
    times = ratios(peer, own)
    return summary(peer) | {"ratio": statistics.median(times), "spread": spread(times)}


def result(rounds: Mapping[str, Rounds], own: str = "psdist") -> dict[str, Any]:
    """Return the contenders' figures: ``psdist_ms``, and for each peer its time and its ratio."""
    mine = rounds[own]
    peers = {name: comparison(theirs, mine) for name, theirs in rounds.items() if name != own}
    return {"psdist_ms": milliseconds(mine), own: summary(mine), "peers": peers}


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles of round trips, in milliseconds."""
    points = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}
    return {name: 1e3 * percentile(seconds, percent) for name, percent in points.items()} | {"calls": len(seconds)}
