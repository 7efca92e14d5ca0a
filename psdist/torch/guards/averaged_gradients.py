"""Detection of optimizer steps with gradients that ``DistributedDataParallel`` did not average.

``backward`` averages. Gradients that a script makes by ``torch.autograd.grad`` or ``torch.func.grad`` and assigns to
``p.grad`` stay this worker's own, and so do those of passes in ``no_sync`` alone. A step with them makes the workers'
models differ without any error, also with torch's own class.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from psdist.errors import InvalidArgumentError

_records: Final[weakref.WeakSet[AveragedGradients]] = weakref.WeakSet()
_hooks: Final[list[Any]] = []


class AveragedGradients:
    """Record of the gradients of ``trained`` that were averaged.

    Steps of any optimizer with other gradients of these parameters raise InvalidArgumentError. A script may change or
    replace averaged gradients between ``backward`` and ``step``.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(parameter): name for name, parameter in trained.items()}
        self._parameters = list(trained.values())
        self._passes = 0
        #: Number of averaged passes at an optimizer's latest step.
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        #: Gradients after the latest averaged pass, by the identity of the parameter.
        self._gradients: dict[int, weakref.ref[torch.Tensor]] = {}
        _records.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_check))

    def on_average(self) -> None:
        """Record that a backward pass ended with averaged gradients."""
        self._passes += 1
        self._gradients = {id(one): weakref.ref(one.grad) for one in self._parameters if one.grad is not None}

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InvalidArgumentError if ``optimizer`` is about to use gradients that were not averaged."""
        if self._seen.get(optimizer, 0) != self._passes:
            self._seen[optimizer] = self._passes
            return
        for parameter in _parameters_of(optimizer):
            name = self._names.get(id(parameter))
            known = self._gradients.get(id(parameter))
            if name is not None and parameter.grad is not None and (known is None or known() is not parameter.grad):
                raise InvalidArgumentError(
                    f"the gradient of {name!r} is this worker's own: no backward() averaged it, so the workers' models "
                    "would differ. Call backward() outside no_sync() instead of assigning p.grad, or use "
                    "psdist.torch.DistributedOptimizer, whose step() averages whatever p.grad holds"
                )


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for record in list(_records):
        record.check(optimizer)
