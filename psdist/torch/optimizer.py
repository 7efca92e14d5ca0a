"""``DistributedOptimizer``: weights and optimizer live on the servers; the script keeps its loop.

Invariants: When ``step`` returns, the model holds the weights that include this step, as each consistency mode defines
it. In BSP they are those of a single process that trains on all workers' batches, up to the rounding of float32 sums.
Calls that talk to servers are graph breaks of torch.compile, as the steps of torch's optimizers are.

Not here: pushing gradients (``gradients``), the servers' form of torch's settings (``conversion``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import lr_scheduler

from psdist.client.context import Context, init
from psdist.client.session.membership import OnDrop
from psdist.client.sync_client import Parameters
from psdist.compression import Codec
from psdist.consistency import BSP, Consistency, Reduction, with_reduction
from psdist.errors import InvalidArgumentError
from psdist.optim import MEANS_SUFFIX, Constant, Optimizer, group_of
from psdist.torch.averaging import LossScale, MeanGradients, TensorBroadcast, UnevenBatches, UnevenInputs
from psdist.torch.clipping import MeanClipping
from psdist.torch.conversion import KEY, convert_settings, end_factors, has_settings_alone, schedule_or_none
from psdist.torch.gradients import GradientStream, bucket_bytes_of, check_free
from psdist.torch.guards import InnerOptimizer, WrappedName
from psdist.torch.inspection import KeptBuffers, ModelTensors, inspect, merge_shared
from psdist.torch.overlap import Overlap, OverlapChoice, OverlapProbe, check_overlap
from psdist.torch.rates import LearningRates, check_scheduler, shown_settings
from psdist.torch.values import TensorWriter, initial_values, share_fixed
from psdist.torch.writes import Detection, Fingerprint, ModelWatch, WeightWrites, check_detection
from psdist.types import DType, NonFinite

logger = logging.getLogger("psdist")


class DistributedOptimizer(UnevenBatches, torch.optim.Optimizer):
    """Trains ``model`` through psdist, in place of ``optimizer``, with its loop unchanged.

    model: its trained parameters are on one device. If some are float64 or complex128, the servers compute in float64,
        else in float32; complex parameters are trained as pairs, as by torch. All workers start with the values of the
        lowest rank, including frozen parameters and buffers. A parameter without a gradient on this worker counts with
        zeros; without one on any worker it is skipped, as by torch. Buffers, such as running statistics, then belong to
        each worker, and snapshots contain them.
    optimizer: an optimizer of torch.optim that works element by element, with its parameter groups, or a
        specification of psdist.optim. It runs on the servers. Parameters that torch's optimizer lacks are not trained.
        Frozen ones that it has are held by the servers, and may be unfrozen at any time.
    scheduler: learning-rate scheduler of torch's optimizer, for BSP. The loop calls ``scheduler.step()`` after each
        step. The servers run a scheduler that ``convert_scheduler`` supports; the rates of others are sent to them. In
        a resumed run the scheduler is advanced to the run's step. None: the rates in ``param_groups`` are sent. So are
        all other numbers there that change. In BSP all workers must set the same ones.
    consistency: psdist.BSP() by default, SSP(n) or ASP().
    compression, pull_dtype, non_finite, on_drop, reset_optimizer: as for ``Client.parameters``.
    reduction: "sum" adds the workers' gradients up and does not divide them, for losses that are sums over the samples
        of a batch (``reduction="sum"`` of torch's loss functions). BSP only.
    max_grad_norm: clips the mean gradient (with ``reduction="sum"`` the sum) to this global norm, like
        ``clip_grad_norm_`` in a single process. None uses the specification's value. For the norm's value call
        ``clip_grad_norm_`` of this class, or torch's.
    name: name of the parameter set. Each model of a script has its own, also one that is wrapped after another was
        closed: in a loop over folds pass ``name=f"fold-{fold}"``. The same model can be wrapped again.
    overlap: push gradients while the backward pass still computes others. False pushes all of them in ``step``, and so
        do SSP and ASP with ``max_grad_norm``. "auto" starts in ``step``, and overlaps once each optimizer of the script
        has made two steps, unless these showed a reason not to: gradients or weights that change after ``backward``,
        several passes in a step, none, or skipped steps. It logs that reason. ``close`` an optimizer that is not used.
    bucket_cap_mb: MiB of gradients that are pushed together.
    detect_writes: writes to weights and pushed gradients that autograd does not see, such as ``p.data[row] = 1``, are
        found by comparing values. "sampled" finds a write to a whole tensor, and one to few elements only by chance
        from the third step on. "all" finds each one, and reads the weights twice more in a step.
    context: None uses the context of ``psdist.init()``: a script without a launcher trains alone.

    Raises InvalidArgumentError that names what cannot be converted or trained; DTypeMismatchError; and the errors of
    ``psdist.init`` and ``Client.parameters``.
    """

    #: torch's GradScaler lets an optimizer with this attribute unscale gradients and skip steps by itself.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Optimizer,
        scheduler: lr_scheduler.LRScheduler | None = None,
        *,
        consistency: Consistency | None = None,
        reduction: Reduction = "mean",
        compression: Codec | str | None = None,
        pull_dtype: DType = "float32",
        max_grad_norm: float | None = None,
        non_finite: NonFinite = "reject",
        name: str = "model",
        overlap: Overlap = "auto",
        bucket_cap_mb: float = 8.0,
        detect_writes: Detection = "sampled",
        on_drop: OnDrop = "warn",
        reset_optimizer: bool = False,
        context: Context | None = None,
    ) -> None:
        self._is_made = False
        consistency = with_reduction(BSP() if consistency is None else consistency, reduction)
        check_scheduler(optimizer, scheduler, consistency)
        bucket_bytes = bucket_bytes_of(bucket_cap_mb)
        check_overlap(overlap)
        check_detection(detect_writes)
        wrapped = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        tensors = tensors_to_train(model, wrapped)
        spec = _with_max_norm(specification_of(optimizer, tensors.trained, scheduler), max_grad_norm)
        #: This script's place in its run.
        self.context = init() if context is None else context
        client = self.context.client
        self._name = WrappedName(client, name, tensors.trained, is_late=client.joins_late(name))
        #: Parameter set of the model, for its ``step``, ``version`` and ``statistics()``.
        self.handle: Parameters = client.parameters(
            name, initial_values(tensors.trained), spec, consistency, compression=compression, pull_dtype=pull_dtype,
            non_finite=non_finite, on_drop=on_drop, reset_optimizer=reset_optimizer, master_dtype=tensors.master_dtype,
        )  # fmt: skip
        self._name.record(tensors.trained)
        share_fixed(client, f"{name}/fixed", tensors.fixed)
        self._trained = tensors.trained
        self._writer = TensorWriter(tensors.trained)
        watch = ModelWatch(model, tensors.trained, parameters_of(wrapped), detect_writes)
        self._writes = WeightWrites(self.handle, model, tensors.trained, watch)
        self._stream = GradientStream(
            self.handle, tensors.trained, bucket_bytes, self._check, values=Fingerprint(detect_writes)
        )  # fmt: skip
        self._pull()
        buffers = KeptBuffers(model, [name], f"{name}/fixed", tensors.fixed, tensors.aliases)
        buffers.save_in_snapshots(client, self.handle)
        self._loss_scale = LossScale(self.context, f"{name}/overflows", consistency)
        self._means: MeanGradients | None = None
        self._clipping = MeanClipping(tensors.trained, self._average_before)
        self._rates = LearningRates(spec, wrapped, scheduler, self.handle)
        super().__init__(*groups_and_defaults(spec, tensors.trained, wrapped))
        if wrapped is not None:
            self.param_groups = wrapped.param_groups  # the same objects that its scheduler writes to
        self.state.default_factory = _RemoteState
        self._rates.attach(self.param_groups, [(self.handle, tensors.trained)])
        self._inner = InnerOptimizer(wrapped, self, "DistributedOptimizer")
        self._overlap = OverlapChoice(
            overlap, not spec.max_grad_norm or isinstance(consistency, BSP), name,
            self.context.world_size if isinstance(consistency, BSP) else 1,
            client.session, self._stream.listen, self._make_probe,
        )  # fmt: skip
        self._is_made = True

    # --- the step ---

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients of the backward pass, and load the new weights into the model.

        closure: recomputes the loss and its gradients and returns the loss; called once. ``step`` returns its result.

        BSP: returns when all workers have made this step. If the step was dropped, because this worker had been
        expelled or the run rolled back to a snapshot, a warning was logged, and the weights are those to continue
            with. Raises InvalidArgumentError for a model or gradients that were changed meanwhile, and for settings
            that the servers cannot change; PushDroppedError as ``on_drop`` says; and the errors of
            ``Parameters.push_pull``. After errors other than these, calling it again retries the same step.

        torch's GradScaler needs pushes in ``step``, see ``overlap``. In BSP all workers skip a step in which any
        worker's gradients overflow.
        """
        if hasattr(self, "found_inf") and self._overlap.is_active:
            raise InvalidArgumentError(
                "a GradScaler skips steps, but with overlap=True gradients are pushed before they are known to be "
                "finite: use overlap=False, or bfloat16, which needs no scaler"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._overlap.is_active:  # Otherwise ``_check`` does it before anything is pushed.
            self._inner.check()
        self._overlap.on_step(is_scaled=hasattr(self, "found_inf"))
        if hasattr(self, "found_inf") and not self._unscale():
            return result
        self._rates.check_unchanged(self.param_groups)
        if not self._overlap.is_active:
            self._stream.push_pull(self._writer.write)
        else:
            self._check_unwritten()
            self._stream.complete()
            self._collect()
        self._writes.watch.accept()
        self._rates.on_step(self.param_groups)
        self._clipping.forget()
        if self._join is not None:
            self._join.end_step()
        self._overlap.on_step_end()
        return result

    def _check_unwritten(self) -> None:
        """Check that the script wrote to no weight since its gradients were pushed: the step would overwrite it."""
        try:
            self._writes.watch.check_unwritten()
        except InvalidArgumentError:
            self._stream.refuse()
            raise

    def _make_probe(self) -> OverlapProbe:
        return OverlapProbe(
            self._trained, lambda: self._stream.is_paused, lambda: shown_settings(self.param_groups, self.defaults)
        )

    def _collect(self) -> None:
        if not self._stream.collect(self._writer.write):
            self._pull()

    def _unscale(self) -> bool:
        """Remove a GradScaler's scale from the gradients. Returns False if all workers skip the step."""
        if self._join is not None:
            self._join.begin_step(is_scaled=True)
        if self._loss_scale.unscale(self, self._trained.values()):
            return True
        self._stream.forget()
        self._clipping.forget()
        self._rates.on_irregular_step(self.param_groups)
        if self._join is not None:
            self._join.end_step()
        return False

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch's optimizers do.

        After a failed backward pass, training continues with the next batch. Gradients that the pass had pushed cannot
        be taken back: the step is then made here, with zeros for all other parameters. The same happens if ``step``
        refused gradients that were changed after they were pushed. Raises as ``step`` in that case. Between a backward
        pass that pushed and ``step``, raises InvalidArgumentError and clears nothing.
        """
        self._overlap.on_clear()
        self._clipping.forget()
        if self._stream.discard():
            self._collect()
            self._writes.watch.accept()
            self._rates.on_irregular_step(self.param_groups)
            if self._join is not None:
                self._join.end_step()
        super().zero_grad(set_to_none)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _check(self) -> None:
        """Check model and rates before anything of a step is sent."""
        self._writes.take_back()
        self._writes.watch.check()
        self._inner.check()
        self._writes.send()
        self._rates.send(self.param_groups)
        if self._join is not None:
            self._join.begin_step()

    def _pull(self) -> None:
        self._writer.write(self.handle.pull(copy=False))
        self._writes.watch.accept()

    def swapped(self, source: nn.Module | Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the model has the tensors of ``source``, for an evaluation; it writes nothing.

        source: a model with the same parameters, such as ``torch.optim.swa_utils.AveragedModel``, or a dict of tensors
            by name. Its buffers are used, too.

        Afterwards the model has its own tensors again. Raises InvalidArgumentError for a parameter that ``source``
        lacks, and for a backward pass in the block that would push.
        """
        return self._writes.swapped(source)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients. The next pass after it pushes the sum.

        Use it for steps of several micro-batches. Divide the loss by their number, as without psdist.
        """
        return self._stream.paused()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def average_gradients(self) -> None:
        """Replace ``p.grad`` of each trained parameter by the mean over all workers, which ``step`` then pushes.

        The script can clip, scale or inspect the mean afterwards, as in a single process. Call it between ``backward``
        and ``step``, in each step and on all workers. Each gradient is then sent twice; ``max_grad_norm`` costs
        nothing.

        Raises InvalidArgumentError outside BSP, in ``join``, and if gradients were pushed during the backward pass; and
        the errors of ``Parameters.push_pull``.
        """
        self._overlap.on_average()
        if obstacle := self._obstacle_to_averages():
            raise InvalidArgumentError(
                f"average_gradients() and clip_grad_norm_() of {self.handle.name!r} are not possible {obstacle}"
            )
        if self._means is None:
            self._means = MeanGradients(
                self.context.client, f"{self.handle.name}{MEANS_SUFFIX}", self._trained, self.handle.spec.dtype
            )
        self._means.average(self._stream.weight)
        self._clipping.accept()

    def _average_before(self, function: str) -> None:
        """Average before ``function`` of torch clips, unless each worker's gradient makes a step of its own."""
        if self.context.is_alone or not isinstance(self.handle.spec.consistency, BSP):
            return
        if obstacle := self._obstacle_to_averages():
            raise InvalidArgumentError(
                f"torch.nn.utils.{function} would see this worker's own gradients of {self.handle.name!r}, and their "
                f"mean is not possible {obstacle}"
            )
        if self._means is None:
            logger.info(
                "%r averages gradients before torch.nn.utils.%s, which then sees the mean; each gradient is sent "
                "twice. max_grad_norm= of the DistributedOptimizer clips the mean on the servers, at no cost",
                self.handle.name, function,
            )  # fmt: skip
        self.average_gradients()

    def _obstacle_to_averages(self) -> str:
        consistency = self.handle.spec.consistency
        if not isinstance(consistency, BSP):
            return (
                f"in {type(consistency).__name__}, where workers make no common steps: torch.nn.utils.clip_grad_norm_ "
                "clips this worker's own gradient"
            )
        if consistency.reduction != "mean":
            return "with reduction='sum': use max_grad_norm=, or reduction='mean'"
        if self._join is not None:
            return "in join(), whose workers make different numbers of calls: use max_grad_norm="
        if self._overlap.is_active:
            return (
                "after gradients were pushed during the backward pass: call them from the first step on, or use "
                "overlap=False"
            )
        return ""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the mean gradient to ``max_norm`` and return its norm before, as a single process does.

        The arguments are those of ``torch.nn.utils.clip_grad_norm_``. Costs and errors are those of
        ``average_gradients``.
        """
        self.average_gradients()
        return nn.utils.clip_grad_norm_(self._trained.values(), max_norm, norm_type, error_if_nonfinite, foreach)

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Return a context for training loops whose workers have different numbers of batches.

        A worker that leaves the context makes the steps of the others until no worker has a batch, and takes the
        weights that the others write. Afterwards all models have the same weights.

        divide_by_initial_world_size: a worker without a batch counts in the mean with zeros. False: the mean is over
            the others.
        enable: False disables the context, for loops that are known to be even.
        throw_on_early_termination: raise UnevenInputsError in all workers when the first one runs out of batches.

        All workers enter the context, and no worker may join the run meanwhile. Each step in it costs one more small
        step. The scheduler advances with all steps.

        Raises InvalidArgumentError outside BSP, where workers do not make steps together; and the errors of ``step``.
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
            self.context, f"{self.handle.name}/join",
            counts_joined=divide_by_initial_world_size, raises_early=throw_on_early_termination,
        )  # fmt: skip
        try:
            yield
            self._stream.check_idle()
            before = self.handle.step
            if join.is_begun:  # The others wait for the step of a backward pass that failed.
                self._make_empty_step(join)
                join.end_step()
            join.finish(lambda _: self._make_empty_step(join), self._writes.has_any)
            self._end_join(join, is_last=self.handle.step == before)
        finally:
            self._join = None

    def _end_join(self, join: UnevenInputs, *, is_last: bool) -> None:
        """Load the weights of the last step, with what was written after it. is_last: this worker had a batch then."""
        if not is_last:
            self._pull()
        if join.has_written and (source := join.last_source) is not None:
            last = TensorBroadcast(self.context.client, f"{self.handle.name}/joined", lambda: self._trained)
            last.send(is_source=self.context.rank == source)
            last.release_memory()

    def _make_empty_step(self, join: UnevenInputs) -> None:
        if join.is_scaled and self._loss_scale.overflows_anywhere(mine=False):
            return
        self._rates.leave_to_others()  # Workers with a batch set them, and write the weights.
        self.handle.assign(None)
        self._stream.skip(float(join.counts_joined))
        self._rates.on_empty_step(self.param_groups)

    def close(self) -> None:
        """Remove the hooks from the model, which keeps its weights. The context stays open."""
        self._stream.close()
        self._overlap.release()
        self._clipping.close()
        self._inner.release()
        self._name.release()

    # --- what torch's optimizers have ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse once the optimizer is made: the servers store the parameters that it had then."""
        if self._is_made:
            raise InvalidArgumentError(
                "parameters cannot be added to a DistributedOptimizer, because the servers store those that the "
                "optimizer had when it was wrapped. For layers that are trained later, pass them to the optimizer from "
                "the start, frozen by requires_grad_(False), in a group of their own if they need one, and unfreeze "
                "them later. For new layers change the model first, then wrap it"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and step.

        The optimizer's state is on the servers and in the run's snapshots, from which a run resumes. ``psdist snapshot
        export`` writes the model's ``state_dict`` to files.
        """
        step = self.handle.step
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        own = {"name": self.handle.name, "step": step, **self._rates.state()}
        return {"state": {}, "param_groups": groups, KEY: own}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that this run is at the step at which ``state_dict`` was made, and load the settings that the script
        sets.

        A run resumes from its own snapshots, with the same ``--run-id``. The state of a torch optimizer is loaded if it
        has settings alone, as before its first step. Raises InvalidArgumentError for the state of another optimizer or
        model, and for another step.
        """
        saved = state_dict.get(KEY)
        if saved is None and has_settings_alone(state_dict, self):
            self._rates.load(self.param_groups, state_dict)
            return
        if saved is None:
            raise InvalidArgumentError(
                "this state is not of a DistributedOptimizer: the servers cannot load the state of a torch optimizer. "
                "Load the model's weights before wrapping it, and start with a new optimizer state"
            )
        if saved["name"] != self.handle.name:
            raise InvalidArgumentError(
                f"this state is of the parameter set {saved['name']!r}, but this optimizer's set is "
                f"{self.handle.name!r}: load it into the optimizer that it was saved from"
            )
        if saved["step"] != self.handle.step:
            raise InvalidArgumentError(
                f"this state is of step {saved['step']}, but the run is at step {self.handle.step}: the optimizer's "
                "state comes from the run's snapshots. Start the run with its earlier --run-id"
            )
        self._rates.load(self.param_groups, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a DistributedOptimizer belongs to this process and cannot be copied or pickled")


class _RemoteState(dict[str, Any]):
    """State of a parameter: empty, because the servers hold it."""

    def __missing__(self, key: str) -> NoReturn:
        raise InvalidArgumentError(
            f"the servers hold the state {key!r} of this parameter: read it from a snapshot, by "
            "psdist.torch.load_optimizer_state, or use psdist.torch.DistributedDataParallel, which keeps the optimizer"
        )


def tensors_to_train(model: nn.Module, wrapped: torch.optim.Optimizer | None) -> ModelTensors:
    """Return the tensors of ``model`` that ``wrapped`` trains, and the others. Raises as ``inspect``."""
    tensors = inspect(model, parameters_of(wrapped), with_frozen=True)
    check_free({**tensors.trained, **tensors.fixed})
    return merge_shared(model, tensors, wrapped)


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter] | None:
    """Return the parameters of a torch optimizer, or None if there is no optimizer."""
    return None if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]


def specification_of(
    optimizer: torch.optim.Optimizer | Optimizer,
    trained: Mapping[str, nn.Parameter],
    scheduler: lr_scheduler.LRScheduler | None,
) -> Optimizer:
    """Return the specification for the servers, without a schedule if they cannot follow the scheduler.

    Raises InvalidArgumentError, see ``convert_optimizer``.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        schedule = None if scheduler is None else schedule_or_none(scheduler)
        names = {parameter: name for name, parameter in trained.items()}
        if scheduler is None or schedule is None:
            return convert_settings(optimizer, names, Constant())
        return convert_settings(optimizer, names, schedule, end_factors(scheduler))
    raise InvalidArgumentError(
        f"optimizer is of type {type(optimizer).__qualname__}: give one of torch.optim, or a specification of "
        "psdist.optim, such as psdist.optim.AdamW(lr=1e-3)"
    )


def _with_max_norm(spec: Optimizer, max_grad_norm: float | None) -> Optimizer:
    return spec if max_grad_norm is None else replace(spec, max_grad_norm=max_grad_norm)


def groups_and_defaults(
    spec: Optimizer, trained: Mapping[str, nn.Parameter], wrapped: torch.optim.Optimizer | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the parameter groups and the defaults of an optimizer of torch: those of ``wrapped``, to which torch then
    adds nothing, or those of the specification."""
    return (groups_of(spec, trained), spec.values()) if wrapped is None else (wrapped.param_groups, wrapped.defaults)


def groups_of(spec: Optimizer, trained: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Return torch's parameter groups for a specification: one for each override that applies."""
    groups: dict[int, dict[str, Any]] = {}
    for name, parameter in trained.items():
        number = group_of(name, spec.overrides)
        values = spec.group_values(number) | (dict(spec.overrides[number - 1].values) if number else {})
        groups.setdefault(number, {"params": [], **values})["params"].append(parameter)
    return [groups[number] for number in sorted(groups)]
