"""Settings of parameters as a manifest has them: plain values that JSON can carry, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.optim import Override, optimizer_from_values, schedule_from_values
from psdist.types import ParametersSpec


def spec_to_json(spec: ParametersSpec) -> dict[str, Any]:
    """As plain values. What is of version 2 of the format is there only where it says something."""
    optimizer = spec.optimizer
    schedule = {field.name: float(getattr(optimizer.schedule, field.name)) for field in fields(optimizer.schedule)}
    return {
        "name": spec.name,
        "consistency": _consistency_to_json(spec.consistency),
        "non_finite": spec.non_finite,
        "slice_elements": spec.slice_elements,
        "optimizer": {
            "kind": optimizer.kind,
            "values": optimizer.values(),
            "schedule": {"kind": optimizer.schedule.kind, "values": schedule},
            "max_grad_norm": float(optimizer.max_grad_norm),
            "overrides": [{"pattern": item.pattern, "values": dict(item.values)} for item in optimizer.overrides],
        },
        **({"reset_optimizer": True} if spec.reset_optimizer else {}),
    }


def spec_from_json(values: Mapping[str, Any]) -> ParametersSpec:
    """What ``spec_to_json`` gave. Raises PsdistError, or what values of other kinds raise on their way."""
    given = values["optimizer"]
    overrides = [Override(item["pattern"], tuple(sorted(item["values"].items()))) for item in given["overrides"]]
    schedule = schedule_from_values(given["schedule"]["kind"], given["schedule"]["values"])
    return ParametersSpec(
        name=values["name"],
        optimizer=optimizer_from_values(given["kind"], given["values"], schedule, given["max_grad_norm"], overrides),
        consistency=_consistency_from_json(values["consistency"]),
        non_finite=values["non_finite"],
        slice_elements=values["slice_elements"],
        reset_optimizer=values.get("reset_optimizer", False),
    )


def _consistency_to_json(consistency: Consistency) -> dict[str, Any]:
    kind = {BSP: "bsp", SSP: "ssp", ASP: "asp"}[type(consistency)]
    return {"kind": kind, **asdict(consistency)}


def _consistency_from_json(values: Mapping[str, Any]) -> Consistency:
    kinds: dict[str, type[Consistency]] = {"bsp": BSP, "ssp": SSP, "asp": ASP}
    given = dict(values)
    return kinds[given.pop("kind")](**given)
