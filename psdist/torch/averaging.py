"""Exchanges of all workers in a script: means of gradients, losses and overflows, broadcasts, and uneven inputs.

Each travels through a parameter set whose optimizer is a mean (``psdist.client.means``), so all workers get the same
bytes.

**Broadcasts.** Only the source's push has a weight, so the mean equals the source's values. Every step replaces all
values, so a snapshot of such a set is never used.

**Uneven inputs.** Each step in such a context starts with a small one, in a parameter set of its own, in which every
worker reports whether it has a batch. All workers get the same answer, so all stop after the same step.

Invariants: All workers make the same number of small steps and of the model's steps. As always in BSP, no one waits for
a worker that died.

Not here: gradients that are pushed while the backward pass runs (``gradients``), initial values of workers that join
later or of a resumed run (``values.share_fixed``).
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
from psdist.client.sync_client import Bucket, Client
from psdist.consistency import BSP, Consistency, Reduction
from psdist.errors import InvalidArgumentError, UnevenInputsError
from psdist.torch.gradients import GradientStream, dense, gradient_memory
from psdist.torch.values import as_real, take_finite, to_finite, write_into
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


#: Number of ranks that can be told apart.
_RANKS: Final = 4096
#: Tensor with the number of the step that its values belong to. A step without a source repeats an earlier number.
_STEP: Final = "psdist/step"
#: Step numbers wrap here. float32 represents all smaller integers exactly.
_STEPS: Final = 1 << 20


class TensorBroadcast:
    """Copies ``tensors`` from one worker to all others. All workers make the same calls.

    name: parameter set that carries the tensors.
    tensors: returns the current tensors, always with the same names and shapes. A module may replace a buffer by
        another tensor.
    """

    def __init__(self, client: Client, name: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._all = tensors
        found = self._tensors()
        self._handle = ServerMean(client, name).open(_values(found, 0)) if found else None
        self._dropped = 0
        #: Latest values that the source sent without waiting.
        self._sent: Bucket | None = None

    def _tensors(self) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in self._all().items() if tensor.numel()}

    def send(self, *, is_source: bool, waits: bool = True) -> bool:
        """Run one broadcast step: afterwards all workers hold the source's values.

        waits: False lets the source continue before the others take the values.

        Returns False, in all workers, if no worker was the source because it has left. Tensors are unchanged then.
        Raises as ``Parameters.push_pull``.
        """
        if self._handle is None:
            return True
        if self._sent is not None:
            unless_dropped(self._sent.wait)
            self._sent = None
        tensors, number = self._tensors(), 1 + self._handle.step % _STEPS
        if is_source and not waits:
            sent = self._handle.push_pull_async
            self._sent = unless_dropped(lambda: sent(_values(tensors, number)))
            return True
        values = self._handle.push_pull(_values(tensors, number), copy=False, weight=float(is_source))
        if values[_STEP][0] != number:
            dropped, self._dropped = self._dropped, self._handle.statistics().dropped
            return self._dropped > dropped  # A drop means that this worker missed the step; the others had a source.
        if not is_source:
            for key, tensor in tensors.items():
                take_finite(tensor, values[key])
        return True

    def release_memory(self) -> None:
        """Free the buffers of the values until the next step."""
        if self._handle is not None:
            self._handle.release_memory()


def _values(tensors: Mapping[str, Tensor], number: int) -> dict[str, NDArray[np.float32]]:
    return {_STEP: np.full(1, number, np.float32)} | {key: to_finite(tensor) for key, tensor in tensors.items()}


class LowestRank:
    """Lowest rank among the workers that make the same calls, agreed on by a step of a parameter set.

    name: parameter set for the agreement. The lowest rank changes when its worker leaves.
    """

    def __init__(self, context: Context, name: str) -> None:
        self._mine = context.rank % _RANKS
        self._ranks = ServerMean(context.client, name)
        self._lowest = self._find()

    def _find(self) -> int:
        taking_part = np.zeros(_RANKS, np.float32)
        taking_part[self._mine] = 1.0
        return int(np.flatnonzero(self._ranks.exchange({"ranks": taking_part})["ranks"])[0])

    def send(self, broadcast: TensorBroadcast, *, waits: bool = True) -> None:
        """Broadcast the values of the worker with the lowest rank. waits: as for ``TensorBroadcast.send``."""
        while not broadcast.send(is_source=self._mine == self._lowest, waits=waits):
            self._lowest = self._find()

    def send_once(self, client: Client, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast ``tensors`` of that worker through the parameter set ``name``, and free the buffers."""
        broadcast = TensorBroadcast(client, name, lambda: tensors)
        self.send(broadcast)
        broadcast.release_memory()


_TENSOR: Final = "has_batch"
#: Tensor that reports a scaled loss: the step then starts with another small one, see ``LossScale``.
_SCALED: Final = "is_scaled"
#: Tensor that reports writes to the weights after the model's last step.
_WRITTEN: Final = "has_written"
#: Tolerance of float32 sums over workers.
_ROUNDING: Final = 1e-4


class UnevenBatches:
    """Base of the classes that push a model's gradients: batches of different sizes have weights."""

    _stream: GradientStream
    _join: UnevenInputs | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def set_weight(self, weight: float) -> None:
        """Set the weight of this worker's gradient in the mean of the next step.

        weight: for example the number of samples or tokens that the loss is the mean of. Workers with uneven batches
            then make the step of a single process with all batches. 0 contributes nothing.

        Call it before the backward pass that pushes. The weight is 1 again after the step. Raises InvalidArgumentError
        after that pass, for a weight that is out of range, and outside BSP.
        """
        if self._join is not None:
            self._join.check_weight()
        self._stream.set_weight(weight)


class UnevenInputs:
    """One ``with`` block of uneven inputs.

    name: parameter set of the small steps.
    counts_joined: a worker without a batch counts in the mean of a step, with zeros.
    raises_early: raise UnevenInputsError in all workers when the first one runs out of batches.
    """

    def __init__(self, context: Context, name: str, *, counts_joined: bool, raises_early: bool) -> None:
        self.counts_joined = counts_joined
        self._raises_early = raises_early
        self._rank = context.rank
        self._flags = np.zeros(context.world_size, np.float32)
        self._scaled, self._written = np.zeros(1, np.float32), np.zeros(1, np.float32)
        self._values = {_TENSOR: self._flags, _SCALED: self._scaled, _WRITTEN: self._written}
        self._mean = ServerMean(context.client, name)
        self._mean.open(self._values)
        self._is_begun = False
        #: True if workers scale the loss of this step.
        self.is_scaled = False
        #: True if a worker wrote to the weights after the last step of the model.
        self.has_written = False
        #: Ranks that had a batch in the last step of the model.
        self.active: frozenset[int] = frozenset()

    @property
    def is_begun(self) -> bool:
        """True if this worker has started a step that it has a batch for."""
        return self._is_begun

    def begin_step(self, *, is_scaled: bool = False) -> frozenset[int]:
        """Report that this worker has a batch. Returns the ranks that have one; the lowest of them provides its
        buffers.

        Later calls in the same step return the same ranks. Raises UnevenInputsError.
        """
        if not self._is_begun:
            self._is_begun = True
            self._scaled[0] = is_scaled
            self.active, all_have = self._tell(has_batch=True)
            if self._raises_early and not all_have:
                self._raise()
        return self.active

    def end_step(self) -> None:
        """Record that the step of the model is made."""
        self._is_begun = False

    @property
    def last_source(self) -> int | None:
        """Lowest rank that made the last step with a batch. None if all workers did, or none."""
        return min(self.active) if 0 < len(self.active) < len(self._flags) else None

    def finish(
        self, make_step: Callable[[frozenset[int]], None], has_written: Callable[[], bool] = lambda: False
    ) -> None:
        """Make the steps of the others after this worker's last batch, until no worker has one.

        make_step: makes one step; called with the ranks that have a batch.
        has_written: returns True if this worker wrote to the weights after its last step.

        Raises UnevenInputsError.
        """
        self._scaled[0], self._written[0] = False, has_written()
        while active := self._tell(has_batch=False)[0]:
            self.active = active
            if self._raises_early:
                self._raise()
            make_step(active)
            self._written[0] = False  # The others have made these writes, too.

    def _tell(self, *, has_batch: bool) -> tuple[frozenset[int], bool]:
        """Return the ranks that have a batch, and whether they are all workers."""
        self._flags[self._rank % len(self._flags)] = has_batch
        answer = self._mean.exchange(self._values)
        self.has_written = bool(answer[_WRITTEN][0] > 0)
        means, self.is_scaled = answer[_TENSOR], bool(answer[_SCALED][0] > 0)
        # Each worker adds 1 divided by their number.
        return frozenset(np.flatnonzero(means).tolist()), float(means.sum()) > 1.0 - _ROUNDING

    def check_weight(self) -> None:
        """Raise InvalidArgumentError if weights are impossible, because workers without a batch count as 1."""
        if self.counts_joined:
            raise InvalidArgumentError(
                "set_weight() in join() that counts workers without a batch, each as 1: use "
                "join(divide_by_initial_world_size=False), in which they do not count"
            )

    def _raise(self) -> None:
        ranks = f" (of ranks {', '.join(map(str, sorted(self.active)))})" if len(self._flags) > 1 else ""
        raise UnevenInputsError(
            f"a worker has no batch left, while others have some{ranks}, and throw_on_early_termination is set: give "
            "all workers the same number of batches, or leave it out"
        )
