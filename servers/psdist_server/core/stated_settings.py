"""Settings of one update, decided among the contributions that state them: learning rate and hyperparameters. Pure.

The worker that has been a member longest decides, of equal ones the lowest rank, because a restarted worker may not
know the run's current settings. The learning-rate factor and the hyperparameters are decided independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from psdist.hyperparameters import Optimizer, Settings, by_group

#: Settings computed by different libraries differ in the last digits.
_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Stated:
    """Settings that one contribution states.

    first_step: BSP: its worker's first step.
    lr_factor: factor on the learning rate; None if other workers decide.
    settings: hyperparameters that differ from the specification's; None if other workers decide.
    """

    worker_id: str
    first_step: int
    lr_factor: float | None
    settings: Settings | None


class Decision:
    """Settings of an update by contributions, which are in rank order."""

    def __init__(self, optimizer: Optimizer, stated: Iterable[Stated]) -> None:
        self._optimizer = optimizer
        given = list(stated)
        self._by_factor = _first(one for one in given if one.lr_factor is not None)
        self._by_settings = _first(one for one in given if one.settings is not None)

    @property
    def lr_factor(self) -> float:
        """Factor on the learning rate: 1 if nobody states one."""
        factor = self._by_factor.lr_factor if self._by_factor is not None else None
        return 1.0 if factor is None else factor

    @property
    def settings(self) -> Settings:
        """Hyperparameters that differ from the specification's."""
        settings = self._by_settings.settings if self._by_settings is not None else None
        return () if settings is None else settings

    def difference(self, one: Stated) -> tuple[str, str, str]:
        """Return the first setting of ``one`` that differs, the decided one, and the worker that decided; empty texts
        if none differs."""
        if self._by_factor is not None and one.lr_factor is not None and _differ(one.lr_factor, self.lr_factor):
            return f"lr_factor={one.lr_factor!r}", f"lr_factor={self.lr_factor!r}", self._by_factor.worker_id
        if self._by_settings is None or one.settings is None or one.settings == self.settings:
            return "", "", ""
        mine, decided = _by_name(one.settings), _by_name(self.settings)
        for group, name in sorted({*mine, *decided}):
            default = self._optimizer.setting_defaults(group)[name]
            stated, used = (values.get((group, name), default) for values in (mine, decided))
            if _differ(stated, used):
                return f"{name}={stated!r} of group {group}", f"{name}={used!r}", self._by_settings.worker_id
        return "", "", ""


class SettingsCheck:
    """Checks the settings that messages carry. Equal ones that follow each other are stored once."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._last: tuple[Settings, Settings] = (), ()

    def check(self, received: Settings) -> Settings:
        """Return the settings as ``Optimizer.check_settings`` does. Raises InvalidArgumentError as it does, and for one
        that is given twice."""
        if received != self._last[0]:
            self._last = received, self._optimizer.check_settings(by_group(received))
        return self._last[1]


def _first(stated: Iterable[Stated]) -> Stated | None:
    return min(stated, key=lambda one: one.first_step, default=None)


def _by_name(settings: Settings) -> Mapping[tuple[int, str], float]:
    return {(group, name): value for group, name, value in settings}


def _differ(one: float, used: float) -> bool:
    return abs(one - used) > _TOLERANCE * used
