"""Pushes that were refused after slices had counted them. Pure.

Settings are compared, and contributions over TCP or in shared memory are checked, while a slice is updated. A
connection may break before the worker reads the error. It then sends the same push again: slices that have counted it
would answer as if nothing had been wrong.

Invariants: Per producer, only the newest refused push is stored, and only for the last ``MEMBERS_MAX`` producers. A
worker that is expelled and returns is the same producer. A push with other settings or other values is a correction,
and not refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from psdist.errors import PsdistError, copy_error
from psdist.hyperparameters import Settings
from psdist.wire.limits import MEMBERS_MAX
from psdist_server.core.slice_records import Producer

#: Learning-rate factor and hyperparameters that a push states.
StatedSettings = tuple[float | None, Settings | None]


@dataclass(slots=True)
class _RefusedPush:
    """Refused push of a producer.

    settings: the settings that differed from those of its step, and the error; None if they were not refused.
    counted: slices that have counted the push with these settings.
    not_finite: slices whose contribution held NaN or Inf.
    """

    step: int
    settings: tuple[StatedSettings, PsdistError] | None = None
    counted: set[int] = field(default_factory=set)
    not_finite: set[int] = field(default_factory=set)


class LateRefusals:
    """The refused pushes of one parameter set on one server."""

    def __init__(self) -> None:
        self._by_producer: dict[Producer, _RefusedPush] = {}

    def add_settings(
        self, producer: Producer, step: int, index: int, stated: StatedSettings, error: PsdistError
    ) -> None:
        """Record that the settings of a push were refused with ``error`` once slice ``index`` had counted it."""
        push = self._of(producer, step)
        push.settings = (stated, error)
        push.counted.add(index)

    def add_not_finite(self, producer: Producer, step: int, index: int) -> None:
        """Record that a push held NaN or Inf in slice ``index``, and was refused for that."""
        self._of(producer, step).not_finite.add(index)

    def settings_error(self, producer: Producer, step: int, index: int, stated: StatedSettings) -> PsdistError | None:
        """Return the error of this push if slice ``index`` has counted it, and its settings were refused."""
        known = self._by_producer.get(producer)
        if known is None or known.step != step or known.settings is None or index not in known.counted:
            return None
        settings, error = known.settings
        return copy_error(error) if settings == stated else None

    def was_not_finite(self, producer: Producer, step: int, index: int) -> bool:
        """Return True if this push was refused for NaN or Inf in slice ``index``."""
        known = self._by_producer.get(producer)
        return known is not None and known.step == step and index in known.not_finite

    def _of(self, producer: Producer, step: int) -> _RefusedPush:
        known = self._by_producer.pop(producer, None)
        if known is None or known.step != step:
            known = _RefusedPush(step)
        self._by_producer[producer] = known
        if len(self._by_producer) > MEMBERS_MAX:
            del self._by_producer[next(iter(self._by_producer))]
        return known
