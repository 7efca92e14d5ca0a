"""Shared gradient memory: layers of equal size take turns with it, so that it is not reallocated for each layer.

A push reads the memory until it is answered, and the next layer's first gradient waits for that. A second place would
shorten this wait if servers are slow, but it would exist during the whole backward pass: 4 % of a model of 24 layers.

Not here: the memory (``Parameters.share_gradient_memory``), waiting for a turn (``passes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from psdist.client.sync_client import Parameters


class PlaceUser(Protocol):
    """Layer that puts its gradients into a place."""

    handle: Parameters
    parameters: dict[str, nn.Parameter]
    place: GradientPlace


class GradientPlace:
    """Memory for the gradients of one layer, or of several that take turns."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        #: Layer whose gradients are in the memory.
        self.holder: PlaceUser | None = None
        #: Gradients by name.
        self._buffers: dict[str, Tensor] = {}
        #: True if it was written to in this step.
        self.is_used = False

    def buffer(self, layer: PlaceUser, name: str) -> Tensor:
        """Return the memory of one gradient of ``layer``. Starts the layer's turn; no other layer may have one."""
        if self.holder is None:
            arrays = layer.handle.gradient_buffers(is_checked=False)
            self._buffers = {key: torch.from_numpy(one) for key, one in arrays.items()}
            self.holder, self.is_used = layer, True
        assert self.holder is layer, "the place has gradients of another layer"
        return self._buffers[name]

    def leave(self, layer: PlaceUser) -> None:
        """End the turn of ``layer``, if it has one."""
        if self.holder is layer:
            self.holder, self._buffers = None, {}


def take_turns(layers: Sequence[PlaceUser]) -> None:
    """Let layers of equal size share one place, if servers read their gradients in place.

    Otherwise each layer uses memory of this process, which is cheaper to allocate.
    """
    for layer in layers:
        layer.handle.share_gradient_memory(None)  # It may have been a layer of another model.
    layers[0].handle.gradient_buffers()  # Connects to the servers.
    layers[0].handle.release_memory()
    if layers[0].handle.statistics().transport != "shm":
        return
    by_size: dict[int, list[PlaceUser]] = {}
    for layer in layers:
        by_size.setdefault(sum(one.numel() for one in layer.parameters.values()), []).append(layer)
    for alike in by_size.values():
        place = GradientPlace(is_shared=len(alike) > 1)
        for layer in alike:
            layer.handle.share_gradient_memory(alike[0].handle)
            layer.place = place
