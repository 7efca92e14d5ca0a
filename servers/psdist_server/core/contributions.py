"""Statements of contributions beside their values: settings, refusals, equal gradients, and differences. Pure.

* ``Decision``: the settings of an update, among the contributions that state them.
* ``LateRefusals``: pushes that were refused after slices had counted them.
* ``ContributionComparison``: workers that push the same gradients.
* ``GradientEstimates``: the gradients that workers push differences to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psdist.compression import segments
from psdist.errors import PsdistError, StaleEstimateError, copy_error
from psdist.hyperparameters import Optimizer, Settings, by_group
from psdist.optim import Mean
from psdist.types import GradientDifference, Identity, ParametersSpec, Slicing
from psdist.wire.limits import MEMBERS_MAX
from psdist_server.core.shard import Producer

# --- settings ---------------------------------------------------------------------------------------------------------

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
    """Settings of an update by contributions, which are in rank order.

    The worker that has been a member longest decides, of equal ones the lowest rank, because a restarted worker may not
    know the run's current settings. The learning-rate factor and the hyperparameters are decided independently.

    lr_factor: factor on the learning rate: 1 if nobody states one.
    settings: hyperparameters that differ from the specification's.
    """

    def __init__(self, optimizer: Optimizer, stated: Iterable[Stated]) -> None:
        self._optimizer = optimizer
        self.lr_factor = 1.0
        self.settings: Settings = ()
        #: Workers that decided; empty if nobody did.
        self._factor_by = self._settings_by = ""
        for one in sorted(stated, key=lambda one: one.first_step):
            if one.lr_factor is not None and not self._factor_by:
                self.lr_factor, self._factor_by = one.lr_factor, one.worker_id
            if one.settings is not None and not self._settings_by:
                self.settings, self._settings_by = one.settings, one.worker_id

    def difference(self, one: Stated) -> tuple[str, str, str]:
        """Return the first setting of ``one`` that differs, the decided one, and the worker that decided; empty texts
        if none differs."""
        if self._factor_by and one.lr_factor is not None and _differ(one.lr_factor, self.lr_factor):
            return f"lr_factor={one.lr_factor!r}", f"lr_factor={self.lr_factor!r}", self._factor_by
        if not self._settings_by or one.settings is None or one.settings == self.settings:
            return "", "", ""
        mine, decided = _by_name(one.settings), _by_name(self.settings)
        for group, name in sorted({*mine, *decided}):
            default = self._optimizer.setting_defaults(group)[name]
            stated, used = (values.get((group, name), default) for values in (mine, decided))
            if _differ(stated, used):
                return f"{name}={stated!r} of group {group}", f"{name}={used!r}", self._settings_by
        return "", "", ""


class SettingsCheck:
    """Checks the settings that messages carry. Those that equal the last ones need no check."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._received: tuple[float | None, Settings] = (None, ())
        self._checked: Settings = ()

    def check(self, received: Settings, lr_factor: float | None = None) -> Settings:
        """Return the settings as ``Optimizer.check_settings`` does. Raises InvalidArgumentError as it does, for one
        that is given twice, and for a factor that does not fit."""
        if (lr_factor, received) != self._received:
            if lr_factor is not None:
                self._optimizer.check_lr_factor(lr_factor)
            checked = self._optimizer.check_settings(by_group(received))
            self._optimizer.check_rates(1.0 if lr_factor is None else lr_factor, checked)
            self._received, self._checked = (lr_factor, received), checked
        return self._checked


def _by_name(settings: Settings) -> Mapping[tuple[int, str], float]:
    return {(group, name): value for group, name, value in settings}


def _differ(one: float, used: float) -> bool:
    return abs(one - used) > _TOLERANCE * used


# --- refused pushes ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _RefusedPush:
    """Refused push of a producer.

    stated: the learning-rate factor and hyperparameters that were refused.
    error: their error; None if they were not refused.
    counted: slices that have counted the push with these settings.
    not_finite: slices whose contribution held NaN or Inf.
    """

    step: int
    stated: tuple[float | None, Settings | None] = (None, None)
    error: PsdistError | None = None
    counted: set[int] = field(default_factory=set)
    not_finite: set[int] = field(default_factory=set)


class LateRefusals:
    """Pushes to one parameter set that were refused after slices had counted them.

    Settings are compared, and contributions over TCP or in shared memory are checked, while a slice is updated. A
    connection may break before the worker reads the error. It then sends the same push again: slices that have counted
    it would answer as if nothing had been wrong.

    Invariants: Per producer, only the newest refused push is stored, and only for the last ``MEMBERS_MAX`` producers. A
    worker that is expelled and returns is the same producer. A push with other settings or other values is a
    correction, and not refused.
    """

    def __init__(self) -> None:
        self.by_producer: dict[Producer, _RefusedPush] = {}

    def add_settings(self, producer: Producer, step: int, index: int, stated: Stated, error: PsdistError) -> None:
        """Record that the settings of a push were refused with ``error`` once slice ``index`` had counted it."""
        push = self._add(producer, step)
        push.stated, push.error = (stated.lr_factor, stated.settings), error
        push.counted.add(index)

    def add_not_finite(self, producer: Producer, step: int, index: int) -> None:
        """Record that a push held NaN or Inf in slice ``index``, and was refused for that."""
        self._add(producer, step).not_finite.add(index)

    def settings_error(self, producer: Producer, step: int, index: int, stated: Stated) -> PsdistError | None:
        """Return the error of this push if slice ``index`` has counted it, and its settings were refused."""
        known = self.by_producer.get(producer)
        if known is None or known.step != step or known.error is None or index not in known.counted:
            return None
        return copy_error(known.error) if known.stated == (stated.lr_factor, stated.settings) else None

    def was_not_finite(self, producer: Producer, step: int, index: int) -> bool:
        """Return True if this push was refused for NaN or Inf in slice ``index``."""
        known = self.by_producer.get(producer)
        return known is not None and known.step == step and index in known.not_finite

    def _add(self, producer: Producer, step: int) -> _RefusedPush:
        known = self.by_producer.pop(producer, None)
        if known is None or known.step != step:
            known = _RefusedPush(step)
        self.by_producer[producer] = known
        if len(self.by_producer) > MEMBERS_MAX:
            del self.by_producer[next(iter(self.by_producer))]
        return known


# --- equal gradients --------------------------------------------------------------------------------------------------

#: Steps in a row after which workers are reported.
STEPS: Final = 3
_SAMPLE: Final = 64
#: Different values that a sample must hold. The script may average metrics with ``Mean``, which may be equal.
_DIFFERENT_VALUES: Final = 8
_DIFFERENT_VALUES_OF_MEANS: Final = 32
#: Elements that are compared between two checks for a difference.
_BLOCK: Final = 1 << 16
#: Comparisons of whole slices that found a difference, after which no more are made: each costs a pass over memory.
_FAILURES_ALLOWED: Final = 10


@dataclass(frozen=True, slots=True)
class EqualReport:
    """Report to the scheduler: these workers pushed equal gradients in ``STEPS`` steps, up to ``step``."""

    parameters: str
    worker_ids: tuple[str, ...]
    step: int


class ContributionComparison:
    """Detection of workers that push the same gradients to a parameter set, because they read the same batches.

    A script that shuffles its data with a fixed seed in every worker trains like one worker, only slower. In each BSP
    step one slice is compared: first a sample of it and, only if samples agree, all of it. After ``STEPS`` steps in a
    row with the same result the workers are reported.

    Equal contributions prove nothing if they hold few different values, as do gradients that are zero or constant,
    flags, and averages of a few numbers. Encoded contributions are not compared, and in SSP and ASP workers compute
    gradients on different weights.
    """

    def __init__(self, spec: ParametersSpec) -> None:
        self._name = spec.name
        self._least = _DIFFERENT_VALUES_OF_MEANS if isinstance(spec.optimizer, Mean) else _DIFFERENT_VALUES
        self._step = -1
        self._equal: frozenset[str] = frozenset()
        self._count = 0
        self._failures = 0
        #: Set once; nothing is compared from then on.
        self.report: EqualReport | None = None

    def needs(self, step: int) -> bool:
        """Return True if contributions to ``step`` should be compared."""
        return step > self._step and self.report is None and self._failures < _FAILURES_ALLOWED

    def compare(self, step: int, values: Mapping[str, NDArray[np.generic]]) -> None:
        """Compare contributions to a slice in ``step``. values: by worker, of one length; none is encoded."""
        alike = _largest_group({worker: _sample_of(_bits(array)).tobytes() for worker, array in values.items()})
        if len(alike) > 1:
            first = _bits(values[alike[0]])
            if len(set(_sample_of(first).tolist()) - {0}) < self._least:
                return  # Another slice of this step may tell more.
            alike = [worker for worker in alike if _are_equal(first, _bits(values[worker]))]
            self._failures += len(alike) == 1
        equal = frozenset(alike) if len(alike) > 1 else frozenset[str]()
        self._count = self._count + 1 if equal == self._equal else 1
        self._step, self._equal = step, equal
        if equal and self._count == STEPS:
            self.report = EqualReport(self._name, tuple(sorted(equal)), step)


def _bits(values: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
    """Return the elements as integers, which are compared bit by bit. shape: [n]."""
    return values.view(f"u{values.itemsize}")


def _sample_of(values: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    return values[:: max(1, values.size // _SAMPLE)][:_SAMPLE]


def _largest_group(samples: Mapping[str, bytes]) -> list[str]:
    """Return the workers of the sample that most of them share."""
    groups: dict[bytes, list[str]] = {}
    for worker, sample in samples.items():
        groups.setdefault(sample, []).append(worker)
    return max(groups.values(), key=len)


def _are_equal(first: NDArray[np.unsignedinteger], second: NDArray[np.unsignedinteger]) -> bool:
    starts = range(0, first.size, _BLOCK)
    return all(np.array_equal(first[at : at + _BLOCK], second[at : at + _BLOCK]) for at in starts)


# --- differences ------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float32]


class _Estimate(NamedTuple):
    """The gradient of one slice in one push. push: the worker's incarnation and the push's number."""

    push: tuple[int, int]
    values: Floats


class GradientEstimates:
    """Estimates of workers' gradients (EF21), which let workers push differences instead of gradients.

    The gradient of such a push is the updated estimate. The worker computes the same estimate, since both sides add the
    same segments in float32. Estimates only save bandwidth: they are in no snapshot and on no replica. If the server's
    estimate is not the one that a push is a difference to, the server refuses the push and the worker sends the whole
    gradient.

    Source: Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
    Feedback" (arXiv 2106.05203), algorithm 2.

    Invariants: There is at most one estimate per slice and live worker. A returned array never changes.
    """

    def __init__(self, slicing: Slicing) -> None:
        self._slicing = slicing
        #: By worker and slice.
        self._kept: dict[tuple[str, int], _Estimate] = {}
        #: Total size of the estimates. Reported in each heartbeat.
        self.bytes = 0

    def add(self, worker: Identity, difference: GradientDifference, index: int, payload: NDArray[np.uint8]) -> Floats:
        """Return the gradient of a push whose segments have been checked. The caller stores it by ``keep``.

        Raises StaleEstimateError if the base of the difference is not stored here.
        """
        number, from_zeros = difference
        kept = self._kept.get((worker.worker_id, index))
        if from_zeros:
            values = np.zeros(self._slicing.size(index), np.float32)
        elif kept is not None and kept.push == (worker.incarnation, number):
            return kept.values  # A retry.
        elif kept is not None and kept.push == (worker.incarnation, number - 1):
            values = kept.values.copy()
        else:
            raise StaleEstimateError(
                f"push {number} of slice {index} is a difference to the gradient of push {number - 1}, which is not "
                "stored here: send the whole gradient",
                slice=index,
            )
        segments.accumulate(payload, values)
        return values

    def keep(self, worker: Identity, difference: GradientDifference, index: int, values: Floats) -> None:
        """Store the gradient of a push, as the base of the worker's next difference."""
        self.discard(worker.worker_id, index)
        self._kept[worker.worker_id, index] = _Estimate((worker.incarnation, difference.number), values)
        self.bytes += values.nbytes

    def fence(self, live: Mapping[str, int]) -> None:
        """Discard the estimates of workers that are no longer ``live`` (incarnation by worker id)."""
        for key, estimate in list(self._kept.items()):
            if live.get(key[0]) != estimate.push[0]:
                self.discard(*key)

    def discard(self, worker_id: str, index: int) -> None:
        """Discard a worker's estimate of a slice."""
        if (estimate := self._kept.pop((worker_id, index), None)) is not None:
            self.bytes -= estimate.values.nbytes

    def discard_slices(self, indices: Collection[int]) -> None:
        """Discard the estimates of slices that are no longer served here."""
        for key in [key for key in self._kept if key[1] in indices]:
            self.discard(*key)
