"""``ElasticDDP``: data-parallel training that continues when workers die, and takes in new ones.

Gradients are averaged over the workers' own links at the end of each backward pass. No server takes part: each worker
holds the weights, and a new one receives them from another. Such a state of module, optimizer and other objects with a
``state_dict`` travels as bytes: tensors in the format of safetensors, everything else in JSON (numbers, texts, and
lists and dicts of these).

Invariant: After a backward pass outside ``no_sync``, all workers of the group hold the same gradient bytes, of the same
workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist.client.context import Context, init
from psdist.client.session import loop
from psdist.collectives import SILENCE_SECONDS
from psdist.collectives.elastic import ElasticSteps, StepArrays
from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import DTypeMismatchError, InvalidArgumentError, ShapeMismatchError
from psdist.torch.values import as_array

#: Tensor that holds the JSON text.
_TEXT: Final = "psdist/json"
#: Limit on another worker's state: so many bytes, and so many times the bytes that this worker's state has. Optimizers
#: create most of their state in their first steps: LBFGS keeps 200 vectors of the size of the model.
_BYTES: Final = 1 << 30
_TIMES: Final = 256
#: Errors of JSON text that is none, or not that of ``_pack``.
_UNREADABLE: Final = (AttributeError, KeyError, RecursionError, TypeError, ValueError)


class Stateful(Protocol):
    """Object whose state can be read and replaced, such as an optimizer or a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Replace the state."""


class TrainingState:
    """See ``ElasticState``. others: objects by name, the same at all workers."""

    def __init__(self, module: nn.Module, others: Mapping[str, Stateful]) -> None:
        self._module = module
        self._others = others

    @property
    def bytes_max(self) -> int:
        """See ``ElasticState``."""
        states = [other.state_dict() for other in self._others.values()]
        return _BYTES + _TIMES * _count_bytes([*self._tensors().values(), *states])

    async def export(self) -> NDArray[np.uint8]:
        """See ``ElasticState``. Raises InvalidArgumentError for states that cannot be sent."""
        return await asyncio.to_thread(self._export)

    async def load(self, data: NDArray[np.uint8]) -> None:
        """See ``ElasticState``. Raises ShapeMismatchError and InvalidArgumentError if it does not fit; then nothing was
        changed in the module."""
        await asyncio.to_thread(self._load, data)

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _export(self) -> NDArray[np.uint8]:
        tensors = {f"module/{name}": _copied(tensor) for name, tensor in self._tensors().items()}
        trees = {name: _pack(other.state_dict(), name, tensors) for name, other in self._others.items()}
        tensors[_TEXT] = torch.frombuffer(bytearray(json.dumps(trees).encode()), dtype=torch.uint8)
        return np.frombuffer(safetensors.torch.save(tensors), np.uint8)

    def _load(self, data: NDArray[np.uint8]) -> None:
        try:
            tensors = safetensors.torch.load(data.tobytes())
            trees = json.loads(tensors.pop(_TEXT).numpy().tobytes())
            states = {name: _unpack(tree, tensors) for name, tree in trees.items()}
        except (safetensors.SafetensorError, *_UNREADABLE) as error:
            raise InvalidArgumentError(f"the state of another worker cannot be read: {error}") from None
        mine = self._tensors()
        given = {name.removeprefix("module/"): one for name, one in tensors.items() if name.startswith("module/")}
        _check_equal(mine, given)
        if states.keys() != self._others.keys():
            raise InvalidArgumentError(
                f"another worker has the states {sorted(states)}, and this one {sorted(self._others)}: give all "
                "workers the same"
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(given[name])
        for name, other in self._others.items():
            other.load_state_dict(states[name])


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _count_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a state."""
    match value:
        case Tensor():
            return value.nbytes
        case dict():
            return sum(map(_count_bytes, value.values()))
        case list() | tuple():
            return sum(map(_count_bytes, value))
    return 0


def _check_equal(mine: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name in sorted({*mine, *given}):
        shapes = [(tuple(one[name].shape), one[name].dtype) if name in one else None for one in (mine, given)]
        if shapes[0] != shapes[1]:
            raise ShapeMismatchError(
                f"tensor {name!r} has shape and dtype {shapes[0]} here, and {shapes[1]} at another worker: build the "
                "same model"
            )


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, with its tensors added to ``tensors``."""
    match value:
        case Tensor():
            name = f"state/{len(tensors)}"
            tensors[name] = _copied(value)
            return {"tensor": name}
        case dict():
            return {"dict": [[key, _pack(one, f"{path}/{key}", tensors)] for key, one in value.items()]}
        case list() | tuple():
            return {type(value).__name__: _packed_items(value, path, tensors)}
        case None | bool() | int() | float() | str():
            return value
    raise InvalidArgumentError(
        f"{path!r:.80} of a state is a {type(value).__name__}, which cannot be sent: use tensors, numbers, texts, and "
        "lists and dicts of these"
    )


def _packed_items(values: Iterable[Any], path: str, tensors: dict[str, Tensor]) -> list[Any]:
    return [_pack(one, f"{path}/{number}", tensors) for number, one in enumerate(values)]


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: _unpack(one, tensors) for key, one in content}
        case "tuple":
            return tuple(_unpack(one, tensors) for one in content)
    return [_unpack(one, tensors) for one in content]


class ElasticDDP(nn.Module):
    """Wraps ``module`` so that each backward pass ends with the mean of all workers' gradients.

    module: with dense parameters. All workers start with the values of the lowest rank.
    optimizer: steps the module's parameters; its state is sent to workers that join. None if it has no state.
    others: other objects whose state is sent, such as {"scheduler": scheduler}.
    broadcast_buffers: all workers get the buffers of the lowest rank at the end of each backward pass.
    name: name of the group. Each model of a script has its own.
    size: workers that start the training together; None is the number that the run was started with.
    size_min: with fewer workers than this, training waits for new ones.
    silence: seconds after which a worker that the others wait for is left out if its process is stopped, or its host
        cannot be reached. None leaves that to its lease.
    context: None uses the context of ``psdist.init()``.

    The constructor waits for the others. A worker that joins a training under way receives module, optimizer and
    ``others``, and ``step`` tells how many steps are complete. A worker that was stopped, or whose network was cut,
    joins again by itself. Its next backward pass contributes nothing.

    Raises InvalidArgumentError for modules without parameters to train, LateWorkerError if the training is complete,
    LimitExceededError if the others' state is far larger than this worker's, and the errors of ``Context.join_group``.
    Backward passes raise CollectiveMismatchError if modules differ, and ClosedError.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        others: Mapping[str, Stateful] | None = None,
        broadcast_buffers: bool = True,
        name: str = "elastic",
        size: int | None = None,
        size_min: int = 1,
        silence: float | None = SILENCE_SECONDS,
        context: Context | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
        if not self._trained:
            raise InvalidArgumentError("the module has no parameters to train: each has requires_grad=False")
        self._broadcasts = broadcast_buffers
        self.require_backward_grad_sync = True
        self._is_waiting_for_end = False
        if optimizer is not None and "optimizer" in (others or {}):
            raise InvalidArgumentError("others has a state 'optimizer', as optimizer= is: use another name")
        stateful = {**({} if optimizer is None else {"optimizer": optimizer}), **(others or {})}
        place = init() if context is None else context

        async def join() -> AsyncWorkerGroup:
            collectives = place.async_collectives()
            return await collectives.join_group(
                name, size=place.world_size if size is None else size, size_min=size_min, silence=silence
            )

        self._steps = ElasticSteps(join, TrainingState(module, stateful))
        loop.shared().call(self._steps.start())
        for one in self._trained.values():
            one.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]  # torch's

    @property
    def step(self) -> int:
        """Number of completed steps, those before this worker joined included."""
        return self._steps.step

    @property
    def rank(self) -> int:
        """This worker's number in the group, which changes with the group. Raises ClosedError after ``close``."""
        return self._steps.group.rank

    @property
    def size(self) -> int:
        """Number of workers in the group. Raises ClosedError after ``close``."""
        return self._steps.group.size

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module and return its result. Takes in new workers first, if some wait."""
        if self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._is_waiting_for_end = False  # A backward pass that failed had no end.
            loop.shared().call(self._steps.begin_step())
        return self.module(*arguments, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context whose backward passes only accumulate gradients.

        The next pass after it averages the sums.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def close(self) -> None:
        """Wait until all workers have completed their last step, and end the group.

        Raises CollectiveMismatchError if others make more steps.
        """
        loop.shared().call(self._steps.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    # --- the end of a backward pass ---

    def _on_gradient(self, _: Tensor) -> None:
        if self.require_backward_grad_sync and not self._is_waiting_for_end:
            self._is_waiting_for_end = True
            # Called at the end of the running backward pass. torch's own classes use the same queue.
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        self._is_waiting_for_end = False
        vectors = _Vectors(self._trained, dict(self.module.named_buffers()) if self._broadcasts else {})
        loop.shared().call(self._steps.reduce(vectors.arrays))
        vectors.finish()


class _Vectors:
    """Gradients and buffers of one step: one vector of each dtype, and which parameters have gradients."""

    def __init__(self, trained: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
        self._trained = trained
        self._buffers = [one for one in buffers.values() if one.numel()]
        self._used = torch.zeros(len(trained))
        self._given: list[Tensor] = [self._used]
        self._places: list[list[nn.Parameter]] = []
        for dtype in dict.fromkeys(one.dtype for one in trained.values()):
            alike = [one for one in trained.values() if one.dtype == dtype]
            self._places.append(alike)
            self._given.append(torch.cat([self._gradient(one) for one in alike]))
        for number, one in enumerate(trained.values()):
            self._used[number] = one.grad is not None
        means = len(self._given)
        self._given += [one.detach().cpu().contiguous().reshape(-1).clone() for one in self._buffers]
        self._out = [torch.empty_like(one) for one in self._given]
        given, out = (list(map(as_array, vectors)) for vectors in (self._given, self._out))
        self.arrays = StepArrays(given, out, means)

    @staticmethod
    def _gradient(parameter: nn.Parameter) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros(parameter.numel(), dtype=parameter.dtype)
        if gradient.layout is not torch.strided:
            raise DTypeMismatchError(f"a gradient has the layout {gradient.layout}: use sparse=False")
        return gradient.detach().cpu().reshape(-1)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the results into the gradients and the buffers."""
        used, *means = self._out[: self.arrays.means]
        is_used = {id(one): bool(flag) for one, flag in zip(self._trained.values(), used, strict=True)}
        for vector, parameters in zip(means, self._places, strict=True):
            parts = torch.split(vector, [one.numel() for one in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if not is_used[id(parameter)]:
                    parameter.grad = None  # This worker may have one of a state that was replaced.
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))
        for buffer, result in zip(self._buffers, self._out[self.arrays.means :], strict=True):
            buffer.copy_(result.view_as(buffer))
