"""One layer of an offloaded model: memory for its weights while they are in use, and its parameter set.

All weights of the layer lie in one storage, which has memory only while the layer is in use. Autograd keeps views of
that storage for the backward pass. They show the weights again when the storage has its memory and its content back, as
with FSDP of torch.

Invariants: the memory is not taken away while a pull writes to it. What a backward pass reads has the values that the
forward pass had, or the step is dropped.

Not here: when a layer is in use (``passes``).
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

from psdist.client.process.loop import StartedCall
from psdist.client.sync_client import Bucket, Parameters
from psdist.errors import FencedError, InvalidArgumentError
from psdist.torch.offloaded.freed_parameters import drop_gradient, mark_freed, mark_present
from psdist.torch.offloaded.memory import LayerMemory, MovedPages, PagePool, ResizedStorage
from psdist.torch.offloaded.turns import GradientPlace

#: Places of tensors in a storage of several dtypes, or on a device, begin at multiples of so many bytes.
_ALIGNMENT: Final = 64


class Residence(Enum):
    """Where the weights of a layer are."""

    #: On the servers alone.
    AWAY = auto()
    #: On their way here.
    COMING = auto()
    HERE = auto()


#: The layer of each parameter set, by the handle's identity: two would write to the same memory.
_layers: WeakValueDictionary[int, OffloadedLayer] = WeakValueDictionary()


class OffloadedLayer:
    """The trained parameters of one layer, by name, whose values are in ``handle``. Those that they have are let go of.

    title: the name of the layer, for messages. incarnation: this worker's. pages: of the model's layers; None where
    they cannot move.

    Raises InvalidArgumentError where ``handle`` has a layer already.
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
                f"the parameter set {handle.name!r} already is a layer of a model: give this model another name="
            )
        _layers[id(handle)] = self
        self.title = title
        self.handle = handle
        self.parameters = dict(parameters)
        self.state = Residence.AWAY
        #: Forward passes that use it now.
        self.users = 0
        #: Where gradients are put together.
        self.place = GradientPlace(is_shared=False)
        #: Parameters whose gradient of this step was taken over.
        self.taken: set[str] = set()
        #: The push of this step, once it is under way.
        self.push: Bucket | None = None
        #: Whether something of this step's push may have been sent.
        self.is_begun = False
        self.is_pushed = False
        self._pulling: StartedCall[dict[str, NDArray[Any]]] | None = None
        #: Version of the weights that were here last, and this worker's incarnation then.
        self._seen = (-1, -1)
        self._incarnation = incarnation
        first = next(iter(self.parameters.values()))
        #: Whether a pull writes into the storage itself.
        self._is_direct = first.device.type == "cpu" and all(
            one.dtype == torch.float32 for one in self.parameters.values()
        )
        self._memory = self._move_together(first.device, pages)
        self._drop_memory()
        handle.release_memory()

    def _move_together(self, device: torch.device, pages: PagePool | None) -> LayerMemory:
        """Lets all parameters lie in one storage. Their values are lost: the servers have them."""
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
        """What tells the storage of the weights from all others."""
        return int(self._memory.storage._cdata)

    def fetch(self) -> None:
        """Begins to bring the weights here, unless they are, or are coming."""
        if self.state is not Residence.AWAY:
            return
        self._memory.acquire()
        self._pulling = (
            self.handle.start_pull(self._places()) if self._is_direct else self.handle.start_pull(copy=False)
        )
        self.state = Residence.COMING

    def _places(self) -> dict[str, NDArray[np.float32]]:
        """Arrays that lie in the memory."""
        memory = self._memory.array()
        assert memory is not None
        flat, places, start = memory.view(np.float32), {}, 0
        for name, parameter in self.parameters.items():
            places[name] = flat[start : start + parameter.numel()].reshape(tuple(parameter.shape))
            start += parameter.numel()
        return places

    def bring(self, *, again: bool) -> bool:
        """Returns when the weights are here. again: for the second pass of a step. Returns whether they can be those of
        the first one; not where this worker was expelled since.

        Raises as ``Parameters.pull``; calling it again tries again.
        """
        self.fetch()
        if self.state is Residence.COMING:
            try:
                arrays = self._end_pull()
                for name, parameter in self.parameters.items():
                    mark_present(parameter)
                    if not self._is_direct:
                        # By ``data``, which does not count as a change. float32 holds all that may come.
                        parameter.data.copy_(torch.from_numpy(np.array(arrays[name], np.float32)))
                if not self.taken:  # A server that was connected to has a place for gradients, which has memory.
                    self.handle.release_memory(shared=not again and self.place.holder is None)
            except BaseException:
                self._drop_memory()
                raise
            self.state = Residence.HERE
        before, self._seen = self._seen, (self.handle.version, self._incarnation())
        is_dropped = again and before[1] != self._seen[1]
        if before[0] != self._seen[0] and not is_dropped:  # A graph from before a step is refused by autograd.
            torch.autograd.graph.increment_version(list(self.parameters.values()))
        return not is_dropped

    def _end_pull(self) -> dict[str, NDArray[Any]]:
        pulling, self._pulling = self._pulling, None
        assert pulling is not None
        return pulling.result()

    def free(self) -> None:
        """Takes the memory of the weights away. Weights that are coming are waited for first."""
        if self.state is Residence.COMING:
            try:
                self._end_pull()
            finally:
                self._drop_memory()
        elif self.state is Residence.HERE:
            self._drop_memory()

    def close(self) -> None:
        """Takes the memory of the weights away at the end of training."""
        self.free()
        self._memory.close()

    def _drop_memory(self) -> None:
        for name, parameter in self.parameters.items():
            mark_freed(parameter, name, self.taken)
        self._memory.release()
        self.state = Residence.AWAY

    # --- gradients ---

    def share_place(self, place: GradientPlace, first: OffloadedLayer) -> None:
        """Takes turns with other layers from now on. The memory is that of ``first``."""
        self.handle.share_gradient_memory(first.handle)
        self.place = place

    def leave_place(self) -> None:
        """Has its gradients in memory of its own from now on."""
        self.handle.share_gradient_memory(None)
        self.place = GradientPlace(is_shared=False)

    def take(self, name: str) -> bool:
        """Takes over the gradient of a parameter; zeros where it has none. Returns whether it was the last one."""
        parameter, place = self.parameters[name], self.place.of(self, name)
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            place.zero_()
        else:
            with torch.no_grad():
                place.copy_(gradient.to_dense() if gradient.layout is not torch.strided else gradient)
        self.taken.add(name)
        return len(self.taken) == len(self.parameters)

    def complete(self) -> None:
        """Parameters that got no gradient count with zeros."""
        for name in self.parameters:
            if name not in self.taken:
                self.take(name)

    def send(self, weight: float) -> bool:
        """Begins to push the gradients, all of which were taken over. Returns False where the push was dropped, because
        this worker had been expelled. Raises as ``Parameters.push``."""
        try:
            self.push = self.handle.push_async(list(self.parameters), weight)
        except FencedError:
            self._end_push()
            return False
        self.is_begun = True
        return True

    @property
    def is_answered(self) -> bool:
        """Whether ``finish_push`` would not wait."""
        return self.push is not None and self.push.done()

    def finish_push(self) -> bool:
        """Waits until the push is answered, and gives the memory of the gradients back. Returns False where it was
        dropped, because this worker had been expelled.

        Raises what the push failed with; ``send`` goes on with it then.
        """
        assert self.push is not None
        try:
            self.push.wait()
        except FencedError:
            self._end_push()
            return False
        except Exception:  # Not an interrupt: then it is under way still.
            self.push = None
            raise
        self._end_push()
        return True

    def _end_push(self) -> None:
        self.push, self.is_begun, self.is_pushed = None, True, True
        self.place.leave(self)
        self.handle.release_memory(shared=False)

    def forget(self) -> None:
        """The gradients of this step that are not on their way are lost. What brings weights gives their memory back,
        or the next gradient takes it."""
        if self.push is None and not self.is_pushed:
            self.taken.clear()
            self.place.leave(self)
            for parameter in self.parameters.values():
                drop_gradient(parameter)

    def begin_step(self) -> None:
        """The step is over: gradients are of the next one, and the weights are let go of."""
        self.taken.clear()
        self.is_begun = self.is_pushed = False
        self.users = 0
        self.free()
        if self.place.is_shared and self.place.is_used:
            self.handle.release_memory()
            self.place.is_used = False


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie in order without gaps."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def second_backward(layer: OffloadedLayer) -> InvalidArgumentError:
    """The error for gradients that come after those of the step were pushed."""
    return InvalidArgumentError(
        f"the layer {layer.title!r} got gradients twice before step(), and the first are on the servers already: call "
        "step() after each backward pass, and give checkpoints of a layer that is used twice use_reentrant=False. The "
        "gradients of an offloaded model are not added up in the worker"
    )
