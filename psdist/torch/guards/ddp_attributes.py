"""Attributes of torch's DistributedDataParallel that scripts read and set: they act, or setting them is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Final

from torch import nn

from psdist.errors import InvalidArgumentError

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
