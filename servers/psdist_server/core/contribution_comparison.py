"""Detection of workers that push the same gradients, because they read the same batches.

A script that shuffles its data with a fixed seed in every worker trains like one worker, only slower. In each BSP step
one slice is compared: first a sample of it and, only if samples agree, all of it. After ``STEPS`` steps in a row with
the same result the workers are reported.

Equal contributions prove nothing if they hold few different values, as do gradients that are zero or constant, flags,
and averages of a few numbers. Encoded contributions are not compared, and in SSP and ASP workers compute gradients on
different weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.optim import Mean
from psdist.types import ParametersSpec

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
    """Comparison of the contributions to one parameter set."""

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
        alike = _largest_group({worker: _sample(array) for worker, array in values.items()})
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


def _sample(values: NDArray[np.generic]) -> bytes:
    return _sample_of(_bits(values)).tobytes()


def _largest_group(samples: Mapping[str, bytes]) -> list[str]:
    """Return the workers of the sample that most of them share."""
    groups: dict[bytes, list[str]] = {}
    for worker, sample in samples.items():
        groups.setdefault(sample, []).append(worker)
    return max(groups.values(), key=len)


def _are_equal(first: NDArray[np.unsignedinteger], second: NDArray[np.unsignedinteger]) -> bool:
    starts: Sequence[int] = range(0, first.size, _BLOCK)
    return all(np.array_equal(first[at : at + _BLOCK], second[at : at + _BLOCK]) for at in starts)
