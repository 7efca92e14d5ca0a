"""Tensors that all workers take over from one of them.

Not here: values at the beginning, which the lowest rank gives (``values.share_fixed``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from psdist.client.sync_client import Client
from psdist.optim import Mean
from psdist.torch.values import take_finite, to_finite


class TensorBroadcast:
    """Gives ``tensors`` the values that one worker has. All workers make the same calls.

    name: of the parameter set for that. The others contribute nothing to its steps, so the mean is what one pushed.
    tensors: gives those of now, always of the same names and shapes; a module may replace a buffer by another tensor.
    """

    def __init__(self, client: Client, name: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._all = tensors
        found = self._tensors()
        self._handle = client.parameters(name, _values(found), Mean()) if found else None

    def _tensors(self) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in self._all().items() if tensor.numel()}

    def send(self, *, is_source: bool) -> None:
        """Makes one step: the source's values are in all workers' tensors. Raises as ``Parameters.push_pull``."""
        if self._handle is None:
            return
        tensors = self._tensors()
        values = self._handle.push_pull(_values(tensors), copy=False, weight=float(is_source))
        if not is_source:
            for key, tensor in tensors.items():
                take_finite(tensor, values[key])


def _values(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.float32]]:
    return {key: to_finite(tensor) for key, tensor in tensors.items()}
