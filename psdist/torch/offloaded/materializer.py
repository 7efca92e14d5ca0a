"""Initial values of modules on the meta device, made for one layer at a time.

Each tensor starts with a value that no initialization produces, so that tensors left uninitialized are detected.

Invariant: Tied parameters stay tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from psdist.errors import InvalidArgumentError

Init = Callable[[nn.Module], Any]


class Materializer:
    """Creates tensors on ``device`` and initializes them.

    init: called with each module that has tensors of its own on the meta device. None calls the module's
        ``reset_parameters()``.
    """

    def __init__(self, device: torch.device, init: Init | None) -> None:
        self._device = device
        self._init = init
        #: New parameter of each replaced one.
        self.replaced: dict[Tensor, nn.Parameter] = {}

    def make(self, modules: Iterable[nn.Module]) -> None:
        """Create the meta tensors of these modules, without those of their children.

        Raises InvalidArgumentError for a module without an initialization, or one that leaves a tensor uninitialized.
        """
        for module in modules:
            if any(one.is_meta for one in (*module.parameters(False), *module.buffers(False))):
                self._make(module)

    def _make(self, module: nn.Module) -> None:
        before = {key: one for key, one in module._parameters.items() if one is not None and one.is_meta}
        made: dict[str, nn.Parameter] = {}
        for key, old in before.items():
            made[key] = module._parameters[key] = nn.Parameter(self._unset(old), old.requires_grad)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = self._unset(buffer)
        self._initialize(module)
        self._check(module)
        for key, old in before.items():
            # The first of several tied parameters wins, as if it had replaced the others when the model was made.
            module._parameters[key] = self.replaced.setdefault(old, made[key])

    def _unset(self, like: Tensor) -> Tensor:
        if not (like.dtype.is_floating_point or like.dtype in (torch.int32, torch.int64)):
            raise InvalidArgumentError(
                f"a tensor of dtype {like.dtype} is on the meta device, and psdist could not check its initialization: "
                "build its module with values"
            )
        return torch.full(like.shape, _sentinel(like.dtype), dtype=like.dtype, device=self._device)

    def _initialize(self, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if self._init is None and reset is None:
            raise InvalidArgumentError(
                f"a {type(module).__name__} of the model is on the meta device, and has no reset_parameters(): give "
                "init=, a function that initializes the tensors of a module"
            )
        with torch.no_grad():
            if self._init is not None:
                self._init(module)
            else:
                assert reset is not None
                reset()

    def _check(self, module: nn.Module) -> None:
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            unset = tensor.isnan() if tensor.dtype.is_floating_point else tensor == _sentinel(tensor.dtype)
            if tensor.is_meta or bool(unset.any()):
                how = "init=" if self._init is not None else "reset_parameters()"
                raise InvalidArgumentError(
                    f"{key} of a {type(module).__name__} was on the meta device, and {how} left it uninitialized: give "
                    "an init= that sets all tensors of the module"
                )


def _sentinel(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
