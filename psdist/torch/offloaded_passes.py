"""Passes over an offloaded model: hooks load the weights of a layer before it is used and free them afterwards.

A forward hook finds the tensors that a layer returns, and reloads the weights before the backward pass reaches one of
them. The order of layers is learned from the previous pass, and the next layer's weights are pulled while a layer
computes. A gradient is taken as soon as autograd has computed it, and a layer is pushed when its gradients are
complete.

The hook on a layer's results loads its weights before the backward pass goes through them. A backward pass may reach
the layer in another way, for example by a loss that the layer keeps in an attribute. It would then read unmapped
memory, which ends the process. Autograd therefore asks this module for every tensor that it saved in a layer's forward
pass (``SavedTensors``). A saved weight is read when its layer is loaded, with the values of the forward pass. Other
tensors are returned as they were saved, or refused if they were changed since, as without these hooks.

Invariants: Of the layers that no pass uses now, only the next one may have weights in memory. At most two layers have
gradients in memory, unless several layers get theirs at the same time. A layer is freed in a backward pass when it has
all gradients, because autograd sums those of all uses first.

Not here: memory (``offloaded_layer``), the step (``offloading``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from psdist.errors import InvalidArgumentError, NonFiniteGradientError
from psdist.torch.offloaded_layer import OffloadedLayer, Residence, second_backward
from psdist.torch.offloaded_memory import Use, drop_gradient

#: Pushes that may be under way while the next layer's gradients arrive, unless these use the same memory.
_PUSHES: Final = 1
_BEFORE_SENDING: Final = "Nothing of other layers was sent either: continue with zero_grad() or the next batch"
_AFTER_FAILURE: Final = "Call zero_grad() of the optimizer: it makes the step with these, and with zeros for all others"


class LayerOrder:
    """Successor of each layer in the previous pass."""

    def __init__(self) -> None:
        self._next: dict[OffloadedLayer, OffloadedLayer] = {}
        #: First layer of a pass, and the layer used last.
        self._first: OffloadedLayer | None = None
        self._last: OffloadedLayer | None = None

    def expect(self, layers: Sequence[OffloadedLayer]) -> None:
        """Expect this order."""
        self._next, self._first = dict(pairwise(layers)), layers[0]

    def start(self) -> None:
        """Start a pass."""
        self._first = self._last = None

    @property
    def first(self) -> OffloadedLayer | None:
        """Layer with which passes start."""
        return self._first

    def on_use(self, layer: OffloadedLayer) -> OffloadedLayer | None:
        """Record that a pass uses ``layer``. Returns the next layer, if it is known."""
        if self._first is None:
            self._first = layer
        elif layer is not self._first and self._last is not None and self._last is not layer:
            self._next[self._last] = layer
        self._last = layer
        return self._next.get(layer)


class Passes:
    """Forward and backward passes over layers. uses: modules, with the layers that they use."""

    def __init__(self, layers: Sequence[OffloadedLayer], uses: Sequence[Use]) -> None:
        self._layers = list(layers)
        self._uses = list(uses)
        self._forward, self._backward = LayerOrder(), LayerOrder()
        self._forward.expect(self._layers)
        self._backward.expect(self._layers[::-1])
        #: Layer that was fetched ahead and not used yet.
        self._ahead: OffloadedLayer | None = None
        #: Layers whose pushes are under way, the oldest first.
        self._pushes: deque[OffloadedLayer] = deque()
        self._is_in_backward = False
        #: True if a backward pass of this step failed, or a push of it was refused.
        self._is_broken = False
        #: True if gradients of this step were taken.
        self.has_gradients = False
        self.weight = 1.0
        #: True if gradients of this step were computed on weights of two steps, or a push of it was dropped.
        self.is_dropped = False
        self._hooks: list[RemovableHandle] = []
        self._saved = SavedTensors(self._layers, self._load_saved)

    def listen(self, on_begin: Callable[[], None]) -> None:
        """Register hooks, so that passes load weights and push gradients.

        on_begin: called before the first gradient of a step is taken. Its errors end the backward pass.
        """
        for use in self._uses:
            layers = [self._layers[number] for number in use.layers]
            before, after = partial(self._before_forward, layers), partial(self._after_forward, layers)
            self._hooks.append(use.module.register_forward_pre_hook(before, prepend=True))
            self._hooks.append(use.module.register_forward_hook(after, always_call=True))
        for layer in self._layers:
            for name, parameter in layer.parameters.items():
                take = partial(self._on_gradient, on_begin, layer, name)
                hook = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]  # torch: untyped
                self._hooks.append(hook)

    def close(self) -> None:
        """Remove the hooks, and free all weights."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for layer in self._layers:
            layer.close()

    # --- weights ---

    def _use(self, layer: OffloadedLayer, order: LayerOrder) -> None:
        """Load the weights of a layer, and start to pull the next one's."""
        if layer is self._ahead:
            self._ahead = None
        if not layer.load(is_second=order is self._backward):
            self.is_dropped = True
        following = order.on_use(layer)
        if following is not None and following.state is Residence.AWAY and not following.taken:
            self._fetch_ahead(following)

    def _fetch_ahead(self, layer: OffloadedLayer) -> None:
        if self._ahead is not None and not self._ahead.users:
            self._ahead.free()
        self._ahead = layer
        layer.fetch()

    def _fetch_first(self) -> None:
        """Pull the weights with which the next forward pass starts."""
        first = self._forward.first
        if first is not None and first.state is Residence.AWAY:
            self._fetch_ahead(first)

    def _before_forward(self, layers: Sequence[OffloadedLayer], module: nn.Module, inputs: Any) -> None:
        for layer in layers:  # First, because the hook after the pass always runs.
            layer.users += 1
        self._saved.enter()
        if not _in_backward():
            self._check_forward(layers[0])
        for layer in layers:
            self._use(layer, self._backward if _in_backward() else self._forward)

    def _check_forward(self, layer: OffloadedLayer) -> None:
        if self._has_failed() and self.discard():
            raise InvalidArgumentError(
                f"a forward pass reached the layer {layer.title!r} after a backward pass that failed when it had sent "
                f"gradients. {_AFTER_FAILURE}"
            )
        if self.has_gradients:
            raise InvalidArgumentError(
                f"a forward pass reached the layer {layer.title!r} after backward() and before step(): gradients of "
                "this step are on the servers, and weights of two steps would be mixed. Call step() first"
            )

    def _after_forward(self, layers: Sequence[OffloadedLayer], module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._saved.leave()
        for layer in layers:
            layer.users -= 1
        if torch.is_grad_enabled() and outputs is not None:
            self._watch(layers, outputs)
        if not _in_backward():  # In a backward pass a checkpoint repeats the forward pass, and the gradients follow.
            for layer in layers:
                self._free(layer)

    def _watch(self, layers: Sequence[OffloadedLayer], outputs: Any) -> None:
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
        if not tensors:
            raise InvalidArgumentError(
                f"the layer {layers[0].title!r} returned no tensor with a gradient, in {type(outputs).__name__}: "
                "return tensors in tuples, lists or dicts, so that its weights can be loaded for the backward pass; or "
                "use torch.no_grad()"
            )
        for tensor in tensors:
            if (owner := self._saved.owner(tensor)) is not None:
                raise InvalidArgumentError(
                    f"the layer {layers[0].title!r} returned a weight of {owner.title!r}, or a view of one, whose "
                    "values are freed now: give the module that uses it in layers=, or return a copy, for example by "
                    "clone()"
                )
            before = partial(self._before_backward, layers)
            tensor.register_hook(before)  # type: ignore[no-untyped-call]  # torch gives it no types

    @staticmethod
    def _free(layer: OffloadedLayer) -> None:
        if not layer.users:
            layer.free()

    # --- gradients ---

    def _before_backward(self, layers: Sequence[OffloadedLayer], gradient: Tensor) -> None:
        self._begin_backward(layers[0])
        for layer in layers:
            if len(layer.taken) == len(layer.parameters):
                raise second_backward(layer)
            if layer.state is not Residence.HERE:
                self._use(layer, self._backward)

    def _begin_backward(self, layer: OffloadedLayer) -> None:
        if torch.is_grad_enabled():
            raise InvalidArgumentError(
                f"a backward pass with create_graph=True reached the layer {layer.title!r}: a second one through its "
                "gradients would need weights that are not in memory. Use psdist.torch.DistributedOptimizer"
            )
        if not self._is_in_backward:
            self._is_in_backward = True
            self._backward.start()
            # Called at the end of the running backward pass. torch's own classes use the same queue.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _load_saved(self, layer: OffloadedLayer) -> None:
        """Load a layer whose weight autograd kept."""
        if layer.state is Residence.HERE:
            return
        if not _in_backward() or len(layer.taken) == len(layer.parameters):
            raise InvalidArgumentError(
                f"a weight of the layer {layer.title!r}, which autograd kept in the forward pass, was read outside of "
                "a backward pass, or in one after all gradients of the layer were computed: it is on the servers. Let "
                "the layer return everything that depends on its weights"
            )
        self._begin_backward(layer)
        self._use(layer, self._backward)

    def _on_gradient(self, on_begin: Callable[[], None], layer: OffloadedLayer, name: str, parameter: Tensor) -> None:
        if name in layer.taken:
            drop_gradient(layer.parameters[name])  # Otherwise the next step would add to it.
            raise second_backward(layer)
        if not self.has_gradients:
            on_begin()
            self.has_gradients = True
            # Different steps: this worker was expelled in the forward pass, and weights of two steps were used.
            self.is_dropped = self.is_dropped or len({one.handle.step for one in self._layers}) > 1
        # Free the memory of answered pushes now.
        self._reap(len(self._pushes) if layer.taken else _PUSHES)
        self._give_place(layer)
        if layer.take(name):
            self._free(layer)
            self._push(layer)

    def _give_place(self, layer: OffloadedLayer) -> None:
        """Make the memory for gradients of ``layer`` available."""
        while layer.place.holder in self._pushes:
            self._reap(len(self._pushes) - 1)
        if layer.place.holder not in (None, layer):  # The holder still misses gradients, which may arrive at any time.
            layer.leave_place()

    def _push(self, layer: OffloadedLayer) -> None:
        try:
            is_sent = layer.send(0.0 if self.is_dropped else self.weight)
        except NonFiniteGradientError as error:
            raise self._refused(error) from None
        if is_sent:
            self._pushes.append(layer)
        else:
            self.is_dropped = True

    def _reap(self, left: int) -> None:
        """Wait until at most ``left`` pushes are under way, and free the gradients of all finished ones."""
        while self._pushes and (len(self._pushes) > left or self._pushes[0].is_answered):
            try:
                is_taken = self._pushes[0].finish_push()
            except Exception as error:  # After an interrupt the push is still under way.
                self._pushes.popleft()
                if isinstance(error, NonFiniteGradientError):
                    raise self._refused(error) from None
                raise
            self._pushes.popleft()
            if not is_taken:
                self.is_dropped = True

    def _refused(self, error: NonFiniteGradientError) -> NonFiniteGradientError:
        self._is_broken = True
        remedy = f"Gradients of other layers were sent. {_AFTER_FAILURE}" if self._is_begun() else _BEFORE_SENDING
        return NonFiniteGradientError(f"{error.message}. {remedy}", **error.details)

    def _is_begun(self) -> bool:
        """True if parts of this step may have been sent."""
        return any(layer.is_begun for layer in self._layers)

    def _has_failed(self) -> bool:
        """True if the last backward pass of this step ended with an error."""
        return self._is_broken or (self._is_in_backward and not _in_backward())

    def discard(self) -> bool:
        """Discard the gradients of the last backward pass if it failed.

        Gradients that were sent cannot be taken back. In that case discard the others and return True: ``complete``
        makes the step.
        """
        if not self._has_failed():
            return False
        if self._is_in_backward:
            self._end_backward()
        if not self._is_broken and all(layer.is_begun for layer in self._layers):
            return False  # A second pass failed: the step's gradients are complete.
        self._is_broken = True
        for layer in self._layers:
            layer.forget()
        if self._is_begun():
            return True
        self._is_broken = self.has_gradients = self.is_dropped = False
        return False

    def _end_backward(self) -> None:
        self._is_in_backward = False
        self._ahead = None
        for layer in self._layers:
            self._free(layer)

    # --- the step ---

    def complete(self) -> None:
        """Push the rest of this step, and wait until all of it is answered. Parameters without a gradient count with
        zeros.

        Raises the error of a failed push. Calling it again retries the same step.
        """
        if self._is_in_backward:
            self._end_backward()
        self._reap(0)
        for layer in reversed(self._layers):  # The order of the backward pass in other workers.
            if not layer.is_pushed:
                self._give_place(layer)
                layer.complete()
                self._push(layer)
                self._reap(_PUSHES)
        self._reap(0)

    def begin_step(self) -> None:
        """Start the next step."""
        for layer in self._layers:
            layer.begin_step()
        self.has_gradients = self._is_broken = False
        self.weight = 1.0
        self.is_dropped = False
        self._fetch_first()


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


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
