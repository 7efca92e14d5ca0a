"""Comparison of a resumed run's settings with those in its snapshot: which changes need an optimizer reset.

Pure. docs/snapshots.md lists the allowed changes.

The saved state remains usable while the same optimizer has the same arrays with the same meaning, so that torch's
``Optimizer.load_state_dict`` would accept it as well. Settings that affect only the arithmetic of later updates may
change. Layouts and slices are compared when values are loaded (``psdist_scheduler.decide.snapshot_catalog``).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Final

from psdist.optim import Constant, Optimizer, Override
from psdist.types import ParametersSpec

#: Length of one value in a text, since there may be 256 overrides.
_VALUE_CHARACTERS_MAX: Final = 240
#: Fields that all optimizers share.
_SHARED: Final = tuple(field.name for field in fields(Optimizer))


@dataclass(frozen=True, slots=True)
class SettingChange:
    """Changed setting.

    needs_reset: True if the saved optimizer state cannot be used with it.
    """

    name: str
    before: str
    after: str
    needs_reset: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.after}"


def changes(before: ParametersSpec, after: ParametersSpec) -> tuple[SettingChange, ...]:
    """Return the settings that ``after`` changes, except name and slices; those that need a reset come first."""
    old, new = before.optimizer, after.optimizer
    pairs: dict[str, tuple[Any, Any]] = {
        "schedule": (old.schedule, new.schedule),
        "max_grad_norm": (old.max_grad_norm, new.max_grad_norm),
        "overrides": (old.overrides, new.overrides),
        "consistency": (before.consistency, after.consistency),
        "non_finite": (before.non_finite, after.non_finite),
        "pull_compression": (before.pull_compression, after.pull_compression),
    }
    if old.kind != new.kind:
        pairs = {"optimizer": (_alone(old), _alone(new)), **pairs}
    else:
        own = [field.name for field in fields(old) if field.name not in _SHARED]
        pairs = {name: (getattr(old, name), getattr(new, name)) for name in own} | pairs
    found = [
        SettingChange(name, _brief(mine), _brief(theirs), _needs_reset(name, old, new))
        for name, (mine, theirs) in pairs.items()
        if mine != theirs
    ]
    return tuple(sorted(found, key=lambda change: not change.needs_reset))


def _needs_reset(name: str, old: Optimizer, new: Optimizer) -> bool:
    if name == "overrides":
        return _states_by_pattern(old) != _states_by_pattern(new)
    if name in old.structural and old.kind == new.kind:
        return bool(getattr(old, name)) != bool(getattr(new, name))
    return name == "optimizer" or name in old.initial


def _states_by_pattern(optimizer: Optimizer) -> list[tuple[str, tuple[str, ...], list[float]]]:
    """Return what the state of each override's group consists of and begins with. Empty if all are like group 0."""
    states = []
    for group in optimizer.groups:
        values, pattern = optimizer.group_values(group), optimizer.overrides[group - 1].pattern if group else ""
        states.append((pattern, optimizer.group_state_names(group), [values[name] for name in optimizer.initial]))
    return states[1:] if any(state[1:] != states[0][1:] for state in states) else []


def _alone(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer without the settings that are compared separately."""
    return replace(optimizer, schedule=Constant(), max_grad_norm=0.0, overrides=())


def _brief(value: Any) -> str:
    """Return a setting as a user would write it, without defaults, in one line."""
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
