"""``offload``: trains a model of which a worker holds a few layers at a time. The others are on the servers alone.

Each layer is a parameter set of its own, so that a layer is created, pulled, pushed and given back by the calls that
every parameter set has. One set for the whole model would need a pull of some of its tensors in the middle of a step,
and initial values that are staged somewhere. What it would add, a norm of all gradients, cannot be had here anyway: the
servers would need all of them before the first is let go of.

Invariants: after ``step`` all layers are at the same step. The weights are, byte for byte, those that
``DistributedOptimizer`` would have.

Not here: what is a layer (``division``), when it is here (``passes``), its memory (``layer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import lr_scheduler

from psdist.client.context import Context
from psdist.client.context import init as init_context
from psdist.client.session.drops import OnDrop
from psdist.client.sync_client import Parameters
from psdist.compression import Cast, Codec, resolve
from psdist.consistency import BSP, Consistency
from psdist.errors import InvalidArgumentError
from psdist.optim import Optimizer, group_of
from psdist.torch.inspection import ModelParameters, fixed_tensors, inspect
from psdist.torch.kept_buffers import KeptBuffers
from psdist.torch.offloaded import memory
from psdist.torch.offloaded.division import divide
from psdist.torch.offloaded.layer import OffloadedLayer
from psdist.torch.offloaded.materializer import Init, Materializer
from psdist.torch.offloaded.passes import Passes
from psdist.torch.offloaded.turns import take_turns
from psdist.torch.optimizer import groups_of, parameters_of, refuse_steps, specification_of
from psdist.torch.rates import Rates, check_scheduler
from psdist.torch.values import initial_values, share_fixed, weight_of
from psdist.types import NonFinite
from psdist.wire.malloc_options import give_back_buffers


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
    """Trains ``model`` through psdist, with its weights on the servers. A worker has those of the layers that compute,
    and of the one that comes next, and gradients of two layers. Frozen parameters and buffers stay with it.

    model: its trained parameters as for ``DistributedOptimizer``. On the meta device it is never held whole: a layer is
        given values when its turn comes. Ordinary modules must fit into memory once; their values go to the servers.
    optimizer, scheduler, non_finite, name, on_drop, reset_optimizer, context: as for ``DistributedOptimizer``.
        ``max_grad_norm`` is refused. The parameter sets are called ``name/layer``.
    layers: modules that come and go as a whole, with all that is in them. None: those of the ``nn.ModuleList`` or
        ``nn.Sequential`` with most parameters. Everything else: each module with parameters of its own, during its
        forward pass.
    init: called with each module that has tensors of its own on the meta device, to give them values, as the function
        that ``Module.apply`` takes. None calls its ``reset_parameters()``.
    device: of tensors that are on the meta device.
    consistency: BSP without backup workers, in which weights stand still between the two passes of a step.
    compression: "bfloat16", "float16", or none. A codec that keeps what it left out would keep as much as the model.

    Returns what takes the optimizer's place in the loop. All workers must use the layers in the same order.
    Raises InvalidArgumentError for what cannot be offloaded, and names it; and as ``DistributedOptimizer``.
    """
    consistency = BSP() if consistency is None else consistency
    check_scheduler(optimizer, scheduler, consistency)
    _check_settings(consistency, compression)
    materializer = Materializer(_checked_device(device), init)
    wrapped = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    tensors = inspect(model, parameters_of(wrapped), has_values=False)
    spec = specification_of(optimizer, tensors.trained, scheduler)
    _check_model(model, tensors.trained, spec)
    parts, uses = divide(model, tensors.trained, layers)
    context = init_context() if context is None else context
    pages = memory.PagePool() if memory.is_supported() else None
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
    materializer.make(model.modules())
    give_back_buffers()
    for group in wrapped.param_groups if wrapped is not None else ():
        group["params"] = [materializer.replaced.get(one, one) for one in group["params"]]
    fixed, fixed_name = fixed_tensors(model, tensors.trained), f"{name}/-/fixed"
    share_fixed(context.client, fixed_name, fixed)
    take_turns(made)
    KeptBuffers(model, [one.handle.name for one in made], fixed_name, fixed).keep(context.client, made[0].handle)
    passes = Passes(made, uses)
    rates = Rates(spec, wrapped, scheduler, made[0].handle)
    then = ModelParameters(model, parameters_of(wrapped))
    return OffloadedOptimizer(context, made, passes, rates, then, spec, wrapped)


class OffloadedOptimizer(torch.optim.Optimizer):
    """The optimizer of a model whose layers are on the servers. Made by ``offload``."""

    def __init__(
        self,
        context: Context,
        layers: Sequence[OffloadedLayer],
        passes: Passes,
        rates: Rates,
        then: ModelParameters,
        spec: Optimizer,
        wrapped: torch.optim.Optimizer | None,
    ) -> None:
        self._is_made = False
        #: This script's place in its run.
        self.context = context
        #: The parameter set of each layer, by the layer's name.
        self.handles: dict[str, Parameters] = {layer.title: layer.handle for layer in layers}
        self._layers = list(layers)
        self._passes = passes
        self._rates = rates
        self._parameters_then = then
        self._trained = {name: one for layer in layers for name, one in layer.parameters.items()}
        super().__init__(groups_of(spec, self._trained) if wrapped is None else wrapped.param_groups, spec.values())
        if wrapped is not None:
            self.param_groups = wrapped.param_groups  # the very groups that its scheduler writes to
        self._align()
        rates.begin(self.param_groups)
        passes.listen(self._check)
        self._refusal = refuse_steps(wrapped, "optimizer that offload() returned")
        self._is_made = True

    @property
    def handle(self) -> Parameters:
        """The parameter set of the first layer. Its ``step`` is that of all layers."""
        return self._layers[0].handle

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the step of the backward pass: returns when the servers have all new weights.

        closure: computes the loss again and returns it, with its gradients; called once. Returns what it returns.

        BSP: returns when all workers have made this step. Where this worker had been expelled, some layers may have its
        gradient and others not; a warning was logged. Raises InvalidArgumentError for learning rates that the servers
        do not have; PushDroppedError as ``on_drop`` says; and what ``Parameters.push`` raises: calling it again goes on
        with the same step.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self._passes.has_gradients:
            self._check()
        self._rates.check_unchanged(self.param_groups)
        self._passes.complete()
        self._align()
        self._rates.on_step(self.param_groups)
        self._passes.begin_step()
        return result

    def _check(self) -> None:
        """Is called before anything of a step is sent."""
        factor = self._rates.check(self.param_groups)
        for layer in self._layers if factor is not None else ():
            layer.handle.lr_factor = factor
        self._parameters_then.check()
        for name, parameter in self._trained.items():
            if not parameter.requires_grad:
                raise InvalidArgumentError(
                    f"parameter {name!r} was frozen after offload(), but the servers train it: freeze it before"
                )

    def _align(self) -> None:
        """Brings all layers to one step, after some of them had been left out of steps that others made: makes their
        steps without a gradient. A worker that was expelled, or came later, needs it."""
        while len(steps := {layer.handle.step for layer in self._layers}) > 1:
            for layer in self._layers:
                if layer.handle.step < max(steps):
                    layer.handle.push({key: _zeros(one) for key, one in layer.parameters.items()}, weight=0)
                    layer.handle.release_memory(shared=layer.place.holder is None)

    def set_weight(self, weight: float) -> None:
        """As ``DistributedOptimizer.set_weight``. Raises InvalidArgumentError after gradients were pushed."""
        weight = weight_of(weight, self.handle.spec.consistency)
        if self._passes.has_gradients and weight != self._passes.weight:
            raise InvalidArgumentError(
                f"weight={weight!r:.40} comes after gradients of this step were pushed: set it before the backward pass"
            )
        self._passes.weight = weight

    def weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Names and values of all trained parameters, a layer at a time: for saving a model that does not fit into
        memory. Call it between steps. Each worker may call it alone."""
        for layer in self._layers:
            arrays = layer.handle.pull()
            layer.handle.release_memory(shared=layer.place.holder is None)
            yield from arrays.items()

    def close(self) -> None:
        """Takes the hooks off the model, whose weights stay on the servers. The context stays open."""
        self._passes.close()
        if self._refusal is not None:
            self._refusal.remove()

    # --- what torch's optimizers have ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, except after a backward pass that failed: no gradient stays here after it was computed.

        After a pass that failed, training goes on with the next batch. What the pass had sent cannot be taken back:
        then the step is made here, with zeros for all other parameters. Raises as ``step`` in that case.
        """
        if self._passes.discard():
            self._passes.complete()
            self._align()
            self._rates.on_irregular_step(self.param_groups)
            self._passes.begin_step()

    def no_sync(self) -> NoReturn:
        """Refused: gradients of several backward passes would have to be kept, which takes as much memory as the model.
        Make batches smaller, use torch.utils.checkpoint, or call ``step`` after each."""
        raise InvalidArgumentError(
            "no_sync() would add up gradients of all layers in this worker, which offload() is there to avoid: use "
            "torch.utils.checkpoint for larger batches, or more workers"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the optimizer is made: the servers have the parameters that the model had then."""
        if self._is_made:
            raise InvalidArgumentError(
                "parameters cannot be added to an offloaded model: the servers hold those that it had. Change the "
                "model first, then offload it"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The settings and the step. The optimizer's state is on the servers, and in the snapshots that the run
        takes."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups, "psdist": {"name": self.handle.name, "step": self.handle.step}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Refused: a run goes on from its own snapshots, with the same ``--run-id``."""
        raise InvalidArgumentError(
            "the state of an offloaded model is on the servers, and comes from the run's snapshots: start the run with "
            "the --run-id that it had"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadedOptimizer belongs to this process and cannot be copied or pickled")


def _part_of(spec: Optimizer, names: Iterable[str]) -> Optimizer:
    """The specification for a layer. Overrides that match none of its tensors would be refused; which of the others is
    the first to match a tensor stays the same."""
    overrides = tuple(one for one in spec.overrides if any(group_of(name, [one]) for name in names))
    return replace(spec, overrides=overrides)


def _zeros(like: Tensor) -> NDArray[np.float32]:
    return np.zeros(tuple(like.shape), np.float32)


def _check_settings(consistency: Consistency, compression: Codec | str | None) -> None:
    if not isinstance(consistency, BSP) or consistency.backup_workers:
        raise InvalidArgumentError(
            f"consistency={consistency!r:.80}: a layer is pulled for the forward pass and again for the backward pass, "
            "and only in BSP without backup workers are these the same weights. Use psdist.BSP()"
        )
    if not isinstance(codec := resolve(compression), Cast):
        raise InvalidArgumentError(
            f"compression={codec}: it keeps what it leaves out of gradients, which is as large as the model. Use "
            "'bfloat16' or 'float16'"
        )


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"device={device!r:.60} is none of torch: {error}") from None
    if checked.type == "meta":
        raise InvalidArgumentError("device='meta' has no values: name the device that computes, such as 'cpu'")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"device={str(checked)!r} is a CUDA device, but this process sees none: leave device out, or install a "
            "torch that finds the device"
        )
    return checked


def _check_model(model: nn.Module, trained: Mapping[str, nn.Parameter], spec: Optimizer) -> None:
    if spec.max_grad_norm:
        raise InvalidArgumentError(
            f"max_grad_norm={spec.max_grad_norm:g} needs the gradients of all layers before the first is used, and "
            "offload() lets go of each when it was pushed: leave it out, or use DistributedOptimizer"
        )
    if hasattr(model, "_orig_mod"):
        raise InvalidArgumentError(
            "the model is compiled, and its graph would read weights that are not here: give the model itself, without "
            "torch.compile"
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
