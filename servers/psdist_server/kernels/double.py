"""Updates in float64, by numpy: ``DenseParameters`` of a set whose ``dtype`` is float64.

Two elements of each array hold one value (``psdist.types.WORDS``). So everything that stores, copies or sends a slice
treats it as float32, and only the arithmetic here sees float64. The optimizers' arithmetic is that of the
kernels, which is written for arrays of any float dtype.

Invariants: As those of ``arrays``, except that a contribution with NaN or Inf is left out of the whole slice, and that
a slice whose mean is not finite is not updated at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.errors import DTypeMismatchError
from psdist.types import ParametersEntry
from psdist_server.core.lags import pieces
from psdist_server.kernels.arrays import Array, Bad, DenseParameters, Gradient, Update, skip_absent
from psdist_server.kernels.optimizers import Rule

Doubles = NDArray[np.float64]

#: Values that are updated together: numpy's temporary arrays then fit in a second-level cache.
_PIECE: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class _Mean:
    """Mean of the finite contributions to a slice, None if there is none, and the positions of the others."""

    values: Doubles | None
    left_out: Bad


class DoubleParameters(DenseParameters):
    """The slices of ``entry``, of dtype float64, that this server holds a copy of."""

    def __init__(self, entry: ParametersEntry) -> None:
        super().__init__(entry)
        self.rule = Rule(entry.spec.optimizer, entry.state_since, np.float64)

    def read(self, index: int, dtype: str) -> memoryview:
        """Return the weights of a slice as bytes. Raises DTypeMismatchError unless ``dtype`` is float32, which stands
        for the values as they are."""
        if dtype != "float32":
            raise DTypeMismatchError(
                f"weights in float64 cannot be pulled as {dtype}: use float32, which leaves them whole"
            )
        return super().read(index, dtype)

    def combine(
        self, index: int, parts: Sequence[Gradient], is_encoded: bool = False, weights: tuple[float, ...] = ()
    ) -> tuple[Array | None, float, Bad]:
        """See ``DenseParameters``."""
        if not parts:
            return None, 0.0, ()
        mean = _mean_of(Update(index, 0, parts, weights=weights), self.sums)
        if mean.values is None:
            return None, 0.0, mean.left_out
        return mean.values.view(np.float32), float(np.square(mean.values).sum()), mean.left_out

    def apply(self, updates: Sequence[Update]) -> list[Bad]:
        """See ``DenseParameters``."""
        return [self._apply_one(update) for update in updates]

    def _apply_one(self, update: Update) -> Bad:
        sequence = self.weights.sequence
        left_out: Bad = ()
        if update.parts:
            mean = _mean_of(update, self.sums)
            left_out = mean.left_out
            if update.mean is not None:
                update.mean.view(np.float64)[...] = np.nan if mean.values is None else mean.values
            if mean.values is not None:
                sequence[update.index] = 2 * update.step + 1
                self._update(update, mean.values)
            skip_absent(update, self.lags)
        sequence[update.index] = 2 * update.step + 2
        return left_out

    def _update(self, update: Update, mean: Doubles) -> None:
        """Update the weights and state of a slice by its mean."""
        every = [array.view(np.float64) for array in self.export(update.index)]
        with np.errstate(all="ignore"):
            for start, stop, group, lag in pieces(self._runs[update.index], self.lags.of(update.index), update.absent):
                mine = self.rule.scalars(update.step, update.lr_scale, update.settings, lag)[group]
                if mine is None:
                    continue
                element, arrays = self.rule.kernels[group].element, [every[at] for at in self.rule.arrays[group]]
                for at in range(start // 2, stop // 2, _PIECE):
                    end = min(at + _PIECE, stop // 2)
                    own = [array[at:end] for array in arrays]
                    new = element(*own, mean[at:end], *mine)
                    for array, values in zip(own, new if isinstance(new, tuple) else (new,), strict=True):
                        array[...] = values


def _mean_of(update: Update, sums: bool) -> _Mean:
    """Compute the mean of an update's contributions, or their sum. Each is copied before it is examined, as it may
    change."""
    copies: list[Doubles] = [np.array(part).view(np.float64) for part in update.parts]
    good = [place for place, values in enumerate(copies) if np.isfinite(values).all()]
    left_out = tuple(sorted(set(range(len(copies))).difference(good)))
    if not good:
        return _Mean(None, left_out)
    with np.errstate(all="ignore"):
        if update.weights:
            total = np.zeros_like(copies[0])
            for place in good:
                total += update.weights[place] * copies[place]
            mean = total if sums else total / sum(update.weights[place] for place in good)
        else:
            total = copies[good[0]]
            for place in good[1:]:
                total += copies[place]
            if update.factor is not None and not left_out:
                mean = total * update.factor
            else:
                mean = total if sums else total / (update.divisor or len(good))
    return _Mean(mean if np.isfinite(mean).all() else None, left_out)
