"""Conversion between torch's tensors and psdist's arrays.

Invariants: Tensors keep their memory. Autograd sees writes into a tensor as changes, so a backward pass over an older
graph is refused, as after a step of torch's own optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist import optim
from psdist.client.sync_client import Client
from psdist.collectives.core.plans import DTYPES
from psdist.consistency import Consistency, check_weight

#: Optimizer of a parameter set that is never pushed to.
_NO_TRAINING: Final = optim.SGD(lr=0.0)


def as_real(tensor: Tensor) -> Tensor:
    """Return the tensor, or a view of a complex one that has real and imaginary parts in a last dimension of 2.

    torch's optimizers update complex parameters as such pairs, too.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def write_into(tensor: Tensor, array: NDArray[Any]) -> None:
    """Copy the array into a tensor of any dtype and device, ``as_real``. The array may change afterwards."""
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
        np.copyto(tensor.detach().numpy(), array)
    else:
        as_real(tensor.detach()).copy_(from_array(array))
    torch.autograd.graph.increment_version(tensor)


class TensorWriter:
    """Writes arrays into tensors of the same names, shapes and dtypes; complex ones ``as_real``.

    tensors: on any one device.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        #: Memory of the tensors that numpy can write to.
        self._memory: dict[str, NDArray[Any]] = {
            name: as_real(tensor.detach()).numpy()
            for name, tensor in self._tensors.items()
            if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16
        }

    def write(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy the arrays into the tensors. The arrays may change afterwards."""
        for name, array in arrays.items():
            memory = self._memory.get(name)
            if memory is None:
                as_real(self._tensors[name].detach()).copy_(from_array(array))
            else:
                np.copyto(memory, array)
        torch.autograd.graph.increment_version([self._tensors[name] for name in arrays])


def from_array(array: NDArray[Any]) -> Tensor:
    """Return a tensor with a copy of the array. Supports the bfloat16 of ml_dtypes."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def initial_values(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the ``init`` argument of ``Client.parameters``."""
    return {name: as_real(tensor.detach()).cpu() for name, tensor in tensors.items()}


def weight_of(value: Any, consistency: Consistency) -> float:
    """Convert the weight of a gradient: a number of Python or numpy, or a tensor or an array of one element.

    Raises InvalidArgumentError for a weight that ``Parameters.push`` does not accept.
    """
    try:
        number = value.item() if isinstance(value, Tensor | np.generic | np.ndarray) else value
    except (RuntimeError, ValueError):  # More than one element.
        number = value
    if type(number) in (int, float) and number in (0, 1):  # Valid in every mode.
        return float(number)
    return check_weight(number, consistency)


def share_fixed(client: Client, name: str, fixed: Mapping[str, Tensor]) -> None:
    """Copy the lowest rank's values of the tensors that are not trained to all workers.

    name: parameter set that carries them.

    A parameter set holds finite floats, so buffers (masks with -inf, counters) travel as one number of 0 to 255 per
    byte. Only frozen float32 parameters, which may be large, travel as they are.
    """
    init = {key: to_finite(tensor) for key, tensor in fixed.items() if tensor.numel()}
    if init:
        for key, array in client.parameters(name, init, _NO_TRAINING).pull().items():
            take_finite(fixed[key], array)


def to_finite(tensor: Tensor) -> NDArray[np.float32]:
    """Return a tensor as finite float32[n]: a float32 parameter as it is, anything else as one number of 0 to 255 for
    each of its bytes."""
    return _plain(tensor) if is_plain(tensor) else as_bytes(tensor)


def take_finite(tensor: Tensor, array: NDArray[np.float32]) -> None:
    """Write the values encoded by ``to_finite`` into ``tensor``."""
    if is_plain(tensor):
        write_into(tensor, array)
    else:
        with torch.no_grad():
            tensor.copy_(from_bytes(array, tensor).view_as(tensor))


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor that is not trained travels as it is."""
    return isinstance(tensor, nn.Parameter) and tensor.dtype == torch.float32


def _plain(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().cpu().contiguous().numpy()
    return array


class _ArrayInterface:
    """Memory of a tensor for ``numpy.asarray``. The array keeps it, and it keeps the tensor."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor, dtype: np.dtype[Any]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3, "data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape), "typestr": dtype.str,
        }  # fmt: skip


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return numpy's dtype, or None if collectives cannot reduce arrays of it."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(name) if name in DTYPES else None


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return an array on the memory of a contiguous tensor on the CPU.

    Dtypes that numpy lacks become bytes, in one dimension.

    ``tensor.numpy()`` would mark the storage for good: nobody could resize it any more, as FSDP does.
    """
    dtype = numpy_dtype(tensor.dtype)
    if dtype is None:
        tensor, dtype = tensor.reshape(-1).view(torch.uint8), np.dtype(np.uint8)
    if dtype.kind == "V":  # bfloat16, for which the interface has no name.
        return np.asarray(_ArrayInterface(tensor, np.dtype(np.int16))).view(dtype)
    return np.asarray(_ArrayInterface(tensor, dtype))


def as_bytes(tensor: Tensor) -> NDArray[np.float32]:
    """Return the bytes of a tensor of any dtype, as numbers of 0 to 255; float32[bytes]."""
    return raw_bytes(tensor).astype(np.float32)


def raw_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor of any dtype. They may share its memory."""
    return as_array(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))


def from_bytes(array: NDArray[Any], like: Tensor) -> Tensor:
    """Return the tensor encoded in ``array``: one-dimensional, with the dtype of ``like``."""
    return torch.from_numpy(array.astype(np.uint8)).view(like.dtype)
