"""Mean gradients on the worker: for scripts that clip or change the mean itself, as a single process does.

A single process clips the gradient of the whole batch. Each worker's own gradient has another norm, so the mean of
clipped gradients is another step. Therefore ``torch.nn.utils.clip_grad_norm_`` and its relatives average the gradients
of a ``DistributedOptimizer`` before they read them. The functions are changed from within, because scripts import them
by name. The mean is that of a parameter set with ``psdist.optim.Mean`` as its optimizer, created by the first call. The
step then pushes the mean, so each gradient is sent twice.

Invariants: After ``average`` every worker holds the same gradient bytes. All workers average at the same calls, if they
make the same calls of torch's functions in each step.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist.client.session.membership import unless_dropped
from psdist.client.sync_client import Client, Parameters
from psdist.errors import NonFiniteGradientError
from psdist.optim import Mean
from psdist.torch.gradients import gradient_memory
from psdist.torch.values import as_real, write_into
from psdist.types import MasterDType

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


#: Tensor with 1 for each parameter that got a gradient.
_USED: Final = "psdist/used"
#: Tensor that is above 0 if gradients of any worker are not finite.
_OVERFLOWS: Final = "psdist/overflows"


class MeanGradients:
    """Averages the gradients of ``trained`` over all workers.

    name: parameter set of the means.
    master_dtype: dtype in which the servers compute.
    """

    def __init__(
        self, client: Client, name: str, trained: Mapping[str, nn.Parameter], master_dtype: MasterDType
    ) -> None:
        self._trained = dict(trained)
        shapes: dict[str, NDArray[Any]] = {
            key: np.zeros(tuple(as_real(one).shape), master_dtype) for key, one in trained.items()
        }
        flags: dict[str, NDArray[np.float32]] = {
            _USED: np.zeros(len(trained), np.float32),
            _OVERFLOWS: np.zeros(1, np.float32),
        }
        self._handle: Parameters = client.parameters(name, shapes | flags, Mean(), master_dtype=master_dtype)
        device = next(iter(trained.values())).device
        self._arrays, self._buffers = gradient_memory(self._handle, device)

    def average(self, weight: float) -> None:
        """Replace ``parameter.grad`` by the mean over workers. A gradient that no worker has stays None.

        weight: of this worker's gradients in the mean.

        If gradients of any worker are not finite, those of all workers become NaN. The gradients stay as they are if
        this worker had been expelled; its next step is dropped as well. Raises the errors of ``Parameters.push_pull``.
        """
        self._fill()
        means = unless_dropped(lambda: self._push_pull(weight))
        if means is None:
            return
        used = [bool(one) for one in means[_USED]]
        overflows = float(means[_OVERFLOWS][0]) > 0
        for (name, parameter), is_used in zip(self._trained.items(), used, strict=True):
            if is_used:
                _set_gradient(parameter, means[name])
                if overflows and parameter.grad is not None:
                    parameter.grad.detach().fill_(np.nan)

    def _fill(self) -> None:
        for name, parameter in self._trained.items():
            gradient = parameter.grad
            if gradient is None:
                self._buffers[name].zero_()
            else:
                with torch.no_grad():
                    self._buffers[name].copy_(as_real(_dense(gradient)))
        self._buffers[_USED].copy_(torch.tensor([one.grad is not None for one in self._trained.values()]))
        self._buffers[_OVERFLOWS].zero_()

    def _push_pull(self, weight: float) -> Mapping[str, NDArray[Any]]:
        try:
            return self._handle.push_pull(self._arrays, copy=False, weight=weight)
        except NonFiniteGradientError:
            for name in self._trained:
                self._buffers[name].zero_()
            self._buffers[_OVERFLOWS].fill_(1.0)
            return self._handle.push_pull(self._arrays, copy=False, weight=weight)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _set_gradient(parameter: nn.Parameter, mean: NDArray[Any]) -> None:
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        parameter.grad = torch.empty_like(parameter)
    write_into(parameter.grad, mean)
