"""``DistributedDataParallel``: average gradients for a script that keeps its own optimizer.

The arguments are those of torch.nn.parallel.DistributedDataParallel. The gradients are a parameter set with
``psdist.optim.Mean`` as its optimizer, so in BSP a push returns the step's mean gradient.

Invariant: After a backward pass outside ``no_sync``, every worker holds the same gradient bytes. Models that start
equal and use the same optimizer therefore stay equal.

Not here: pushing gradients (``gradients``). Weights are not on the servers, so workers cannot join later, and snapshots
do not contain the weights. Use ``DistributedOptimizer`` for that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist.client.context import Context, init
from psdist.client.means import ScriptWeights
from psdist.compression import Codec
from psdist.consistency import Reduction
from psdist.errors import InvalidArgumentError
from psdist.torch.averaging import (
    OVERFLOWS,
    USED,
    LowestRank,
    MeanLosses,
    TensorBroadcast,
    UnevenBatches,
    UnevenInputs,
    fill_with_nan,
    gradient_zeros,
    set_gradient,
)
from psdist.torch.gradients import GradientStream, bucket_bytes_of, check_free
from psdist.torch.guards import AveragedGradients
from psdist.torch.inspection import ModelParameters, ModelTensors, inspect

_WEIGHTS: Final = ScriptWeights("psdist.torch.DistributedDataParallel", "psdist.torch.DistributedOptimizer")
_AFTER_FAILURE: Final = (
    "After a failed pass this worker cannot continue, because the others make a step that it did not: stop the run, "
    "and start it again from a checkpoint"
)
#: Defaults of torch's arguments that have no meaning here. Other values are refused.
_UNSUPPORTED: Final[dict[str, Any]] = {
    "dim": 0,
    "process_group": None,
    "init_sync": True,
    "check_reduction": False,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": False,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": False,
    "forward_sync_buffers": None,
}


#: Arguments of earlier versions, and the reason.
_FORMER: Final = {
    "path": "gradients travel through the servers. For all-reduces between the workers wrap the model in "
    'torch.nn.parallel.DistributedDataParallel after torch.distributed.init_process_group("psdist")'
}
#: Attributes that take effect whenever they are set.
_ACTING: Final = frozenset({"require_backward_grad_sync", "require_forward_param_sync"})
#: Attributes of torch's class without a meaning here, and the reason.
_ABSENT: Final = {
    "process_group": "psdist has no process groups: rank and world size are those of its context",
    "reducer": "gradients are averaged by psdist's servers: compression= and bucket_cap_mb= configure it",
    "logger": "psdist reports by psdist.init().report() and handle.statistics()",
}
_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"


class DDPAttributes(nn.Module):
    """Base with torch's attributes.

    require_backward_grad_sync: False has the effect of ``no_sync`` for the passes whose forward pass follows.
    require_forward_param_sync: False copies no buffers before forward passes.

    Others show how the model was wrapped. Setting one of them to another value raises InvalidArgumentError, and so does
    replacing ``module``.
    """

    require_backward_grad_sync: bool
    require_forward_param_sync: bool

    def show(self, **attributes: Any) -> None:
        """Set the attributes when the model is wrapped."""
        self.__dict__.update(attributes, require_backward_grad_sync=True, require_forward_param_sync=True)
        self.__dict__["_shown"] = frozenset(attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_shown", ()) and value != self.__dict__[name]:
            raise InvalidArgumentError(
                f"{name}={value!r:.60} is set after the model was wrapped, where it has no effect: pass it to "
                "DistributedDataParallel()"
            )
        if name == "module" and "module" in self._modules and value is not self.module:
            raise InvalidArgumentError(
                "module is replaced after the model was wrapped, and gradients of the new one would not be averaged: "
                "wrap the new one under another name="
            )
        if name in _ABSENT and value is not None:
            raise InvalidArgumentError(f"{name} cannot be set: {_ABSENT[name]}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}: {_ABSENT[name]}")
        return super().__getattr__(name)

    def will_sync_module_buffers(self) -> bool:
        """True if the next forward pass copies the lowest rank's buffers."""
        return bool(self.require_forward_param_sync and self.broadcast_buffers and any(True for _ in self.buffers()))

    def _set_static_graph(self) -> None:
        if not self.static_graph:
            raise InvalidArgumentError(
                "_set_static_graph() comes after the model was wrapped: pass static_graph=True to "
                "DistributedDataParallel()"
            )
        warnings.warn("static_graph is True already: leave _set_static_graph() out", stacklevel=2)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Iterable[str]) -> None:
        setattr(module, _IGNORED, list(names))


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Return the parameters and buffers that the script excluded, as for torch's class, before it wrapped ``module``.

    Raises InvalidArgumentError for a name that the module lacks.
    """
    names = frozenset(getattr(module, _IGNORED, ()))
    known = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if unknown := sorted(names - known):
        raise InvalidArgumentError(
            f"{unknown[0]!r} is to be ignored, but the model has no parameter or buffer of this name: use the names of "
            "named_parameters() and named_buffers()"
        )
    return names


class DistributedDataParallel(UnevenBatches, DDPAttributes):
    """Wraps ``module`` so that each backward pass ends with the mean of all workers' gradients, or their sum.

    module: as for ``DistributedOptimizer``. All workers start with the values of the lowest rank.
    device_ids, output_device: None, or the one device that the module is on.
    broadcast_buffers: copy the lowest rank's buffers to all workers before the forward pass that follows one with a
        push, in training or for an evaluation, as torch's class does. This costs one more step of a parameter set. The
        lowest rank may evaluate alone; other workers wait for it.
    find_unused_parameters: a backward pass may reach only some parameters. Workers that do not reach a parameter count
        with zeros; a parameter that no worker reaches keeps its previous gradient. False raises InvalidArgumentError in
        this case.
    gradient_as_bucket_view: ``parameter.grad`` is a view of the gradient vector, which saves memory and a copy.
    static_graph: same effect as find_unused_parameters: a backward pass need not reach all parameters.
    bucket_cap_mb: MiB of gradients that are pushed together; None for 8.
    reduction: "sum" adds the workers' gradients up and does not divide them, for losses that are sums over the samples
        of a batch. torch's class has only the mean.
    compression: codec of gradients, as for ``Client.parameters``.
    name: name of the parameter set. Each model of a script has its own.
    context: None uses the context of ``psdist.init()``.
    others: the other arguments of torch's class. Only their defaults are allowed.

    If gradients of any worker are not finite, those of all workers become NaN, so that a GradScaler skips the step
    everywhere.

    Raises InvalidArgumentError for unsupported arguments, DTypeMismatchError, LateWorkerError if the others started
    without this worker, and the errors of ``psdist.init`` and ``Client.parameters``. Backward passes raise the errors
    of pushes. They raise FencedError if this worker was expelled and the others continued: its model differs from
    theirs now.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        *,
        broadcast_buffers: bool | None = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        reduction: Reduction = "mean",
        compression: Codec | str | None = None,
        name: str = "gradients",
        context: Context | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check_unsupported(others)
        bucket_bytes = bucket_bytes_of(8.0 if bucket_cap_mb is None else bucket_cap_mb)
        broadcast_buffers = broadcast_buffers is None or broadcast_buffers
        ignored, tensors = synchronized_tensors(module)
        _check_devices(tensors, device_ids, "device_ids")
        _check_devices(tensors, None if output_device is None else [output_device], "output_device")
        check_free({**tensors.trained, **tensors.fixed})
        self.module = module
        self.show(
            device_ids=device_ids, output_device=output_device, broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph, parameters_to_ignore=ignored, device=tensors.device,
        )  # fmt: skip
        #: This script's place in its run.
        self.context = init() if context is None else context
        client = self.context.client
        self._trained = tensors.trained
        self._may_miss = find_unused_parameters or static_graph
        flags = {OVERFLOWS: np.zeros(1, np.float32)}
        if self._may_miss:
            flags[USED] = np.zeros(len(tensors.trained), np.float32)
        #: Parameter set of the gradients, for its ``step`` and ``statistics()``.
        self.handle = _WEIGHTS.open(
            client, name, gradient_zeros(tensors.trained, tensors.master_dtype) | flags,
            reduction=reduction, compression=compression, master_dtype=tensors.master_dtype,
        )  # fmt: skip
        #: Source of the initial values and of the buffers. A resumed run needs it, too: a snapshot holds the values of
        #: the run's start, and the script those of its checkpoint.
        self._lowest_rank = LowestRank(self.context, f"{name}/ranks")
        self._lowest_rank.send_once(client, f"{name}/initial", {**tensors.trained, **tensors.fixed})
        self._buffers_in_step = TensorBroadcast(
            client, f"{name}/buffers", lambda: self._synchronized_buffers() if broadcast_buffers else {}
        )
        self._buffers_are_due = True
        self._parameters_then = ModelParameters(module)
        #: Excluded from the graphs of torch.compile, because it talks to servers.
        self._begin_step = torch.compiler.disable(self._begin)  # type: ignore[no-untyped-call]  # torch: untyped
        self._stream = GradientStream(
            self.handle, tensors.trained, bucket_bytes, self._on_begin,
            as_views=gradient_as_bucket_view, others=flags, overflows=OVERFLOWS, after_failure=_AFTER_FAILURE,
        )  # fmt: skip
        self._stream.listen()
        self._averaged = AveragedGradients(tensors.trained) if self.context.world_size > 1 else None
        self._losses = self._mean_losses(f"{name}/losses", reduction) if self.context.world_size > 1 else None

    def _mean_losses(self, name: str, reduction: Reduction) -> MeanLosses:
        return MeanLosses(self.context, name, self._trained, reduction, lambda: self._join is not None)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module and return its result."""
        self._begin_step()
        return self.module(*arguments, **keywords)

    def _synchronized_buffers(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.module.named_buffers() if name not in self.parameters_to_ignore}

    def _begin(self) -> None:
        """Decide whether the backward pass of this forward pass pushes, and copy buffers if they may differ: both as
        torch does."""
        pushes = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._stream.is_paused = not pushes
        # Only passes that push count. The others need not be the same on all workers, as when one evaluates alone.
        are_due, self._buffers_are_due = self._buffers_are_due, pushes
        if self._join is None:
            if are_due and self.require_forward_param_sync:
                kept = tuple(one for one in self._synchronized_buffers().values() if not one.is_inference())
                # A backward pass may still use the buffers of an earlier forward pass.
                with torch.autograd._unsafe_preserve_version_counter(kept):  # type: ignore[attr-defined]  # torch: private
                    self._lowest_rank.send(self._buffers_in_step, waits=pushes)
        elif pushes and self.training and not self._join.is_begun:
            active = self._join.begin_step()
            self._buffers_in_step.send(is_source=self.context.rank == min(active))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context whose forward passes have backward passes that only accumulate gradients.

        The next pass after it averages the sums. As with torch, the forward pass decides.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Return a context for training loops whose workers have different numbers of batches.

        A worker that leaves the context makes the steps of the others until no worker has a batch. Afterwards all
        models, buffers included, equal those of the last workers. Optimizer states do not: each worker's state covers
        only its own steps.

        divide_by_initial_world_size: a worker without a batch counts in the mean with zeros. False: the mean is over
            the others.
        enable: False disables the context, for loops that are known to be even.
        throw_on_early_termination: raise UnevenInputsError in all workers when the first one runs out of batches.

        All workers enter the context, and no worker may join the run meanwhile. Each step in it costs one more small
        step. Raises the errors of pushes.
        """
        if not enable:
            yield
            return
        if not self.require_forward_param_sync:
            raise InvalidArgumentError(
                "join() with require_forward_param_sync=False: workers without a batch cannot tell that the others "
                "copy no buffers. Pass broadcast_buffers=False when you wrap the model"
            )
        self._join = join = UnevenInputs(
            self.context, f"{self.handle.name}/join",
            counts_joined=divide_by_initial_world_size, raises_early=throw_on_early_termination,
        )  # fmt: skip
        try:
            yield
            self._stream.check_idle()
            join.finish(self._make_empty_step)
            if (source := join.last_source) is not None:
                tensors = {**self._trained, **dict(self.module.named_buffers())}
                last = TensorBroadcast(self.context.client, f"{self.handle.name}/joined", lambda: tensors)
                last.send(is_source=self.context.rank == source)
        finally:
            self._buffers_are_due = True
            self._join = None

    def _make_empty_step(self, active: frozenset[int]) -> None:
        """Make a step of the others: the same calls, without a gradient of this worker."""
        assert self._join is not None
        self._buffers_in_step.send(is_source=self.context.rank == min(active))
        self._stream.skip(float(self._join.counts_joined))

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refuse: the servers average the gradients. ``compression=`` selects how they are sent."""
        raise InvalidArgumentError("register_comm_hook is not supported: pass compression=, such as 'bfloat16'")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a DistributedDataParallel belongs to this process, and cannot be copied or pickled: copy or save its "
            ".module, which is the model"
        )

    # --- the end of a backward pass ---

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _on_begin(self) -> None:
        if self._join is not None and not self._join.is_begun:
            raise InvalidArgumentError(
                "a backward pass in join() comes after a forward pass that did not start a step: call the wrapped "
                "module itself, in training mode and outside no_sync()"
            )
        self._parameters_then.check()
        self._stream.buffers[OVERFLOWS].zero_()
        # Called at the end of the running backward pass. torch's own classes use the same queue.
        torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _reduce(self) -> None:
        missing = set(self._stream.untaken)
        if missing and not self._may_miss:
            raise InvalidArgumentError(
                f"the backward pass reached no gradient of {', '.join(sorted(missing)[:8])}: pass "
                "find_unused_parameters=True, or freeze them by requires_grad_(False) before wrapping. Activation "
                "checkpointing needs use_reentrant=False, because otherwise it runs several backward passes"
            )
        if self._may_miss:
            used = torch.tensor([name not in missing for name in self._trained])
            self._stream.buffers[USED].copy_(used)
        # The answers' arrays stay valid until the next step starts.
        held: dict[str, NDArray[Any]] = {}

        def write(means: Mapping[str, NDArray[Any]]) -> None:
            for name, mean in means.items():
                if name in missing or name in (USED, OVERFLOWS):
                    held[name] = mean
                else:
                    set_gradient(self._trained[name], mean)

        self._stream.complete()
        if not self._stream.collect(write):
            raise _WEIGHTS.expelled()
        if self._join is not None:
            self._join.end_step()
        if missing:
            for number, name in enumerate(self._trained):
                if name in missing and held[USED][number]:
                    set_gradient(self._trained[name], held[name])
        if held[OVERFLOWS][0] > 0:
            fill_with_nan(self._trained.values())
        if self._averaged is not None:
            self._averaged.on_average()


def check_unsupported(given: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for unknown arguments, and for arguments of torch's class that have no effect here."""
    for name, value in given.items():
        if name not in _UNSUPPORTED:
            reason = f" any more: {_FORMER[name]}" if name in _FORMER else ""
            raise InvalidArgumentError(f"DistributedDataParallel has no argument {name!r}{reason}")
        if value != _UNSUPPORTED[name]:
            raise InvalidArgumentError(
                f"{name}={value!r:.60} is not supported by psdist.torch.DistributedDataParallel: leave it out"
            )


def synchronized_tensors(module: nn.Module) -> tuple[frozenset[str], ModelTensors]:
    """Return the names that torch's class would ignore, and the other tensors of ``module``. Raises as ``inspect``."""
    if not isinstance(module, nn.Module) or not (ignored := ignored_names(module)):
        return frozenset(), inspect(module)
    tensors = inspect(module, [one for name, one in module.named_parameters() if name not in ignored])
    return ignored, ModelTensors(
        tensors.trained, {name: one for name, one in tensors.fixed.items() if name not in ignored}
    )


def _check_devices(tensors: ModelTensors, given: Sequence[int | torch.device | str] | None, argument: str) -> None:
    if not given:
        return
    wanted = [torch.device("cuda", one) if isinstance(one, int) else torch.device(one) for one in given]
    if any(device.type == "cuda" for device in wanted) and not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"{argument}={list(given)} names a CUDA device, but this process sees none: leave {argument} out, or "
            "install a torch that finds the device"
        )
    if wanted != [tensors.device]:
        raise InvalidArgumentError(
            f"{argument}={list(given)}, but the model is on {tensors.device}: move the model, and name its device"
        )
