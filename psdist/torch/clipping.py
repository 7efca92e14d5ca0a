"""Mean gradients on the worker: for scripts that clip or change the mean itself, as a single process does.

A single process clips the gradient of the whole batch. Each worker's own gradient has another norm, so the mean of
clipped gradients is another step. Therefore ``torch.nn.utils.clip_grad_norm_`` and its relatives average the gradients
of a ``DistributedOptimizer`` before they read them. The functions are changed from within, because scripts import them
by name. The step then pushes the mean, so each gradient is sent twice.

Invariant: All workers average at the same calls, if they make the same calls of torch's functions in each step.

Not here: the mean (``averaging``).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

#: Functions of torch.nn.utils whose first argument is parameters, and those with gradients. torch 2.4 has not all.
_WITH_PARAMETERS: Final = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_WITH_GRADIENTS: Final = ("get_total_norm",)

_lock: Final = threading.Lock()
_owners: Final[weakref.WeakSet[MeanClipping]] = weakref.WeakSet()
_changed: Final[list[str]] = []


class MeanClipping:
    """Averages the gradients of ``trained`` when a function of torch is about to clip them.

    average: makes each gradient the mean; called with the function's name. Its errors pass through the function.

    The first such call of a step averages, and later ones do if a gradient has changed in other ways meanwhile.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], average: Callable[[str], None]) -> None:
        self._parameters = list(trained.values())
        self._ids = frozenset(map(id, self._parameters))
        self._average = average
        #: Averaged gradients, with autograd's version of each; None before the first ones of a step.
        self._known: list[tuple[weakref.ref[Tensor] | None, int]] | None = None
        with _lock:
            _owners.add(self)
            if not _changed:
                _change_functions()

    def close(self) -> None:
        """Leave the gradients to the script."""
        with _lock:
            _owners.discard(self)

    def accept(self) -> None:
        """Record that the present gradients are equal on all workers."""
        self._known = [
            (None, 0) if one.grad is None else (weakref.ref(one.grad), one.grad._version) for one in self._parameters
        ]

    def forget(self) -> None:
        """Record the end of a step, or that the script cleared its gradients."""
        self._known = None

    def _is_known(self, number: int, gradient: Tensor | None) -> bool:
        reference, version = (None, 0) if self._known is None else self._known[number]
        if gradient is None:
            return reference is None
        return reference is not None and reference() is gradient and gradient._version == version

    def position(self, tensors: Sequence[Tensor], *, are_gradients: bool) -> int:
        """Return the position of the first of ``tensors`` that is a parameter of this model, or a gradient of one. It
        is the length of ``tensors`` if there is none."""
        ids = {id(one.grad) for one in self._parameters if one.grad is not None} if are_gradients else self._ids
        return next((number for number, one in enumerate(tensors) if id(one) in ids), len(tensors))

    def before(self, function: str) -> list[Tensor]:
        """Average if it is due. Returns gradients that this worker lacked before."""
        if self._known is not None and all(self._is_known(at, one.grad) for at, one in enumerate(self._parameters)):
            return []
        missing = [one for one in self._parameters if one.grad is None]
        self._average(function)
        return [one.grad for one in missing if one.grad is not None]


def _change_functions() -> None:
    """Let torch's functions call ``_before`` first. Each runs an inner function, which is replaced."""
    for name in (*_WITH_PARAMETERS, *_WITH_GRADIENTS):
        function: Any = getattr(nn.utils, name, None)
        if function is None:
            continue
        cell = function.__closure__[function.__code__.co_freevars.index("func")]
        cell.cell_contents = _averaged(name, cell.cell_contents)
        _changed.append(name)


def _averaged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    are_gradients = name in _WITH_GRADIENTS
    first = "tensors" if are_gradients else "parameters"

    @functools.wraps(function)
    def average_first(*arguments: Any, **keywords: Any) -> Any:
        if not _owners or not (arguments or first in keywords):
            return function(*arguments, **keywords)
        given = arguments[0] if arguments else keywords.pop(first)
        tensors = [given] if isinstance(given, Tensor) else list(given)
        owners, added = _before(name, tensors, are_gradients=are_gradients)
        # torch warns of an empty generator.
        result = function((tensors + added) or given, *arguments[1:], **keywords)
        for owner in owners:
            owner.accept()
        return result

    return average_first


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def _before(name: str, tensors: list[Tensor], *, are_gradients: bool) -> tuple[list[MeanClipping], list[Tensor]]:
    """Average where it is due, in the order of ``tensors``, which is the same on all workers. Returns the models'
    records, and gradients that are to be counted with ``tensors``."""
    with _lock:
        owners = list(_owners)
    found = {owner: owner.position(tensors, are_gradients=are_gradients) for owner in owners}
    ordered = [owner for owner in sorted(owners, key=found.__getitem__) if found[owner] < len(tensors)]
    added = [gradient for owner in ordered for gradient in owner.before(name)]
    return ordered, added if are_gradients else []
