"""Tensors that autograd saves in a layer's forward pass: views of weights that are freed before the backward pass.

The hook on a layer's results loads its weights before the backward pass goes through them. A backward pass may reach
the layer in another way, for example by a loss that the layer keeps in an attribute. It would then read unmapped
memory, which ends the process. Autograd therefore asks this module for every tensor that it saved.

Invariants: A saved weight is read when its layer is loaded, with the values of the forward pass. Other tensors are
returned as they were saved, or refused if they were changed since, as without these hooks.

Loading and freeing of layers is in ``passes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from psdist.torch.offloaded.layer import OffloadedLayer

#: Saved tensor: the tensor, its version at that time, and the layer whose weight it is.
_Kept = tuple[Tensor, int, OffloadedLayer | None]


class SavedTensors:
    """Hooks for the forward passes of ``layers``.

    load: called before a weight of a layer is read in a backward pass. Its errors end the pass.
    """

    def __init__(self, layers: Sequence[OffloadedLayer], load: Callable[[OffloadedLayer], None]) -> None:
        self._layers = {layer.storage_id: layer for layer in layers}
        self._load = load
        #: For each forward pass under way, True if it registered the hooks.
        self._listens: list[bool] = []

    def enter(self) -> None:
        """Start a forward pass of a layer.

        Existing hooks stay: those of an enclosing pass, or of a checkpoint, which saves no weights.
        """
        is_first = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        self._listens.append(is_first)
        if is_first:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def leave(self) -> None:
        """End the forward pass that started last, even if it failed."""
        if self._listens.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def owner(self, tensor: Tensor) -> OffloadedLayer | None:
        """Return the layer that owns a tensor's memory, or None."""
        return self._layers.get(tensor.untyped_storage()._cdata)

    def _pack(self, tensor: Tensor) -> _Kept:
        return tensor, tensor._version, self.owner(tensor)

    def _unpack(self, kept: _Kept) -> Tensor:
        tensor, version, layer = kept
        if layer is not None:
            self._load(layer)
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, or "
                f"is a weight of another step: a tensor of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version} instead"
            )
        return tensor
