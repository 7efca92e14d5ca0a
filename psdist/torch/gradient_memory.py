"""Where the gradients of a model lie until they are pushed: the arrays of a parameter set, and tensors in their memory.

Gradients of a model on a CUDA device stay there where the codec encodes there, so that only payloads come to main
memory. That takes CuPy, and room for a vector; else they are copied to main memory first, as those of all other codecs.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from psdist.client.sync_client import Parameters
from psdist.errors import DeviceUnavailableError, LimitExceededError

logger = logging.getLogger("psdist")


def gradient_memory(handle: Parameters, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The gradient buffers of ``handle`` for a model on ``device``, and a tensor in the memory of each; float32 in the
    shapes of the parameters.

    Raises DeviceLostError.
    """
    number, arrays = cuda_number(device), None
    if number is not None and handle.statistics().compression.encodes_on_device:
        arrays = _on_device(handle, number)
    if arrays is None:
        arrays = handle.gradient_buffers(is_checked=False)
    return arrays, {name: as_tensor(array) for name, array in arrays.items()}


def cuda_number(device: torch.device) -> int | None:
    """The number of a CUDA device; None for any other."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _on_device(handle: Parameters, number: int) -> dict[str, Any] | None:
    try:
        return handle.gradient_buffers(device=f"cuda:{number}")
    except (DeviceUnavailableError, LimitExceededError) as error:
        logger.warning(
            "gradients of %r are copied to main memory and encoded there, not on cuda:%d: %s",
            handle.name, number, error.message,
        )  # fmt: skip
        return None


def as_tensor(array: Any) -> Tensor:
    """A tensor in the memory of an array, of numpy or on a device."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else from_dlpack(array)
