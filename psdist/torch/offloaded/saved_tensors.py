"""What autograd keeps of a layer's forward pass for the backward pass: views of weights that are not here then.

The hook on a layer's results brings its weights before the backward pass goes through them. A backward pass that comes
to the layer in another way, as by a loss that the layer keeps in an attribute, would read memory that is not there,
which ends the process. So autograd asks here for everything that it kept.

Invariants: a kept weight is read when its layer is here, and with the values that the forward pass had. What is no
weight is given back as it was kept, or refused where it was changed since, as without these hooks.

Not here: when layers come and go (``passes``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from psdist.torch.offloaded.layer import OffloadedLayer

#: What autograd keeps for a tensor: it, its version then, and the layer of which it is a weight.
_Kept = tuple[Tensor, int, OffloadedLayer | None]


class SavedTensors:
    """The hooks for the forward passes of ``layers``. bring: called before a weight of a layer is read in a backward
    pass; what it raises ends the pass."""

    def __init__(self, layers: Sequence[OffloadedLayer], bring: Callable[[OffloadedLayer], None]) -> None:
        self._layers = {layer.storage_id: layer for layer in layers}
        self._bring = bring
        #: For each forward pass under way, whether it began to listen.
        self._listens: list[bool] = []

    def enter(self) -> None:
        """A forward pass of a layer begins. Hooks that are there already stay: those of a pass around this one, or of
        a checkpoint, which keeps no weights."""
        is_first = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        self._listens.append(is_first)
        if is_first:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def leave(self) -> None:
        """The forward pass that began last has ended, whether or not it failed."""
        if self._listens.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def owner(self, tensor: Tensor) -> OffloadedLayer | None:
        """The layer in whose memory a tensor lies; None for one of its own memory."""
        return self._layers.get(tensor.untyped_storage()._cdata)

    def _pack(self, tensor: Tensor) -> _Kept:
        return tensor, tensor._version, self.owner(tensor)

    def _unpack(self, kept: _Kept) -> Tensor:
        tensor, version, layer = kept
        if layer is not None:
            self._bring(layer)
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, or "
                f"is a weight of another step: a tensor of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version} instead"
            )
        return tensor
