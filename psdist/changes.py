"""What a run that goes on from a snapshot sets otherwise than the run that saved it, and for what of that the
optimizer's state in the snapshot is of no use. Pure. docs/use.md has the table of what is allowed.

State is of use as long as the same optimizer keeps the same arrays, with the same meaning: then torch's
``Optimizer.load_state_dict`` would take it too. Settings that only change the arithmetic of the updates to come are
changed freely. Not here: layouts and slices, which are compared where values are loaded
(``psdist_scheduler.placement.restore_point``).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Final

from psdist.optim import Constant, Optimizer, Override
from psdist.types import ParametersSpec

#: Characters of one value in a text: there may be 256 overrides.
_VALUE_CHARACTERS_MAX: Final = 240
#: Fields that all optimizers have.
_SHARED: Final = tuple(field.name for field in fields(Optimizer))
#: Whether these are 0 decides which arrays there are.
_STRUCTURAL: Final = ("momentum", "centered")
#: These count when the state begins, and never after.
_INITIAL: Final = ("initial_accumulator_value",)


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that is another now. needs_reset: the optimizer's state of before is of no use with it."""

    name: str
    before: str
    after: str
    needs_reset: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.after}"


def changes(before: ParametersSpec, after: ParametersSpec) -> tuple[SettingChange, ...]:
    """What ``after`` has set otherwise, name and cut of the parameters excepted; what needs a reset comes first."""
    old, new = before.optimizer, after.optimizer
    pairs = {
        "schedule": (old.schedule, new.schedule),
        "max_grad_norm": (old.max_grad_norm, new.max_grad_norm),
        "overrides": (old.overrides, new.overrides),
        "consistency": (before.consistency, after.consistency),
        "non_finite": (before.non_finite, after.non_finite),
    }
    others = [
        SettingChange(name, _brief(mine), _brief(theirs)) for name, (mine, theirs) in pairs.items() if mine != theirs
    ]
    return tuple(sorted([*_optimizer_changes(old, new), *others], key=lambda change: not change.needs_reset))


def _optimizer_changes(old: Optimizer, new: Optimizer) -> list[SettingChange]:
    if old.kind != new.kind:
        return [SettingChange("optimizer", _brief(_alone(old)), _brief(_alone(new)), needs_reset=True)]
    own = [field.name for field in fields(old) if field.name not in _SHARED]
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in own}
    return [
        SettingChange(name, _brief(mine), _brief(theirs), _is_of_state(name, mine, theirs))
        for name, (mine, theirs) in pairs.items()
        if mine != theirs
    ]


def _is_of_state(name: str, old: Any, new: Any) -> bool:
    return name in _INITIAL or (name in _STRUCTURAL and bool(old) != bool(new))


def _alone(optimizer: Optimizer) -> Optimizer:
    """Without what is told as a change of its own."""
    return replace(optimizer, schedule=Constant(), max_grad_norm=0.0, overrides=())


def _brief(value: Any) -> str:
    """A setting as a user would write it, without defaults, not longer than a line."""
    text = _written(value)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[: _VALUE_CHARACTERS_MAX - 3]}..."


def _written(value: Any) -> str:
    if isinstance(value, Override):
        return f"override({value.pattern!r}, {', '.join(f'{name}={number!r}' for name, number in value.values)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))})"
    if not is_dataclass(value):
        return repr(value)
    given = [
        f"{field.name}={_written(getattr(value, field.name))}"
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"
