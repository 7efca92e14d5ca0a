"""Memory of a model's gradients until they are pushed: the arrays of a parameter set, and tensors that share them.

Gradients of a model on a CUDA device stay on the device if the codec encodes there, so that only payloads are copied to
main memory. This needs CuPy and device memory for one vector. Otherwise, and for all other codecs, gradients are copied
to main memory first.
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
    """Return the gradient buffers of ``handle`` for a model on ``device``, and a tensor that shares the memory of each.

    All have the dtype of the servers, and the shapes of the parameters ``as_real``. Raises DeviceLostError.
    """
    number, arrays = cuda_number(device), None
    if number is not None and handle.statistics().compression.encodes_on_device:
        arrays = _on_device(handle, number)
    if arrays is None:
        arrays = handle.gradient_buffers(is_checked=False)
    return arrays, {name: as_tensor(array) for name, array in arrays.items()}


def cuda_number(device: torch.device) -> int | None:
    """Return the number of a CUDA device, or None for any other device."""
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
    """Return a tensor that shares the memory of an array of numpy or of a device."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else from_dlpack(array)
