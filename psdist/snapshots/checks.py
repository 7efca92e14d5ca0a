"""Checks of the values in manifests and commit records. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

from psdist.errors import InvalidArgumentError
from psdist.wire.limits import SNAPSHOT_TEXT_MAX

_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_NUMBER_MAX: Final = (1 << 63) - 1


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise InvalidArgumentError, which names what is ``allowed``, unless the condition holds."""
    if not condition:
        raise InvalidArgumentError(f"{name} is {value!r:.80}, not {allowed}")


def check_number(name: str, value: object, low: int = 0) -> None:
    """Raise InvalidArgumentError unless this is a whole number of ``low`` or more that a store can hold."""
    require(type(value) is int and low <= value <= _NUMBER_MAX, name, value, f"a whole number of {low} or more")


def check_text(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless this is text of a limited length."""
    allowed = f"text of at most {SNAPSHOT_TEXT_MAX} characters"
    require(isinstance(value, str) and len(value) <= SNAPSHOT_TEXT_MAX, name, value, allowed)


def check_digest(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless this is a digest as text."""
    require(isinstance(value, str) and bool(_DIGEST.fullmatch(value)), name, value, "an xxh3_128 in hexadecimal")


def check_time(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless these are seconds as a float."""
    require(type(value) is float and math.isfinite(value) and value >= 0, name, value, "seconds as a float, 0 or more")


def check_unique(what: str, names: Iterable[str]) -> None:
    """Raise InvalidArgumentError if a name occurs twice."""
    seen: set[str] = set()
    for name in names:
        require(name not in seen, what, name, "named once only")
        seen.add(name)
