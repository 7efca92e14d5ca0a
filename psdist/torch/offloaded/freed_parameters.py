"""Parameters without values: the operations that a script may do with one, and the error for all others.

An offloaded parameter stays the same Python object, because modules, optimizers and autograd refer to it. While its
layer is not in use its memory is gone, and torch's kernels would read an arbitrary address. Its class is therefore
replaced during that time, so that torch asks this module before each operation.

Memory is managed by ``layer``.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from psdist.errors import InvalidArgumentError

#: Operations that need no values.
_ALLOWED: Final = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
                *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes"),
                *("_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
            )
        ),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.stride,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.__len__,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
    ]
)
#: Operations that are allowed until the gradient was taken.
_GRADIENT: Final = frozenset(
    [
        Tensor.grad.__get__,  # type: ignore[union-attr]  # a descriptor, which torch's stubs show as a tensor
        Tensor.grad.__set__,  # type: ignore[union-attr]  # as above
    ]
)


class FreedParameter(nn.Parameter):
    """Parameter whose layer is not in use: it has a shape and no values.

    Every operation that needs values raises InvalidArgumentError, and so does its gradient once it was taken.
    """

    #: Name of the parameter, for messages.
    psdist_name: str
    #: Names of the layer's parameters whose gradients of this step were taken.
    psdist_taken: AbstractSet[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` if it is allowed. torch calls this in place of ``func``."""
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _GRADIENT:
            return args[0]._psdist_gradient(func, args)
        raise InvalidArgumentError(
            f"{getattr(func, '__name__', func)} was called with parameter {_name_in(args, kwargs)}, whose values are "
            "on the servers: they are in memory only during the forward and backward pass of its layer. If another "
            "module uses it, give that module in layers= of offload(); weights() of the optimizer returns all values"
        )

    def _psdist_gradient(self, func: Any, args: Any) -> Any:
        if self.psdist_name in self.psdist_taken:
            raise InvalidArgumentError(
                f"the gradient of parameter {self.psdist_name!r} was sent to the servers in the backward pass: it "
                "cannot be read, clipped, unscaled or cleared before step(). Clipping and a GradScaler need the "
                "gradients of all layers at the same time: use DistributedOptimizer, with max_grad_norm= to clip, or "
                "overlap=False for a scaler. After a failed backward pass call zero_grad() of the optimizer"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)

    def __repr__(self) -> str:  # type: ignore[override]  # same signature as nn.Parameter
        return f"<offloaded parameter {self.psdist_name!r} of shape {tuple(self.shape)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise InvalidArgumentError(
            f"parameter {self.psdist_name!r} is offloaded, and cannot be copied: copy the model before offload()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgumentError(
            f"parameter {self.psdist_name!r} is offloaded, and cannot be saved: `psdist snapshot export` writes the "
            "weights of a snapshot to a file"
        )


def _name_in(args: Any, kwargs: Any) -> str:
    leaves = tree_leaves((args, kwargs))
    return ", ".join(repr(one.psdist_name) for one in leaves if isinstance(one, FreedParameter)) or "of some layer"


def mark_freed(parameter: nn.Parameter, name: str, taken: AbstractSet[str]) -> None:
    """Mark a parameter as one without values.

    taken: names of the parameters whose gradients cannot be read; the set may change.
    """
    parameter.psdist_name = name  # type: ignore[attr-defined]  # the class that it gets now has it
    parameter.psdist_taken = taken  # type: ignore[attr-defined]  # as above
    parameter.__class__ = FreedParameter


def mark_present(parameter: nn.Parameter) -> None:
    """Mark a parameter as one with values again."""
    parameter.__class__ = nn.Parameter


def drop_gradient(parameter: nn.Parameter) -> None:
    """Clear the gradient, even if it was taken."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None
