"""The mean of all workers' losses, for optimizers that search by the loss of a closure.

``LBFGS`` compares losses of several points, and decides by them where to continue and when to end. If workers compared
their own, their models would differ, although gradients are averaged. So closures of such optimizers return the mean.
Other optimizers of torch call a closure once and pass its result on, which stays each worker's own.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from psdist.client.context import Context
from psdist.client.sync_client import Parameters
from psdist.consistency import BSP, Reduction, with_reduction
from psdist.errors import InvalidArgumentError
from psdist.optim import Mean

logger = logging.getLogger("psdist")

_LOSS: Final = "loss"
_INVALID: Final = "invalid"
_owners: Final[weakref.WeakSet[MeanLosses]] = weakref.WeakSet()
_hooks: Final[list[Any]] = []


class MeanLosses:
    """Lets closures that compute gradients of ``trained`` return the mean of all workers' losses.

    name: parameter set of the losses. It is created at the first closure.
    reduction: that of the gradients.
    in_join: returns True while workers may make different numbers of calls.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        trained: Mapping[str, nn.Parameter],
        reduction: Reduction,
        in_join: Callable[[], bool],
    ) -> None:
        self._context = context
        self._name = name
        self._ids = frozenset(map(id, trained.values()))
        self._reduction = reduction
        self._in_join = in_join
        self._handle: Parameters | None = None
        self._has_warned = False
        _owners.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_average_closure))

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer has parameters of this model."""
        return any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"])

    def averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the mean. Raises InvalidArgumentError in ``join``."""
        if self._in_join():
            raise InvalidArgumentError(
                "an optimizer that searches by the loss of a closure, such as LBFGS, cannot be used in join(), where "
                "workers without a batch call no closure: give all workers the same number of batches"
            )
        return lambda: self._mean(closure())

    def _mean(self, loss: Any) -> Any:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            own = loss.detach()
            return torch.full_like(own, self._mean_of(float(own)))
        if isinstance(loss, float | int):
            return self._mean_of(float(loss))
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a closure of %r returned %s, which cannot be averaged: if the optimizer searches by it, the workers' "
                "models will differ. Return the loss, a tensor of one element or a number",
                self._name, type(loss).__name__,
            )  # fmt: skip
        return loss

    def _mean_of(self, loss: float) -> float:
        """Return the mean; NaN if a worker's loss is not finite."""
        is_valid = math.isfinite(loss)
        values = {_LOSS: np.array([loss if is_valid else 0.0]), _INVALID: np.array([0.0 if is_valid else 1.0])}
        if self._handle is None:
            zeros = {name: np.zeros(1) for name in values}
            consistency = with_reduction(BSP(), self._reduction)
            self._handle = self._context.client.parameters(
                self._name, zeros, Mean(), consistency, master_dtype="float64"
            )
        means = self._handle.push_pull(values)
        return float(means[_LOSS][0]) if means[_INVALID][0] == 0 else math.nan


def _searches_by_loss(optimizer: torch.optim.Optimizer) -> bool:
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
    return isinstance(optimizer, torch.optim.LBFGS) or not is_of_torch


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def _average_closure(
    optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the closure of a step, if its optimizer searches by the loss."""
    closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
    if not callable(closure) or not _searches_by_loss(optimizer):
        return None
    for owner in list(_owners):
        if owner.trains(optimizer):
            closure = owner.averaged(closure)
            if len(arguments) > 1:
                return (arguments[0], closure, *arguments[2:]), keywords
            return arguments, {**keywords, "closure": closure}
    return None
