"""Mean gradients on the worker: for scripts that clip or change the mean itself, as a single process does.

The gradients are averaged by a parameter set with ``psdist.optim.Mean`` as its optimizer, created by the first call.
The step then pushes the mean, so each gradient is sent twice.

Invariant: After ``average`` every worker holds the same gradient bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist.client.session.membership import unless_dropped
from psdist.client.sync_client import Client, Parameters
from psdist.errors import NonFiniteGradientError
from psdist.optim import Mean
from psdist.torch.gradient_vector.gradient_memory import gradient_memory
from psdist.torch.values import as_real, write_into
from psdist.types import MasterDType

#: Tensor with 1 for each parameter that got a gradient.
_USED: Final = "psdist/used"
#: Tensor that is above 0 if gradients of any worker are not finite.
_OVERFLOWS: Final = "psdist/overflows"


class MeanGradients:
    """Averages the gradients of ``trained`` over all workers.

    name: parameter set of the means.
    master_dtype: dtype in which the servers compute.
    """

    def __init__(
        self, client: Client, name: str, trained: Mapping[str, nn.Parameter], master_dtype: MasterDType
    ) -> None:
        self._trained = dict(trained)
        shapes: dict[str, NDArray[Any]] = {
            key: np.zeros(tuple(as_real(one).shape), master_dtype) for key, one in trained.items()
        }
        flags: dict[str, NDArray[np.float32]] = {
            _USED: np.zeros(len(trained), np.float32),
            _OVERFLOWS: np.zeros(1, np.float32),
        }
        self._handle: Parameters = client.parameters(name, shapes | flags, Mean(), master_dtype=master_dtype)
        device = next(iter(trained.values())).device
        self._arrays, self._buffers = gradient_memory(self._handle, device)

    def average(self, weight: float) -> None:
        """Replace ``parameter.grad`` by the mean over workers. A gradient that no worker has stays None.

        weight: of this worker's gradients in the mean.

        If gradients of any worker are not finite, those of all workers become NaN. The gradients stay as they are if
        this worker had been expelled; its next step is dropped as well. Raises the errors of ``Parameters.push_pull``.
        """
        self._fill()
        means = unless_dropped(lambda: self._push_pull(weight))
        if means is None:
            return
        used = [bool(one) for one in means[_USED]]
        overflows = float(means[_OVERFLOWS][0]) > 0
        for (name, parameter), is_used in zip(self._trained.items(), used, strict=True):
            if is_used:
                _set_gradient(parameter, means[name])
                if overflows and parameter.grad is not None:
                    parameter.grad.detach().fill_(np.nan)

    def _fill(self) -> None:
        for name, parameter in self._trained.items():
            gradient = parameter.grad
            if gradient is None:
                self._buffers[name].zero_()
            else:
                with torch.no_grad():
                    self._buffers[name].copy_(as_real(_dense(gradient)))
        self._buffers[_USED].copy_(torch.tensor([one.grad is not None for one in self._trained.values()]))
        self._buffers[_OVERFLOWS].zero_()

    def _push_pull(self, weight: float) -> Mapping[str, NDArray[Any]]:
        try:
            return self._handle.push_pull(self._arrays, copy=False, weight=weight)
        except NonFiniteGradientError:
            for name in self._trained:
                self._buffers[name].zero_()
            self._buffers[_OVERFLOWS].fill_(1.0)
            return self._handle.push_pull(self._arrays, copy=False, weight=weight)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _set_gradient(parameter: nn.Parameter, mean: NDArray[Any]) -> None:
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        parameter.grad = torch.empty_like(parameter)
    write_into(parameter.grad, mean)
