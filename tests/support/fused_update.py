"""One update of a test's arrays by the servers' kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psdist.hyperparameters import Settings
from psdist_server.kernels import means
from psdist_server.kernels.interpreted import division_by
from psdist_server.kernels.optimizers import Rule, Run

Floats = NDArray[np.float32]


def update(
    rule: Rule,
    weights: Floats,
    states: Sequence[Floats],
    gradient: Floats,
    step: int,
    lr_scale: float = 1.0,
    runs: Sequence[Run] | None = None,
    mean: Floats | None = None,
    settings: Settings = (),
) -> None:
    """Update float32[n] ``weights`` and ``states`` once by one gradient.

    runs: as for ``Rule.initialize``; by default the whole in group 0.
    mean: float32[n] that receives the kernel's mean.
    settings: hyperparameters that differ from the specification's.
    """
    scalars = rule.scalars(step, lr_scale, settings)
    addresses = [array.ctypes.data for array in (weights, *states)]
    for start, stop, group in runs if runs is not None else [(0, weights.size, 0)]:
        values = scalars[group]
        if values is not None:
            rule.kernels[group](
                np.array([[addresses[array] + 4 * start for array in rule.arrays[group]]], np.uintp),
                np.array([[stop - start, start, 1]], np.int64),
                np.array([[gradient.ctypes.data]], np.uintp),
                np.array([[means.CODES[gradient.dtype]]], np.int64),
                np.array([division_by(1)], np.float32),
                np.zeros(2 * means.BLOCK, np.float32),
                np.zeros((1, 1), np.uint8),
                np.array([mean.ctypes.data if mean is not None else 0], np.uintp),
                values,
            )
