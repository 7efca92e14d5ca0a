"""Tensors that all workers take over from one of them.

Not here: values at the beginning, which the lowest rank gives (``values.share_fixed``).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from psdist.client.sync_client import Client
from psdist.optim import Mean
from psdist.torch.values import take_finite, to_finite


class TensorBroadcast:
    """Gives ``tensors`` the values that one worker has. All workers make the same calls.

    name: of the parameter set for that. The others contribute nothing to its steps, so the mean is what one pushed.
    """

    def __init__(self, client: Client, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {key: tensor for key, tensor in tensors.items() if tensor.numel()}
        if self._tensors:
            self._handle = client.parameters(name, self._values(), Mean())

    def _values(self) -> dict[str, NDArray[np.float32]]:
        return {key: to_finite(tensor) for key, tensor in self._tensors.items()}

    def send(self, *, is_source: bool) -> None:
        """Makes one step: the source's values are in all workers' tensors."""
        if not self._tensors:
            return
        values = self._handle.push_pull(self._values(), copy=False, weight=float(is_source))
        if not is_source:
            for key, tensor in self._tensors.items():
                take_finite(tensor, values[key])
