"""Memory for a model's gradients: the buffers of a parameter set, and tensors that share them.

Gradients of a model on a CUDA device stay there if the codec encodes on the device, so that only payloads are copied to
main memory. This needs CuPy, and device memory for one vector. Otherwise gradients are copied to main memory first.
"""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from psdist.client.sync_client import Parameters
from psdist.errors import DeviceUnavailableError, LimitExceededError
from psdist.torch.averaging.link_gradients import LinkGradients

logger = logging.getLogger("psdist")

#: References to a view that no script holds: the caller's list and variable, and the arguments of two functions.
_REFERENCES: Final = 4
#: Uses of a buffer's memory without a script: by the buffer, its view, and the query itself.
_USES: Final = 3


def gradient_memory(
    handle: Parameters | LinkGradients, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the gradient buffers of ``handle`` for a model on ``device``, and a tensor that shares the memory of each.

    All have the dtype of the servers, and the shapes of the parameters ``as_real``. Raises DeviceLostError.
    """
    number, arrays = cuda_number(device), None
    if isinstance(handle, Parameters) and number is not None and handle.statistics().compression.encodes_on_device:
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


def separate_kept(view: Tensor, buffer: Tensor, name: str) -> Tensor:
    """Return the view of ``buffer`` that becomes the gradient of the next step.

    view: gradient of the last step. If the script still holds it, it moves to memory of its own, and a new view is
        returned. Views that the script made of it cannot be moved, so their values change; one warning says so.
    name: parameter set, for the warning.
    """
    if sys.getrefcount(view) > _REFERENCES:
        view.data = view.clone()
        view = buffer.data
    if torch._C._storage_Use_Count(view.untyped_storage()._cdata) > _USES:
        _warn_of_view(name)
    return view


@lru_cache(maxsize=256)
def _warn_of_view(name: str) -> None:
    logger.warning(
        "the script still holds a view of a gradient of %r from an earlier step, such as gradient.data or "
        "gradient.view(-1). The next gradient overwrites it: clone() the values to keep",
        name,
    )  # fmt: skip
