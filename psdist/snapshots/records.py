"""Values in manifests and commit records: checks, and a parameter set's settings as plain values. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from psdist.compression.specifications import pull_codec_from_text
from psdist.consistency import KINDS, kind_of
from psdist.errors import InvalidArgumentError
from psdist.optim import Override, optimizer_from_values, schedule_from_values
from psdist.types import ParametersSpec
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


def spec_to_json(spec: ParametersSpec) -> dict[str, Any]:
    """Return the settings as plain values. Fields that version 1 lacks are omitted if they have their default.

    ``workers`` is omitted: a run that resumes may divide its workers otherwise.
    """
    optimizer = spec.optimizer
    schedule = {field.name: float(getattr(optimizer.schedule, field.name)) for field in fields(optimizer.schedule)}
    return {
        "name": spec.name,
        "consistency": {"kind": kind_of(spec.consistency), **_without(asdict(spec.consistency), reduction="mean")},
        "non_finite": spec.non_finite,
        "slice_elements": spec.slice_elements,
        "optimizer": {
            "kind": optimizer.kind,
            "values": optimizer.stated_values(),
            "schedule": {"kind": optimizer.schedule.kind, "values": schedule},
            "max_grad_norm": float(optimizer.max_grad_norm),
            "overrides": [{"pattern": item.pattern, "values": dict(item.values)} for item in optimizer.overrides],
        },
        **({"reset_optimizer": True} if spec.reset_optimizer else {}),
        **({"pull_compression": spec.pull_compression} if spec.pull_compression else {}),
        **({"dtype": spec.dtype} if spec.dtype != "float32" else {}),
    }


def _without(values: dict[str, Any], **defaults: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value != defaults.get(name, object)}


def spec_from_json(values: Mapping[str, Any]) -> ParametersSpec:
    """Parse the result of ``spec_to_json``. Raises PsdistError, KeyError, TypeError or ValueError for other values."""
    given, consistency = values["optimizer"], dict(values["consistency"])
    if pull_compression := values.get("pull_compression", ""):
        pull_codec_from_text(pull_compression)
    overrides = [Override(item["pattern"], tuple(sorted(item["values"].items()))) for item in given["overrides"]]
    schedule = schedule_from_values(given["schedule"]["kind"], given["schedule"]["values"])
    return ParametersSpec(
        name=values["name"],
        optimizer=optimizer_from_values(given["kind"], given["values"], schedule, given["max_grad_norm"], overrides),
        consistency=KINDS[consistency.pop("kind")](**consistency),
        non_finite=values["non_finite"],
        slice_elements=values["slice_elements"],
        reset_optimizer=values.get("reset_optimizer", False),
        pull_compression=pull_compression,
        dtype=values.get("dtype", "float32"),
    )
