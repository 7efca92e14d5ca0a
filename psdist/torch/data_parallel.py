"""``DistributedDataParallel``: gradients are averaged through the servers, and the script keeps its own optimizer.

The shape and the arguments are those of torch.nn.parallel.DistributedDataParallel. A parameter set of the gradients has
``psdist.optim.Mean`` as its optimizer, so what comes back for a push is the mean gradient of the step, in BSP.

Invariants: after a backward pass outside ``no_sync`` every worker has the same bytes in its gradients. So models that
begin alike and have the same optimizer stay alike.

Not here: gradients on their way (``gradients``). Weights are not on the servers, so workers cannot join later, and
snapshots do not have them: that is what ``DistributedOptimizer`` is for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from psdist.client.context import Context, init
from psdist.client.sync_client import Client
from psdist.compression import Codec
from psdist.errors import FencedError, InvalidArgumentError, LateWorkerError
from psdist.optim import Mean
from psdist.torch.broadcast import LowestRank, TensorBroadcast
from psdist.torch.bucket_plan import bucket_bytes_of
from psdist.torch.gradients import GradientStream, check_free
from psdist.torch.inspection import ModelParameters, ModelTensors, inspect
from psdist.torch.uneven_inputs import UnevenInputs
from psdist.torch.values import write_into

logger = logging.getLogger("psdist")

#: A tensor that has 1 for each parameter that got a gradient.
_USED: Final = "psdist/used"
#: A tensor that has more than 0 where gradients of any worker are not finite.
_OVERFLOWS: Final = "psdist/overflows"
_AFTER_FAILURE: Final = (
    "After a pass that failed this worker cannot go on, as the others make a step that it did not: stop the run, and "
    "start it again from a checkpoint"
)
#: Defaults of torch's arguments that have no meaning here. Other values are refused.
_UNSUPPORTED: Final[dict[str, Any]] = {
    "output_device": None,
    "dim": 0,
    "process_group": None,
    "init_sync": True,
    "check_reduction": False,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": False,
}


class DistributedDataParallel(nn.Module):
    """Wraps ``module`` so that each backward pass ends with the mean of all workers' gradients.

    module: as for ``DistributedOptimizer``. All workers begin with the values of the lowest rank.
    device_ids: None, or the one device that the module is on.
    broadcast_buffers: before each forward pass in training that is to be followed by a push, buffers become those of
        the lowest rank. That is one more step of a parameter set.
    find_unused_parameters: a backward pass may reach some parameters only. Workers that do not reach one count with
        zeros; one that nobody reaches keeps the gradient that it had. False raises InvalidArgumentError then.
    gradient_as_bucket_view: ``parameter.grad`` is a view of the gradient vector, which saves memory and a copy.
    static_graph: as find_unused_parameters: the parameters that are reached need not be all.
    bucket_cap_mb: MiB of gradients that are pushed together; None for 8.
    compression: of gradients, as for ``Client.parameters``.
    name: of the parameter set; each model of a script has its own. context: None takes that of ``psdist.init()``.
    others: the other arguments of torch's class, which may only have their defaults.

    Raises InvalidArgumentError for what is not supported, DTypeMismatchError, LateWorkerError where the others have
    begun without this worker, and what ``psdist.init`` and
    ``Client.parameters`` raise. Where gradients of any worker are not finite, those of all become NaN, so that a
    GradScaler skips the step everywhere. Backward passes raise what pushes raise; FencedError where this worker was
    expelled and the others have gone on: its model is not theirs any more.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        *,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        compression: Codec | str | None = None,
        name: str = "gradients",
        context: Context | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check_unsupported(others)
        bucket_bytes = bucket_bytes_of(8.0 if bucket_cap_mb is None else bucket_cap_mb)
        tensors = inspect(module)
        _check_devices(tensors, device_ids)
        check_free({**tensors.trained, **tensors.fixed})
        self.module = module
        #: This script's place in its run.
        self.context = init() if context is None else context
        client = self.context.client
        check_in_time(client, name)
        self._trained = tensors.trained
        self._may_miss = find_unused_parameters or static_graph
        shapes: dict[str, NDArray[np.float32]] = {
            key: np.zeros(tuple(one.shape), np.float32) for key, one in tensors.trained.items()
        }
        flags: dict[str, NDArray[np.float32]] = {_OVERFLOWS: np.zeros(1, np.float32)}
        if self._may_miss:
            flags[_USED] = np.zeros(len(shapes), np.float32)
        #: The parameter set of the gradients, for its ``step`` and ``statistics()``.
        self.handle = client.parameters(name, shapes | flags, Mean(), compression=compression)
        if self.handle.restored:
            logger.warning(
                "%r goes on from snapshot %s, in which a DistributedDataParallel keeps neither weights nor optimizer: "
                "they begin as the script has them now. Load the script's own checkpoint before wrapping the model, or "
                "use psdist.torch.DistributedOptimizer, whose runs go on from snapshots",
                name, self.handle.restored,
            )  # fmt: skip
        #: Whose values all workers begin with, and whose buffers all have: also where a run is resumed, as a snapshot
        #: has the values of its beginning, and a script those of its checkpoint.
        self._lowest_rank = LowestRank(self.context, f"{name}/ranks")
        initial = TensorBroadcast(client, f"{name}/initial", lambda: {**tensors.trained, **tensors.fixed})
        self._lowest_rank.send(initial)
        initial.release_memory()
        self._buffers_in_step = TensorBroadcast(
            client, f"{name}/buffers", lambda: dict(module.named_buffers()) if broadcast_buffers else {}
        )
        self._parameters_then = ModelParameters(module)
        #: torch.compile leaves it out of its graphs, as it talks to servers.
        self._begin_step = torch.compiler.disable(self._begin)  # type: ignore[no-untyped-call]
        self._join: UnevenInputs | None = None
        self._stream = GradientStream(
            self.handle, tensors.trained, bucket_bytes, self._on_begin,
            as_views=gradient_as_bucket_view, others=flags, overflows=_OVERFLOWS, after_failure=_AFTER_FAILURE,
        )  # fmt: skip
        self._stream.listen()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the module returns."""
        if self.training and torch.is_grad_enabled() and not self._stream.is_paused:
            self._begin_step()
        return self.module(*arguments, **keywords)

    def _begin(self) -> None:
        if self._join is None:
            self._lowest_rank.send(self._buffers_in_step)
        elif not self._join.is_begun:
            active = self._join.begin_step()
            self._buffers_in_step.send(is_source=self.context.rank == min(active))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context backward passes add up gradients in the worker. The first one after it averages the sums."""
        with self._stream.paused():
            yield

    def set_weight(self, weight: float) -> None:
        """Says what this worker's gradient counts for in the mean of the next step, such as the number of samples or
        tokens that its loss is the mean of: workers with uneven batches then make the step of a single process with all
        of them. 0 contributes nothing. It is 1 again after the step. Call it before the backward pass that pushes.

        Raises InvalidArgumentError after that, for a weight that is out of range, and outside BSP.
        """
        if self._join is not None:
            self._join.check_weight()
        self._stream.set_weight(weight)

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """For training loops whose workers have different numbers of batches: a worker that leaves this context makes
        the steps of the others until nobody has a batch. Then all models are those of the last ones, buffers included.
        The optimizers' states are not: a worker's has its own steps only.

        divide_by_initial_world_size: a worker without a batch counts in the mean with zeros. False: the mean is of the
            others.
        enable: False has no effect, for loops that are known to be even.
        throw_on_early_termination: raises UnevenInputsError in all workers when the first one has no batch left.

        All workers enter it, and none may join the run meanwhile. Each step in it costs a small one more.
        Raises what pushes raise.
        """
        if not enable:
            yield
            return
        slots = self.context.world_size
        self._join = join = UnevenInputs(
            self.context, f"{self.handle.name}/join", slots,
            counts_joined=divide_by_initial_world_size, raises_early=throw_on_early_termination,
        )  # fmt: skip
        try:
            yield
            self._stream.check_idle()
            join.finish(self._make_empty_step)
            if 0 < len(join.active) < slots:
                tensors = {**self._trained, **dict(self.module.named_buffers())}
                last = TensorBroadcast(self.context.client, f"{self.handle.name}/joined", lambda: tensors)
                last.send(is_source=self.context.rank == min(join.active))
        finally:
            self._join = None

    def _make_empty_step(self, active: frozenset[int]) -> None:
        """A step that others make: the same calls, without a gradient of this worker."""
        assert self._join is not None
        self._buffers_in_step.send(is_source=self.context.rank == min(active))
        self._stream.skip(float(self._join.counts_joined))

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refused: gradients are averaged on the servers. ``compression=`` says how they are sent."""
        raise InvalidArgumentError("register_comm_hook is not supported: pass compression=, such as 'bfloat16'")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a DistributedDataParallel belongs to this process, and cannot be copied or pickled: copy or save its "
            ".module, which is the model"
        )

    # --- the end of a backward pass ---

    def _on_begin(self) -> None:
        if self._join is not None and not self._join.is_begun:
            raise InvalidArgumentError(
                "a backward pass in join() comes after a forward pass that did not begin a step: call the wrapped "
                "module itself, in training mode and outside no_sync()"
            )
        self._parameters_then.check()
        self._stream.buffers[_OVERFLOWS].zero_()
        # As torch's own classes have autograd call them at the end of the backward pass that is running.
        torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        missing = set(self._stream.untaken)
        if missing and not self._may_miss:
            raise InvalidArgumentError(
                f"the backward pass reached no gradient of {', '.join(sorted(missing)[:8])}: pass "
                "find_unused_parameters=True, or freeze them by requires_grad_(False) before wrapping. Activation "
                "checkpointing needs use_reentrant=False: else it makes several passes of one"
            )
        if self._may_miss:
            used = torch.tensor([name not in missing for name in self._trained])
            self._stream.buffers[_USED].copy_(used)
        # Their answers stay as they are until the next step begins.
        held: dict[str, NDArray[Any]] = {}

        def write(means: Mapping[str, NDArray[Any]]) -> None:
            for name, mean in means.items():
                if name in missing or name in (_USED, _OVERFLOWS):
                    held[name] = mean
                else:
                    _set_gradient(self._trained[name], mean)

        self._stream.complete()
        if not self._stream.collect(write):
            raise FencedError(
                "this worker was expelled, and the others went on with a step that it did not make: its model is not "
                "theirs any more. Stop the run and start it again from a checkpoint, or use "
                "psdist.torch.DistributedOptimizer, whose weights are on the servers"
            )
        if self._join is not None:
            self._join.end_step()
        if missing:
            for number, name in enumerate(self._trained):
                if name in missing and held[_USED][number]:
                    _set_gradient(self._trained[name], held[name])
        if held[_OVERFLOWS][0] > 0:
            for parameter in self._trained.values():
                if parameter.grad is not None:
                    parameter.grad.detach().fill_(np.nan)


def _set_gradient(parameter: nn.Parameter, mean: NDArray[Any]) -> None:
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        parameter.grad = torch.empty_like(parameter)
    write_into(parameter.grad, mean)


def check_in_time(client: Client, name: str) -> None:
    """Raises LateWorkerError where others train with the parameter set already: only they have the weights."""
    if client.joins_late(name):
        raise LateWorkerError(
            f"this worker came, or was started again, when {name!r} was in use: the weights of a "
            "DistributedDataParallel are with its workers alone, so that none can join them, and the others go on "
            "without this one. To train with all workers stop the run and start it again from a checkpoint of the "
            "script; psdist.torch.DistributedOptimizer has its weights on the servers, and takes workers back"
        )


def check_unsupported(given: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError for arguments of torch's class that would have no effect here, and unknown ones."""
    for name, value in given.items():
        if name not in _UNSUPPORTED:
            raise InvalidArgumentError(f"DistributedDataParallel has no argument {name!r}")
        if value != _UNSUPPORTED[name]:
            raise InvalidArgumentError(
                f"{name}={value!r:.60} is not supported by psdist.torch.DistributedDataParallel: leave it out"
            )


def _check_devices(tensors: ModelTensors, device_ids: Sequence[int | torch.device] | None) -> None:
    if not device_ids:
        return
    wanted = [torch.device("cuda", one) if isinstance(one, int) else torch.device(one) for one in device_ids]
    if any(device.type == "cuda" for device in wanted) and not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"device_ids={list(device_ids)} names a CUDA device, but this process sees none: leave device_ids out, or "
            "install a torch that finds the device"
        )
    if wanted != [tensors.device]:
        raise InvalidArgumentError(
            f"device_ids={list(device_ids)}, but the model is on {tensors.device}: move the model, and name its device"
        )
