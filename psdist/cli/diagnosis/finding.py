"""Findings of ``psdist doctor``: one line for each check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["ok", "warn", "fail"]

#: Exit status by the worst level.
STATUSES: Final[dict[Level, int]] = {"ok": 0, "warn": 1, "fail": 69}
_ORDER: Final[tuple[Level, ...]] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. remedy: what to do about it, unless it is ok."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    """Return a finding without a remedy."""
    return Finding(check, "ok", text)


def warn(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that may cost speed or a feature."""
    return Finding(check, "warn", text, remedy)


def fail(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that keeps a run from working."""
    return Finding(check, "fail", text, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level."""
    return max((finding.level for finding in findings), key=_ORDER.index, default="ok")
