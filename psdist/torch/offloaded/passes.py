"""When the layers of an offloaded model are in use: hooks that bring their weights before, and take them away after.

A forward hook finds the tensors that a layer gives, and has the weights brought again before the backward pass goes
through one of them. The order of layers is learned from pass to pass, and the next one's weights are on their way while
a layer computes. A gradient is taken over as soon as autograd has it, and a layer's are pushed when they are complete.

Invariants: at most two layers' weights are here that no pass uses now (the next one's, and none that is left over), and
the gradients of at most two layers whose gradients are complete, or come one after the other. A layer is freed in a
backward pass when all of its gradients are there, because autograd adds up those of all uses first.

Not here: memory (``layer``), the step (``offloading``).
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
from psdist.torch.offloaded.division import Use
from psdist.torch.offloaded.freed_parameters import drop_gradient
from psdist.torch.offloaded.layer import OffloadedLayer, Residence, second_backward
from psdist.torch.offloaded.saved_tensors import SavedTensors

#: Pushes that may be under way while the gradients of the next layer are put together, unless these go to the same
#: place.
_PUSHES: Final = 1
_BEFORE_SENDING: Final = "Of other layers nothing was either: go on with zero_grad() or the next batch"
_AFTER_FAILURE: Final = "Call zero_grad() of the optimizer: it makes the step with that, and with zeros for all else"


class Order:
    """Which layer follows which, as the last pass had it."""

    def __init__(self) -> None:
        self._next: dict[OffloadedLayer, OffloadedLayer] = {}
        #: The first layer of a pass, and the one that was used last.
        self._first: OffloadedLayer | None = None
        self._last: OffloadedLayer | None = None

    def begin(self, layers: Sequence[OffloadedLayer]) -> None:
        """Expects this order."""
        self._next, self._first = dict(pairwise(layers)), layers[0]

    def start(self) -> None:
        """A pass begins."""
        self._first = self._last = None

    @property
    def first(self) -> OffloadedLayer | None:
        """The layer with which passes begin."""
        return self._first

    def on_use(self, layer: OffloadedLayer) -> OffloadedLayer | None:
        """A pass uses ``layer``. Returns the layer that comes next, if that is known."""
        if self._first is None:
            self._first = layer
        elif layer is not self._first and self._last is not None and self._last is not layer:
            self._next[self._last] = layer
        self._last = layer
        return self._next.get(layer)


class Passes:
    """Forward and backward passes over layers that are used by modules as ``uses`` say."""

    def __init__(self, layers: Sequence[OffloadedLayer], uses: Sequence[Use]) -> None:
        self._layers = list(layers)
        self._uses = list(uses)
        self._forward, self._backward = Order(), Order()
        self._forward.begin(self._layers)
        self._backward.begin(self._layers[::-1])
        #: Weights that were fetched ahead of time, and not used yet.
        self._ahead: OffloadedLayer | None = None
        #: Pushes under way, the oldest first.
        self._pushes: deque[OffloadedLayer] = deque()
        self._is_in_backward = False
        #: Whether a backward pass of this step was broken off, or a push of it refused.
        self._is_broken = False
        #: Whether gradients of this step were taken over.
        self.has_gradients = False
        self.weight = 1.0
        #: Whether gradients of this step were computed on weights of two steps, or a push of it was dropped.
        self.is_dropped = False
        self._hooks: list[RemovableHandle] = []
        self._saved = SavedTensors(self._layers, self._bring_saved)

    def listen(self, on_begin: Callable[[], None]) -> None:
        """From now on passes bring weights and push gradients.

        on_begin: called before the first gradient of a step is taken; what it raises ends the backward pass.
        """
        for use in self._uses:
            layers = [self._layers[number] for number in use.layers]
            before, after = partial(self._before_forward, layers), partial(self._after_forward, layers)
            self._hooks.append(use.module.register_forward_pre_hook(before, prepend=True))
            self._hooks.append(use.module.register_forward_hook(after, always_call=True))
        for layer in self._layers:
            for name, parameter in layer.parameters.items():
                take = partial(self._on_gradient, on_begin, layer, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(take))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Takes the hooks away, and the weights that are here."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for layer in self._layers:
            layer.close()

    # --- weights ---

    def _use(self, layer: OffloadedLayer, order: Order) -> None:
        """Has the weights of a layer here, and the next one's on their way."""
        if layer is self._ahead:
            self._ahead = None
        if not layer.bring(again=order is self._backward):
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
        """Fetches the weights with which the next forward pass begins."""
        first = self._forward.first
        if first is not None and first.state is Residence.AWAY:
            self._fetch_ahead(first)

    def _before_forward(self, layers: Sequence[OffloadedLayer], module: nn.Module, inputs: Any) -> None:
        for layer in layers:  # First, because the hook after the pass is called whatever happens.
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
        if not _in_backward():  # Else the gradients follow: a checkpoint has the forward pass made again.
            for layer in layers:
                self._free(layer)

    def _watch(self, layers: Sequence[OffloadedLayer], outputs: Any) -> None:
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
        if not tensors:
            raise InvalidArgumentError(
                f"the layer {layers[0].title!r} gave no tensor with a gradient, in {type(outputs).__name__}: return "
                "tensors in tuples, lists or dicts, so that its weights can be here for the backward pass; or use "
                "torch.no_grad()"
            )
        for tensor in tensors:
            if (owner := self._saved.owner(tensor)) is not None:
                raise InvalidArgumentError(
                    f"the layer {layers[0].title!r} gave a weight of {owner.title!r}, or a view of one, whose values "
                    "go away now: give the module that uses it in layers=, or return a copy, as by clone()"
                )
            tensor.register_hook(partial(self._before_backward, layers))  # type: ignore[no-untyped-call]

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
                f"a backward pass with create_graph=True came to the layer {layer.title!r}: a second one through its "
                "gradients would need weights that are not here. Use psdist.torch.DistributedOptimizer"
            )
        if not self._is_in_backward:
            self._is_in_backward = True
            self._backward.start()
            # As torch's own classes have autograd call them at the end of the backward pass that is running.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _bring_saved(self, layer: OffloadedLayer) -> None:
        """Has a layer here, a weight of which autograd kept."""
        if layer.state is Residence.HERE:
            return
        if not _in_backward() or len(layer.taken) == len(layer.parameters):
            raise InvalidArgumentError(
                f"a weight of the layer {layer.title!r}, which autograd kept in the forward pass, was read outside of "
                "a backward pass, or in one after all gradients of the layer were there: it is on the servers. Have "
                "the layer return what depends on its weights"
            )
        self._begin_backward(layer)
        self._use(layer, self._backward)

    def _on_gradient(self, on_begin: Callable[[], None], layer: OffloadedLayer, name: str, parameter: Tensor) -> None:
        if name in layer.taken:
            drop_gradient(layer.parameters[name])  # Else the next step would add to it.
            raise second_backward(layer)
        if not self.has_gradients:
            on_begin()
            self.has_gradients = True
            # Else this worker was expelled in the forward pass, and weights of two steps were used.
            self.is_dropped = self.is_dropped or len({one.handle.step for one in self._layers}) > 1
        # What has been answered meanwhile gives its memory back at once.
        self._reap(len(self._pushes) if layer.taken else _PUSHES)
        self._give_place(layer)
        if layer.take(name):
            self._free(layer)
            self._push(layer)

    def _give_place(self, layer: OffloadedLayer) -> None:
        """Has a place free for the gradients of ``layer``."""
        while layer.place.holder in self._pushes:
            self._reap(len(self._pushes) - 1)
        if layer.place.holder not in (None, layer):  # Gradients of that layer are missing, and may come any time.
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
        """Waits until no more than ``left`` pushes are under way, and frees the gradients of all that have ended."""
        while self._pushes and (len(self._pushes) > left or self._pushes[0].is_answered):
            try:
                is_taken = self._pushes[0].finish_push()
            except Exception as error:  # Not an interrupt: then it is under way still.
                self._pushes.popleft()
                if isinstance(error, NonFiniteGradientError):
                    raise self._refused(error) from None
                raise
            self._pushes.popleft()
            if not is_taken:
                self.is_dropped = True

    def _refused(self, error: NonFiniteGradientError) -> NonFiniteGradientError:
        self._is_broken = True
        remedy = f"Of other layers some was. {_AFTER_FAILURE}" if self._is_begun() else _BEFORE_SENDING
        return NonFiniteGradientError(f"{error.message}. {remedy}", **error.details)

    def _is_begun(self) -> bool:
        """Whether something of this step may have been sent."""
        return any(layer.is_begun for layer in self._layers)

    def _has_failed(self) -> bool:
        """Whether the last backward pass of this step ended by an error."""
        return self._is_broken or (self._is_in_backward and not _in_backward())

    def discard(self) -> bool:
        """Forgets the gradients of a backward pass that failed, if the last one did. Where some were sent, which cannot
        be taken back, it forgets the others, and returns True: ``complete`` makes that step."""
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
        """Pushes what is missing of this step, and waits until all of it is answered. Parameters without a gradient
        count with zeros.

        Raises what a push failed with; calling it again goes on with the same step.
        """
        if self._is_in_backward:
            self._end_backward()
        self._reap(0)
        for layer in reversed(self._layers):  # As other workers have them in their backward pass.
            if not layer.is_pushed:
                self._give_place(layer)
                layer.complete()
                self._push(layer)
                self._reap(_PUSHES)
        self._reap(0)

    def begin_step(self) -> None:
        """The step is over."""
        for layer in self._layers:
            layer.begin_step()
        self.has_gradients = self._is_broken = False
        self.weight = 1.0
        self.is_dropped = False
        self._fetch_first()


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
