"""Tensors of a model that share memory: equal ones are one tensor, and others that overlap are refused.

The servers hold each tensor once. Two tensors over the same elements would both be written, and the last write would
count alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from psdist.errors import InvalidArgumentError

logger = logging.getLogger("psdist")


@dataclass(frozen=True)
class _Place:
    """Tensor and its memory: bytes ``start`` to ``stop`` of ``memory``."""

    name: str
    tensor: Tensor
    memory: str
    start: int
    stop: int


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensors that are the same memory as an earlier one, by name, each with the name of that one.

    Raises InvalidArgumentError for tensors that overlap otherwise: other elements, another order, or another dtype.
    """
    order = {name: number for number, name in enumerate(tensors)}
    aliases: dict[str, str] = {}
    reached: list[_Place] = []
    for place in sorted(_places(tensors), key=lambda one: (one.memory, one.start, order[one.name])):
        reached = [one for one in reached if one.memory == place.memory and one.stop > place.start]
        for other in reached:
            first, second = sorted((other, place), key=lambda one: order[one.name])
            if _is_same(first, second):
                aliases[second.name] = first.name
            elif _overlaps(first, second):
                _refuse(first, second)
        if place.name not in aliases:
            reached.append(place)
    return {name: aliases[name] for name in tensors if name in aliases}


def _places(tensors: Mapping[str, Tensor]) -> Iterable[_Place]:
    for name, tensor in tensors.items():
        if (
            isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)
            or tensor.layout is not torch.strided
        ):
            continue
        if not tensor.numel():
            continue
        start, memory = tensor.data_ptr(), str(tensor.device)
        if tensor.device.type == "meta":  # No address: only tensors of one storage can overlap.
            memory += f" {tensor.untyped_storage()._cdata}"
            start = int(tensor.storage_offset()) * tensor.element_size()
        steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        yield _Place(name, tensor, memory, start, start + (1 + sum(steps)) * tensor.element_size())


def _is_same(one: _Place, other: _Place) -> bool:
    return one.start == other.start and _form(one.tensor) == _form(other.tensor)


def _form(tensor: Tensor) -> tuple[object, ...]:
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tensor.shape, strides


def _overlaps(one: _Place, other: _Place) -> bool:
    """True if two tensors whose ranges of memory overlap have bytes in common."""
    start = min(one.start, other.start)
    marks = torch.zeros(max(one.stop, other.stop) - start, dtype=torch.bool)
    _bytes_of(one, marks, start).fill_(True)
    return bool(_bytes_of(other, marks, start).any())


def _bytes_of(place: _Place, marks: Tensor, start: int) -> Tensor:
    size = place.tensor.element_size()
    strides = [stride * size for stride in place.tensor.stride()]
    return marks.as_strided([*place.tensor.shape, size], [*strides, 1], place.start - start)


def _refuse(one: _Place, other: _Place) -> NoReturn:
    raise InvalidArgumentError(
        f"{one.name!r} of shape {tuple(one.tensor.shape)} and {other.name!r} of shape {tuple(other.tensor.shape)} "
        "overlap in memory without being the same tensor, but the servers hold each on its own: give one of them "
        "memory of its own by clone(), or let the forward pass compute it from the other"
    )


def tie(
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    aliases: Mapping[str, str],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Make each trained parameter that is the same memory as another one that parameter itself, as for tied weights.

    aliases: by ``find_aliases``. Frozen parameters and buffers follow the memory anyway, and stay.
    optimizer: loses the parameter that is replaced.

    Logs a warning, because an optimizer of torch would update the memory once for each of the two. Raises
    InvalidArgumentError, before it changes anything, if they are in different groups.
    """
    pairs = {name: first for name, first in aliases.items() if name in trained}
    groups = [] if optimizer is None else optimizer.param_groups
    for name, first in pairs.items():
        if _groups_with(trained[name], groups) != _groups_with(trained[first], groups):
            raise InvalidArgumentError(
                f"parameters {first!r} and {name!r} are the same memory, but not in the same parameter group: put both "
                "into one, or tie them by assigning the parameter itself instead of its .data"
            )
    for name, first in pairs.items():
        _replace(model, trained[name], trained[first])
        for group in groups:
            group["params"] = [one for one in group["params"] if one is not trained[name]]
    if pairs:
        name, first = next(iter(pairs.items()))
        logger.warning(
            "parameter %r is the memory of %r (one of %d such pairs): they are trained as one tied parameter, with the "
            "sum of their gradients. To tie them in the model, assign the parameter itself instead of its .data",
            name, first, len(pairs),
        )  # fmt: skip


def _groups_with(parameter: nn.Parameter, groups: list[dict[str, Any]]) -> list[int]:
    return [number for number, group in enumerate(groups) if any(one is parameter for one in group["params"])]


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is old:
                setattr(module, key, new)
