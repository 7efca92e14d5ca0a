"""Helpers for JSON forms of messages and dataclasses."""

from __future__ import annotations

import math
from typing import Any


def values(source: object, *names: str) -> dict[str, Any]:
    """Return attributes by name, for a JSON form whose keys are the attribute names."""
    return {name: getattr(source, name) for name in names}


def number(value: float) -> float | str:
    """Return a number as JSON has it: "nan", "inf" and "-inf" are texts."""
    return value if math.isfinite(value) else str(value)
