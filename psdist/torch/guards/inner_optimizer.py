"""The optimizer of torch that a script gave to psdist: its step hooks still run, and its own steps are refused.

psdist and the inner optimizer share their parameter groups, so that schedulers write where psdist reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import torch

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
        self._known = _parameters(outer)
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
        if (now := _parameters(self._outer)) != self._known:
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


def _parameters(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]
