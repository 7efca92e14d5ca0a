"""``DistributedOptimizer``: a model's weights and its optimizer live on the servers; the script keeps its loop.

Invariants: when ``step`` returns, the model has the weights with this step in them, in every consistency mode as that
mode defines it. In BSP they are those of a single process that trains on the workers' batches together, up to the
rounding of float32 sums.

Not here: gradients on their way (``gradients``), what torch's settings mean for the servers (``conversion``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.optim import lr_scheduler

from psdist.client.context import Context, init
from psdist.client.session.drops import OnDrop
from psdist.client.sync_client import Parameters
from psdist.compression import Codec
from psdist.consistency import BSP, Consistency
from psdist.errors import InvalidArgumentError
from psdist.optim import Constant, Optimizer, group_of
from psdist.torch.bucket_plan import bucket_bytes_of
from psdist.torch.conversion import convert_optimizer
from psdist.torch.gradients import GradientStream
from psdist.torch.inspection import ModelWatch, inspect
from psdist.torch.loss_scale import LossScale
from psdist.torch.uneven_inputs import UnevenInputs
from psdist.torch.values import TensorWriter, initial_values, share_fixed
from psdist.types import DType, NonFinite

#: What schedulers and the servers' schedules may differ by: torch multiplies factors step by step, in float64.
_RATE_TOLERANCE: Final = 1e-6


class DistributedOptimizer(torch.optim.Optimizer):
    """Trains ``model`` through psdist, in place of ``optimizer``, with its loop unchanged.

    model: its trained parameters, float32, bfloat16 or float16 on one device. All workers begin with the values of the
        lowest rank, those of frozen parameters and buffers included. A parameter that gets no gradient counts with
        zeros. Buffers, such as running statistics, then stay with each worker.
    optimizer: of torch.optim (SGD, Adam, AdamW, Adagrad, RMSprop, with their parameter groups), or a specification of
        psdist.optim. It runs on the servers. Parameters that torch's optimizer does not have are not trained.
    scheduler: the learning-rate scheduler of torch's optimizer, for BSP; see ``convert_scheduler``. The servers follow
        it by themselves; a loop that goes on calling ``scheduler.step()`` after each step has the same rates.
    consistency: psdist.BSP() by default, SSP(n) or ASP().
    compression, pull_dtype, non_finite, on_drop, reset_optimizer: as for ``Client.parameters``.
    max_grad_norm: clips the mean gradient to this global norm, as ``clip_grad_norm_`` in a single process; None leaves
        it to the specification. ``clip_grad_norm_`` itself cannot be used with ``overlap``.
    name: of the parameter set. Each model of a script has its own.
    overlap: pushes gradients while the backward pass still computes others. False pushes all of them in ``step``; so do
        SSP and ASP with ``max_grad_norm``.
    bucket_cap_mb: MiB of gradients that are pushed together.
    context: None takes that of ``psdist.init()``: a script without a launcher trains alone.

    Raises InvalidArgumentError for what cannot be converted or trained, and names it; DTypeMismatchError; and what
    ``psdist.init`` and ``Client.parameters`` raise.
    """

    #: torch's GradScaler leaves unscaling, and skipping a step, to an optimizer that has this.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Optimizer,
        scheduler: lr_scheduler.LRScheduler | None = None,
        *,
        consistency: Consistency | None = None,
        compression: Codec | str | None = None,
        pull_dtype: DType = "float32",
        max_grad_norm: float | None = None,
        non_finite: NonFinite = "reject",
        name: str = "model",
        overlap: bool = True,
        bucket_cap_mb: float = 8.0,
        on_drop: OnDrop = "warn",
        reset_optimizer: bool = False,
        context: Context | None = None,
    ) -> None:
        self._is_made = False
        consistency = BSP() if consistency is None else consistency
        check_scheduler(optimizer, scheduler, consistency)
        bucket_bytes = bucket_bytes_of(bucket_cap_mb)
        wrapped = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        tensors = inspect(model, parameters_of(wrapped))
        spec = specification_of(optimizer, tensors.trained, scheduler)
        if max_grad_norm is not None:
            spec = replace(spec, max_grad_norm=max_grad_norm)
        #: This script's place in its run.
        self.context = init() if context is None else context
        client = self.context.client
        #: The parameter set: its ``step``, ``version`` and ``statistics()``.
        self.handle: Parameters = client.parameters(
            name,
            initial_values(tensors.trained),
            spec,
            consistency,
            compression=compression,
            pull_dtype=pull_dtype,
            non_finite=non_finite,
            on_drop=on_drop,
            reset_optimizer=reset_optimizer,
        )
        share_fixed(client, f"{name}/fixed", tensors.fixed)
        self._trained = tensors.trained
        self._writer = TensorWriter(tensors.trained)
        self._watch = ModelWatch(model, tensors.trained)
        self._stream = GradientStream(self.handle, tensors.trained, bucket_bytes, self._check)
        self._overlaps = overlap and not (spec.max_grad_norm and not isinstance(consistency, BSP))
        self._wrapped = wrapped
        self._pull()
        if self._overlaps:
            self._stream.listen()
        self._loss_scale = LossScale(self.context, f"{name}/overflows", consistency)
        self._join: UnevenInputs | None = None
        self._rates = Rates(spec, wrapped, scheduler, self.handle)
        super().__init__(groups_of(spec, tensors.trained) if wrapped is None else wrapped.param_groups, spec.values())
        if wrapped is not None:
            self.param_groups = wrapped.param_groups  # the very groups that its scheduler writes to
        self._rates.begin(self.param_groups)
        self._is_made = True

    # --- the step ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step with the gradients of the backward pass, and gives the model its new weights.

        closure: computes the loss again and returns it, with its gradients; called once. Returns what it returns.

        BSP: returns when all workers have made this step. Where the step was dropped, because this worker had been
        expelled or the run went back to a snapshot, a warning was logged, and the weights are those to go on with.
        Raises InvalidArgumentError for a model or gradients that were changed meanwhile, and for learning rates that
        the servers do not have; PushDroppedError as ``on_drop`` says; and what ``Parameters.push_pull`` raises. After
        errors other than these, calling it again goes on with the same step.

        torch's GradScaler steps it with ``overlap=False``. In BSP a step in which any worker's gradients overflow is
        skipped by all.
        """
        if hasattr(self, "found_inf") and self._overlaps:
            raise InvalidArgumentError(
                "a GradScaler skips steps, but with overlap=True gradients are pushed before it is known whether they "
                "are finite: use overlap=False, or bfloat16, which needs no scaler"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self._loss_scale.unscale(self, self._trained.values()):
            return result
        if not self._overlaps:
            self._stream.push_pull(self._writer.write)
        else:
            self._stream.complete()
            if not self._stream.collect(self._writer.write):
                self._pull()
        self._watch.accept()
        self._rates.on_step(self.param_groups)
        if self._join is not None:
            self._join.end_step()
        return result

    def _check(self) -> None:
        """Is called before anything of a step is sent."""
        self._watch.check()
        self._rates.check(self.param_groups)
        if self._join is not None:
            self._join.begin_step()

    def _pull(self) -> None:
        self._writer.write(self.handle.pull(copy=False))
        self._watch.accept()

    def no_sync(self) -> AbstractContextManager[None]:
        """In this context backward passes add up gradients in the worker. The first one after it pushes the sum: for
        steps of several micro-batches. Divide the loss by their number, as without psdist."""
        return self._stream.paused()

    def set_weight(self, weight: float) -> None:
        """Says what this worker's gradient counts for in the mean of the next step, such as the number of samples or
        tokens that its loss is the mean of: workers with uneven batches then make the step of a single process with all
        of them. 0 contributes nothing. It is 1 again after the step. Call it before the backward pass that pushes.

        Raises InvalidArgumentError after that; the push does so for a weight that is out of range, and outside BSP.
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
        the steps of the others until nobody has a batch. Then all models have the same weights.

        divide_by_initial_world_size: a worker without a batch counts in the mean with zeros. False: the mean is of the
            others.
        enable: False has no effect, for loops that are known to be even.
        throw_on_early_termination: raises UnevenInputsError in all workers when the first one has no batch left.

        All workers enter it, and none may join the run meanwhile. Each step in it costs a small one more.
        The scheduler follows all steps.

        Raises InvalidArgumentError outside BSP, where workers do not make steps together; and what ``step`` raises.
        """
        if not enable:
            yield
            return
        if not isinstance(self.handle.spec.consistency, BSP):
            raise InvalidArgumentError(
                f"join() in {type(self.handle.spec.consistency).__name__}: only in BSP do all workers make each step. "
                "End the script of a worker that has no batch left"
            )
        self._join = join = UnevenInputs(
            self.context, f"{self.handle.name}/join", 1,
            counts_joined=divide_by_initial_world_size, raises_early=throw_on_early_termination,
        )  # fmt: skip
        try:
            yield
            self._stream.check_idle()
            join.finish(lambda _: self._make_empty_step(float(join.counts_joined)))
            self._pull()
        finally:
            self._join = None

    def _make_empty_step(self, weight: float) -> None:
        self._stream.skip(weight)
        self._rates.on_empty_step(self.param_groups)

    def close(self) -> None:
        """Takes the hooks off the model, which keeps its weights. The context stays open."""
        self._stream.close()

    # --- what torch's optimizers have ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the optimizer is made: the servers have the parameters that the model had then."""
        if self._is_made:
            raise InvalidArgumentError(
                "parameters cannot be added to a DistributedOptimizer: the servers hold those that the model had when "
                "it was wrapped. Change the model first, then wrap it"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The settings and the step. The optimizer's state is on the servers, and in the snapshots that the run takes;
        ``psdist snapshot export`` writes it to files."""
        step = self.handle.step
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups, "psdist": {"name": self.handle.name, "step": step}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Checks that this run goes on where ``state_dict`` was made. A run goes on from its own snapshots, with the
        same ``--run-id``; a state cannot be given to it.

        Raises InvalidArgumentError for the state of another optimizer, and for another step.
        """
        saved = state_dict.get("psdist")
        if saved is None:
            raise InvalidArgumentError(
                "this state is not of a DistributedOptimizer: the servers cannot take the state of a torch optimizer. "
                "Load the model's weights before wrapping it, and begin with a new optimizer state"
            )
        if saved["step"] != self.handle.step:
            raise InvalidArgumentError(
                f"this state is of step {saved['step']}, but the run is at step {self.handle.step}: the optimizer's "
                "state comes from the run's snapshots. Start the run with the --run-id that it had"
            )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a DistributedOptimizer belongs to this process and cannot be copied or pickled")


class Rates:
    """The learning rates and other settings that torch's side shows, beside those that the servers have."""

    def __init__(
        self,
        spec: Optimizer,
        wrapped: torch.optim.Optimizer | None,
        scheduler: lr_scheduler.LRScheduler | None,
        handle: Parameters,
    ) -> None:
        self._spec = spec
        self._wrapped = wrapped
        self._scheduler = scheduler
        self._handle = handle
        self._base: list[float] = []
        self._seen: list[dict[str, Any]] = []

    def begin(self, groups: list[dict[str, Any]]) -> None:
        """The optimizer is made. A scheduler is brought to the step that the run goes on from."""
        self._base = [float(group["initial_lr"] if self._scheduler is not None else group["lr"]) for group in groups]
        if self._scheduler is not None:
            with warnings.catch_warnings():  # of a scheduler that is stepped before its optimizer
                warnings.simplefilter("ignore")
                for _ in range(self._handle.step):
                    self._scheduler.step()
        self._show(groups)

    def check(self, groups: list[dict[str, Any]]) -> None:
        """Raises InvalidArgumentError where a setting is not the servers'."""
        factor = self._spec.schedule.factor(self._handle.step) if self._scheduler is not None else 1.0
        for number, (group, seen) in enumerate(zip(groups, self._seen, strict=True)):
            if self._scheduler is not None:
                self._check_scheduled(number, float(group["lr"]), self._base[number] * factor)
            for key, value in seen.items():
                if group[key] != value and not (key == "lr" and self._scheduler is not None):
                    raise InvalidArgumentError(
                        f"{key} of parameter group {number} was changed from {value} to {group[key]}, but the servers "
                        "have their settings for the whole run: give a scheduler to DistributedOptimizer as "
                        "scheduler=, or a schedule to a specification of psdist.optim"
                    )

    def _check_scheduled(self, number: int, shown: float, expected: float) -> None:
        if abs(shown - expected) > _RATE_TOLERANCE * self._base[number]:
            raise InvalidArgumentError(
                f"the scheduler gives parameter group {number} lr={shown:g} at step {self._handle.step}, but the "
                f"servers follow it with {expected:g}: call scheduler.step() after each step of the optimizer, and "
                "not once for each data epoch; or give a schedule to a specification of psdist.optim"
            )

    def on_step(self, groups: list[dict[str, Any]]) -> None:
        """A step was made."""
        if self._wrapped is not None:
            self._wrapped._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        if self._scheduler is None and not isinstance(self._spec.schedule, Constant):
            self._show(groups)

    def on_empty_step(self, groups: list[dict[str, Any]]) -> None:
        """A step was made that the loop of the script did not make."""
        self.on_step(groups)
        if self._scheduler is not None:
            self._scheduler.step()

    def _show(self, groups: list[dict[str, Any]]) -> None:
        """Writes the current rates where scripts read them, unless a scheduler does."""
        if self._scheduler is None:
            factor = self._spec.schedule.factor(self._handle.step)
            for base, group in zip(self._base, groups, strict=True):
                group["lr"] = base * factor
        self._seen = [{key: group[key] for key in _settings(self._spec) if key in group} for group in groups]


def _settings(spec: Optimizer) -> list[str]:
    return [name for name in spec.__dataclass_fields__ if name not in ("schedule", "max_grad_norm", "overrides")]


def check_scheduler(optimizer: object, scheduler: object, consistency: Consistency) -> None:
    """Raises InvalidArgumentError for a scheduler that is not of this torch optimizer, or that the servers cannot
    follow."""
    if scheduler is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer) or getattr(scheduler, "optimizer", None) is not optimizer:
        raise InvalidArgumentError(
            f"scheduler is of type {type(scheduler).__name__}: give the torch scheduler of this torch optimizer, or "
            "a schedule in a specification of psdist.optim"
        )
    if not isinstance(consistency, BSP):
        raise InvalidArgumentError(
            f"scheduler={type(scheduler).__name__} counts this worker's steps, but in {type(consistency).__name__} the "
            "servers count the pushes of all workers: give a schedule in a specification of psdist.optim"
        )


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter] | None:
    """The parameters of a torch optimizer; None where there is none."""
    return None if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]


def specification_of(
    optimizer: torch.optim.Optimizer | Optimizer,
    trained: Mapping[str, nn.Parameter],
    scheduler: lr_scheduler.LRScheduler | None,
) -> Optimizer:
    """What the servers are to run. Raises InvalidArgumentError, see ``convert_optimizer``."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return convert_optimizer(optimizer, {parameter: name for name, parameter in trained.items()}, scheduler)
    raise InvalidArgumentError(
        f"optimizer is of type {type(optimizer).__qualname__}: give one of torch.optim, or a specification of "
        "psdist.optim, such as psdist.optim.AdamW(lr=1e-3)"
    )


def groups_of(spec: Optimizer, trained: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups as torch has them, for a specification: one for each override that applies."""
    groups: dict[int, dict[str, Any]] = {}
    for name, parameter in trained.items():
        number = group_of(name, spec.overrides)
        values = spec.group_values(number)
        groups.setdefault(number, {"params": [], **values})["params"].append(parameter)
    return [groups[number] for number in sorted(groups)]
