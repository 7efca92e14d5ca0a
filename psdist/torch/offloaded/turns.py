"""Layers of equal size take turns with the memory for their gradients, so that it is not taken anew for each of them.

A push reads that memory until it is answered, and the next layer's first gradient waits for that. A second place would
make that wait shorter where servers are slow, and be there for the whole backward pass: 4 % of a model of 24 layers.

Not here: the memory (``Parameters.share_gradient_memory``), who waits for a turn (``passes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from psdist.torch.offloaded.layer import OffloadedLayer


class GradientPlace:
    """Memory for the gradients of one layer, or of several that take turns."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        #: The layer whose gradients are there.
        self.holder: OffloadedLayer | None = None
        #: Where they are, by name.
        self._buffers: dict[str, Tensor] = {}
        #: Whether it was written to in this step.
        self.is_used = False

    def of(self, layer: OffloadedLayer, name: str) -> Tensor:
        """Where the gradient of a parameter of ``layer`` is put. Begins the layer's turn; nobody else has one."""
        if self.holder is None:
            arrays = layer.handle.gradient_buffers(is_checked=False)
            self._buffers = {key: torch.from_numpy(one) for key, one in arrays.items()}
            self.holder, self.is_used = layer, True
        assert self.holder is layer, "the place has gradients of another layer"
        return self._buffers[name]

    def leave(self, layer: OffloadedLayer) -> None:
        """Ends the turn of ``layer``, if it has one."""
        if self.holder is layer:
            self.holder, self._buffers = None, {}


def take_turns(layers: Sequence[OffloadedLayer]) -> None:
    """Gives layers of equal size one place, if servers read their gradients where they are put together. Else each has
    memory of this process, which costs less to take."""
    for layer in layers:
        layer.handle.share_gradient_memory(None)  # It may have been a layer of another model.
    layers[0].handle.gradient_buffers()  # Connects to the servers.
    layers[0].handle.release_memory()
    if layers[0].handle.statistics().transport != "shm":
        return
    by_size: dict[int, list[OffloadedLayer]] = {}
    for layer in layers:
        by_size.setdefault(sum(one.numel() for one in layer.parameters.values()), []).append(layer)
    for alike in by_size.values():
        place = GradientPlace(is_shared=len(alike) > 1)
        for layer in alike:
            layer.share_place(place, alike[0])
