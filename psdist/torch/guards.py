"""Refusals of scripts that would train something else than their author meant, without any error.

- ``InnerOptimizer``: the optimizer of torch that a script gave to psdist. Its step hooks still run, and its own steps
  are refused. Both share their parameter groups, so that schedulers write where psdist reads.
- ``WrappedName``: a parameter set outlives the optimizer that was closed, and even the client. A second model of the
  same layout would attach to it, as a restarted worker does. A restarted worker is another process, and has wrapped
  nothing yet.
- ``AveragedGradients``: ``DistributedDataParallel.backward`` averages. Gradients that a script makes by
  ``torch.autograd.grad`` or ``torch.func.grad`` and assigns to ``p.grad`` stay this worker's own, and so do those of
  passes in ``no_sync`` alone. A step with them makes the workers' models differ, also with torch's own class.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from psdist.client.sync_client import Client
from psdist.errors import InvalidArgumentError

#: Keys of the state of torch's optimizers. A script may keep entries of its own beside them.
_STATE: Final = {
    "step", "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product", "sum", "square_avg",
    "grad_avg", "acc_delta", "prev", "step_size", "eta", "mu", "ax",
}  # fmt: skip


class InnerOptimizer:
    """Guard of the optimizer that ``outer`` replaces.

    inner: None if the script gave a specification of psdist.optim instead.
    outer: runs the step hooks of ``inner``, also those that are registered later, in its own steps.
    title: name of ``outer``, for messages.

    A step of ``inner`` would change weights that the servers store, and leave the servers waiting for their own.
    """

    def __init__(self, inner: torch.optim.Optimizer | None, outer: torch.optim.Optimizer, title: str) -> None:
        self._inner = inner
        self._outer = outer
        self._title = title
        self._known = [list(map(id, group["params"])) for group in outer.param_groups]
        self._states = self._present_states()
        self._hooks = [
            outer.register_step_pre_hook(self._before_step),
            outer.register_step_post_hook(self._after_step),
        ]
        if inner is not None:
            self._hooks.append(inner.register_step_pre_hook(self._refuse))

    def release(self) -> None:
        """Let the inner optimizer make steps again."""
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Raise InvalidArgumentError if the script wrote to the optimizer's state, or changed its groups' parameters.

        Groups or parameters may neither be added to the optimizer, nor removed from it.
        """
        if (states := self._present_states()) != self._states:
            key = next((key for _, key, *_ in sorted(states ^ self._states)), "")
            raise InvalidArgumentError(
                f"the script wrote to the optimizer's state {key!r}, but the servers hold it, and would not use this "
                "one: a run resumes its state from its own snapshots. To set it in the script use "
                "psdist.torch.DistributedDataParallel, which keeps the optimizer"
            )
        if (now := [list(map(id, group["params"])) for group in self._outer.param_groups]) != self._known:
            counts = [sum(map(len, groups)) for groups in (self._known, now)]
            raise InvalidArgumentError(
                f"the optimizer has {len(now)} parameter groups of {counts[1]} parameters, but had {len(self._known)} "
                f"of {counts[0]} when it was given to psdist, and the servers train those: call add_param_group() "
                "before wrapping. Layers that are trained later are passed from the start, frozen by "
                "requires_grad_(False). To train new parameters close() this optimizer, and wrap the model again under "
                "another name="
            )

    def _present_states(self) -> set[tuple[int, str, int, int]]:
        """Return the state that the optimizers hold here: for each entry its parameter, key, identity and version."""
        optimizers = [self._outer] if self._inner is None else [self._outer, self._inner]
        return {
            (id(parameter), str(key), id(value), getattr(value, "_version", 0))
            for optimizer in optimizers
            for parameter, entries in optimizer.state.items()
            if isinstance(entries, dict)
            for key, value in entries.items()
            if key in _STATE
        }

    def _refuse(self, inner: torch.optim.Optimizer, *_: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"psdist owns this torch.optim.{type(inner).__name__}, and the servers run its steps. Call step() and "
            f"zero_grad() of the {self._title} instead, or close() it first"
        )

    def _before_step(
        self, outer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self._of_script("_optimizer_step_pre_hooks"):
            result = hook(self._inner, (self._inner, *arguments[1:]), keywords)
            if result is None:
                continue
            if not isinstance(result, tuple) or len(result) != 2:
                raise InvalidArgumentError(
                    f"a step pre-hook returned {result!r:.80}: return None, or a tuple of new arguments and keywords"
                )
            arguments, keywords = (outer, *result[0][1:]), result[1]
        return arguments, keywords

    def _after_step(self, outer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for hook in self._of_script("_optimizer_step_post_hooks"):
            hook(self._inner, (self._inner, *arguments[1:]), keywords)

    def _of_script(self, table: str) -> list[Callable[..., Any]]:
        hooks: Mapping[int, Callable[..., Any]] = getattr(self._inner, table, {})
        return [hook for hook in hooks.values() if hook != self._refuse]


@dataclass
class _Use:
    """Last use of a name: the wrapped parameters, and their versions when the wrapper was closed."""

    client: weakref.ref[Client]
    shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, weakref.ref[nn.Parameter]]
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)


#: Uses by run, worker and name.
_uses: dict[tuple[str, str, str], _Use] = {}


class WrappedName:
    """Name of a model that is being wrapped.

    name: with a slash at its end for a parameter set per layer.
    is_late: the parameter sets of this name were in use before ``client`` registered.

    Raises InvalidArgumentError if this worker has wrapped another model of the same layout under the name, or if this
    model was written to since its wrapper was closed.
    """

    def __init__(self, client: Client, name: str, trained: Mapping[str, nn.Parameter], *, is_late: bool) -> None:
        self._client = client
        self._key = client.run_id, client.worker_id, name
        self._mine: _Use | None = None
        use, name = _uses.get(self._key), name.removesuffix("/")
        # Parameter sets of another layout are refused with the difference, and those of an earlier run are gone.
        if use is None or use.shapes != _shapes(trained) or not (use.client() is client or is_late):
            return
        if any(use.parameters[key]() is not one for key, one in trained.items()):
            raise InvalidArgumentError(
                f"the parameter set {name!r} holds the weights of another model, which this script wrapped before, and "
                f"this model would take them: give it another name=, such as name={name + '-2'!r}, or in a loop "
                f'name=f"{name}-{{number}}". To continue with the trained weights wrap the first model again. To start '
                "afresh, as in a notebook, call close() of the context and psdist.init() again"
            )
        for key, one in trained.items():
            if use.client() is client and use.versions.get(key, _version(one)) != _version(one):
                raise InvalidArgumentError(
                    f"parameter {key!r} was written to after close(), but the parameter set {name!r} still holds its "
                    "earlier values, and this call would load them: give another name= to train on from the present "
                    "ones"
                )

    def record(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Record that the parameter sets of this name hold the weights of these parameters."""
        references = {key: weakref.ref(one) for key, one in trained.items()}
        self._mine = _uses[self._key] = _Use(weakref.ref(self._client), _shapes(trained), references)

    def release(self) -> None:
        """Record the present weights as those of the servers, when the wrapper is closed."""
        if self._mine is None:
            return
        found = {key: reference() for key, reference in self._mine.parameters.items()}
        self._mine.versions = {key: _version(one) for key, one in found.items() if one is not None}


def _shapes(trained: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(one.shape) for key, one in trained.items()}


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


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
