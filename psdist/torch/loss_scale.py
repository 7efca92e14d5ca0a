"""Gradients of a scaled loss: the work that torch's GradScaler leaves to an optimizer that supports it.

float16 gradients overflow now and then. The scaler then makes its optimizer skip the step and lowers the scale. In BSP
all workers must skip a step together, because one would otherwise push alone.

Invariant: No gradient is pushed before all workers have reported finite gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from psdist.client.context import Context
from psdist.client.sync_client import Parameters
from psdist.consistency import BSP, Consistency
from psdist.optim import Mean

_TENSOR: Final = "overflows"


class LossScale:
    """Unscales gradients and decides whether all workers make the step.

    name: parameter set for the workers' agreement. It is created at the first scaled step.
    """

    def __init__(self, context: Context, name: str, consistency: Consistency) -> None:
        self._context = context
        self._name = name
        #: In SSP and ASP a worker skips its own pushes alone.
        self._is_common = isinstance(consistency, BSP)
        self._handle: Parameters | None = None

    def unscale(self, optimizer: Any, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide gradients by the scale. Returns False if the step is skipped.

        optimizer: carries ``found_inf`` and ``grad_scale`` if torch's scaler steps it. The scale is None if the script
            has already unscaled.
        """
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return True
        scale = optimizer.grad_scale
        if self.overflows_anywhere(bool(found.item())):
            return False
        if scale is not None:
            factor = scale.double().reciprocal().float()
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor.to(parameter.grad.device))
        return True

    def overflows_anywhere(self, mine: bool) -> bool:
        """Return True if gradients of any worker overflow in this step; then no worker makes it. mine: this worker's
        overflow.
        """
        if not self._is_common:
            return mine
        flag = np.full(1, mine, np.float32)
        if self._handle is None:
            self._handle = self._context.client.parameters(self._name, {_TENSOR: np.zeros(1, np.float32)}, Mean())
        return bool(self._handle.push_pull({_TENSOR: flag}, copy=False)[_TENSOR][0] > 0)
