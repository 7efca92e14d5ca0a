"""``offload``: train a model while each worker holds only a few of its layers. The servers store the others.

Each layer is a parameter set of its own, so a layer is created, pulled, pushed and freed by the ordinary calls of a
parameter set. A single set for the model would need pulls of some of its tensors in the middle of a step, and staging
of initial values. Its one advantage, a norm over all gradients, is impossible here anyway: the servers would need all
gradients before the first one is freed.

Invariants: After ``step`` all layers are at the same step. The weights equal, byte for byte, those of
``DistributedOptimizer``.

Not here: division into layers (``offloaded_memory``), presence of a layer (``offloaded_passes``), its memory
(``offloaded_layer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import lr_scheduler

from psdist.client.context import Context
from psdist.client.context import init as init_context
from psdist.client.session.membership import OnDrop
from psdist.client.sync_client import Client, Parameters
from psdist.compression import Cast, Codec, resolve
from psdist.consistency import BSP, Consistency
from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.machine import give_back_buffers
from psdist.optim import Optimizer, group_of
from psdist.torch import offloaded_memory
from psdist.torch.conversion import KEY
from psdist.torch.guards import InnerOptimizer, WrappedName
from psdist.torch.inspection import KeptBuffers, ModelParameters, ModelTensors, fixed_tensors, inspect, merge_shared
from psdist.torch.offloaded_layer import OffloadedLayer
from psdist.torch.offloaded_memory import Init, Materializer, divide, take_turns
from psdist.torch.offloaded_passes import Passes
from psdist.torch.optimizer import groups_and_defaults, parameters_of, specification_of
from psdist.torch.rates import LearningRates, check_scheduler
from psdist.torch.values import initial_values, share_fixed, weight_of
from psdist.types import NonFinite


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Optimizer,
    scheduler: lr_scheduler.LRScheduler | None = None,
    *,
    layers: Sequence[nn.Module] | None = None,
    init: Init | None = None,
    device: torch.device | str = "cpu",
    consistency: Consistency | None = None,
    compression: Codec | str | None = None,
    non_finite: NonFinite = "reject",
    name: str = "model",
    on_drop: OnDrop = "warn",
    reset_optimizer: bool = False,
    context: Context | None = None,
) -> OffloadedOptimizer:
    """Train ``model`` through psdist with its weights on the servers.

    A worker holds the weights of the layers that compute and of the next layer, and gradients of two layers. Frozen
    parameters and buffers stay in the worker.

    model: its trained parameters as for ``DistributedOptimizer``. On the meta device it is never held whole: a layer
        gets values when its turn comes. Other modules must fit into memory once; their values are sent to the servers.
    optimizer, scheduler, non_finite, name, on_drop, reset_optimizer, context: as for ``DistributedOptimizer``, without
        ``max_grad_norm``. The parameter sets are called ``name/layer``.
    layers: modules that are loaded and freed as a whole. None: those of the ``nn.ModuleList`` or ``nn.Sequential`` with
        most parameters. Any other module with parameters of its own is a layer during its forward pass.
    init: called with each module that has tensors of its own on the meta device, to initialize them, like the function
        that ``Module.apply`` takes. None calls its ``reset_parameters()``.
    device: device of tensors that are on the meta device.
    consistency: BSP without backup workers, in which weights do not change between the two passes of a step.
    compression: "bfloat16", "float16", or none. A codec with a residual would keep a residual as large as the model.

    All workers must use the layers in the same order. Raises InvalidArgumentError, and as ``DistributedOptimizer``.
    """
    consistency = BSP() if consistency is None else consistency
    check_scheduler(optimizer, scheduler, consistency)
    _check_settings(consistency, compression)
    materializer = Materializer(_checked_device(device), init)
    wrapped = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    tensors = merge_shared(model, inspect(model, parameters_of(wrapped), has_values=False), wrapped)
    _check_aliases(tensors)
    spec = specification_of(optimizer, tensors.trained, scheduler)
    _check_model(model, tensors.trained, spec)
    parts, uses = divide(model, tensors.trained, layers)
    context = init_context() if context is None else context
    is_late = any(context.client.joins_late(f"{name}/{part.title or '-'}") for part in parts)
    used = WrappedName(context.client, f"{name}/", tensors.trained, is_late=is_late)
    pages = offloaded_memory.PagePool() if offloaded_memory.is_supported() else None
    made: list[OffloadedLayer] = []
    for part in parts:
        give_back_buffers()
        materializer.make(part.modules)
        parameters = {key: materializer.replaced.get(one, one) for key, one in part.parameters.items()}
        handle = context.client.parameters(
            f"{name}/{part.title or '-'}", initial_values(parameters), _part_of(spec, parameters), consistency,
            compression=compression, non_finite=non_finite, on_drop=on_drop, reset_optimizer=reset_optimizer,
        )  # fmt: skip
        title = part.title or type(model).__name__
        made.append(OffloadedLayer(title, parameters, handle, lambda: context.client.incarnation, pages))
    used.record({key: one for layer in made for key, one in layer.parameters.items()})
    materializer.make(model.modules())
    give_back_buffers()
    for group in wrapped.param_groups if wrapped is not None else ():
        group["params"] = [materializer.replaced.get(one, one) for one in group["params"]]
    _share_others(context.client, model, tensors, name, made)
    take_turns(made)
    rates = LearningRates(spec, wrapped, scheduler, made[0].handle)
    then = ModelParameters(model, parameters_of(wrapped))
    return OffloadedOptimizer(context, made, Passes(made, uses), rates, then, spec, wrapped)


def _share_others(
    client: Client, model: nn.Module, tensors: ModelTensors, name: str, layers: Sequence[OffloadedLayer]
) -> None:
    """Equalize frozen parameters and buffers over workers, and save the buffers in snapshots."""
    found, title = fixed_tensors(model, tensors.trained), f"{name}/-/fixed"
    fixed = {key: tensor for key, tensor in found.items() if key not in tensors.aliases}
    share_fixed(client, title, fixed)
    buffers = KeptBuffers(model, [one.handle.name for one in layers], title, fixed, tensors.aliases)
    buffers.save_in_snapshots(client, layers[0].handle)


class OffloadedOptimizer(torch.optim.Optimizer):
    """Optimizer of a model whose layers are on the servers. Made by ``offload``."""

    def __init__(
        self,
        context: Context,
        layers: Sequence[OffloadedLayer],
        passes: Passes,
        rates: LearningRates,
        then: ModelParameters,
        spec: Optimizer,
        wrapped: torch.optim.Optimizer | None,
    ) -> None:
        self._is_made = False
        #: This script's place in its run.
        self.context = context
        #: Parameter set of each layer, by the layer's name.
        self.handles: dict[str, Parameters] = {layer.title: layer.handle for layer in layers}
        self._layers = list(layers)
        self._passes = passes
        self._rates = rates
        self._parameters_then = then
        self._trained = {name: one for layer in layers for name, one in layer.parameters.items()}
        super().__init__(*groups_and_defaults(spec, self._trained, wrapped))
        if wrapped is not None:
            self.param_groups = wrapped.param_groups  # the same objects that its scheduler writes to
        self._align()
        rates.attach(self.param_groups, [(layer.handle, layer.parameters) for layer in self._layers])
        passes.listen(self._check)
        self._inner = InnerOptimizer(wrapped, self, "optimizer that offload() returned")
        self._is_made = True

    @property
    def handle(self) -> Parameters:
        """Parameter set of the first layer. Its ``step`` is that of all layers."""
        return self._layers[0].handle

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the step of the backward pass. Returns when the servers have applied it to all layers.

        closure: recomputes the loss and its gradients and returns the loss; called once. ``step`` returns its result.

        BSP: returns when all workers have made this step. If this worker had been expelled, some layers may include its
        gradient and others not; a warning was logged. Raises InvalidArgumentError for settings that the servers cannot
        change; PushDroppedError as ``on_drop`` says; and the errors of ``Parameters.push``. Calling it again then
        retries the same step.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self._passes.has_gradients:
            self._check()
        self._inner.check()
        self._rates.check_unchanged(self.param_groups)
        self._passes.complete()
        self._align()
        self._rates.on_step(self.param_groups)
        self._passes.begin_step()
        return result

    def _check(self) -> None:
        """Check model and rates before anything of a step is sent."""
        self._inner.check()
        self._rates.send(self.param_groups)
        self._parameters_then.check()
        for name, parameter in self._trained.items():
            if not parameter.requires_grad:
                raise InvalidArgumentError(
                    f"parameter {name!r} was frozen after offload(), but the servers train it: freeze it before"
                )

    def _align(self) -> None:
        """Bring all layers to the same step by making the missing steps without a gradient.

        Needed after this worker was expelled or joined later: the others made steps of some layers without it.
        """
        while len(steps := {layer.handle.step for layer in self._layers}) > 1:
            for layer in self._layers:
                if layer.handle.step < max(steps):
                    zeros = {key: np.zeros(tuple(one.shape), np.float32) for key, one in layer.parameters.items()}
                    layer.handle.push(zeros, weight=0)
                    layer.handle.release_memory(shared=layer.place.holder is None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def set_weight(self, weight: float) -> None:
        """Set the gradient's weight as ``DistributedOptimizer.set_weight`` does.

        Raises InvalidArgumentError after gradients were pushed.
        """
        weight = weight_of(weight, self.handle.spec.consistency)
        if self._passes.has_gradients and weight != self._passes.weight:
            raise InvalidArgumentError(
                f"weight={weight!r:.40} comes after gradients of this step were pushed: set it before the backward pass"
            )
        self._passes.weight = weight

    def weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield names and values of all trained parameters, one layer at a time.

        Use it to save a model that does not fit into memory. Call it between steps. Each worker may call it alone.
        """
        for layer in self._layers:
            arrays = layer.handle.pull()
            layer.handle.release_memory(shared=layer.place.holder is None)
            yield from arrays.items()

    def close(self) -> None:
        """Remove the hooks from the model, whose weights stay on the servers. The context stays open."""
        self._passes.close()
        self._inner.release()

    # --- what torch's optimizers have ---

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, except after a failed backward pass: no gradient stays here after it was computed.

        After a failed pass, training continues with the next batch. Gradients that the pass had sent cannot be taken
        back: the step is then made here, with zeros for all other parameters. Raises as ``step`` in that case.
        """
        if self._passes.discard():
            self._passes.complete()
            self._align()
            self._rates.on_irregular_step(self.param_groups)
            self._passes.begin_step()

    def no_sync(self) -> NoReturn:
        """Refuse: gradients of several backward passes would have to be kept, which takes as much memory as the model.

        Use smaller batches or torch.utils.checkpoint, or call ``step`` after each pass.
        """
        raise InvalidArgumentError(
            "no_sync() would accumulate gradients of all layers in this worker, which offload() avoids: use "
            "torch.utils.checkpoint for larger batches, or more workers"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse once the optimizer is made: the servers store the parameters that the model had then."""
        if self._is_made:
            raise InvalidArgumentError(
                "parameters cannot be added to an offloaded model, because the servers store its original ones. Change "
                "the model first, then offload it"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and step. The optimizer's state is on the servers and in the run's snapshots."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups, KEY: {"name": self.handle.name, "step": self.handle.step}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Refuse: a run resumes from its own snapshots, with the same ``--run-id``."""
        raise InvalidArgumentError(
            "the state of an offloaded model is on the servers, and comes from the run's snapshots: start the run with "
            "its earlier --run-id"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadedOptimizer belongs to this process and cannot be copied or pickled")


def _part_of(spec: Optimizer, names: Iterable[str]) -> Optimizer:
    """Return the specification for one layer.

    It omits overrides that match none of the layer's tensors, because these would be refused. The first override that
    matches a tensor stays the same.
    """
    overrides = tuple(one for one in spec.overrides if any(group_of(name, [one]) for name in names))
    return replace(spec, overrides=overrides)


def _check_settings(consistency: Consistency, compression: Codec | str | None) -> None:
    if not isinstance(consistency, BSP) or consistency.backup_workers:
        raise InvalidArgumentError(
            f"consistency={consistency!r:.80}: a layer is pulled once for the forward and once for the backward pass, "
            "and these weights are equal only in BSP without backup workers. Use psdist.BSP()"
        )
    if not isinstance(codec := resolve(compression), Cast):
        raise InvalidArgumentError(
            f"compression={codec}: its residual is as large as the model. Use 'bfloat16' or 'float16'"
        )


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"device={device!r:.60} is not a torch device: {error}") from None
    if checked.type == "meta":
        raise InvalidArgumentError("device='meta' has no values: name the device that computes, such as 'cpu'")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"device={str(checked)!r} is a CUDA device, but this process sees none: leave device out, or install a "
            "torch that finds the device"
        )
    return checked


def _check_aliases(tensors: ModelTensors) -> None:
    for name, first in tensors.aliases.items():
        if first in tensors.trained or tensors.fixed[first].device.type == "meta":
            raise InvalidArgumentError(
                f"{name!r} is not trained, but is the memory of {first!r}, which offload() replaces: make it by "
                "clone(), or use DistributedOptimizer"
            )


def _check_model(model: nn.Module, trained: Mapping[str, nn.Parameter], spec: Optimizer) -> None:
    for name, parameter in trained.items():
        if parameter.dtype in (torch.float64, torch.complex64, torch.complex128):
            raise DTypeMismatchError(
                f"parameter {name!r} has dtype {parameter.dtype}, and offload() trains float32, bfloat16 and float16: "
                "use DistributedOptimizer, or model.float()",
                tensor=name,
                given=str(parameter.dtype),
            )
    if spec.max_grad_norm:
        raise InvalidArgumentError(
            f"max_grad_norm={spec.max_grad_norm:g} needs the gradients of all layers at the same time, and offload() "
            "frees each after its push: leave it out, or use DistributedOptimizer"
        )
    if hasattr(model, "_orig_mod"):
        raise InvalidArgumentError(
            "the model is compiled, and its graph would read weights that are not in memory: give the model itself, "
            "without torch.compile"
        )
    for one in spec.overrides:
        if not any(group_of(name, [one]) for name in trained):
            raise InvalidArgumentError(
                f"override {one.pattern!r} matches no tensor of the model: correct the pattern or leave it out"
            )
    for name, parameter in trained.items():
        if type(parameter) is not nn.Parameter:
            raise InvalidArgumentError(
                f"parameter {name!r} is of type {type(parameter).__qualname__}: only torch.nn.Parameter is offloaded"
            )
