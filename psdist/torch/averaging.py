"""Means over workers of gradients that a script reads, of losses, and of overflows.

Each travels through a parameter set whose optimizer is a mean (``psdist.client.means``), so all workers get the same
bytes.

Not here: gradients that are pushed while the backward pass runs (``gradients``).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from psdist.client.context import Context
from psdist.client.means import ServerMean, push_finite
from psdist.client.session.membership import unless_dropped
from psdist.client.sync_client import Client
from psdist.consistency import BSP, Consistency, Reduction
from psdist.errors import InvalidArgumentError
from psdist.torch.gradients import dense, gradient_memory
from psdist.torch.values import as_real, write_into
from psdist.types import MasterDType

logger = logging.getLogger("psdist")

#: Tensor with 1 for each parameter that got a gradient.
USED: Final = "psdist/used"
#: Tensor that is above 0 if gradients of any worker are not finite.
OVERFLOWS: Final = "psdist/overflows"
#: Tensor of ``LossScale``, and those of ``MeanLosses``.
_OVERFLOWS: Final = "overflows"
_LOSS: Final = "loss"
_INVALID: Final = "invalid"
_owners: Final[weakref.WeakSet[MeanLosses]] = weakref.WeakSet()
_hooks: Final[list[Any]] = []


def gradient_zeros(trained: Mapping[str, Tensor], master_dtype: MasterDType) -> dict[str, NDArray[Any]]:
    """Return the initial values of a parameter set of gradients."""
    return {name: np.zeros(tuple(as_real(one).shape), master_dtype) for name, one in trained.items()}


def set_gradient(parameter: nn.Parameter, mean: NDArray[Any]) -> None:
    """Copy a mean into ``parameter.grad``."""
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        parameter.grad = torch.empty_like(parameter)
    write_into(parameter.grad, mean)


def fill_with_nan(parameters: Iterable[nn.Parameter]) -> None:
    """Make the gradients NaN, so that every worker's GradScaler skips the step."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.detach().fill_(np.nan)


class MeanGradients:
    """Averages the gradients of ``trained`` over all workers.

    name: parameter set of the means.
    master_dtype: dtype in which the servers compute.
    """

    def __init__(
        self, client: Client, name: str, trained: Mapping[str, nn.Parameter], master_dtype: MasterDType
    ) -> None:
        self._trained = dict(trained)
        flags = {USED: np.zeros(len(trained), np.float32), OVERFLOWS: np.zeros(1, np.float32)}
        self._mean = ServerMean(client, name, master_dtype=master_dtype)
        handle = self._mean.open(gradient_zeros(trained, master_dtype) | flags)
        self._arrays, self._buffers = gradient_memory(handle, next(iter(trained.values())).device)

    def average(self, weight: float) -> None:
        """Replace ``parameter.grad`` by the mean over workers. A gradient that no worker has stays None.

        weight: of this worker's gradients in the mean.

        If gradients of any worker are not finite, those of all workers become NaN. The gradients stay as they are if
        this worker had been expelled; its next step is dropped as well. Raises the errors of ``Parameters.push_pull``.
        """
        self._fill()
        means = unless_dropped(lambda: push_finite(lambda: self._mean.exchange(self._arrays, weight), self._clear))
        if means is None:
            return
        used = [name for name, is_used in zip(self._trained, means[USED], strict=True) if is_used]
        for name in used:
            set_gradient(self._trained[name], means[name])
        if means[OVERFLOWS][0] > 0:
            fill_with_nan(self._trained[name] for name in used)

    def _fill(self) -> None:
        for name, parameter in self._trained.items():
            gradient = parameter.grad
            if gradient is None:
                self._buffers[name].zero_()
            else:
                with torch.no_grad():
                    self._buffers[name].copy_(as_real(dense(gradient)))
        self._buffers[USED].copy_(torch.tensor([one.grad is not None for one in self._trained.values()]))
        self._buffers[OVERFLOWS].zero_()

    def _clear(self) -> None:
        for name in self._trained:
            self._buffers[name].zero_()
        self._buffers[OVERFLOWS].fill_(1.0)


class LossScale:
    """Gradients of a scaled loss: the work that torch's GradScaler leaves to an optimizer that supports it.

    float16 gradients overflow now and then. The scaler then makes its optimizer skip the step and lowers the scale. In
    BSP all workers must skip a step together, because one would otherwise push alone. No gradient is pushed before all
    workers have reported finite gradients.

    name: parameter set for the workers' agreement. It is created at the first scaled step.
    """

    def __init__(self, context: Context, name: str, consistency: Consistency) -> None:
        #: None in SSP and ASP, where a worker skips its own pushes alone.
        self._mean = ServerMean(context.client, name) if isinstance(consistency, BSP) else None

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
        if self._mean is None:
            return mine
        return bool(self._mean.exchange({_OVERFLOWS: np.full(1, mine, np.float32)})[_OVERFLOWS][0] > 0)


class MeanLosses:
    """Lets closures that compute gradients of ``trained`` return the mean of all workers' losses.

    ``LBFGS`` compares losses of several points, and decides by them where to continue and when to end. If workers
    compared their own, their models would differ, although gradients are averaged. Other optimizers of torch call a
    closure once and pass its result on, which stays each worker's own.

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
        self._name = name
        self._losses = ServerMean(context.client, name, reduction=reduction, master_dtype="float64")
        self._ids = frozenset(map(id, trained.values()))
        self._in_join = in_join
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
        means = self._losses.exchange(values)
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
