"""Gradients of a scaled loss: what torch's GradScaler leaves to an optimizer that says it can.

float16 gradients overflow now and then. The scaler then has its optimizer skip the step, and scales the loss by less.
Here all workers of a BSP run skip a step together, or one would push what the others do not.

Invariant: no gradient is pushed before all workers have said that theirs are finite.
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
    """Takes the scale out of gradients, and says whether all workers make the step.

    name: of the parameter set by which they tell each other. It is made with the first scaled step.
    """

    def __init__(self, context: Context, name: str, consistency: Consistency) -> None:
        self._context = context
        self._name = name
        #: In SSP and ASP a worker skips a push of its own.
        self._is_common = isinstance(consistency, BSP)
        self._handle: Parameters | None = None

    def unscale(self, optimizer: Any, parameters: Iterable[nn.Parameter]) -> bool:
        """Divides gradients by the scale. Returns False where the step is to be skipped.

        optimizer: has ``found_inf`` and ``grad_scale`` of torch's scaler, if it is stepped by one; the scale is None
            where the script has unscaled before.
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
        """Whether the gradients of any worker overflow in this step, which then none makes. mine: of this one."""
        if not self._is_common:
            return mine
        flag = np.full(1, mine, np.float32)
        if self._handle is None:
            self._handle = self._context.client.parameters(self._name, {_TENSOR: np.zeros(1, np.float32)}, Mean())
        return bool(self._handle.push_pull({_TENSOR: flag}, copy=False)[_TENSOR][0] > 0)
