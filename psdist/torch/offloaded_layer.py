"""One layer of an offloaded model: memory for its weights while they are in use, and its parameter set.

All weights of the layer share one storage, which has memory only while the layer is in use. Autograd keeps views of
that storage for the backward pass. They show the weights again once the storage has its memory and content back, as in
torch's FSDP.

Invariants: Memory is not freed while a pull writes to it. A backward pass reads the values of its forward pass, or the
step is dropped.

Passes decide when a layer is in use (``offloaded_passes``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from psdist.client.session.loop import StartedCall
from psdist.client.session.membership import unless_dropped
from psdist.client.sync_client import Bucket, Parameters
from psdist.errors import InvalidArgumentError
from psdist.torch.offloaded_memory import (
    GradientPlace,
    LayerMemory,
    MovedPages,
    PagePool,
    ResizedStorage,
    drop_gradient,
    mark_freed,
    mark_present,
)

#: Alignment in bytes of tensors in a storage of several dtypes, or on a device.
_ALIGNMENT: Final = 64


class Residence(Enum):
    """Location of a layer's weights."""

    #: Only on the servers.
    AWAY = auto()
    #: Being pulled.
    COMING = auto()
    HERE = auto()


#: Layers by the identity of their handle. Two layers of one set would write to the same memory.
_layers: WeakValueDictionary[int, OffloadedLayer] = WeakValueDictionary()


class OffloadedLayer:
    """Trained parameters of one layer, by name, whose values are in ``handle``. Their local values are freed.

    title: name of the layer, for messages.
    incarnation: returns this worker's incarnation.
    pages: page pool of the model's layers; None if pages cannot move.

    Raises InvalidArgumentError if ``handle`` already has a layer.
    """

    def __init__(
        self,
        title: str,
        parameters: Mapping[str, nn.Parameter],
        handle: Parameters,
        incarnation: Callable[[], int],
        pages: PagePool | None,
    ) -> None:
        if id(handle) in _layers:
            raise InvalidArgumentError(
                f"the parameter set {handle.name!r} is already a layer of a model: give this model another name="
            )
        _layers[id(handle)] = self
        self.title = title
        self.handle = handle
        self.parameters = dict(parameters)
        self.state = Residence.AWAY
        #: Number of forward passes that use it now.
        self.users = 0
        #: Memory for the layer's gradients.
        self.place = GradientPlace(is_shared=False)
        #: Parameters whose gradient of this step was taken, and whether there was one.
        self.taken: dict[str, bool] = {}
        #: Push of this step, once it was started.
        self.push: Bucket | None = None
        #: True if parts of this step's push may have been sent.
        self.is_begun = False
        self.is_pushed = False
        self._pulling: StartedCall[dict[str, NDArray[Any]]] | None = None
        #: Version of the last weights in memory, and this worker's incarnation at that time.
        self._seen = (-1, -1)
        self._incarnation = incarnation
        first = next(iter(self.parameters.values()))
        #: True if a pull writes directly into the storage.
        self._is_direct = first.device.type == "cpu" and all(
            one.dtype == torch.float32 for one in self.parameters.values()
        )
        self._memory = self._move_together(first.device, pages)
        self._drop_memory()
        handle.release_memory()

    def _move_together(self, device: torch.device, pages: PagePool | None) -> LayerMemory:
        """Move all parameters into one storage. Their values are lost: the servers have them."""
        starts, end = [], 0
        for parameter in self.parameters.values():
            if not self._is_direct:
                end = -(-end // _ALIGNMENT) * _ALIGNMENT
            starts.append(end)
            end += parameter.nbytes
        memory: LayerMemory
        memory = MovedPages(end, pages) if pages and device.type == "cpu" else ResizedStorage(end, device)
        for start, parameter in zip(starts, self.parameters.values(), strict=True):
            whole = torch.empty(0, dtype=parameter.dtype, device=device)
            place = start // parameter.element_size(), parameter.shape, _strides(parameter.shape)
            parameter.data = whole.set_(memory.storage, *place)
        return memory

    # --- weights ---

    @property
    def storage_id(self) -> int:
        """Identity of the weights' storage."""
        return int(self._memory.storage._cdata)

    def fetch(self) -> None:
        """Start to pull the weights, unless they are in memory or being pulled."""
        if self.state is not Residence.AWAY:
            return
        self._memory.acquire()
        self._pulling = (
            self.handle.start_pull(self._places()) if self._is_direct else self.handle.start_pull(copy=False)
        )
        self.state = Residence.COMING

    def _places(self) -> dict[str, NDArray[np.float32]]:
        """Return arrays of the parameters in the storage's memory."""
        memory = self._memory.array()
        assert memory is not None
        flat, places, start = memory.view(np.float32), {}, 0
        for name, parameter in self.parameters.items():
            places[name] = flat[start : start + parameter.numel()].reshape(tuple(parameter.shape))
            start += parameter.numel()
        return places

    def load(self, *, is_second: bool) -> bool:
        """Load the weights; return when they are in memory.

        is_second: True for the second pass of a step.

        Returns True if the weights can be those of the first pass; False if this worker was expelled in between. Raises
        as ``Parameters.pull``; calling it again retries.
        """
        self.fetch()
        if self.state is Residence.COMING:
            try:
                arrays = self._end_pull()
                for name, parameter in self.parameters.items():
                    mark_present(parameter)
                    if not self._is_direct:
                        # Writes to ``data`` do not count as a change. float32 represents all supported values exactly.
                        parameter.data.copy_(torch.from_numpy(np.array(arrays[name], np.float32)))
                if not self.taken:  # Connecting to a server allocates memory for gradients.
                    self.handle.release_memory(shared=not is_second and self.place.holder is None)
            except BaseException:
                self._drop_memory()
                raise
            self.state = Residence.HERE
        before, self._seen = self._seen, (self.handle.version, self._incarnation())
        is_dropped = is_second and before[1] != self._seen[1]
        if before[0] != self._seen[0] and not is_dropped:  # Makes autograd refuse graphs from before the step.
            torch.autograd.graph.increment_version(list(self.parameters.values()))
        return not is_dropped

    def _end_pull(self) -> dict[str, NDArray[Any]]:
        pulling, self._pulling = self._pulling, None
        assert pulling is not None
        return pulling.result()

    def free(self) -> None:
        """Free the weights' memory. Waits first if they are being pulled."""
        if self.state is Residence.COMING:
            try:
                self._end_pull()
            finally:
                self._drop_memory()
        elif self.state is Residence.HERE:
            self._drop_memory()

    def close(self) -> None:
        """Free the weights' memory at the end of training."""
        self.free()
        self._memory.close()

    def _drop_memory(self) -> None:
        for name, parameter in self.parameters.items():
            mark_freed(parameter, name, self.taken.keys())
        self._memory.release()
        self.state = Residence.AWAY

    # --- gradients ---

    def leave_place(self) -> None:
        """Use gradient memory of its own from now on."""
        self.handle.share_gradient_memory(None)
        self.place = GradientPlace(is_shared=False)

    def take(self, name: str) -> bool:
        """Take the gradient of a parameter, or zeros if it has none. Returns True if it was the layer's last one."""
        parameter, place = self.parameters[name], self.place.buffer(self, name)
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            place.zero_()
        else:
            with torch.no_grad():
                place.copy_(gradient.to_dense() if gradient.layout is not torch.strided else gradient)
        self.taken[name] = gradient is not None
        return len(self.taken) == len(self.parameters)

    def complete(self) -> None:
        """Take zeros for the parameters without a gradient."""
        for name in self.parameters:
            if name not in self.taken:
                self.take(name)

    def send(self, weight: float) -> bool:
        """Start to push the gradients. All of them were taken.

        Returns False if the push was dropped because this worker had been expelled. Raises as ``Parameters.push``.
        """
        absent = [name for name, has_gradient in self.taken.items() if not has_gradient]
        self.push = unless_dropped(lambda: self.handle.push_async(list(self.parameters), weight, absent))
        if self.push is None:
            self._end_push()
            return False
        self.is_begun = True
        return True

    @property
    def is_answered(self) -> bool:
        """True if ``finish_push`` would not wait."""
        return self.push is not None and self.push.done()

    def finish_push(self) -> bool:
        """Wait until the push is answered, and free the gradients' memory.

        Returns False if the push was dropped because this worker had been expelled. Raises the error of a failed push;
        ``send`` then retries it.
        """
        assert self.push is not None
        try:
            answer = unless_dropped(self.push.wait)
        except Exception:  # After an interrupt the push is still under way.
            self.push = None
            raise
        self._end_push()
        return answer is not None

    def _end_push(self) -> None:
        self.push, self.is_begun, self.is_pushed = None, True, True
        self.place.leave(self)
        self.handle.release_memory(shared=False)

    def forget(self) -> None:
        """Discard the gradients of this step that are not being pushed.

        Their memory is freed when weights are loaded, or reused by the next gradient.
        """
        if self.push is None and not self.is_pushed:
            self.taken.clear()
            self.place.leave(self)
            for parameter in self.parameters.values():
                drop_gradient(parameter)

    def begin_step(self) -> None:
        """Start the next step: discard the state of the finished one and free the weights."""
        self.taken.clear()
        self.is_begun = self.is_pushed = False
        self.users = 0
        self.free()
        if self.place.is_shared and self.place.is_used:
            self.handle.release_memory()
            self.place.is_used = False


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def second_backward(layer: OffloadedLayer) -> InvalidArgumentError:
    """Return the error for gradients that arrive after those of the step were pushed."""
    return InvalidArgumentError(
        f"the layer {layer.title!r} got gradients twice before step(), and the first are already on the servers: call "
        "step() after each backward pass, and give checkpoints of a layer that is used twice use_reentrant=False. "
        "Gradients of an offloaded model are not accumulated in the worker"
    )
