"""State of a training as bytes, for workers that join it: module, optimizer, and other objects with a ``state_dict``.

Tensors are in the format of safetensors, everything else in JSON: numbers, texts, and lists and dicts of these.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist.errors import InvalidArgumentError, ShapeMismatchError

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
